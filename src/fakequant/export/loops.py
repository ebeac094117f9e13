"""Operators that ONNX Runtime or ONNX lacks, built from basic ones: step functions, formats, scales, recurrent layers.

Step functions: ONNX has no operator for the bits or the exponent of a number. A monotonic function with few values is
fully described by its thresholds: the smallest number at which each next value begins. Bisection over all float32
numbers finds them with the torch definition itself, so the function is not implemented twice.

Formats that ONNX Runtime cannot store, computed exactly in float32:

* Small floats: the spacing of a number is the power of two below it, found by comparisons, times a constant power of
  two. Quotients and products with powers of two are exact, Round goes to even, and -0.0 and NaN are kept.
* Tables: a binary search over the smallest numbers that round to each value.
* Weights: codes in 4 or 8 bits, whose values Gather looks up.

Scales from the range of a tensor, for symmetric specifications: torch computes scales in their own format with frexp
and the bits of numbers, which ONNX lacks. The exported graph has one opaque node for them, `fakequant::ChooseScale`,
which is replaced here. The replacement has the same operations as torch, except for powers of two: these are found by a
binary search over thresholds (`look_up`), or with Cast in the styles that have the type E8M0 (`trt.powers_of_two`).

A recurrent layer in one direction is a `Scan`: one node for any number of steps, whose body is one step. The states
before the steps and the quantized states are outputs of the node, so that each can be verified.
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
from fakequant.export.trt import EmittedSite, Emitter, multiply, powers_of_two, scale_codes
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
    """Map float32 numbers to integers of the same order; both zeros map to 0."""
    bits = v.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & _SIGN), bits)


def _number(order: Tensor) -> Tensor:
    bits = torch.where(order < 0, -order - (_SIGN + 1), order)
    return bits.to(torch.int32).view(torch.float32)


def look_up(emitter: Emitter, name: str, value: str, limits: Tensor, results: Tensor) -> str:
    """Add nodes that return results[i] where limits[i - 1] <= value < limits[i]; results[0] for NaN.

    Args:
        emitter: the emitter that gets the nodes.
        name: prefix of the names of the constants.
        value: name of the input.
        limits: ascending thresholds [k - 1]; NaN for a threshold that is never reached.
        results: float32 values [k].
    """
    steps = [1 << k for k in reversed(range(max(len(results) - 1, 1).bit_length()))]
    # A comparison with NaN is false, so the index never goes beyond the last result.
    padded = np.full(2 * steps[0] - 1, np.nan, np.float32)
    padded[: len(limits)] = limits.numpy()
    table = emitter.add(f"{name}_limits", padded)
    index = emitter.add(f"{name}_start", np.array(0, np.int64))
    for step in steps:
        limit = emitter.emit(
            "Gather", table, emitter.emit("Add", index, emitter.add(f"{name}_probe_{step}", np.array(step - 1)))
        )
        moved = emitter.emit("Add", index, emitter.add(f"{name}_step_{step}", np.array(step)))
        index = emitter.emit("Where", emitter.emit("GreaterOrEqual", value, limit), moved, index)
    return emitter.emit("Gather", emitter.add(f"{name}_values", results), index)


def round_to(emitter: Emitter, value: str, fmt: Format) -> str:
    """Add nodes that round a value in code units to the nearest code of a format; NaN is kept.

    Raises:
        ExportError: formats of this kind cannot be computed with basic operators.
    """
    if isinstance(fmt, TableFormat):
        values = torch.tensor(fmt.values, dtype=torch.float32, device="cpu")
        limits = thresholds(lambda v: fmt.to_storage(v).long(), len(values))
        return emitter.emit(
            "Where", emitter.emit("IsNaN", value), value, look_up(emitter, "table", value, limits, values)
        )
    if not isinstance(fmt, (FloatFormat, IntegerFormat)):
        raise ExportError(f"the format {fmt} has no form in ONNX; use an integer, float or table format")
    # The standard does not specify Clip, Min and Max for NaN.
    for name, compare, bound in (("code_high", "Greater", fmt.quant_max), ("code_low", "Less", fmt.quant_min)):
        limit = emitter.number(name, bound)
        value = emitter.emit("Where", emitter.emit(compare, value, limit), limit, value)
    if isinstance(fmt, IntegerFormat):
        return _positive_zero(emitter, emitter.emit("Round", value))
    lowest = fmt.grid.min_exponent
    highest = math.frexp(fmt.quant_max)[1] - 1
    magnitude = emitter.emit("Abs", value)
    power = emitter.number("smallest_power", 2.0**lowest)
    for bit in reversed(range((highest - lowest).bit_length())):
        larger = emitter.emit("Mul", power, emitter.number(f"power_{bit}", 2.0 ** (1 << bit)))
        power = emitter.emit("Where", emitter.emit("GreaterOrEqual", magnitude, larger), larger, power)
    spacing = emitter.emit("Mul", power, emitter.number("unit", 2.0**-fmt.mantissa_bits))
    code = emitter.emit("Mul", emitter.emit("Round", emitter.emit("Div", value, spacing)), spacing)
    return code if fmt.grid.negative_zero else _positive_zero(emitter, code)


def _positive_zero(emitter: Emitter, code: str) -> str:
    zero = emitter.number("zero", 0.0)
    return emitter.emit("Where", emitter.emit("Equal", code, zero), zero, code)


def express(site: EmittedSite) -> tuple[str, str]:
    """Add the nodes of an activation; returns the name of its scale and a description."""
    scale = site.scale if site.constant is None else site.add("scale", site.constant.scale)
    spread = site.spread_computed(scale)
    value = site.as_float32(site.x)
    if site.spec.arithmetic is Arithmetic.RECIPROCAL:
        scaled = site.emit("Mul", value, site.emit("Div", site.number("one", 1.0), spread))
    else:
        scaled = site.emit("Div", value, spread)
    _multiply(site, round_to(site, scaled, site.spec.format), spread)
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
    _multiply(site, gathered, site.spread_computed(scale))
    return codes, scale, f"{site.encoding.element.name} codes, Gather and Mul"


def _multiply(site: EmittedSite, code: str, spread: str) -> None:
    """Add the product of codes and scales, in the type of the quantizer's tensor."""
    from onnx import TensorProto

    kind = site.editor.type(site.x)
    if kind == TensorProto.FLOAT:
        site.emit("Mul", code, spread, result=site.y)
    else:
        site.emit("Cast", site.emit("Mul", code, spread), result=site.y, to=kind)


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
    emitter = Emitter(editor, editor.label(f"{path or 'fake_quantize'}/range"))
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
    magnitude = emitter.emit("Abs", emitter.as_float32(x))
    finite = emitter.emit("Less", magnitude, emitter.number("inf", math.inf))  # a comparison with NaN is false
    magnitude = emitter.emit("Where", finite, magnitude, emitter.number("zero", 0.0))
    amax = _group_max(emitter, magnitude, shape, block_sizes(spec.granularity, shape))
    if isinstance(spec.scale.format, ExponentFormat):
        (powers_of_two if encoding.powers else _search_power_of_two)(emitter, amax, spec, limit, scale)
        return emitter
    tiny = emitter.number("tiny", _INFO.tiny)
    if spec.scale.format is None or spec.scale.granularity is None:
        chosen = emitter.emit("Div", amax, emitter.number("bound", spec.scale.bound(spec.format)))
    else:
        chosen = _two_level_scale(emitter, amax, editor.shape(scale), spec, encoding)
    emitter.emit("Min", emitter.emit("Max", chosen, tiny), emitter.number("limit", limit), result=scale)
    return emitter


