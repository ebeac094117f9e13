"""Export a model with quantizers as a graph of torch with the operators of `quantized_decomposed`.

ExecuTorch, LiteRT, Core ML and torch's own compiler read such graphs ("PT2E"). Sources: torch,
`torch/ao/quantization/fx/_decomposed.py`; torchao, `choose_qparams_affine` for ranges of every token.

* An activation is quantize_per_tensor and dequantize_per_tensor, or both per channel: clamp(rint(x * (1 / s)) + z) and
  (q - z) * s in float32, `Arithmetic.RECIPROCAL`.
* A weight is a constant of integers and a dequantize per tensor, per channel or per group of inputs.
* Unsigned codes are stored as signed codes, with codes and zero point lower by the same number: engines take int8.
* A product whose result is pooled or reshaped before its quantizer is also quantized before the pool or reshape:
  XNNPACK and LiteRT compute a product on integers only if its result is quantized directly.
* Equal quantizers of one tensor share one quantize node. With two, ExecuTorch 1.5's XNNPACK computes other numbers: it
  leaves the convolution behind one of the nodes to another kernel, without the quantizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument

from fakequant.data.arguments import check_model, refuse_stored
from fakequant.data.batches import Inputs, select_inputs
from fakequant.distributed import refuse_sharded
from fakequant.errors import ExportError, warn_user
from fakequant.export.capability import ScaleLayout, block_sizes, check_scale, layout, require
from fakequant.export.exporter import active_quantizers, checked_arguments, fixed_codes, ready_to_trace
from fakequant.export.trace import TARGET, depending, known_values, quantizing_nodes, scope_of, trace
from fakequant.model.engine import holders
from fakequant.model.placement import moves
from fakequant.model.summary import warn_of_new_layers
from fakequant.model.weights import raise_scales, warn_raised, warn_stale_scales
from fakequant.nn.paths import join
from fakequant.nn.quantizer import Kind, Mode, Quantizer, quantizers
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.granularity import PerToken
from fakequant.numerics.qparams import QParams
from fakequant.numerics.scales import ScaleRounding
from fakequant.numerics.spec import Arithmetic, QuantSpec, Rounding
from fakequant.ops import library
from fakequant.restore import forwards_of, restore_after
from fakequant.text import listed, module_name

_CALL = "export_pt2e(model, example)"
_NO_LOOPS = "these graphs have no loops; its quantizers inside need another engine, such as ONNX Runtime by export_onnx"
_TOKENS = QuantSpec("int8", PerToken(), symmetric=False)
"""The specification that torchao's operators compute for every token, in the arithmetic RECIPROCAL."""


@accepts_wrapped_model
def export_pt2e(
    model: nn.Module, example: Any, *, inputs: Inputs | None = None, dynamic_shapes: Any = None
) -> ExportedProgram:
    """A calibrated model as a graph of torch with the operators of `quantized_decomposed`, which mobile engines read.

    In torch the graph computes the bits of the simulation, for every number except NaN. Weights are integers, and equal
    quantizers of one tensor share one quantize node. The model is exported in eval mode and not changed, except that
    scales too small for an engine are enlarged, with a warning.

    Args:
        model: a prepared and calibrated model, or any module that calls `fakequant.fake_quantize`.
        example: an input, a tuple of inputs, or a dict of keyword arguments.
        inputs: which part of the example the model gets, as for `calibrate`: 0 for a loader's batch of (x, y).
        dynamic_shapes: as for `torch.export.export`, for example ({0: Dim("batch")},).

    Raises:
        ExportError: some quantizers are not calibrated, or no operator of `quantized_decomposed` computes them: all are
            named, before the work; or the model fails on the example.
        torch.export's errors: the model cannot be traced.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 2)), "INT8_WEIGHT_ONLY")
    >>> program = export_pt2e(model, torch.ones(1, 4))
    >>> [node.name for node in program.graph.nodes if node.op == "call_function"]
    ['dequantize_per_channel_default', 'linear']
    """
    return lowered(model, example, inputs, dynamic_shapes, call=_CALL)


