"""Quantizers of a graph's module that compute the ReLU before them."""

from __future__ import annotations

from torch import fx

from fakequant.ir.fake_quantization import FakeQuantize
from fakequant.ir.table import in_order
from fakequant.numerics.spec import Arithmetic, QuantSpec
from fakequant.ops.relu import relu_later

_POOLS = ("MaxPool1d", "MaxPool2d", "MaxPool3d")
_RESHAPES = ("Reshape", "Flatten")


def lower(module: fx.GraphModule) -> None:
    """Have quantizers of constant scales compute the ReLU before them, also over maxima and reshapes in between.

    A ReLU and a quantizer are one pass over memory instead of two, and after the maxima there are fewer elements.

    Args:
        module: of a graph, with the constants as inputs; it is changed.
    """
    for node in list(module.graph.nodes):
        quantizer = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(quantizer, FakeQuantize) or not in_order(node.meta["op"]):
            continue
        parameters = [value.meta.get("constant") for name, value in node.kwargs.items() if name != "x"]
        if not parameters or any(constant is None or constant.trainable for constant in parameters):
            continue
        relu = _relu_before(node, quantizer.spec)
        if relu is None:
            continue
        quantizer.rectified = True
        if node.kwargs["x"] is relu:
            relu.replace_all_uses_with(relu.all_input_nodes[0])
            module.graph.erase_node(relu)
        else:
            relu.target = relu_later
    module.recompile()


def _relu_before(quantizer: fx.Node, spec: QuantSpec) -> fx.Node | None:
    """The ReLU whose place the quantizer can take: nothing else reads what is in between. None if there is none."""
    # Of -1.0 and -0.0 the largest is +0.0 where they are rectified first, and -0.0 where they are not. No other maximum
    # differs but those below zero, which are rectified then; and where it is not above zero, no gradient passes.
    equal_zeros = spec.format.has_zero_point and spec.arithmetic is not Arithmetic.MULTIPLIER
    value = quantizer.kwargs["x"]
    while isinstance(value, fx.Node) and len(value.users) == 1:
        op = value.meta.get("op")
        if op is None or not in_order(op):
            return None
        if op.op_type == "ReLU":
            return value
        # With dilation, a window may hold padding alone, and its maximum is -inf.
        padding = op.attributes.get("padding", 0)
        pads = any(padding) if isinstance(padding, (list, tuple)) else bool(padding)
        if op.op_type not in _RESHAPES and not (op.op_type in _POOLS and equal_zeros and not pads):
            return None
        value = value.args[0]
    return None
