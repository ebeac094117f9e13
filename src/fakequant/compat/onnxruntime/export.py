"""Export a model with quantizers as an ONNX file for training, with one FakeQuant per quantizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fakequant.compat.onnxruntime.functions import MICROSOFT, attach_functions
from fakequant.errors import ExportError
from fakequant.export.capability import FIRST_OPSET, Style, check_opset
from fakequant.export.exporter import finish, traced
from fakequant.export.inputs import GraphEditor
from fakequant.export.nodes.loops import lower_scale
from fakequant.export.nodes.trt import Emitter
from fakequant.export.trace import DOMAIN, SCALE_OPERATOR, path_of
from fakequant.files import write_whole
from fakequant.numerics.formats.floats import IntegerFormat
from fakequant.numerics.granularity import PerTensor
from fakequant.numerics.spec import Arithmetic, Gradient, QuantSpec
from fakequant.text import module_name

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def export_fake_quant(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Any = None,
    opset: int = FIRST_OPSET,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> Path:
    """Write a calibrated model as ONNX for training, with float weights and one FakeQuant per quantizer.

    ONNX Runtime's training builds the gradient graph from it, with a FakeQuantGrad for every FakeQuant. The functions
    are attached, so the public wheel runs the file too. Weights keep the names of the torch parameters. The model is
    traced in eval mode and not changed; dynamic ranges of weights and learned ranges become constants.

    Args:
        model: prepared and calibrated, every quantizer an integer one, per tensor, with `Arithmetic.DIVIDE`.
        example: an input, a tuple of inputs, or a dict of keyword arguments.
        path: the file to write; its folder is created if it does not exist.
        dynamic_shapes: as for `fakequant.export_onnx`.
        opset: the operator set, 18 to 25; onnxruntime-training 1.19 reads up to 21.
        input_names: names of the inputs in the file.
        output_names: names of the outputs in the file.

    Raises:
        ExportError: quantizers that are not calibrated or that FakeQuant cannot express (names them all), or onnx is
            not installed.
        OutputError: the file cannot be written; raised before any work.

    >>> import tempfile
    >>> from fakequant.model.config import Config, Rule, TensorConfig
    >>> from fakequant.model.calibration.calibrate import calibrate
    >>> from fakequant.model.prepare import prepare
    >>> config = Config("per tensor", (Rule(input="uint8", weight="int8"),))
    >>> model = prepare(nn.Sequential(nn.Linear(4, 2)), config)
    >>> used = calibrate(model, [torch.randn(8, 4)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = export_fake_quant(model, torch.randn(8, 4), folder + "/model.onnx")
    """
    check_opset(opset, FIRST_OPSET, "FakeQuant")
    ready = traced(model, example, path, dynamic_shapes)
    converted = ready.to_onnx(model, opset, dynamic_shapes, input_names, output_names)
    _lower(converted)
    write_whole(ready.target, finish(attach_functions(converted), opset))
    return ready.target


def _lower(model: ModelProto) -> None:
    """Replace every quantizer of a traced model by a FakeQuant, in place."""
    from onnx import helper

    editor = GraphEditor(model.graph)
    nodes: list[NodeProto] = []
    refused: list[str] = []
    for node in model.graph.node:
        if node.domain != DOMAIN:
            nodes.append(node)
            continue
        path = path_of({entry.key: entry.value for entry in node.metadata_props})
        spec = QuantSpec.parse(next(a.s.decode() for a in node.attribute if a.name == "spec"))
        try:
            fmt = _integers(spec)
            if node.op_type == SCALE_OPERATOR:
                nodes += lower_scale(editor, node, path, Style.PORTABLE).nodes
            else:
                nodes += _fake_quant_nodes(Emitter(editor, editor.label(path or "fake_quantize")), node, fmt)
        except ExportError as error:
            refused.append(f"{module_name(path)}: {error}")
    if refused:
        raise ExportError("cannot be expressed as FakeQuant:\n" + "\n".join(dict.fromkeys(refused)))
    editor.finish(nodes)
    kept = [imported for imported in model.opset_import if imported.domain != DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend([*kept, helper.make_opsetid(MICROSOFT, 1)])


def _integers(spec: QuantSpec) -> IntegerFormat:
    """The format of a specification that FakeQuant can express."""
    if (
        isinstance(spec.format, IntegerFormat)
        and isinstance(spec.granularity, PerTensor)
        and spec.arithmetic is Arithmetic.DIVIDE
        and spec.gradient is Gradient.CODE_RANGE
    ):
        return spec.format
    raise ExportError(
        f"{spec}: FakeQuant has integers per tensor with Arithmetic.DIVIDE, Gradient.CODE_RANGE; "
        "prepare the model with such a specification, for weights as well, or use fakequant.export_onnx"
    )


def _fake_quant_nodes(to: Emitter, node: NodeProto, fmt: IntegerFormat) -> list[NodeProto]:
    from onnx import TensorProto, helper

    x, scale, zero_point = (*node.input, "")[:3]
    kind = to.editor.type(x)
    parameters = (
        _without_axes(to, "scale", scale),
        (_without_axes(to, "zero_point", zero_point) if zero_point else to.number("zero_point", 0.0)),
    )
    given = to.as_float32(x)
    result = node.output[0] if kind == TensorProto.FLOAT else f"{to.label}/values"
    quantizer = helper.make_node(
        "FakeQuant",
        [given, *parameters],
        [result, f"{to.label}/mask"],
        f"{to.label}/FakeQuant",
        domain=MICROSOFT,
        quant_min=fmt.low,
        quant_max=fmt.high,
    )
    to.nodes.append(quantizer)
    if kind != TensorProto.FLOAT:
        to.emit("Cast", result, result=node.output[0], to=kind)
    return to.nodes


def _without_axes(to: Emitter, name: str, value: str) -> str:
    """A parameter [groups, axes kept] as one float32 number."""
    if to.editor.is_constant(value):
        return to.number(name, to.editor.tensor(value).item())
    return to.scalar(to.as_float32(value))
