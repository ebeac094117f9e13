"""A model with quantizers as an ONNX file with QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from fakequant.distributed import refuse_sharded
from fakequant.errors import ExportError
from fakequant.export import trt
from fakequant.export.capability import FIRST_OPSET, check_opset, check_scale, check_spec
from fakequant.export.lower import lower
from fakequant.export.packages import require
from fakequant.export.record import FileRecord, InputRecord, write
from fakequant.export.runtime import element_types
from fakequant.export.style import Style
from fakequant.export.trace import Site, sites, to_onnx, trace
from fakequant.files import writable_file, write_whole
from fakequant.model.batches import example_arguments
from fakequant.model.execution import simulated
from fakequant.model.modes import evaluating
from fakequant.model.weights import warn_stale_scales
from fakequant.nn import fixed_ranges
from fakequant.nn.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Mode, Quantizer, quantizers
from fakequant.restore import attributes_of, restore_after
from fakequant.version import __version__

if TYPE_CHECKING:
    from onnx import ModelProto

MAX_BYTES = 2**31 - 2**20
"""What one protobuf message can hold, less a margin for nodes and names."""

_IR_VERSION = 10
"""The version of the file format: ONNX Runtime reads it since 1.18, and it has all that the portable style needs."""


@dataclass(frozen=True)
class Exported:
    """How one quantizer came out: its path, specification and ONNX form in words."""

    quantizer: str
    spec: str
    expressed: str


@dataclass(frozen=True)
class ExportReport:
    """What `export_onnx` wrote; prints as a table.

    Attributes:
        path: the file.
        opset: the operator set that it needs.
        bytes: its size.
        float_bytes: its size if the folded weights had stayed float32.
        quantizers: every quantizer in the graph, in order.
        left_out: paths of quantizers that are not in the file, because they are off or were not reached.
    """

    path: Path
    opset: int
    bytes: int
    float_bytes: int
    quantizers: list[Exported]
    left_out: list[str]

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, for JSON."""
        return {**asdict(self), "path": str(self.path)}

    def __str__(self) -> str:
        rows = [("quantizer", "specification", "in ONNX")]
        rows += [(q.quantizer or "(model)", q.spec, q.expressed) for q in self.quantizers]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        lines = [f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}" for row in rows]
        lines.append(
            f"{self.path}: opset {self.opset}, {self.bytes:,} bytes, {self.bytes / self.float_bytes:.2f} of "
            f"{self.float_bytes:,} with float weights"
        )
        if self.left_out:
            lines.append(f"not in the file (off, or not reached by the example): {', '.join(self.left_out)}")
        return "\n".join(lines)


