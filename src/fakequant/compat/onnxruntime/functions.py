"""FakeQuant and FakeQuantGrad as functions inside a model, for runtimes without kernels for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING

from fakequant.errors import ExportError
from fakequant.export.packages import require

if TYPE_CHECKING:
    from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
FIRST_OPSET = 15
"""The first operator set with CastLike, which the functions need."""
_IR_VERSION = 9
"""The first version of the file format in which functions have attributes with defaults."""


def attach_functions(model: ModelProto) -> ModelProto:
    """Return a copy of a model with definitions of its FakeQuant and FakeQuantGrad nodes, which runs anywhere.

    Nodes without the mask output or an attribute get it: ONNX Runtime needs the mask to infer types, and onnx's
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
    from onnx import ModelProto, helper

    attached = ModelProto()
    attached.CopyFrom(model)
    versions = {imported.domain: imported.version for imported in attached.opset_import}
    opset = versions.get("", versions.get("ai.onnx", 0))
    used = {(node.domain, node.op_type) for node in _all_nodes(attached)}
    own = {(function.domain, function.name) for function in attached.functions}
    missing = [name for name in _DEFINITIONS if (MICROSOFT, name) in used - own]
    if not missing:
        return attached
    if opset < FIRST_OPSET:
        raise ExportError(
            f"the model has operator set {opset}, but the functions need {FIRST_OPSET} or newer; convert it "
            "with onnx.version_converter"
        )
    added = {name: _function(name, opset) for name in missing}
    for node in _all_nodes(attached):
        if node.domain == MICROSOFT and node.op_type in added:
            _complete(node, added[node.op_type])
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


def _function(name: str, opset: int) -> FunctionProto:
    from onnx import parser

    return parser.parse_function(_DEFINITIONS[name].format(opset=opset))


def _complete(node: NodeProto, function: FunctionProto) -> None:
    """Add the missing outputs and attributes of a node."""
    prefix = next(filter(None, node.output))
    outputs = zip_longest(node.output, function.output, fillvalue="")
    node.output[:] = [output or f"{prefix}/{name}" for output, name in outputs]
    given = {attribute.name for attribute in node.attribute}
    node.attribute.extend(default for default in function.attribute_proto if default.name not in given)
