"""Export a model with quantizers as an ONNX file with QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from fakequant.data.again import state_before
from fakequant.data.arguments import check_model, refuse_stored
from fakequant.data.batches import OF_TORCH, Arguments, Inputs, described, example_arguments, select_inputs
from fakequant.distributed import refuse_sharded
from fakequant.errors import ExportError, shown, warn_user
from fakequant.export.capability import FIRST_OPSET, FileRecord, Style, check_opset, check_scale, require, write
from fakequant.export.inputs import depends_on, input_records, unread_inputs
from fakequant.export.lower import lower
from fakequant.export.trace import TracedSite, check, depending, result_names, sites, to_onnx, trace, written_inputs
from fakequant.export.verdict import element_types
from fakequant.files import check_path, writable_file, write_whole
from fakequant.model.engine import holders, simulated
from fakequant.model.run.tracing import example_named
from fakequant.model.summary import warn_of_new_layers
from fakequant.model.weights import (
    evaluating,
    in_eval_mode,
    quantized_weights,
    raise_scales,
    warn_raised,
    warn_stale_scales,
)
from fakequant.nn import fixed_ranges
from fakequant.nn.products import Product
from fakequant.nn.quantized.recurrent import written_as_loops
from fakequant.nn.quantizer import Kind, Mode, Quantizer, quantizers
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.restore import attributes_of, forwards_of, restore_after
from fakequant.text import listed, module_name, table
from fakequant.version import __version__

if TYPE_CHECKING:
    from onnx import ModelProto


def active_weights(model: nn.Module) -> list[Product]:
    """The weights of a model whose quantizers are on: the file stores them quantized."""
    return [weight for weight in quantized_weights(model).values() if weight.quantizer.mode is Mode.QUANTIZE]


@contextmanager
def weights_fixed(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """A context in which scales that follow the weights are fixed, so that quantized weights are constants.

    Weights with fixed codes are quantized like others, so that each gets a node; `lower` writes the fixed codes.
    """
    weights = active_weights(model)
    dynamic = [w for w in weights if w.quantizer.scales_each_call]
    coded = [w.quantizer for w in weights if w.quantizer.fixed_codes is not None]
    with (
        restore_after(
            attributes_of([w.quantizer for w in dynamic], "scale", "zero_point", "is_zero_weight", "dynamic")
        ),
        restore_after(attributes_of(coded, "fixed_codes")),
    ):
        for quantizer in coded:
            quantizer.fixed_codes = None
        # A layer may compute its weight from the parameter of that name, as one with a folded batch normalisation does.
        plain = {id(w): w.parameter for w in dynamic if w.parameter is not None and w.tensor is w.parameter}
        for weight in dynamic:
            if (parameter := plain.get(id(weight))) is not None:
                weight.quantizer.freeze(parameter)
        # Scales of computed weights are fixed in a forward pass, because `layer.weight` may be outdated.
        if waiting := [w.quantizer for w in dynamic if id(w) not in plain]:
            with ExitStack() as hooks, simulated(model), torch.no_grad():
                for quantizer in waiting:
                    hooks.callback(quantizer.register_forward_pre_hook(lambda own, args: own.freeze(args[0])).remove)
                model(*args, **kwargs)
        for weight in dynamic:
            weight.quantizer.dynamic = False
        yield


_NEXT = "next_"
"""The prefix of the name of the output with the new value of a buffer."""


def states(program: ExportedProgram) -> dict[str, str]:
    """The buffers that the model writes and whose earlier value its outputs depend on, by the name of their input.

    Raises:
        ExportError: the model writes a constant tensor that is not a buffer.
    """
    written = {node.name for node in written_inputs(program.graph)}
    if not written:
        return {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR and spec.arg.name in written:
            raise ExportError(
                f"forward writes the tensor {spec.target}, which is not a buffer; register it by register_buffer, so "
                "that it becomes an input and an output of the file"
            )
    program = program.run_decompositions({})
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    held = {str(spec.target): nodes[spec.arg.name] for spec in signature.input_specs if spec.kind is InputKind.BUFFER}
    mutations = [spec for spec in signature.output_specs if spec.kind is OutputKind.BUFFER_MUTATION]
    changed = {str(spec.target): spec.arg.name for spec in mutations}
    wanted = {spec.arg.name for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT}
    readers = {path: depending(program.graph, lambda node, own=held[path]: node is own) for path in changed}
    reached = {path: {node.name for node in own} for path, own in readers.items()}
    found: list[str] = []
    while new := [path for path in changed if path not in found and wanted & reached[path]]:
        found += new
        wanted |= {changed[path] for path in new}
    return {f"state_{path.replace('.', '_')}": path for path in changed if path in found}


@contextmanager
def as_arguments(model: nn.Module, found: Mapping[str, str]) -> Iterator[dict[str, Tensor]]:
    """A context in which `forward` takes the buffers of `states` as arguments, and also returns their new values.

    It yields the present values of the buffers, by name.
    """
    if not found:
        yield {}
        return
    forward = model.forward
    # A buffer may be that of several modules.
    places = [
        (module._buffers, attribute, name)
        for name, path in found.items()
        for module in model.modules()
        for attribute, buffer in module._buffers.items()
        if buffer is model.get_buffer(path)
    ]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name).clone() for name in found}
        before = [buffers[attribute] for buffers, attribute, _ in places]
        try:
            for buffers, attribute, name in places:
                buffers[attribute] = given[name]
            result = forward(*args, **kwargs)
            after = {name: buffers[attribute] for buffers, attribute, name in places}
        finally:
            for (buffers, attribute, _), buffer in zip(places, before, strict=True):
                buffers[attribute] = buffer
        return result, [after[name] for name in found]

    signature = inspect.signature(forward)
    parameters = [*signature.parameters.values()]
    at = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    parameters[at:at] = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in found]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  torch reads the names

    with restore_after(forwards_of([model])):
        vars(model)["forward"] = run
        yield {name: model.get_buffer(path).detach().clone() for name, path in found.items()}


def with_state(model: nn.Module, found: Mapping[str, str], dynamic_shapes: Any) -> Any:
    """Dynamic shapes by name, with Dim.AUTO for every axis of the buffers in `found`."""
    if dynamic_shapes is None or not found:
        return dynamic_shapes
    if not isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = dict(zip(inspect.signature(model.forward).parameters, dynamic_shapes, strict=False))
    free = {name: dict.fromkeys(range(model.get_buffer(path).dim()), Dim.AUTO) for name, path in found.items()}
    return {**dynamic_shapes, **free}


MAX_BYTES = 2**31 - 2**20
"""The limit of one protobuf message, minus a margin for nodes and names."""

_NO_LOOPS = "it is not known that TensorRT computes quantizers in a loop"

_IR_VERSION = 10
"""The IR version of the file, which ONNX Runtime reads since 1.18 and which suffices for the portable style."""


@dataclass(frozen=True)
class Exported:
    """One exported quantizer: its path, its specification and a description of its ONNX nodes."""

    quantizer: str
    spec: str
    expressed: str


@dataclass(frozen=True)
class ExportReport:
    """The result of `export_onnx`; prints as a table.

    Attributes:
        path: the file.
        opset: the opset that the file needs.
        bytes: the size of the file.
        float_bytes: the size that the file would have with float weights.
        quantizers: the quantizers in the file, in graph order.
        left_out: paths of quantizers that are not in the file, because they are off, the example did not reach them, or
            their tensor depends only on parameters and is a constant in the file.
        unread: the inputs of the file that no node reads, because the model's outputs do not depend on them.
        state: the buffers that the model writes, by the names of the inputs for them.
    """

    path: Path
    opset: int
    bytes: int
    float_bytes: int
    quantizers: list[Exported]
    left_out: list[str]
    unread: list[str] = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict for JSON."""
        return {**asdict(self), "path": str(self.path)}

    def __str__(self) -> str:
        rows = [("quantizer", "specification", "in ONNX")]
        rows += [(q.quantizer or "(model)", q.spec, q.expressed) for q in self.quantizers]
        lines = [
            f"{self.path}: opset {self.opset}, {self.bytes:,} bytes, {self.bytes / self.float_bytes:.2f} of "
            f"{self.float_bytes:,} with float weights"
        ]
        if self.left_out:
            lines.append(
                f"not in the file (off, not reached by the example, or within a constant): {', '.join(self.left_out)}"
            )
        if self.unread:
            lines.append(f"no node reads the input {', '.join(self.unread)}: the model's outputs do not depend on it")
        return table(rows, lines)

    __repr__ = __str__  # what notebooks and consoles show


