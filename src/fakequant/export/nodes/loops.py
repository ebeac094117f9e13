"""Write a recurrent layer in one direction as a `Scan`: one node for any number of steps, whose body is one step.

The states before the steps and their quantized values are outputs of the node, so that each can be verified.

Step functions in ONNX: find the thresholds by bisection, look a number up by binary search.

ONNX has no operator for the bits or the exponent of a number. A monotonic function with few values is fully described
by its thresholds: the smallest number at which each next value begins. Bisection over all float32 numbers finds them
with the torch definition itself, so the function is not implemented twice.

Formats that ONNX Runtime cannot store, computed exactly in float32 with basic operators.

* Small floats: the spacing of a number is the power of two below it, found by comparisons, times a constant power of
  two. Quotients and products with powers of two are exact, Round goes to even, and -0.0 and NaN are kept.
* Tables: a binary search over the smallest numbers that round to each value.
* Weights: codes in 4 or 8 bits, whose values Gather looks up.

Scales that the graph computes from the range of a tensor, for symmetric specifications.

torch computes scales in their own format with frexp and the bits of numbers, which ONNX lacks. The exported graph has
one opaque node for them, `fakequant::ChooseScale`, which is replaced here. The replacement has the same operations as
torch, except for powers of two: these are found by a binary search over thresholds (`steps`), or with Cast in the
styles that have the type E8M0 (`scales`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fakequant.errors import ExportError
from fakequant.export.capability import Dimension, Encoding, SiteRecord, Style, block_sizes, check_choice, check_spec
from fakequant.export.inputs import GraphEditor
from fakequant.export.nodes.trt import EmittedSite, Emitter, multiply, powers_of_two, scale_codes
from fakequant.nn.paths import join
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.formats.floats import ExponentFormat, FloatFormat, Format, TableFormat
from fakequant.numerics.spec import Arithmetic, QuantSpec

if TYPE_CHECKING:
    from onnx import NodeProto, ValueInfoProto

_LARGEST = torch.finfo(torch.float32).max
_SIGN = 0x7FFFFFFF


def thresholds(index_of: Callable[[Tensor], Tensor], count: int, lowest: float = -_LARGEST) -> Tensor:
    """Return the smallest float32 numbers at which a step function reaches 1, 2, ... count - 1; NaN if it never does.

    Args:
        index_of: maps numbers [k] to indices 0 to count - 1 [k], monotonically.
        count: the number of indices.
        lowest: the start of the function's domain, where the index is 0.

    >>> thresholds(lambda v: (v >= 0.5).long() + (v > 2.0).long(), 3)
    tensor([0.5000, 2.0000])
    """
    wanted = torch.arange(1, count, device="cpu")
    first, last = (torch.full((count - 1,), end, dtype=torch.float32, device="cpu") for end in (lowest, _LARGEST))
    low, high = _order(first), _order(last)
    reached = index_of(_number(high)) >= wanted
    already = index_of(_number(low)) >= wanted
    # There are 2**32 ordered numbers, and every round halves the interval.
    for _ in range(33):
        middle = (low + high).div(2, rounding_mode="floor")
        beyond = index_of(_number(middle)) >= wanted
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    limits = torch.where(already, first, _number(high))
    return torch.where(reached, limits, torch.nan)


def _order(v: Tensor) -> Tensor:
    """Map float32 numbers to integers in the same order; both zeros map to 0."""
    bits = v.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & _SIGN), bits)


def _number(order: Tensor) -> Tensor:
    bits = torch.where(order < 0, -order - (_SIGN + 1), order)
    return bits.to(torch.int32).view(torch.float32)


def look_up(to: Emitter, name: str, value: str, limits: Tensor, results: Tensor) -> str:
    """Add nodes that return results[i] where limits[i - 1] <= value < limits[i]; results[0] for NaN.

    Args:
        to: receives the nodes.
        name: prefix of the names of the constants.
        value: name of the input.
        limits: ascending thresholds [k - 1]; NaN for those that are never reached.
        results: float32 values [k].
    """
    steps = [1 << k for k in reversed(range(max(len(results) - 1, 1).bit_length()))]
    # A comparison with NaN is false, so the index never goes beyond the last result.
    padded = np.full(2 * steps[0] - 1, np.nan, np.float32)
    padded[: len(limits)] = limits.numpy()
    table = to.add(f"{name}_limits", padded)
    index = to.add(f"{name}_start", np.array(0, np.int64))
    for step in steps:
        limit = to.emit("Gather", table, to.emit("Add", index, to.add(f"{name}_probe_{step}", np.array(step - 1))))
        moved = to.emit("Add", index, to.add(f"{name}_step_{step}", np.array(step)))
        index = to.emit("Where", to.emit("GreaterOrEqual", value, limit), moved, index)
    return to.emit("Gather", to.add(f"{name}_values", results), index)


def round_to(to: Emitter, value: str, fmt: Format) -> str:
    """Add nodes that round a value in code units to the nearest code of a format; NaN is kept.

    Raises:
        ExportError: the kind of format has no implementation here.
    """
    if isinstance(fmt, FloatFormat):
        return _round_clamped(to, _clamp(to, value, fmt), fmt)
    if isinstance(fmt, TableFormat):
        return _round_to_table(to, value, fmt)
    if isinstance(fmt, IntegerFormat):
        return _positive_zero(to, to.emit("Round", _clamp(to, value, fmt)))
    raise ExportError(f"the format {fmt} has no form in ONNX; use an integer, float or table format")


def _clamp(to: Emitter, value: str, fmt: Format) -> str:
    # The standard does not specify Clip, Min and Max for NaN.
    for name, compare, bound in (("code_high", "Greater", fmt.quant_max), ("code_low", "Less", fmt.quant_min)):
        limit = to.number(name, bound)
        value = to.emit("Where", to.emit(compare, value, limit), limit, value)
    return value


def _round_clamped(to: Emitter, value: str, fmt: FloatFormat) -> str:
    lowest = fmt.grid.min_exponent
    highest = math.frexp(fmt.quant_max)[1] - 1
    magnitude = to.emit("Abs", value)
    power = to.number("smallest_power", 2.0**lowest)
    for bit in reversed(range((highest - lowest).bit_length())):
        larger = to.emit("Mul", power, to.number(f"power_{bit}", 2.0 ** (1 << bit)))
        power = to.emit("Where", to.emit("GreaterOrEqual", magnitude, larger), larger, power)
    spacing = to.emit("Mul", power, to.number("unit", 2.0**-fmt.mantissa_bits))
    code = to.emit("Mul", to.emit("Round", to.emit("Div", value, spacing)), spacing)
    return code if fmt.grid.negative_zero else _positive_zero(to, code)


def _positive_zero(to: Emitter, code: str) -> str:
    zero = to.number("zero", 0.0)
    return to.emit("Where", to.emit("Equal", code, zero), zero, code)


def _round_to_table(to: Emitter, value: str, fmt: TableFormat) -> str:
    values = torch.tensor(fmt.values, dtype=torch.float32, device="cpu")
    limits = thresholds(lambda v: fmt.to_storage(v).long(), len(values))
    return to.emit("Where", to.emit("IsNaN", value), value, look_up(to, "table", value, limits, values))


def express(site: EmittedSite) -> tuple[str, str]:
    """Add the nodes of an activation; returns the name of its scale and a description."""
    from onnx import TensorProto

    scale = site.scale if site.constant is None else site.add("scale", site.constant.scale)
    spread = site.spread_computed(scale)
    value = site.as_float32(site.x)
    if site.spec.arithmetic is Arithmetic.RECIPROCAL:
        scaled = site.emit("Mul", value, site.emit("Div", site.number("one", 1.0), spread))
    else:
        scaled = site.emit("Div", value, spread)
    code = round_to(site, scaled, site.spec.format)
    kind = site.editor.type(site.x)
    if kind == TensorProto.FLOAT:
        site.emit("Mul", code, spread, result=site.y)
    else:
        site.emit("Cast", site.emit("Mul", code, spread), result=site.y, to=kind)
    return scale, "comparisons and Gather" if isinstance(site.spec.format, TableFormat) else "comparisons and Round"


def fold(site: EmittedSite) -> tuple[str, str, str]:
    """Add the codes of a constant weight and its nodes; returns the names of codes and scale, and a description."""
    from onnx import TensorProto, helper

    assert site.constant is not None
    fmt = site.spec.format
    stored = site.weight_codes(site.constant).view(torch.uint8)
    element = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(site.encoding.element.name))
    codes = site.add("codes", stored.numpy().astype(element))
    scale = site.add("scale", site.constant.scale)
    values = site.add("values", code_values(fmt))
    gathered = site.emit("Gather", values, site.emit("Cast", codes, to=TensorProto.INT32))
    kind = site.editor.type(site.x)
    if kind == TensorProto.FLOAT:
        site.emit("Mul", gathered, site.spread_computed(scale), result=site.y)
    else:
        site.emit("Cast", site.emit("Mul", gathered, site.spread_computed(scale)), result=site.y, to=kind)
    return codes, scale, f"{site.encoding.element.name} codes, Gather and Mul"


def code_values(fmt: Format) -> np.ndarray:
    """Return the value of every code of a format of at most 8 bits, in float32.

    >>> from fakequant.numerics.formats import FLOAT4_E2M1FN
    >>> code_values(FLOAT4_E2M1FN)[:8]
    array([0. , 0.5, 1. , 1.5, 2. , 3. , 4. , 6. ], dtype=float32)
    """
    count = len(fmt.values) if isinstance(fmt, TableFormat) else 1 << fmt.bits
    stored = torch.arange(count, dtype=torch.uint8, device="cpu").view(fmt.storage)
    return fmt.from_storage(stored, torch.float32).numpy()


_INFO = torch.finfo(torch.float32)


def lower_scale(editor: GraphEditor, node: NodeProto, path: str, style: Style) -> Emitter:
    """Return the nodes that replace a `ChooseScale` node.

    Raises:
        ExportError: blocks divide an axis of unknown length, or ONNX cannot express the specification.
    """
    from onnx import TensorProto

    spec = QuantSpec.parse(next(a.s.decode() for a in node.attribute if a.name == "spec"))
    to = Emitter(editor, editor.label(f"{path or 'fake_quantize'}/range"))
    encoding = check_spec(spec, style)
    check_choice(spec)
    (x,), (scale,) = node.input, node.output
    shape = editor.shape(x)
    halves = (
        (TensorProto.FLOAT16, torch.finfo(torch.float16).max),
        (TensorProto.BFLOAT16, torch.finfo(torch.bfloat16).max),
    )
    largest = next((most for kind, most in halves if kind == editor.type(x)), _INFO.max)
    # As in `numerics.qparams.choose_qparams`.
    limit = largest * (1.0 - _INFO.eps) / max(-spec.format.quant_min, spec.format.quant_max)
    amax = _group_max(to, _finite_magnitude(to, to.as_float32(x)), shape, block_sizes(spec.granularity, shape))
    if isinstance(spec.scale.format, ExponentFormat):
        (powers_of_two if encoding.powers else _search_power_of_two)(to, amax, spec, limit, scale)
        return to
    tiny = to.number("tiny", _INFO.tiny)
    if spec.scale.format is None or spec.scale.granularity is None:
        chosen = to.emit("Div", amax, to.number("bound", spec.scale.bound(spec.format)))
    else:
        chosen = _two_level_scale(to, amax, editor.shape(scale), spec, encoding)
    to.emit("Min", to.emit("Max", chosen, tiny), to.number("limit", limit), result=scale)
    return to


def _finite_magnitude(to: Emitter, value: str) -> str:
    """Add nodes for |x| with 0 in place of inf and NaN; a comparison with NaN is false."""
    magnitude = to.emit("Abs", value)
    finite = to.emit("Less", magnitude, to.number("inf", math.inf))
    return to.emit("Where", finite, magnitude, to.number("zero", 0.0))


def _group_max(to: Emitter, value: str, shape: Sequence[Dimension], blocks: Sequence[Dimension]) -> str:
    """Add nodes for the maximum of every group [groups, axes kept]; values are >= 0, so zeros pad incomplete blocks."""
    whole = [axis for axis, (n, b) in enumerate(zip(shape, blocks, strict=True)) if b == n and n != 1]
    for axis, (n, block) in enumerate(zip(shape, blocks, strict=True)):
        if block in (1, n):
            continue
        assert isinstance(n, int)
        assert isinstance(block, int)
        value = _block_max(to, value, axis, (n, block, len(shape)))
    if whole:
        value = to.emit("ReduceMax", value, to.add("axes", np.array(whole, np.int64)), keepdims=1)
    return value


def _block_max(to: Emitter, value: str, axis: int, sizes: tuple[int, int, int]) -> str:
    """Add nodes for the maximum of every block along one axis, which is moved to the end for the Reshape.

    Args:
        to: receives the nodes.
        value: name of the input.
        axis: the axis that blocks divide.
        sizes: the length of the axis, the length of a block, and the number of axes.
    """
    n, block, rank = sizes
    order = [i for i in range(rank) if i != axis] + [axis]
    moved = axis != rank - 1
    if moved:
        value = to.emit("Transpose", value, perm=order)
    groups = -(-n // block)
    if missing := groups * block - n:
        pads = to.add(f"pads_{axis}", np.array([0] * rank + [0] * (rank - 1) + [missing], np.int64))
        value = to.emit("Pad", value, pads)
    shape = to.add(f"blocks_{axis}", np.array([0] * (rank - 1) + [groups, block], np.int64))
    value = to.emit("ReduceMax", to.emit("Reshape", value, shape), to.add("last", np.array([-1], np.int64)), keepdims=0)
    return to.emit("Transpose", value, perm=[order.index(i) for i in range(rank)]) if moved else value


def _search_power_of_two(to: Emitter, amax: str, spec: QuantSpec, limit: float, result: str) -> None:
    assert isinstance(spec.scale.format, ExponentFormat)
    largest = spec.scale.format.exponent_bias

    def exponent(values: Tensor) -> Tensor:
        return torch.frexp(spec.scale.choose(values, spec.format, limit).double())[1] - 1 + largest

    count = 2 * largest + 1
    exponents = torch.arange(count, device="cpu") - largest
    powers = torch.ldexp(torch.ones(count, dtype=torch.float64, device="cpu"), exponents).float()
    power = look_up(to, "scale", amax, thresholds(exponent, count, lowest=0.0), powers)
    to.emit("Identity", power, result=result)


def _two_level_scale(
    to: Emitter,
    amax: str,
    shape: Sequence[Dimension],
    spec: QuantSpec,
    encoding: Encoding,
) -> str:
    """Add nodes for scales with a second level, operation by operation as in `numerics.scales`.

    Args:
        to: receives the nodes.
        amax: name of the largest magnitudes.
        shape: the shape of `amax`.
        spec: the specification.
        encoding: the encoding of the specification.
    """
    fmt, granularity, bound = spec.scale.format, spec.scale.granularity, spec.scale.bound(spec.format)
    assert fmt is not None
    assert granularity is not None
    blocks = block_sizes(granularity, shape)
    whole = _group_max(to, amax, shape, blocks)
    shared = to.emit("Div", whole, to.number("largest", fmt.quant_max * bound))
    shared = to.emit("Max", shared, to.number("tiny", _INFO.tiny))
    divided = [axis for axis, (n, b) in enumerate(zip(shape, blocks, strict=True)) if b not in (1, n)]
    spread = to.repeat(shared, [b if isinstance(b, int) else 0 for b in blocks], shape, divided)
    quotient = to.emit("Div", amax, to.emit("Mul", to.number("bound", bound), spread))
    smallest = to.number("smallest", fmt.smallest)
    if encoding.scale is not None:
        return multiply(to, scale_codes(to, quotient, smallest, encoding.scale), shared, shape, blocks)
    code = round_to(to, quotient, fmt)
    positive = to.emit("Greater", code, to.number("none", 0.0))
    return to.emit("Mul", to.emit("Where", positive, code, smallest), spread)


DOMAIN = "fakequant"
OPERATOR = "Recurrent"
TARGET = torch.ops.fakequant.recurrent.default
_GATES = {"LSTM": 4, "GRU": 3}
_FORMS = ("spec", "quantizer", "mode")

Express = Callable[["NodeProto", str], tuple[list["NodeProto"], SiteRecord]]
"""Gives the nodes that replace a quantizer node, and its record, from the node and the path of the quantizer."""


def translation() -> Any:
    """The function that torch's exporter calls for the operator."""
    import onnx.defs
    from onnxscript import values

    formal, option = onnx.defs.OpSchema.FormalParameter, onnx.defs.OpSchema.FormalParameterOption.Optional
    attribute, types = onnx.defs.OpSchema.Attribute, onnx.defs.OpSchema.AttrType
    schema = onnx.defs.OpSchema(
        OPERATOR,
        DOMAIN,
        1,
        inputs=[
            *(formal(name, "T") for name in ("gates", "hidden", "cell", "weight")),
            formal("bias", "T", param_option=option),
            formal("scale", "tensor(float)", param_option=option),
            formal("zero_point", "tensor(int32)", param_option=option),
        ],
        outputs=[formal(name, "T") for name in ("y", "last_hidden", "last_cell")],
        type_constraints=[("T", ["tensor(float)"], "")],
        attributes=[*(attribute(name, types.STRING, "") for name in _FORMS), attribute("reverse", types.INT, "")],
    )
    operator = values.Op(values.Opset(DOMAIN, 1), OPERATOR, schema)

    def translate(*inputs: Any) -> Any:
        *tensors, spec, quantizer, mode, reverse = inputs
        return operator(*tensors, spec=spec, quantizer=quantizer, mode=mode, reverse=int(reverse))

    return translate


