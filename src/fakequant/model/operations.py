"""What a model computes and what of it stays in float, read from the traced graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fakequant.model.prepare import evaluating
from fakequant.nn.quantizer import quantizers

# Operations that an integer or low-precision unit would compute. All others are elementwise, normalisations or
# reductions, which run in float on most engines.
_PRODUCTS = frozenset(
    """
    linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution matmul mm bmm addmm
    baddbmm addbmm einsum dot mv scaled_dot_product_attention embedding embedding_bag lstm gru rnn_tanh rnn_relu
    bilinear _native_multi_head_attention
    """.split()  # noqa: SIM905
)
# Where a product's factors are among its tensors; the rest is a bias. All of them where nothing is said.
_FACTORS = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d", "convolution"), slice(2)),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), slice(2)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm"), slice(1, 3)),
    "bilinear": slice(3),
}
# Operations that move values without computing: their output is quantized if their input is.
_MOVES = frozenset(
    """
    view reshape _unsafe_view permute transpose t contiguous clone detach alias flatten unflatten squeeze unsqueeze
    expand slice select split split_with_sizes chunk unbind cat stack pad constant_pad_nd getitem to _to_copy dropout
    feature_dropout max_pool1d max_pool2d max_pool3d relu clamp hardtanh index gather narrow roll flip repeat
    lift_fresh_copy _assert_tensor_metadata
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Operation:
    """One operation of the traced graph that computes on float tensors.

    Attributes:
        module: path of the module that calls it, "" for the model itself.
        name: the operation, as torch names it.
        is_product: whether quantized hardware would compute it (convolutions, matrix products, attention, recurrence).
        float_inputs: how many of its float tensor inputs reach it unquantized.
        inputs: how many float tensor inputs it has.
    """

    module: str
    name: str
    is_product: bool
    float_inputs: int
    inputs: int

    @property
    def quantized(self) -> bool:
        """Whether every input is quantized."""
        return self.float_inputs == 0

    def __str__(self) -> str:
        where = self.module or "(model)"
        return f"{where}: {self.name}, {self.float_inputs} of {self.inputs} inputs in float"


def operations(model: nn.Module, example: Any) -> list[Operation]:
    """All operations of a model that compute on float tensors, in the order of the traced graph.

    Args:
        model: a prepared (or float) model; quantizers need not be calibrated.
        example: an input, a tuple of inputs, or a dict of keyword arguments.

    Raises:
        torch.export's errors: the model cannot be traced.
    """
    args, kwargs = example_arguments(example)
    with _ranges_optional(model), evaluating(model), torch.no_grad():
        program = torch.export.export(model, args, kwargs, strict=False)
    activations = set(program.graph_signature.user_inputs)
    quantized: dict[fx.Node, bool] = {}
    found = []
    for node in program.graph.nodes:
        inputs = [n for n in node.all_input_nodes if _is_float(n)]
        name = _name(node)
        if node.target is torch.ops.fakequant.fake_quantize.default:
            quantized[node] = True
            continue
        quantized[node] = name in _MOVES and bool(inputs) and all(quantized[n] for n in inputs)
        if node.op != "call_function" or name in _MOVES or not inputs or not _is_float(node) or _is_plumbing(node):
            continue
        constants = {n for n in inputs if n.op in ("placeholder", "get_attr") and n.name not in activations}
        operands = _operands(node, inputs, constants)
        if not operands:
            continue
        in_float = sum(not quantized[n] for n in operands)
        found.append(Operation(_module(node), name, name in _PRODUCTS, in_float, len(operands)))
    return found


def unquantized(model: nn.Module, example: Any, *, products_only: bool = False) -> list[Operation]:
    """The operations that see at least one unquantized float input: what `prepare` left in float.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), presets.INT8)
    >>> print(*unquantized(model, torch.ones(2, 4)))
    1: softmax, 1 of 1 inputs in float
    """
    left = [operation for operation in operations(model, example) if not operation.quantized]
    return [operation for operation in left if operation.is_product] if products_only else left


def example_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of an example: a tensor, a tuple of arguments, or a mapping."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


@contextmanager
def _ranges_optional(model: nn.Module) -> Iterator[None]:
    """A context in which uncalibrated quantizers take their range from the tensor, so that any model can be traced."""
    waiting = [quantizer for quantizer in quantizers(model).values() if quantizer.needs_calibration]
    for quantizer in waiting:
        quantizer.dynamic = True
    try:
        yield
    finally:
        for quantizer in waiting:
            quantizer.dynamic = False


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", str(packet)).rstrip("_")


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return paths[-1] if paths else ""


def _is_plumbing(node: fx.Node) -> bool:
    """Whether a node belongs to a quantizer: the operations that find a dynamic range."""
    stack = node.meta.get("nn_module_stack") or {}
    return any(str(kind).endswith("fakequant.nn.quantizer.Quantizer") for _, kind in stack.values())


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = next((v for v in value if isinstance(v, torch.Tensor)), None)
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _operands(node: fx.Node, inputs: list[fx.Node], constants: set[fx.Node]) -> list[fx.Node]:
    """The inputs that count: of a product both factors, of anything else the activations.

    A product's bias is added in higher precision, and statistics, affine parameters and constants of other operations
    are no tensors that an engine would quantize.
    """
    name = _name(node)
    if name not in _PRODUCTS:
        return [n for n in inputs if n not in constants]
    if name not in _FACTORS:
        return inputs
    # By position, because `inputs` names a tensor once that is passed twice.
    factors: Any = node.args[_FACTORS[name]]
    return [n for n in factors if isinstance(n, fx.Node) and _is_float(n)]
