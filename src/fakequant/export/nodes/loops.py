"""Write a recurrent layer in one direction as a `Scan`: one node for any number of steps, whose body is one step.

The states before the steps and their quantized values are outputs of the node, so that each can be verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fakequant.export.graph import GraphEditor
from fakequant.export.nodes.ranges import lower_scale
from fakequant.export.nodes.site import Emitter
from fakequant.export.record import SiteRecord
from fakequant.export.style import Style
from fakequant.nn.paths import join
from fakequant.numerics.spec import QuantSpec

if TYPE_CHECKING:
    from onnx import NodeProto, ValueInfoProto

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