def _group_max(emitter: Emitter, value: str, shape: Sequence[Dimension], blocks: Sequence[Dimension]) -> str:
    """Add nodes for the maximum of every group [groups per axis]; values are >= 0, so zeros pad incomplete blocks."""
    whole = [axis for axis, (n, b) in enumerate(zip(shape, blocks, strict=True)) if b == n and n != 1]
    rank = len(shape)
    for axis, (n, block) in enumerate(zip(shape, blocks, strict=True)):
        if block in (1, n):
            continue
        assert isinstance(n, int)
        assert isinstance(block, int)
        order = [i for i in range(rank) if i != axis] + [axis]  # the axis goes to the end for the Reshape
        moved = axis != rank - 1
        if moved:
            value = emitter.emit("Transpose", value, perm=order)
        groups = -(-n // block)
        if missing := groups * block - n:
            pads = emitter.add(f"pads_{axis}", np.array([0] * rank + [0] * (rank - 1) + [missing], np.int64))
            value = emitter.emit("Pad", value, pads)
        sizes = emitter.add(f"blocks_{axis}", np.array([0] * (rank - 1) + [groups, block], np.int64))
        value = emitter.emit("Reshape", value, sizes)
        value = emitter.emit("ReduceMax", value, emitter.add("last", np.array([-1], np.int64)), keepdims=0)
        if moved:
            value = emitter.emit("Transpose", value, perm=[order.index(i) for i in range(rank)])
    if whole:
        value = emitter.emit("ReduceMax", value, emitter.add("axes", np.array(whole, np.int64)), keepdims=1)
    return value


def _search_power_of_two(emitter: Emitter, amax: str, spec: QuantSpec, limit: float, result: str) -> None:
    assert isinstance(spec.scale.format, ExponentFormat)
    largest = spec.scale.format.exponent_bias

    def exponent(values: Tensor) -> Tensor:
        return torch.frexp(spec.scale.choose(values, spec.format, limit).double())[1] - 1 + largest

    count = 2 * largest + 1
    exponents = torch.arange(count, device="cpu") - largest
    powers = torch.ldexp(torch.ones(count, dtype=torch.float64, device="cpu"), exponents).float()
    power = look_up(emitter, "scale", amax, thresholds(exponent, count, lowest=0.0), powers)
    emitter.emit("Identity", power, result=result)


def _two_level_scale(
    emitter: Emitter, amax: str, shape: Sequence[Dimension], spec: QuantSpec, encoding: Encoding
) -> str:
    """Add nodes for scales [shape] with a second level, operation by operation as in `numerics.scales`."""
    fmt, granularity, bound = spec.scale.format, spec.scale.granularity, spec.scale.bound(spec.format)
    assert fmt is not None
    assert granularity is not None
    blocks = block_sizes(granularity, shape)
    whole = _group_max(emitter, amax, shape, blocks)
    shared = emitter.emit("Div", whole, emitter.number("largest", fmt.quant_max * bound))
    shared = emitter.emit("Max", shared, emitter.number("tiny", _INFO.tiny))
    spread = emitter.repeat(shared, blocks, shape)
    quotient = emitter.emit("Div", amax, emitter.emit("Mul", emitter.number("bound", bound), spread))
    smallest = emitter.number("smallest", fmt.smallest)
    if encoding.scale is not None:
        return multiply(emitter, scale_codes(emitter, quotient, smallest, encoding.scale), shared, shape, blocks)
    code = round_to(emitter, quotient, fmt)
    positive = emitter.emit("Greater", code, emitter.number("none", 0.0))
    return emitter.emit("Mul", emitter.emit("Where", positive, code, smallest), spread)


DOMAIN = "fakequant"
OPERATOR = "Recurrent"
TARGET = torch.ops.fakequant.recurrent.default
_GATES = {"LSTM": 4, "GRU": 3}
_FORMS = ("spec", "quantizer", "mode")

Express = Callable[["NodeProto", str], tuple[list["NodeProto"], SiteRecord]]
"""A function that returns the nodes for a quantizer node and its record, from the node and the quantizer's path."""


def translation() -> Any:
    """The function by which torch's exporter translates the operator `fakequant::recurrent`."""
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
    """The nodes that replace a recurrent node, and the record of its hidden state's quantizer; None without one."""
    from onnx import TensorProto, helper

    given = {a.name: a.i if a.name == "reverse" else a.s.decode() for a in node.attribute}
    mode, quantizer, direction = str(given["mode"]), str(given["quantizer"]), [int(given["reverse"])]
    count = 2 if mode == "LSTM" else 1
    gates, hidden, cell, weight, bias, *params = (*node.input, "", "", "")[:7]
    y, *last = (*node.output, "", "")[:3]
    emitter = Emitter(editor, editor.label(f"{path}/{quantizer}/loop"))
    state, of_cell, step, turned = (f"{emitter.label}/{name}" for name in ("state", "cell", "step", "weight"))
    shape, before, seen, record = editor.shape(hidden), state, [], None
    if spec := str(given["spec"]):
        editor.declare(state, TensorProto.FLOAT, shape)
        before, path = f"{state}_quantized", join(path, quantizer)
        own = [name for name in params if name]
        if not own:  # each step computes the scale
            own = [f"{state}_scale"]
            groups = QuantSpec.parse(spec).granularity.group_shape((1, int(shape[-1])))[1:]
            editor.declare(own[0], TensorProto.FLOAT, [shape[0], *groups])
            chooser = helper.make_node("ChooseScale", [state], own, domain=DOMAIN, spec=spec)
            emitter.nodes += lower_scale(editor, chooser, path, style).nodes
        quantize = helper.make_node("FakeQuantize", [state, *own], [before], domain=DOMAIN, spec=spec)
        nodes, record = express(quantize, path)
        emitter.nodes += nodes
        seen = [emitter.emit("Identity", state), emitter.emit("Identity", before)]
        record = record.seen_as(f"{emitter.label}/state_before", f"{emitter.label}/state_before_quantized")
    product = emitter.emit("MatMul", before, turned)
    product = emitter.emit("Add", product, bias) if bias else product
    after = _step(emitter, mode, (step, product, before, of_cell), shape[-1])
    results = [*after[:count], emitter.emit("Identity", after[0]), *seen]
    sizes = {step: [*shape[:-1], editor.shape(gates)[-1]]}

    def info(name: str) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes.get(name, shape))

    taken = [*[state, of_cell][:count], step]
    body = helper.make_graph(emitter.nodes, f"{emitter.label}/body", [*map(info, taken)], [*map(info, results)])
    outer = [] if record is None else [record.x, record.y]
    for name in outer:
        editor.declare(name, TensorProto.FLOAT, [editor.shape(gates)[0], *shape], visible=True)
    ends = [name or f"{emitter.label}/last_{place}" for place, name in enumerate(last[:count])]
    transpose = helper.make_node("Transpose", [weight], [turned], f"{emitter.label}/Transpose", perm=[1, 0])
    scan = helper.make_node(
        "Scan",
        [*[hidden, cell][:count], gates],
        [*ends, y, *outer],
        f"{emitter.label}/Scan",
        body=body,
        num_scan_inputs=1,
        scan_input_directions=direction,
        scan_output_directions=direction * (1 + len(outer)),
    )
    return [transpose, scan], record


