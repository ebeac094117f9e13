"""Write a recurrent layer in one direction as a `Scan`: one node for any number of steps, whose body is one step.

The states before the steps and their quantized values are outputs of the node, so that each can be verified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fakequant.export.graph import GraphEditor
from fakequant.export.ranges import lower_scale
from fakequant.export.record import SiteRecord
from fakequant.export.site import Emitter
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
    mode, is_lstm = str(given["mode"]), given["mode"] == "LSTM"
    gates, hidden, cell, weight, bias, scale, zero_point = (*node.input, "", "", "")[:7]
    y, last_hidden, last_cell = (*node.output, "", "")[:3]
    to = Emitter(editor, editor.label(f"{path}/{given['quantizer']}/loop"))
    state, of_cell, step = (f"{to.label}/{name}" for name in ("state", "cell", "step"))
    shape = editor.shape(hidden)
    before, seen, record = state, [], None
    if given["spec"]:
        editor.declare(state, TensorProto.FLOAT, shape)
        before, one = f"{to.label}/state_quantized", QuantSpec.parse(str(given["spec"]))
        if not scale:
            scale, scaled = f"{to.label}/state_scale", one.granularity.group_shape((1, int(shape[-1])))[1:]
            editor.declare(scale, TensorProto.FLOAT, [shape[0], *scaled])
            chooser = helper.make_node("ChooseScale", [state], [scale], domain=DOMAIN, spec=given["spec"])
            to.nodes += lower_scale(editor, chooser, join(path, str(given["quantizer"])), style).nodes
        inputs = [state, scale, *([zero_point] if zero_point else [])]
        one = helper.make_node("FakeQuantize", inputs, [before], domain=DOMAIN, spec=given["spec"])
        nodes, record = express(one, join(path, str(given["quantizer"])))
        to.nodes += nodes
        seen = [to.emit("Identity", state), to.emit("Identity", before)]
    own = to.emit("MatMul", before, f"{weight}/turned")
    own = to.emit("Add", own, bias) if bias else own
    after, cell_after = _step(to, mode, (step, own, before, of_cell), shape[-1])
    body_in = [state, *([of_cell] if is_lstm else []), step]
    body_out = [after, *([cell_after] if is_lstm else []), to.emit("Identity", after), *seen]
    sizes = {step: [*shape[:-1], editor.shape(gates)[-1]]}

    def info(name: str) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes.get(name, shape))

    body = helper.make_graph(to.nodes, f"{to.label}/body", [*map(info, body_in)], [*map(info, body_out)])
    steps = [editor.shape(gates)[0], *shape]
    outer = [f"{to.label}/state_before", f"{to.label}/state_before_quantized"][: len(seen)]
    for name in outer:
        editor.declare(name, TensorProto.FLOAT, steps, visible=True)
    direction = [int(given["reverse"])]
    scan = helper.make_node(
        "Scan",
        [hidden, *([cell] if is_lstm else []), gates],
        [last_hidden or f"{to.label}/last", *([last_cell or f"{to.label}/last_cell"] if is_lstm else []), y, *outer],
        f"{to.label}/Scan",
        body=body,
        num_scan_inputs=1,
        scan_input_directions=direction,
        scan_output_directions=direction * (1 + len(outer)),
    )
    turned = helper.make_node("Transpose", [weight], [f"{weight}/turned"], f"{to.label}/Transpose", perm=[1, 0])
    if record is not None:
        record = record.seen_as(*outer)
    return [turned, scan], record


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