def lowered(
    model: nn.Module,
    example: Any,
    inputs: Inputs | None = None,
    dynamic_shapes: Any = None,
    *,
    call: str,
    multiplies: bool = True,
    operators: type[Lowering] | None = None,
) -> ExportedProgram:
    """Trace a model, and replace its quantizers by operators; the graph that `export_pt2e` returns.

    Args:
        call: the user's call, for messages.
        multiplies: whether the reader of the graph multiplies by 1 / scale, as torch does; otherwise it divides.
        operators: the class that replaces quantizers; None for `quantized_decomposed`.
    """
    operators = Lowering if operators is None else operators
    check_model(model, call.partition("(")[0], call, ExportError)
    refuse_sharded(model, "export")
    refuse_stored(model, "export")
    warn_stale_scales(model)
    warn_of_new_layers(model)
    warn_raised(raise_scales(model))
    active = active_quantizers(model)
    check_quantizers(active, operators)
    example = example if inputs is None else select_inputs(example, inputs)
    arguments, codes = checked_arguments(model, example), fixed_codes(model)
    by_token = [one for one in active.values() if one.dynamic and one.kind is Kind.INPUT]
    if by_token:
        require("torchao", reader="A graph with ranges of every token", install="'torchao>=0.18,<0.19'")
        import_module("torchao.quantization.quant_primitives")  # registers the operators
    with ready_to_trace(model, arguments, _NO_LOOPS), restore_after(forwards_of(by_token)):
        for one in by_token:
            vars(one)["forward"] = _quantize_tokens
        program = trace(model, *arguments, dynamic_shapes)
    dividing = operators(program, codes).run()
    if dividing and multiplies:
        warn_user(
            f"{len(dividing)} quantizers divide by their scale ({listed(dividing, 3)}), but the graph multiplies by "
            "1 / scale: a value halfway between two codes may get the other code. prepare(..., target='executorch') "
            "or 'reciprocal' in a specification as in 'int8 reciprocal', simulates what the graph computes"
        )
    return program


def why_not(spec: QuantSpec, *, constant: bool) -> str | None:
    """The reason why no operator of `quantized_decomposed` computes a specification; None if one does.

    >>> why_not(QuantSpec("int8"), constant=False)
    >>> why_not(QuantSpec("float8_e4m3fn"), constant=True)
    'the operators have integers, but float8_e4m3fn is not one; prepare with int8, or use export_onnx'
    """
    fmt = spec.format
    if not isinstance(fmt, IntegerFormat):
        return f"the operators have integers, but {fmt} is not one; prepare with int8, or use export_onnx"
    if fmt.bits > 16 or (fmt.low < 0) != fmt.signed:
        return f"the operators have integers of at most 16 bits, but {fmt} is not one"
    if spec.arithmetic not in (Arithmetic.DIVIDE, Arithmetic.RECIPROCAL):
        return f"the operators encode and decode by one scale, which {spec.arithmetic} does not; use RECIPROCAL"
    if spec.offset is not None or spec.scale.rounding is ScaleRounding.SIGNED:
        return "the operators have positive scales and integer zero points; leave offsets and 'signed' to GGUF"
    if spec.rounding is Rounding.STOCHASTIC and not constant:
        return (
            "stochastic rounding draws other codes in every run; set "
            "quantizer.spec = quantizer.spec.replace(rounding=Rounding.NEAREST_EVEN)"
        )
    return None


def check_quantizers(active: Mapping[str, Quantizer], operators: type[Lowering]) -> None:
    """Raise ExportError with the names of all quantizers that the operators cannot express."""
    refused = []
    for name, quantizer in active.items():
        spec, is_weight = quantizer.spec, quantizer.kind is Kind.WEIGHT
        try:
            if quantizer.mode is Mode.OBSERVE:
                raise ExportError("is observing; finish the calibration")
            if quantizer.by_value is not None:
                by = quantizer.by_value.name
                raise ExportError(f"has ranges by {by}, and the graph has constants; calibrate without by=")
            if quantizer.dynamic and not is_weight and (reason := operators.why_not_dynamic(spec)) is not None:
                raise ExportError(f"{spec} takes its range from every tensor, and {reason}")
            if (reason := operators.why_not(spec, constant=is_weight)) is not None:
                raise ExportError(f"{spec}: {reason}")
            if quantizer.scale is not None and not quantizer.dynamic:
                check_scale(quantizer.scale, spec)
        except ExportError as error:
            refused.append(f"{name}: {error}")
    if refused:
        raise ExportError(f"cannot be expressed in {operators.label}:\n" + "\n".join(refused))