def _step(emitter: Emitter, mode: str, values: tuple[str, str, str, str], width: Any) -> tuple[str, str]:
    """Add the nodes of one step; returns the names of hidden and cell state after the step.

    `values` names the products [n, gates * hidden] of input and hidden state, and both states before the step.
    """
    x, own, hidden, cell = values
    count = _GATES.get(mode, 1)
    sizes = emitter.add("sizes", np.full(count, int(width), np.int64))

    def parts(value: str) -> list[str]:
        names = [f"{emitter.label}/Split_{len(emitter.nodes)}_{place}" for place in range(count)]
        emitter.split(value, sizes, names)
        return names

    if mode == "LSTM":
        into, forget, new, out = parts(emitter.emit("Add", x, own))
        kept = emitter.emit("Mul", emitter.emit("Sigmoid", forget), cell)
        cell = emitter.emit("Add", kept, emitter.emit("Mul", emitter.emit("Sigmoid", into), emitter.emit("Tanh", new)))
        return emitter.emit("Mul", emitter.emit("Sigmoid", out), emitter.emit("Tanh", cell)), cell
    if mode == "GRU":
        (r, z, n), (of_r, of_z, of_n) = parts(x), parts(own)
        reset = emitter.emit("Sigmoid", emitter.emit("Add", r, of_r))
        n = emitter.emit("Tanh", emitter.emit("Add", n, emitter.emit("Mul", reset, of_n)))
        share = emitter.emit("Sigmoid", emitter.emit("Add", z, of_z))
        return emitter.emit("Add", n, emitter.emit("Mul", share, emitter.emit("Sub", hidden, n))), cell
    return emitter.emit("Tanh" if mode == "RNN_TANH" else "Relu", emitter.emit("Add", x, own)), cell