def write_loop(
    editor: GraphEditor, node: NodeProto, path: str, style: Style, express: Express
) -> tuple[list[NodeProto], SiteRecord | None]:
    """The nodes that replace a node of the operator, and the record of the quantizer of its hidden state.

    Args:
        editor: of the graph; it gets the constants.
        node: of the operator.
        path: of the layer.
        style: the dialect of the file.
        express: writes the quantizer.
    """
    from onnx import TensorProto, helper

    given = {a.name: a.i if a.name == "reverse" else a.s.decode() for a in node.attribute}
    mode, quantizer, direction = str(given["mode"]), str(given["quantizer"]), [int(given["reverse"])]
    count = 2 if mode == "LSTM" else 1
    gates, hidden, cell, weight, bias, *params = (*node.input, "", "", "")[:7]
    y, *last = (*node.output, "", "")[:3]
    to = Emitter(editor, editor.label(f"{path}/{quantizer}/loop"))
    state, of_cell, step, turned = (f"{to.label}/{name}" for name in ("state", "cell", "step", "weight"))
    shape, before, seen, record = editor.shape(hidden), state, [], None
    if given["spec"]:
        editor.declare(state, TensorProto.FLOAT, shape)
        before, record = _quantize(to, state, params, str(given["spec"]), join(path, quantizer), style, express)
        seen = [to.emit("Identity", state), to.emit("Identity", before)]
        record = record.seen_as(f"{to.label}/state_before", f"{to.label}/state_before_quantized")
    own = to.emit("MatMul", before, turned)
    own = to.emit("Add", own, bias) if bias else own
    after = _step(to, mode, (step, own, before, of_cell), shape[-1])
    results = [*after[:count], to.emit("Identity", after[0]), *seen]
    sizes = {step: [*shape[:-1], editor.shape(gates)[-1]]}

    def info(name: str) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes.get(name, shape))

    taken = [*[state, of_cell][:count], step]
    body = helper.make_graph(to.nodes, f"{to.label}/body", [*map(info, taken)], [*map(info, results)])
    outer = [] if record is None else [record.x, record.y]
    for name in outer:
        editor.declare(name, TensorProto.FLOAT, [editor.shape(gates)[0], *shape], visible=True)
    ends = [name or f"{to.label}/last_{place}" for place, name in enumerate(last[:count])]
    transpose = helper.make_node("Transpose", [weight], [turned], f"{to.label}/Transpose", perm=[1, 0])
    scan = helper.make_node(
        "Scan",
        [*[hidden, cell][:count], gates],
        [*ends, y, *outer],
        f"{to.label}/Scan",
        body=body,
        num_scan_inputs=1,
        scan_input_directions=direction,
        scan_output_directions=direction * (1 + len(outer)),
    )
    return [transpose, scan], record