def refuse_early(export: str, operators: type[Lowering]) -> None:
    """Make `prepare` refuse quantizers that a graph cannot express, for targets whose `Engine.export` is `export`."""

    def check(name: str, model: nn.Module) -> None:
        if name == export:
            check_quantizers(
                {path: one for path, one in quantizers(model).items() if one.mode is not Mode.OFF}, operators
            )

    holders.append(check)


def _quantize_tokens(x: Tensor) -> Tensor:
    ops: Any = torch.ops.torchao
    block = [1] * (x.dim() - 1) + [x.shape[-1]]
    scale, point = ops.choose_qparams_affine(x, "ASYMMETRIC", block, torch.int8, -128, 127, None, None, torch.int8)
    codes = ops.quantize_affine(x, block, scale, point, torch.int8, -128, 127)
    return ops.dequantize_affine(codes, block, scale, point, torch.int8, -128, 127, output_dtype=x.dtype)


@dataclass(frozen=True)
class _Grid:
    """The arguments of an operator: scales and zero points in its layout, the bounds and the dtype of codes."""

    where: ScaleLayout
    scale: Tensor
    zero_point: Tensor
    low: int
    high: int
    dtype: torch.dtype
    shift: int

    @property
    def limits(self) -> tuple[int, int, torch.dtype]:
        return self.low, self.high, self.dtype


def _grid(spec: QuantSpec, params: QParams, shape: tuple[int, ...]) -> _Grid:
    """The arguments of an operator for a tensor; raises ExportError if no operator has its layout of scales."""
    fmt = spec.format
    assert isinstance(fmt, IntegerFormat), "checked"
    where = layout(shape, tuple(params.scale.shape), block_sizes(spec.granularity, shape))
    shift = 0 if fmt.signed else 1 << fmt.bits - 1
    zero_point = torch.zeros_like(params.scale) if params.zero_point is None else params.zero_point
    scale, zero_point = (x.detach() for x in (params.scale.float(), zero_point.to(torch.int64) - shift))
    if where.block_size:
        if len(shape) != 2 or where.axis != 1 or shape[1] % where.block_size:
            raise ExportError(
                f"{spec}: the operators need a matrix [out, in] with equal groups along each row, but the tensor is "
                f"{list(shape)}; use per_channel, or groups whose length divides {shape[-1]}"
            )
        times = [max(n, 1) for n in where.repeats] or [1] * len(shape)
        for axis, count in enumerate(times):
            scale, zero_point = (x.repeat_interleave(count, axis) for x in (scale, zero_point))
        scale, zero_point = (x[: shape[0]] for x in (scale, zero_point))
    else:
        scale, zero_point = scale.reshape(-1), zero_point.reshape(-1)
    dtype = torch.int8 if fmt.bits <= 8 else torch.int16
    return _Grid(where, scale.contiguous(), zero_point, fmt.low - shift, fmt.high - shift, dtype, shift)


