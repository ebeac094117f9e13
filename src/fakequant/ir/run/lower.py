"""ReLUs fused into the quantizers after them, where that changes no bit of results and gradients."""

from __future__ import annotations

from torch import fx

from fakequant.ir.fake_quantization import FakeQuantize
from fakequant.ir.op import IROp
from fakequant.ir.structure import GraphStructure
from fakequant.ir.table import in_order
from fakequant.numerics.spec import Arithmetic, QuantSpec
from fakequant.ops.relu import relu_later

_POOLS = ("MaxPool1d", "MaxPool2d", "MaxPool3d")
_RESHAPES = ("Reshape", "Flatten")


def lower(module: fx.GraphModule, graph: GraphStructure) -> None:
    """Have quantizers compute the ReLU before them, also over maxima and reshapes in between.

    A ReLU and a quantizer are one pass over memory instead of two, and after the maxima there are fewer elements.

    Args:
        module: of the graph, by `execute.to_torch`; it is changed.
        graph: says which parameters of quantizers are constant.
    """
    for node in list(module.graph.nodes):
        if node.op == "call_module":
            _take_relu(node, module, graph)
    module.recompile()


def _take_relu(node: fx.Node, module: fx.GraphModule, graph: GraphStructure) -> None:
    assert isinstance(node.target, str)
    quantizer = module.get_submodule(node.target)
    if not isinstance(quantizer, FakeQuantize) or not _has_constant_scale(node.meta["op"], graph):
        return
    relu = _relu_before(node, quantizer.spec)
    if relu is None:
        return
    quantizer.rectified = True
    if node.kwargs["x"] is relu:
        relu.replace_all_uses_with(relu.all_input_nodes[0])
        module.graph.erase_node(relu)
    else:
        relu.target = relu_later


def _has_constant_scale(op: IROp, graph: GraphStructure) -> bool:
    parameters = [graph.constants.get(id) for id in op.input_ids[1:]]
    return in_order(op) and bool(parameters) and all(p is not None and not p.trainable for p in parameters)


def _relu_before(quantizer: fx.Node, spec: QuantSpec) -> fx.Node | None:
    """The ReLU whose place the quantizer can take: nothing else reads what is in between. None if there is none."""
    value = quantizer.kwargs["x"]
    while isinstance(value, fx.Node) and len(value.users) == 1:
        op = value.meta.get("op")
        if op is None or not in_order(op):
            return None
        if op.op_type == "ReLU":
            return value
        if op.op_type not in _RESHAPES and not (op.op_type in _POOLS and _has_equal_zeros(spec) and not _pads(op)):
            return None
        value = value.args[0]
    return None


def _has_equal_zeros(spec: QuantSpec) -> bool:
    """Whether -0.0 and +0.0 are quantized to the same bits.

    The largest of -1.0 and -0.0 is +0.0 where they are rectified first, and -0.0 where they are not. No other maximum
    differs but those below zero, which are rectified then; and where it is not above zero, no gradient passes.
    """
    return spec.format.has_zero_point and spec.arithmetic is not Arithmetic.MULTIPLIER


def _pads(op: IROp) -> bool:
    """Whether there is padding: with dilation, a window may hold padding alone, and its maximum is -inf."""
    padding = op.attributes.get("padding", 0)
    return any(padding) if isinstance(padding, (list, tuple)) else bool(padding)