def _quantize(
    to: Emitter, state: str, params: Sequence[str], spec: str, path: str, style: Style, express: Express
) -> tuple[str, SiteRecord]:
    """Add the nodes that quantize the hidden state of a step; the name of the result, and the record.

    Args:
        to: gets them.
        state: the hidden state [n, hidden].
        params: the names of scale and zero point, "" for one that is missing; without a scale each step computes it.
        spec: of the quantizer, as text.
        path: of the quantizer.
        style: the dialect of the file.
        express: writes the quantizer.
    """
    from onnx import TensorProto, helper

    given = [name for name in params if name]
    if not given:
        n, width = to.editor.shape(state)
        given = [f"{state}_scale"]
        groups = QuantSpec.parse(spec).granularity.group_shape((1, int(width)))[1:]
        to.editor.declare(given[0], TensorProto.FLOAT, [n, *groups])
        chooser = helper.make_node("ChooseScale", [state], given, domain=DOMAIN, spec=spec)
        to.nodes += lower_scale(to.editor, chooser, path, style).nodes
    result = f"{state}_quantized"
    nodes, record = express(helper.make_node("FakeQuantize", [state, *given], [result], domain=DOMAIN, spec=spec), path)
    to.nodes += nodes
    return result, record


def _step(to: Emitter, mode: str, values: tuple[str, str, str, str], width: Any) -> tuple[str, str]:
    """Add the nodes of a step; the names of hidden state and state of the cell after it.

    Args:
        to: gets them.
        mode: of the layer.
        values: the products [n, gates * hidden] of input and hidden state, and the states before the step.
        width: of the hidden state.
    """
    x, own, hidden, cell = values
    count = _GATES.get(mode, 1)
    sizes = to.add("sizes", np.full(count, int(width), np.int64))

    def parts(value: str) -> list[str]:
        names = [f"{to.label}/Split_{len(to.nodes)}_{place}" for place in range(count)]
        to.split(value, sizes, names)
        return names

    if mode == "LSTM":
        into, forget, new, out = parts(to.emit("Add", x, own))
        kept = to.emit("Mul", to.emit("Sigmoid", forget), cell)
        cell = to.emit("Add", kept, to.emit("Mul", to.emit("Sigmoid", into), to.emit("Tanh", new)))
        return to.emit("Mul", to.emit("Sigmoid", out), to.emit("Tanh", cell)), cell
    if mode == "GRU":
        (r, z, n), (of_r, of_z, of_n) = parts(x), parts(own)
        reset = to.emit("Sigmoid", to.emit("Add", r, of_r))
        n = to.emit("Tanh", to.emit("Add", n, to.emit("Mul", reset, of_n)))
        share = to.emit("Sigmoid", to.emit("Add", z, of_z))
        return to.emit("Add", n, to.emit("Mul", share, to.emit("Sub", hidden, n))), cell
    return to.emit("Tanh" if mode == "RNN_TANH" else "Relu", to.emit("Add", x, own)), cell