class Lowering:
    """Replaces the quantizers of a traced graph by operators of `quantized_decomposed`, in place.

    Attributes:
        label: the name of the operators in messages.
        package: the module that registers the operators.
        namespace: the namespace of the operators in `torch.ops`.
        float_weights: whether weights are float constants that go through a quantize and a dequantize node.
    """

    label = "quantized_decomposed"
    package = "torch.ao.quantization.fx._decomposed"
    namespace = "quantized_decomposed"
    float_weights = False

    def __init__(self, program: ExportedProgram, codes: Mapping[str, Tensor]) -> None:
        import_module(self.package)
        self._ops: Any = getattr(torch.ops, self.namespace)
        self._program, self._codes = program, codes
        self._quantized: dict[tuple[Any, ...], fx.Node] = {}

    @classmethod
    def why_not(cls, spec: QuantSpec, *, constant: bool) -> str | None:
        """The reason why no operator computes a specification; None if one does."""
        return why_not(spec, constant=constant)

    @classmethod
    def why_not_dynamic(cls, spec: QuantSpec) -> str | None:
        """The reason why no operator computes this specification's range from the tensor; None if an operator does."""
        if spec.replace(arithmetic=_TOKENS.arithmetic, gradient=_TOKENS.gradient) == _TOKENS:
            return None
        return (
            "engines do so for 'int8 per_token asymmetric' alone; use W4A8_EXECUTORCH for language models, or a static "
            "range such as INT8 and calibrate"
        )

    def run(self) -> list[str]:
        """Lower all quantizers; returns the paths of activations' quantizers that divide by their scale.

        Raises:
            ExportError: some quantizers cannot be expressed; the message names them all.
        """
        program, refused, dividing = self._program, dict[str, str](), list[str]()
        found = list(quantizing_nodes(program))
        if not found and not any("torchao" in str(node.target) for node in program.graph.nodes):
            raise ExportError(
                "nothing in the model quantizes; prepare it first, or use torch.export.export for a float model"
            )
        nodes = [node for node, reason in found if not reason and node.target is TARGET]
        inputs = set(program.graph_signature.user_inputs)
        moving = depending(program.graph, lambda node: node.name in inputs)
        known: list[dict[fx.Node, Tensor]] = []  # the arguments that do not depend on an input of the model
        for place in range(3):
            sources = {
                node: own for node in nodes if isinstance(own := node.args[place], fx.Node) and own not in moving
            }
            known.append({node: value.detach().clone() for node, value in known_values(program, sources)})
        x, scale, zero_point = known
        for node, reason in found:
            path = scope_of(node)
            try:
                if reason or node.target is not TARGET:
                    raise ExportError(reason or f"is a recurrent layer; {_NO_LOOPS}")
                spec = QuantSpec.parse(str(node.args[3]))
                if reason := self.why_not(spec, constant=node in x):
                    raise ExportError(f"{spec}: {reason}")
                if node not in scale or (node.args[2] is not None and node not in zero_point):
                    raise ExportError(
                        f"{spec}: its scale depends on the input, and the graph has constants; use a static range"
                    )
                params = QParams(scale[node], zero_point.get(node))
                check_scale(params.scale, spec)
                y = self._weight(node, spec, params, x[node]) if node in x else self._activation(node, spec, params)
                if node not in x and spec.arithmetic is Arithmetic.DIVIDE:
                    dividing.append(path)
                node.replace_all_uses_with(y)
                program.graph_signature.replace_all_uses(node.name, y.name)
                program.graph.erase_node(node)
            except ExportError as error:
                refused[path] = str(error)
        if refused:
            lines = "\n".join(f"{module_name(path)}: {reason}" for path, reason in refused.items())
            raise ExportError(f"cannot be expressed in {self.label}:\n{lines}")
        self._without_copies()
        self._finish()
        program.graph.eliminate_dead_code(lambda node: node.is_impure())
        self._drop_unused()
        for held in (program.state_dict, program.constants):  # the model, which trains on, has these tensors, too
            for name, value in held.items():
                if isinstance(value, Tensor):
                    copied = value.detach().clone()
                    is_trained = isinstance(value, nn.Parameter)
                    held[name] = nn.Parameter(copied, value.requires_grad) if is_trained else copied
        program.graph_module.recompile()
        program.graph.lint()
        program.validate()
        return dividing

    def _without_copies(self) -> None:
        """Remove nodes that copy a result over a tensor, as `y += x` does: readers get the result directly."""
        order = {node: place for place, node in enumerate(self._program.graph.nodes)}
        for node in list(self._program.graph.nodes):
            if node.target is not torch.ops.aten.copy_.default:
                continue
            over, result = node.args[:2]
            same = all(getattr(over.meta["val"], of) == getattr(result.meta["val"], of) for of in ("shape", "dtype"))
            near = [one for one in {over, result, *over.users, *result.users} - {node} if one.op == "call_function"]
            schemas = [getattr(one.target, "_schema", None) for one in near]
            # Views and in-place operators share memory; functions that are no operators of torch may share it, too.
            shares = any(one is None or any(a.alias_info is not None for a in one.arguments) for one in schemas)
            if over.op != "call_function" or not same or shares:
                continue
            for reader in [one for one in over.users if one is not node and order[one] > order[node]]:
                reader.replace_input_with(over, result)
            node.replace_all_uses_with(result)
            self._program.graph_signature.replace_all_uses(node.name, result.name)
            node.graph.erase_node(node)

    def _finish(self) -> None:
        """Also quantize before functions that move or pick values, if only one quantize node reads the result.

        Values do not change if they are quantized twice, or before they are picked instead of after.
        """
        target, names = self._ops.quantize_per_tensor.default, {f"aten::{name}" for name in moves()}
        nodes = list(self._program.graph.nodes)
        movers = {one for one in nodes if getattr(getattr(one.target, "_schema", None), "name", "") in names}
        for node in reversed(nodes):
            quantize, moved = node, node.args[0] if node.target is target else None
            while isinstance(moved, fx.Node) and moved in movers and set(moved.users) == {quantize}:
                (x, *others), parameters = moved.all_input_nodes, quantize.args[1:]
                dtypes = {one.meta["val"].dtype for one in (x, moved)}
                if others or x.op != "call_function" or dtypes != {torch.float32}:
                    break
                equal = [one for one in x.users if one.target is target and one.args[1:] == parameters]
                with x.graph.inserting_after(x):
                    first = self._call(x, target, x, *parameters)
                with x.graph.inserting_after(first):
                    values = self._call(x, self._ops.dequantize_per_tensor.default, first, *parameters)
                moved.replace_input_with(x, values)
                for one in equal:
                    one.replace_all_uses_with(first)
                    x.graph.erase_node(one)
                quantize, moved = first, x

    def _weight(self, node: fx.Node, spec: QuantSpec, params: QParams, weight: Tensor) -> fx.Node:
        """The node that dequantizes the codes of a weight."""
        path, grid = scope_of(node), _grid(spec, params, tuple(weight.shape))
        codes = self._codes.get(path)
        codes = library.encode(weight, params, spec) if codes is None else codes
        if codes is None:
            raise ExportError("the weight holds NaN, which has no integer; repair the weight")
        stored = (codes.to(weight.device, torch.int32) - grid.shift).to(grid.dtype)
        with node.graph.inserting_before(node):
            held = self._constant(path, "codes", stored, node)
            if self.float_weights and not grid.where.block_size:
                values = library.dequantize(codes, params, spec, torch.float32)
                held = self._quantize(node, self._constant(path, "values", values, node), grid)
            return self._dequantize(node, held, grid)

    def _activation(self, node: fx.Node, spec: QuantSpec, params: QParams) -> fx.Node:
        x = node.args[0]
        assert isinstance(x, fx.Node)
        shape = x.meta["val"].shape
        grid = _grid(spec, params, tuple(n if isinstance(n, int) else str(n) for n in shape))  # type: ignore[misc]
        if grid.where.block_size:
            raise ExportError(f"{spec}: the operators have no groups of activations; use per_tensor")
        key = x, grid.limits, grid.where, *(own.cpu().numpy().tobytes() for own in (grid.scale, grid.zero_point))
        with node.graph.inserting_before(node):
            if key not in self._quantized:
                self._quantized[key] = self._quantize(node, x, grid)
            return self._dequantize(node, self._quantized[key], grid)

    def _quantize(self, node: fx.Node, x: fx.Node, grid: _Grid) -> fx.Node:
        if grid.where.axis is None:
            values = float(grid.scale), int(grid.zero_point)
            return self._call(node, self._ops.quantize_per_tensor.default, x, *values, *grid.limits)
        values = self._parameters(node, grid)
        return self._call(node, self._ops.quantize_per_channel.default, x, *values, grid.where.axis, *grid.limits)

    def _dequantize(self, node: fx.Node, codes: fx.Node, grid: _Grid) -> fx.Node:
        ops, where = self._ops, grid.where
        if where.axis is None:
            values = float(grid.scale), int(grid.zero_point)
            y = self._call(node, ops.dequantize_per_tensor.default, codes, *values, *grid.limits)
        elif where.block_size:
            rest = *grid.limits, where.block_size, torch.float32
            target = ops.dequantize_per_channel_group.default
            y = self._call(node, target, codes, *self._parameters(node, grid), *rest)
        else:
            target = ops.dequantize_per_channel.default
            y = self._call(node, target, codes, *self._parameters(node, grid), where.axis, *grid.limits)
        dtype = node.meta["val"].dtype
        return y if dtype is torch.float32 else self._call(node, torch.ops.aten.to.dtype, y, dtype)

    def _parameters(self, node: fx.Node, grid: _Grid) -> tuple[fx.Node, fx.Node]:
        path = scope_of(node)
        return self._constant(path, "scales", grid.scale, node), self._constant(
            path, "zero_points", grid.zero_point, node
        )

    def _call(self, node: fx.Node, target: Any, *args: Any) -> fx.Node:
        """A node that calls an operator, with the metadata of the quantizer's node."""
        made = node.graph.call_function(target, args)
        values = [one.meta["val"] if isinstance(one, fx.Node) else one for one in args]
        with node.meta["val"].fake_mode:
            made.meta = {**node.meta, "val": target(*values)}
        return made

    def _constant(self, path: str, name: str, value: Tensor, node: fx.Node) -> fx.Node:
        """Add a buffer to the program, and return its placeholder."""
        program, target = self._program, join(path, name)
        count = 0
        while target in program.state_dict or target in program.constants:
            count += 1
            target = join(path, f"{name}_{count}")
        first = next(one for one in program.graph.nodes if one.op == "placeholder")
        with program.graph.inserting_before(first):  # the inputs come last
            made = program.graph.placeholder(f"b_{target.replace('.', '_')}")
        made.meta["val"] = node.meta["val"].fake_mode.from_tensor(value, static_shapes=True)
        argument = TensorArgument(made.name)
        program.graph_signature.input_specs.insert(0, InputSpec(InputKind.BUFFER, argument, target, persistent=True))
        program.state_dict[target] = value
        return made

    def _drop_unused(self) -> None:
        """Remove parameters and buffers that no node reads, such as float weights."""
        program, signature = self._program, self._program.graph_signature
        kinds = OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION
        written = {spec.target for spec in signature.output_specs if spec.kind in kinds}
        nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        for spec in list(signature.input_specs):
            is_own = spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
            node = nodes[spec.arg.name] if is_own else None
            if node is not None and not node.users and spec.target not in written:
                program.graph.erase_node(node)
                signature.input_specs.remove(spec)
        used = {spec.target for spec in signature.input_specs}
        for held in (program.state_dict, program.constants):
            for name in [name for name in held if name not in used]:
                del held[name]


class LoweringToInt8(Lowering):
    """`Lowering` for an engine whose activations are int8 with static ranges."""

    @classmethod
    def why_not(cls, spec: QuantSpec, *, constant: bool) -> str | None:
        return super().why_not(spec, constant=constant) or (None if constant else cls.why_not_codes(spec))

    @staticmethod
    def why_not_codes(spec: QuantSpec) -> str | None:
        """The reason why activations cannot have the codes of a specification; None for the codes of 8 bits."""
        fmt = spec.format
        assert isinstance(fmt, IntegerFormat), "checked"
        all_codes = IntegerFormat.of(8, signed=fmt.signed)
        return None if fmt == all_codes else f"codes are {fmt.low} to {fmt.high}, not all of 8 bits; use int8 or uint8"

    @classmethod
    def why_not_dynamic(cls, spec: QuantSpec) -> str | None:
        return f"{cls.label} has static ranges alone; use a preset such as INT8"