_CALL = "export_onnx(model, example, 'model.onnx')"


@accepts_wrapped_model
def export_onnx(  # noqa: PLR0913  all options of a file in one call
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    inputs: Inputs | None = None,
    dynamic_shapes: Any = None,
    opset: int | None = None,
    style: str = "portable",
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> ExportReport:
    """Write a calibrated model as an ONNX file that gives the same results for every number except NaN.

    Every quantizer becomes QuantizeLinear and DequantizeLinear, every weight an integer or float8 constant. Formats
    that ONNX Runtime cannot store become other operators; docs/onnx.md lists the forms of each style. The model is
    exported in eval mode and not changed, except that scales too small for an engine are enlarged, with a warning.
    Every tensor of the example is an input, even if it occurs twice, and so is every buffer that `forward` writes.

    Args:
        model: a prepared and calibrated model, or any module that calls `fakequant.fake_quantize`.
        example: an input, a tuple of inputs, or a dict of keyword arguments.
        path: the file to write; its folder is created if it does not exist.
        inputs: which part of the example the model gets, as for `calibrate`: 0 for a loader's batch of (x, y).
        dynamic_shapes: as for `torch.export.export`, for example ({0: "batch"},). An example is repeated along dynamic
            axes of length 1. Axes that blocks divide must be static.
        opset: 18 to 25, or a newer opset that a type needs; by default the smallest from 20 on that suffices.
        style: "portable" for ONNX Runtime, "standard" for all element types of ONNX, or "trt" for TensorRT.
        input_names: names of the inputs in the file.
        output_names: names of the outputs in the file; by default keys and fields of the result, else "output",
            "output_1" and so on.

    Raises:
        ExportError: the style is unknown; some quantizers are not calibrated, or ONNX cannot express them; the model
            fails on the example; the file would have more than 2 GB; or onnx is not installed. Nothing is written.
        OutputError: the file cannot be written; raised before any work.
        torch.export's errors: the model cannot be traced.

    >>> from tempfile import TemporaryDirectory
    >>> model = prepare(nn.Sequential(nn.Linear(4, 2)), "INT8_WEIGHT_ONLY")
    >>> with TemporaryDirectory() as folder:
    ...     report = export_onnx(model, torch.ones(1, 4), folder + "/model.onnx")
    >>> report.opset, [q.quantizer for q in report.quantizers]
    (20, ['0._weight_quantizer'])
    """
    dialect = Style.parse(style)
    check_model(model, "export_onnx", _CALL, ExportError)
    check_path(path, _CALL, ExportError)
    refuse_sharded(model, "export")
    refuse_stored(model, "export")
    warn_stale_scales(model)
    warn_of_new_layers(model)
    warn_raised(raise_scales(model))
    chosen_example = example if inputs is None else select_inputs(example, inputs)
    ready = traced(model, chosen_example, path, dynamic_shapes, opset, dialect)
    demanding = max(ready.sites, key=lambda site: site.needs)
    needed = max(demanding.needs, FIRST_OPSET)
    chosen = check_opset(opset, needed, f"{module_name(demanding.path)} ({demanding.spec})")
    converted = ready.to_onnx(model, chosen, dynamic_shapes, input_names, output_names)
    sizes = {tensor.name: tensor.ByteSize() for tensor in converted.graph.initializer}
    dynamic = frozenset(name for name, q in ready.active.items() if q.dynamic and q.kind is Kind.INPUT)
    records = lower(converted, dynamic, dialect, ready.codes)
    write(converted, FileRecord(__version__, dialect, records, input_records(converted, ready.program, ready.state)))
    data = finish(converted, needed)
    unread = unread_inputs(converted)

    def run(example: Any) -> Any:
        args, kwargs = example
        kwargs = {name: x for name, x in kwargs.items() if name not in ready.state}
        with restore_after(state_before(model)), evaluating(model), torch.no_grad():
            return model(*args, **kwargs)

    names = [value.name for value in converted.graph.input]
    if lost := [name for name in unread if depends_on(run, ready.program.example_inputs, names.index(name))]:
        raise ExportError(
            f"no node of the file would read the input {', '.join(lost)}, on which the model's outputs depend: tracing "
            "made a constant of it. Compute with tensors in forward, without float(), int() and numpy"
        )
    write_whole(ready.target, data)
    stored = {tensor.name: tensor.ByteSize() for tensor in converted.graph.initializer}
    weights = {record.x: sizes[record.x] for record in records if record.codes and record.x not in stored}
    codes = {record.codes: stored[record.codes] for record in records if record.codes}
    return ExportReport(
        ready.target,
        chosen,
        len(data),
        len(data) + sum(weights.values()) - sum(codes.values()),
        [Exported(record.quantizer, record.spec, record.expressed) for record in records],
        sorted(set(quantizers(model)) - {record.quantizer for record in records}),
        unread,
        ready.state,
    )


def _names(option: str, given: Sequence[str] | None, found: Collection[Any], state: Sequence[str]) -> list[str] | None:
    """The names of all inputs or outputs, the buffers' last; None if `given` is None.

    Raises:
        ExportError: `given` has another number of names.
    """
    if given is None:
        return None
    count = len(found) - len(state)
    if len(given) != count:
        raise ExportError(f"{option} has {len(given)} names for {count} {option.partition('_')[0]}s; give one for each")
    return [*given, *state]


@dataclass(frozen=True)
class Traced:
    """A traced and checked model: a graph of torch operations in which every quantizer is one node.

    Attributes:
        target: the file to write.
        active: for each path, the quantizer that will be in the file.
        program: the graph.
        sites: all quantizers of the graph.
        codes: fixed codes of weights, by the path of the quantizer, if quantizing would give other codes.
        state: buffers that the model writes, by the names of the inputs for them.
    """

    target: Path
    active: dict[str, Quantizer]
    program: ExportedProgram
    sites: list[TracedSite]
    codes: dict[str, Tensor]
    state: dict[str, str]

    def to_onnx(
        self,
        model: nn.Module,
        opset: int,
        dynamic_shapes: Any,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
    ) -> ModelProto:
        """Convert the graph to an ONNX model.

        Raises:
            ExportError: there are more or fewer names than inputs or outputs.
        """
        signature, state = self.program.graph_signature, self.state
        inputs = _names("input_names", input_names, signature.user_inputs, [*state])
        following = [f"{_NEXT}{name}" for name in state]  # the last outputs are the new values of the buffers
        taken = [*(inputs or map(str, signature.user_inputs)), *signature.parameters, *signature.buffers]
        named = [*result_names(self.program, taken, has_state=bool(state)), *following]
        outputs = _names("output_names", output_names, named, following) or named
        return to_onnx(self.program, opset, with_state(model, state, dynamic_shapes), inputs, outputs)


def traced(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    dynamic_shapes: Any,
    opset: int | None = None,
    style: Style = Style.PORTABLE,
) -> Traced:
    """Check and trace a model in eval mode, with fixed scales of weights.

    Raises:
        ExportError: the model has no quantizers; some are not calibrated, or ONNX cannot express them; or onnx is not
            installed.
        OutputError: the file cannot be written.
        torch.export's errors: the model cannot be traced.
    """
    require("onnx", "onnxscript")
    target = writable_file(path)
    active = active_quantizers(model)
    _check_all(model, active, opset, style)
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    size = sum(t.numel() * t.element_size() for t in tensors.values()) - sum(
        weight.tensor.numel() * (8 * weight.tensor.element_size() - weight.quantizer.spec.format.bits) // 8
        for weight in active_weights(model)
    )
    if size > MAX_BYTES:
        raise ExportError(
            f"the file would have about {size:,} bytes, but one ONNX file holds at most {MAX_BYTES:,}; "
            "quantize more weights, or export the model in parts"
        )
    arguments, codes = checked_arguments(model, example), fixed_codes(model)
    with ready_to_trace(model, arguments, _NO_LOOPS if style is Style.TRT else None):
        program, state = _program(model, *arguments, dynamic_shapes)
    quantizing = sites(program, style)
    if not quantizing:
        raise ExportError(
            "nothing in the model quantizes; prepare it first, or use torch.onnx.export for a float model"
        )
    known = dict(model.named_modules(remove_duplicate=False))
    if unnamed := [site.path for site in quantizing if site.path not in known]:
        raise ExportError(
            f"torch.export finds quantizers at {listed(unnamed)}, but the model has no modules there; put the modules "
            "that forward calls into nn.ModuleList or nn.ModuleDict"
        )
    return Traced(target, active, program, quantizing, codes, state)


def checked_arguments(model: nn.Module, example: Any) -> Arguments:
    """The arguments of `forward` in an example, checked.

    Raises:
        ExportError: the example has no tensor, or `forward` does not take it.
    """
    arguments = args, kwargs = example_arguments(example)
    leaves = pytree.tree_leaves((args, kwargs))
    if leaves and not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise ExportError(f"an example is a tensor, a tuple of arguments or a dict of them, got {shown(example)}")
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        cure = "give one batch, not a list of batches" if isinstance(example, list) else "give the arguments of forward"
        raise ExportError(
            f"the model cannot be called with the example, {described(example)}: {error}; {cure}"
        ) from error
    return arguments


def fixed_codes(model: nn.Module) -> dict[str, Tensor]:
    """The fixed codes of weights, on the CPU by the quantizer's path, if quantizing would give other codes."""
    with torch.no_grad():
        weights = quantized_weights(model).items()
        fixed = {path: w.quantizer.codes_of_weight(w.parameter) for path, w in weights if w.parameter is not None}
        return {path: one.cpu() for path, one in fixed.items() if one is not None}


@contextmanager
def ready_to_trace(model: nn.Module, arguments: Arguments, no_loops: str | None) -> Iterator[None]:
    """A context with eval mode and fixed scales of weights, in which an error names shapes and the layer.

    Args:
        no_loops: the reason why recurrent layers cannot be written as loops; None if they can.
    """
    with (
        in_eval_mode(model),
        fixed_ranges(model),
        weights_fixed(model, *arguments),
        example_named(model, arguments),
        written_as_loops(no_loops),
    ):
        yield


def _program(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> tuple[ExportedProgram, dict[str, str]]:
    """The traced model, and the buffers that are its inputs and outputs, by the names of the inputs."""
    try:
        program = trace(model, args, kwargs, dynamic_shapes)
        if not (state := states(program)):
            return program, state
    except OF_TORCH:
        # A buffer has the sizes of the example, so that a model with a state takes no others.
        if dynamic_shapes is None or not (state := states(trace(model, args, kwargs, None))):
            raise
    warn_user(
        f"forward writes the buffers {listed(state.values())}: they are inputs and outputs of the file, such as "
        f"{next(iter(state))} and next_{next(iter(state))}; give each run the outputs of the run before"
    )
    with as_arguments(model, state) as values:
        return trace(model, args, {**kwargs, **values}, with_state(model, state, dynamic_shapes)), state


def active_quantizers(model: nn.Module) -> dict[str, Quantizer]:
    """For each path, the quantizer that is not off.

    Raises:
        ExportError: some are not calibrated; the message names them all.
    """
    active = {name: q for name, q in quantizers(model).items() if q.mode is not Mode.OFF}
    if waiting := [name for name, q in active.items() if q.needs_calibration]:
        raise ExportError(
            f"{len(waiting)} quantizers are not calibrated: {', '.join(waiting)}; "
            "call fakequant.calibrate(model, batches)"
        )
    return active


def _check_all(model: nn.Module, active: Mapping[str, Quantizer], opset: int | None, style: Style) -> None:
    """Raise ExportError with the names of all quantizers that ONNX cannot express."""
    refused = []
    shapes = {id(weight.quantizer): weight.tensor.shape for weight in active_weights(model)}
    for name, quantizer in active.items():
        try:
            if quantizer.mode is Mode.OBSERVE:
                raise ExportError("is observing; finish the calibration")
            if quantizer.global_scale is not None:
                raise ExportError("has a fixed global_scale, which ONNX files cannot have; set it to None")
            if quantizer.by_value is not None and style is Style.TRT:
                by = quantizer.by_value.name
                raise ExportError(f"has ranges by {by}, and TensorRT takes constant scales; calibrate without by=")
            spec, is_weight = quantizer.spec, quantizer.kind is Kind.WEIGHT
            encoding = check(spec, style, shapes.get(id(quantizer)), constant=is_weight, dynamic=quantizer.dynamic)
            check_opset(opset, encoding.opset(constant=is_weight), str(spec))
            if quantizer.scale is not None and not quantizer.dynamic:
                check_scale(quantizer.scale, spec, style)
        except ExportError as error:
            refused.append(f"{name}: {error}")
    if refused:
        raise ExportError("cannot be expressed in ONNX:\n" + "\n".join(refused))


def refuse_unexportable(style: str, model: nn.Module) -> None:
    """Raise ExportError if a style cannot express a prepared model; names of other exporters are ignored."""
    if style in [one.value for one in Style]:
        _check_all(model, quantizers(model), None, Style(style))


holders.append(refuse_unexportable)


def finish(model: ModelProto, needed: int) -> bytes:
    """Check a model with ONNX's own checker and return the bytes of the file.

    Args:
        model: the model, which gets the format version and the producer.
        needed: the opset of the newest element type.

    Raises:
        ExportError: the file is too large, or not valid ONNX.
    """
    import onnx
    from onnx import TensorProto

    with_types = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", needed)])
    model.ir_version = max(_IR_VERSION, with_types)
    model.producer_name, model.producer_version = "fakequant", __version__
    if model.ByteSize() > MAX_BYTES:
        raise ExportError(
            f"the file would have {model.ByteSize():,} bytes, but one ONNX file holds at most {MAX_BYTES:,}"
        )
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        half = TensorProto.BFLOAT16 in element_types(model).values()
        advice = "; few operators take bfloat16: export the model in float32, as by model.float()" if half else ""
        raise ExportError(f"the converted model is not valid ONNX, so nothing was written: {error}{advice}") from error
    return model.SerializeToString()
