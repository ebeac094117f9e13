"""ONNX Runtime's training operators FakeQuant and FakeQuantGrad, for tensors, and for the public onnxruntime wheel.

y = (clamp(rint(x / scale) + zero_point) - zero_point) * scale, and a mask that is true where the code was in range
before it was clamped; docs/notes/differences.md lists what differs from the kernels.

Source: microsoft/onnxruntime, orttraining/training_ops/{cpu,cuda}/quantization/fake_quant*.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fakequant.compat.aten import CodeRange
from fakequant.errors import DTypeError, ExportError, QParamsError, ShapeError
from fakequant.export.capability import FIRST_OPSET, Style, check_opset, require
from fakequant.export.exporter import finish, traced
from fakequant.export.inputs import GraphEditor
from fakequant.export.loops import lower_scale
from fakequant.export.trace import DOMAIN, SCALE_OPERATOR, path_of
from fakequant.export.trt import Emitter
from fakequant.files import write_whole
from fakequant.numerics.formats.floats import IntegerFormat
from fakequant.numerics.granularity import PerTensor
from fakequant.numerics.qparams import QParams, check_scale, compute_dtype, is_concrete
from fakequant.numerics.reference import grad_input
from fakequant.numerics.spec import Arithmetic, Gradient, QuantSpec
from fakequant.ops import library
from fakequant.text import module_name

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

__all__ = ["attach_functions", "export_fake_quant", "fake_quant", "fake_quant_grad"]


def fake_quant(
    x: Tensor, scale: float | Tensor, zero_point: float | Tensor, quant_min: int = 0, quant_max: int = 255
) -> tuple[Tensor, Tensor]:
    """com.microsoft.FakeQuant: x quantized and dequantized, and the mask that `fake_quant_grad` needs.

    Differentiable: the gradient of y reaches x where the mask is set, and a scale or zero point that requires grad.

    Args:
        x: any shape; float32 as in ONNX Runtime, or float64, float16 or bfloat16.
        scale: units of x per code; a number, or a tensor of shape [] or [1].
        zero_point: the code of 0.0, a whole number; a number, or a tensor of shape [] or [1].
        quant_min: lowest code.
        quant_max: highest code; the range has at most 24 bits and at least two codes.

    Returns:
        y, of the shape and dtype of x; the mask, bool, of the shape of x.

    Raises:
        ShapeError: a scale or zero point of more than one element or one axis.
        QParamsError: a scale that is not positive and finite, a zero point that is not a whole number.
        SpecError: a range of codes that float32 does not hold, or that holds fewer than two.
        DTypeError: x is not a floating tensor.

    >>> y, mask = fake_quant(torch.tensor([0.24, -1.0, 30.0]), 0.1, 3)
    >>> y
    tensor([ 0.2000, -0.3000, 25.2000])
    >>> mask
    tensor([ True, False, False])
    """
    if not isinstance(x, Tensor):
        raise DTypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    scale, zero_point = _scalar("scale", scale, x), _scalar("zero_point", zero_point, x)
    check_scale(scale, Arithmetic.DIVIDE)
    if is_concrete(zero_point) and not (code := float(zero_point.item())).is_integer():
        raise QParamsError(f"zero_point must be a whole number, the code of 0.0, got {code}")
    codes = CodeRange(operator.index(quant_min), operator.index(quant_max), PerTensor(), Arithmetic.DIVIDE)
    groups = codes.granularity.group_shape(x.shape)
    params = QParams(scale.reshape(groups), (zero_point - codes.origin).reshape(groups))
    return library.fake_quantize_with_mask(x, params, codes.spec)


def fake_quant_grad(dy: Tensor, mask: Tensor) -> Tensor:
    """com.microsoft.FakeQuantGrad: dy where the mask is set, else exactly 0; differentiable with respect to dy.

    Args:
        dy: the gradient of y, any shape.
        mask: the bool mask from `fake_quant`, of the same shape.

    Raises:
        DTypeError: a mask that is not bool.
        ShapeError: shapes that differ.

    >>> fake_quant_grad(torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([True, False, False]))
    tensor([1., 0., 0.])
    """
    if mask.dtype != torch.bool:
        raise DTypeError(f"the mask has dtype {mask.dtype}, expected torch.bool; give the mask of fake_quant")
    if mask.shape != dy.shape:
        raise ShapeError(f"the mask has shape {list(mask.shape)}, but dy {list(dy.shape)}; they must agree")
    return grad_input(dy, mask)


def _scalar(name: str, value: float | Tensor, x: Tensor) -> Tensor:
    """A parameter as a 0-d tensor in the dtype of computation."""
    dtype = compute_dtype(x.dtype)
    given = value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype, device="cpu")
    if given.shape not in ((), (1,)):
        raise ShapeError(
            f"{name} has shape {list(given.shape)}, expected [] or [1]: FakeQuant is per tensor; for one value per "
            "channel use fakequant.fake_quantize"
        )
    return given.reshape(()).to(x.device, dtype)


MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
_CAST_LIKE_OPSET = 15
"""The first opset with the operator CastLike, which the function definitions use."""
_IR_VERSION = 9
"""The first IR version of files whose functions have attributes with defaults."""


def attach_functions(model: ModelProto) -> ModelProto:
    """Add definitions of FakeQuant and FakeQuantGrad to a copy of a model, so that it runs in any ONNX runtime.

    A node without the mask output or an attribute gets it: ONNX Runtime needs the mask to infer types, and onnx's
    ReferenceEvaluator ignores defaults. The definitions are local functions of the domain com.microsoft. If ONNX
    Runtime has a kernel for a node, as onnxruntime-training has, it uses the kernel. A scale of 0 fails when the model
    runs, as in the kernel.

    Args:
        model: operator set 15 or newer (onnxruntime 1.31 loads 15 to 26); the nodes may be in subgraphs and functions.

    Raises:
        ExportError: an older operator set, or onnx is not installed.

    >>> from onnx import TensorProto, helper, parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    ...     step (float[n] x, float scale, float zero_point) => (float[n] y, bool[n] mask) {
    ...         y, mask = com.microsoft.FakeQuant <quant_min = -8, quant_max = 7> (x, scale, zero_point)
    ...     }''')
    >>> [function.name for function in attach_functions(model).functions]
    ['FakeQuant']
    """
    require("onnx")
    from onnx import ModelProto, helper, parser

    attached = ModelProto()
    attached.CopyFrom(model)
    versions = {imported.domain: imported.version for imported in attached.opset_import}
    opset = versions.get("", versions.get("ai.onnx", 0))
    used = {(node.domain, node.op_type) for node in _all_nodes(attached)}
    own = {(function.domain, function.name) for function in attached.functions}
    missing = [name for name in _DEFINITIONS if (MICROSOFT, name) in used - own]
    if not missing:
        return attached
    if opset < _CAST_LIKE_OPSET:
        raise ExportError(
            f"the model has operator set {opset}, but the functions need {_CAST_LIKE_OPSET} or newer; convert it "
            "with onnx.version_converter"
        )
    added = {name: parser.parse_function(_DEFINITIONS[name].format(opset=opset)) for name in missing}
    for node in _all_nodes(attached):
        if node.domain == MICROSOFT and node.op_type in added:
            function = added[node.op_type]
            prefix = next(filter(None, node.output))
            outputs = zip_longest(node.output, function.output, fillvalue="")
            node.output[:] = [output or f"{prefix}/{name}" for output, name in outputs]
            given = {attribute.name for attribute in node.attribute}
            node.attribute.extend(default for default in function.attribute_proto if default.name not in given)
    attached.functions.extend(added.values())
    if MICROSOFT not in versions:
        attached.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    attached.ir_version = max(attached.ir_version, _IR_VERSION)
    return attached


def _all_nodes(model: ModelProto) -> Iterator[NodeProto]:
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        yield from _nested(nodes)


def _nested(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            graphs: list[GraphProto] = [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
            for graph in graphs:
                yield from _nested(graph.node)


# A comparison with NaN is false, so NaN is kept and is outside the range. All values are computed in float32, as in
# `fake_quant`. The Gather raises the error for a scale of 0: it then reads the second element of one.
_FAKE_QUANT = """
<opset_import: ["" : {opset}], domain: "com.microsoft">
FakeQuant <quant_min: int = 0, quant_max: int = 255> (input_tensor, scale, zero_point)
    => (fake_quantized_tensor, quantization_mask)
{{
    low_int = Constant <value_int: int = @quant_min> ()
    high_int = Constant <value_int: int = @quant_max> ()
    low = Cast <to = 1> (low_int)
    high = Cast <to = 1> (high_int)
    x = Cast <to = 1> (input_tensor)
    no_axes = Constant <value = int64[0] {{}}> ()
    one_axis = Constant <value_ints = [1]> ()
    nothing = Constant <value_float = 0.0> ()
    zero_point_32 = Cast <to = 1> (zero_point)
    z = Reshape (zero_point_32, no_axes)
    scale_32 = Cast <to = 1> (scale)
    scale_scalar = Reshape (scale_32, no_axes)
    scale_is_zero = Equal (scale_scalar, nothing)
    position = Cast <to = 7> (scale_is_zero)
    scale_vector = Reshape (scale_32, one_axis)
    s = Gather (scale_vector, position)
    steps = Div (x, s)
    rounded = Round (steps)
    code = Add (rounded, z)
    below = Less (code, low)
    above = Greater (code, high)
    raised = Where (below, low, code)
    clamped = Where (above, high, raised)
    shifted = Sub (clamped, z)
    value = Mul (shifted, s)
    fake_quantized_tensor = CastLike (value, input_tensor)
    at_least = GreaterOrEqual (code, low)
    at_most = LessOrEqual (code, high)
    quantization_mask = And (at_least, at_most)
}}
"""
_FAKE_QUANT_GRAD = """
<opset_import: ["" : {opset}], domain: "com.microsoft">
FakeQuantGrad (dY, gradient_mask) => (dX)
{{
    nothing = Constant <value_float = 0.0> ()
    zero = CastLike (nothing, dY)
    dX = Where (gradient_mask, dY, zero)
}}
"""


_DEFINITIONS = {"FakeQuant": _FAKE_QUANT, "FakeQuantGrad": _FAKE_QUANT_GRAD}


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
    """Write a calibrated model as ONNX for training, with float weights and a FakeQuant node for every quantizer.

    ONNX Runtime's training builds the gradient graph from it, with a FakeQuantGrad for every FakeQuant. The functions
    are attached, so the public wheel runs the file too. Weights keep the names of the torch parameters. The model is
    traced in eval mode and not changed; dynamic ranges of weights and learned ranges become constants.

    Args:
        model: prepared and calibrated; all quantizers have integers, per tensor, with `Arithmetic.DIVIDE`.
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
    >>> from fakequant.model.calibrate import calibrate
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
    """Replace every quantizer of a traced model by a FakeQuant node, in place."""
    from onnx import TensorProto, helper

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
            fmt, per_tensor = spec.format, isinstance(spec.granularity, PerTensor)
            as_here = spec.arithmetic is Arithmetic.DIVIDE and spec.gradient is Gradient.CODE_RANGE
            if not (isinstance(fmt, IntegerFormat) and per_tensor and as_here):
                raise ExportError(
                    f"{spec}: FakeQuant has integers per tensor with Arithmetic.DIVIDE, Gradient.CODE_RANGE; prepare "
                    "the model with such a specification, for weights as well, or use fakequant.export_onnx"
                )
            if node.op_type == SCALE_OPERATOR:
                nodes += lower_scale(editor, node, path, Style.PORTABLE).nodes
                continue
        except ExportError as error:
            refused.append(f"{module_name(path)}: {error}")
            continue
        to = Emitter(editor, editor.label(path or "fake_quantize"))
        x, scale, zero_point = (*node.input, "")[:3]
        kind = editor.type(x)
        point = _without_axes(to, "zero_point", zero_point) if zero_point else ""
        parameters = _without_axes(to, "scale", scale), point or to.number("zero_point", 0.0)
        given = to.as_float32(x)
        result = node.output[0] if kind == TensorProto.FLOAT else f"{to.label}/values"
        outputs, name = [result, f"{to.label}/mask"], f"{to.label}/FakeQuant"
        limits: dict[str, Any] = {"quant_min": fmt.low, "quant_max": fmt.high}
        to.nodes.append(helper.make_node("FakeQuant", [given, *parameters], outputs, name, domain=MICROSOFT, **limits))
        if kind != TensorProto.FLOAT:
            to.emit("Cast", result, result=node.output[0], to=kind)
        nodes += to.nodes
    if refused:
        raise ExportError("FakeQuant cannot express these quantizers:\n" + "\n".join(dict.fromkeys(refused)))
    editor.finish(nodes)
    kept = [imported for imported in model.opset_import if imported.domain != DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend([*kept, helper.make_opsetid(MICROSOFT, 1)])


def _without_axes(emitter: Emitter, name: str, value: str) -> str:
    """Add nodes that turn a parameter [groups per axis] into one float32 number; returns its name."""
    if emitter.editor.is_constant(value):
        return emitter.number(name, emitter.editor.tensor(value).item())
    return emitter.scalar(emitter.as_float32(value))