def export_onnx(  # noqa: PLR0913  one call has all that a file can be given
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Any = None,
    opset: int | None = None,
    style: str = "portable",
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> ExportReport:
    """Write a calibrated model as ONNX, every quantizer as QuantizeLinear and DequantizeLinear with the same results.

    Weights become integer (or float8) constants with one DequantizeLinear. In the portable style formats that ONNX
    Runtime cannot store in QuantizeLinear (4- and 6-bit floats, tables, float8 with other exponents) are rounded by
    comparisons, Round and Gather instead, and their weights are codes that Gather looks up. Scales in a format of their
    own (E8M0, or E4M3 under a tensor's scale) are float32 numbers there, which the graph computes where they are
    dynamic. What the other styles write is on the page docs/onnx.md.

    The model is exported in eval mode and comes back as it was. The file is written whole or not at all. NaN is the one
    number for which results differ: integer codes have none, and ONNX Runtime gives the lowest code; nor have floats of
    4 and 6 bits in the standard style.

    Args:
        model: a prepared and calibrated model, or any module that calls `fakequant.fake_quantize`.
        example: an input, a tuple of inputs, or a dict of keyword arguments.
        path: the file to write; its folder is made if need be.
        dynamic_shapes: as for `torch.export.export`, for example ({0: "batch"},); names may be given as text. The
            example's length of a dynamic axis must not be 1, which torch.export takes for a constant. Axes that blocks
            divide must stay static.
        opset: the operator set, 18 to 25 or a newer one that a type needs; by default the smallest from 20 on that has
            what the formats need.
        style: "portable", which ONNX Runtime runs; "standard", which says all by QuantizeLinear and DequantizeLinear,
            also in the types of newer operator sets (to 28) that few run; or "trt", which TensorRT's parser reads.
        input_names: names of the inputs in the file.
        output_names: names of the outputs in the file.

    Raises:
        ExportError: an unknown style, quantizers that are not calibrated or that ONNX cannot express (names them all),
            a file of more than 2 GB, or onnx is not installed. Raised before anything is written.
        OutputError: the file cannot be written; raised before any work.
        torch.export's errors: the model cannot be traced.

    >>> import tempfile
    >>> from fakequant.model.calibrate import calibrate
    >>> from fakequant.model.prepare import prepare
    >>> from fakequant.model import presets
    >>> model = prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), presets.INT8)
    >>> used = calibrate(model, [torch.ones(1, 4)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = export_onnx(model, torch.ones(1, 4), folder + "/model.onnx")
    >>> report.opset, [q.quantizer for q in report.quantizers]
    (20, ['0._input_quantizer', '0._weight_quantizer'])
    """
    dialect = Style.parse(style)
    refuse_sharded(model, "export")
    warn_stale_scales(model)
    ready = traced(model, example, path, dynamic_shapes, opset, dialect)
    needed, who = _most_demanding(ready.sites)
    chosen = check_opset(opset, needed, who)
    converted = to_onnx(ready.program, chosen, dynamic_shapes, input_names, output_names)
    dynamic = frozenset(name for name, q in ready.active.items() if q.dynamic and q.kind is Kind.INPUT)
    float_weights = {tensor.name: tensor.ByteSize() for tensor in converted.graph.initializer}
    records = lower(converted, dynamic, dialect)
    write(converted, FileRecord(__version__, dialect, records, _inputs(converted, ready.program)))
    data = finish(converted, needed)
    write_whole(ready.target, data)
    kept = {tensor.name: tensor.ByteSize() for tensor in converted.graph.initializer}
    folded = {record.x: float_weights[record.x] for record in records if record.codes and record.x not in kept}
    codes = {record.codes: kept[record.codes] for record in records if record.codes}
    return ExportReport(
        ready.target,
        chosen,
        len(data),
        len(data) + sum(folded.values()) - sum(codes.values()),
        [Exported(record.quantizer, record.spec, record.expressed) for record in records],
        sorted(set(quantizers(model)) - {record.quantizer for record in records}),
    )


@dataclass(frozen=True)
class Traced:
    """A model as a graph of torch operations in which every quantizer is one node, checked.

    Attributes:
        target: the file to write.
        active: the quantizers that will be in the file, by path.
        sites: every place where the graph quantizes.
    """

    target: Path
    active: dict[str, Quantizer]
    program: ExportedProgram
    sites: list[Site]


def traced(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    dynamic_shapes: Any,
    opset: int | None = None,
    style: Style = Style.PORTABLE,
) -> Traced:
    """What is done before anything is said in ONNX, in eval mode and with constant ranges of weights.

    Raises:
        ExportError: quantizers that are missing, not calibrated or that ONNX cannot express; onnx is not installed.
        OutputError: the file cannot be written.
        torch.export's errors: the model cannot be traced.
    """
    require("onnx", "onnxscript")
    target = writable_file(path)
    active = _check(model, opset, style)
    args, kwargs = example_arguments(example)
    with evaluating(model), fixed_ranges(model), _weights_fixed(model, args, kwargs):
        program = trace(model, args, kwargs, dynamic_shapes)
    found = sites(program, style)
    if not found:
        raise ExportError(
            "nothing in the model quantizes; prepare it first, or use torch.onnx.export for a float model"
        )
    return Traced(target, active, program, found)


def _check(model: nn.Module, opset: int | None, style: Style) -> dict[str, Quantizer]:
    """The quantizers that will be in the file.

    Raises:
        ExportError: some that cannot be; names them all.
    """
    active = {name: q for name, q in quantizers(model).items() if q.mode is not Mode.OFF}
    if waiting := [name for name, q in active.items() if q.needs_calibration]:
        raise ExportError(
            f"{len(waiting)} quantizers are not calibrated: {', '.join(waiting)}; "
            "call fakequant.calibrate(model, batches)"
        )
    refused = []
    shapes = {id(quantizer): layer.weight.shape for layer, quantizer in _weight_quantizers(model)}
    for name, quantizer in active.items():
        try:
            _check_quantizer(quantizer, shapes.get(id(quantizer)), opset, style)
        except ExportError as error:
            refused.append(f"{name}: {error}")
    if refused:
        raise ExportError("cannot be expressed in ONNX:\n" + "\n".join(refused))
    _check_size(model)
    return active


def _check_quantizer(quantizer: Quantizer, shape: Size | None, opset: int | None, style: Style) -> None:
    """Check that a quantizer can be said, given the shape of its weight if it has one.

    Raises:
        ExportError: it cannot; says why.
    """
    if quantizer.mode is Mode.OBSERVE:
        raise ExportError("is observing; finish the calibration")
    is_weight = quantizer.kind is Kind.WEIGHT
    spec = quantizer.spec
    if style is Style.TRT:
        trt.check(spec, shape, constant=is_weight, dynamic=quantizer.dynamic)
    check_opset(opset, check_spec(spec, style).opset(constant=is_weight), str(spec))
    if quantizer.scale is not None and not quantizer.dynamic:
        check_scale(quantizer.scale, spec, style)


def _check_size(model: nn.Module) -> None:
    saved = sum(
        layer.weight.numel() * (8 * layer.weight.element_size() - quantizer.spec.format.bits) // 8
        for layer, quantizer in _weight_quantizers(model)
    )
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    size = sum(t.numel() * t.element_size() for t in tensors.values()) - saved
    if size > MAX_BYTES:
        raise ExportError(
            f"the file would have about {size:,} bytes, but one ONNX file holds at most {MAX_BYTES:,}; "
            "quantize more weights, or export the model in parts"
        )


def _weight_quantizers(model: nn.Module) -> Iterator[tuple[QuantizedLayer, Quantizer]]:
    for layer in model.modules():
        quantizer = getattr(layer, "_weight_quantizer", None)
        if isinstance(layer, QuantizedLayer) and quantizer is not None and quantizer.mode is Mode.QUANTIZE:
            yield layer, quantizer


@contextmanager
def _weights_fixed(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """A context in which the weights that follow their range have fixed scales, so that they are constants."""
    following = [(layer, q) for layer, q in _weight_quantizers(model) if q.dynamic or not q.calibrated]
    with restore_after(attributes_of([q for _, q in following], "scale", "zero_point", "dynamic")):
        for layer, quantizer in following:
            if "weight" in layer._parameters:
                quantizer.freeze(layer.weight)
        _freeze_as_called(model, [q for layer, q in following if "weight" not in layer._parameters], args, kwargs)
        for _, quantizer in following:
            quantizer.dynamic = False
        yield


def _freeze_as_called(
    model: nn.Module, waiting: list[Quantizer], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Fix the scales of computed weights: what `layer.weight` holds may be older than what the model computes."""
    if not waiting:
        return
    hooks: list[RemovableHandle] = []
    with restore_after(lambda: [hook.remove() for hook in hooks]), simulated(model), torch.no_grad():
        for quantizer in waiting:
            hooks.append(_freezing(quantizer))
        model(*args, **kwargs)


def _freezing(quantizer: Quantizer) -> RemovableHandle:
    def freeze(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        quantizer.freeze(given[0])

    return quantizer.register_forward_pre_hook(freeze)


def _most_demanding(found: list[Site]) -> tuple[int, str]:
    """The operator set that all quantizers together need, and which one needs it."""
    site = max(found, key=lambda s: s.needs)
    return max(site.needs, FIRST_OPSET), f"{site.path or 'the model'} ({site.spec})"


def _inputs(model: ModelProto, program: ExportedProgram) -> list[InputRecord]:
    """The inputs of the file in order, with the example's shapes and ranges."""
    args, kwargs = program.example_inputs or ((), {})
    leaves: list[tuple[str | None, Tensor]] = [
        (key, leaf)
        for key, value in ((None, args), *kwargs.items())
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]
    records = []
    for declared, (key, x) in zip(model.graph.input, leaves, strict=True):
        finite = x.detach().double()
        finite = finite[finite.isfinite()]
        low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (0.0, 0.0)
        dtype = str(x.dtype).removeprefix("torch.")
        records.append(InputRecord(declared.name, list(x.shape), dtype, low, high, key))
    return records


def finish(model: ModelProto, needed: int) -> bytes:
    """The bytes of the file, checked by ONNX's own checker.

    Args:
        needed: the operator set that has the newest element type.
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
