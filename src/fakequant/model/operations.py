"""What a model computes and what of it stays in float, read from the traced graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fakequant.distributed import refuse_sharded
from fakequant.model.batches import Inputs, example_arguments
from fakequant.model.modes import evaluating
from fakequant.model.targets.table import MOVES
from fakequant.model.tracing import traced_program
from fakequant.nn.quantizer import quantizers
from fakequant.restore import attributes_of, restore_after

# Operations that an integer or low-precision unit would compute. All others are elementwise, normalisations or
# reductions, which run in float on most engines.
# Variants are known by their family: `_scaled_dot_product_flash_attention` is a `scaled_dot_product`.
_PRODUCTS = frozenset(
    """
    linear linear_cross_entropy conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
    _convolution conv_tbc addmv addr _addmm_activation linalg_multi_dot linalg_matrix_power matrix_power einsum
    tensordot dot vdot linalg_vecdot mv inner outer ger kron cdist _cdist_forward _euclidean_dist bilinear _trilinear
    embedding embedding_bag _embedding_bag lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _native_multi_head_attention _transformer_encoder_layer_fwd flex_attention
    """.split()  # noqa: SIM905
)
_ATTENTION = ("scaled_dot_product", "flash_attention")
_PRODUCT_FAMILIES = (*_ATTENTION, "grouped_mm", "scaled_mm", "scaled_grouped_mm")
_PRODUCT_ENDINGS = ("mm", "matmul")
_LOOKUPS = frozenset({"embedding", "embedding_bag", "_embedding_bag"})
# Where a product's factors are among its tensors; the rest is a bias. All of them where nothing is said.
_FACTORS = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d", "convolution", "conv_tbc"), slice(2)),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), slice(2)),
    **dict.fromkeys(("addmm", "addmv", "addr", "baddbmm", "addbmm", "_addmm_activation"), slice(1, 3)),
    **dict.fromkeys(("_grouped_mm", "grouped_mm", "_scaled_mm", "_scaled_grouped_mm"), slice(2)),
    **dict.fromkeys(("bilinear", "scaled_dot_product_attention", "flex_attention"), slice(3)),  # a mask is no factor
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), slice(4)),
}


def _along_last_axis(outputs: int, first: torch.Tensor, *_: torch.Tensor) -> int:
    return outputs * first.shape[-1]


def _attention(outputs: int, query: torch.Tensor, key: torch.Tensor, *_: torch.Tensor) -> int:
    return (query.numel() + outputs) * key.shape[-2]


def _recurrent(_: int, x: torch.Tensor, *others: torch.Tensor) -> int:
    return x[..., 0].numel() * sum(weight.numel() for weight in others if weight.dim() == 2)


# The number of multiply-accumulates for a given number of outputs, for products that torch's counter does not know.
_COUNTS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("outer", "ger", "kron", "addr"), lambda outputs, *_: outputs),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    "addmv": lambda outputs, _, matrix, *__: outputs * matrix.shape[-1],
    "addbmm": lambda outputs, _, first, *__: outputs * first.shape[0] * first.shape[-1],
    "bilinear": lambda outputs, _, __, weight, *___: outputs * weight[0].numel(),
    "conv_tbc": lambda outputs, _, weight, *__: outputs * weight[..., 0].numel(),
}
# As engines move values, with the names of ATen: a result is quantized if all that it is made of is.
_KEEPS = MOVES | frozenset(
    """
    _unsafe_view copy alias split_with_sizes constant_pad_nd _to_copy feature_dropout index repeat_interleave
    lift_fresh_copy _assert_tensor_metadata cat stack hstack vstack dstack column_stack relu clamp hardtanh
    """.split()  # noqa: SIM905
)


def keeps_quantized(name: str) -> bool:
    """Whether the result of an operation is quantized if its inputs are, because it only moves or cuts values."""
    return name in _KEEPS


@dataclass(frozen=True)
class Operation:
    """One operation of the traced graph that computes on float tensors.

    Attributes:
        module: path of the module that calls it, "" for the model itself.
        name: the operation, as torch names it.
        is_product: whether quantized hardware would compute it (convolutions, matrix products, attention, recurrence).
        float_inputs: how many of its float tensor inputs reach it unquantized.
        inputs: how many float tensor inputs it has.
        multiplications: the multiply-accumulates of a product; 0 where its sizes depend on data, and for tables, which
            are only read.
    """

    module: str
    name: str
    is_product: bool
    float_inputs: int
    inputs: int
    multiplications: int = 0

    @property
    def quantized(self) -> bool:
        """Whether every input is quantized."""
        return self.float_inputs == 0

    def __str__(self) -> str:
        where = self.module or "(model)"
        return f"{where}: {self.name}, {self.float_inputs} of {self.inputs} inputs in float"


def operations(model: nn.Module, example: Any, inputs: Inputs | None = None) -> list[Operation]:
    """All operations of a model that compute on float tensors, in the order of the traced graph.

    Args:
        model: a prepared (or float) model; quantizers need not be calibrated.
        example: an input, a tuple of inputs, or a dict of keyword arguments.
        inputs: which part of the example these are, as for `calibrate`; None for all of it.

    Raises:
        torch.export's errors: the model cannot be traced.
    """
    refuse_sharded(model, "look into")
    args, kwargs = example_arguments(example, inputs)
    with _ranges_optional(model), evaluating(model), torch.no_grad():
        program = traced_program(model, args, kwargs)
    activations = set(program.graph_signature.user_inputs)
    parameters = set(program.graph_signature.inputs_to_parameters)
    of_parameters: set[fx.Node] = set()  # computed from parameters alone, as engines do once
    quantized: dict[fx.Node, bool] = {}
    found = []
    for node in program.graph.nodes:
        sources = [n for n in node.all_input_nodes if _is_float(n)]
        name = _name(node)
        if node.target is torch.ops.fakequant.fake_quantize.default:
            quantized[node] = True
            continue
        read = sources[1:] if name == "copy" and len(sources) == 2 else sources  # copy_ overwrites its first tensor
        if node.name in parameters or (node.all_input_nodes and of_parameters.issuperset(node.all_input_nodes)):
            of_parameters.add(node)
        quantized[node] = keeps_quantized(name) and bool(read) and all(quantized[n] for n in read)
        if node.op != "call_function" or keeps_quantized(name) or not sources or not _is_float(node):
            continue
        if node in of_parameters or _is_plumbing(node):
            continue
        constants = {n for n in sources if n.op in ("placeholder", "get_attr") and n.name not in activations}
        constants |= of_parameters.intersection(sources)
        operands = _operands(node, sources, constants)
        if not operands:
            continue
        in_float = sum(not quantized[n] for n in operands)
        count = _multiplications(node) if is_product(name) else 0
        found.append(Operation(_module(node), name, is_product(name), in_float, len(operands), count))
    return found


def unquantized(
    model: nn.Module, example: Any, *, products_only: bool = False, inputs: Inputs | None = None
) -> list[Operation]:
    """The operations that see at least one unquantized float input: what `prepare` left in float.

    Args:
        model: a prepared model.
        example: an input, a tuple of inputs, or a dict of keyword arguments; with `inputs`, a batch of a data loader.
        products_only: whether to list only what an integer or low-precision unit would compute.
        inputs: which part of the example the model gets, as for `calibrate`.

    Raises:
        torch.export's errors: the model cannot be traced.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), presets.INT8)
    >>> print(*unquantized(model, torch.ones(2, 4)))
    1: softmax, 1 of 1 inputs in float
    """
    left = [operation for operation in operations(model, example, inputs) if not operation.quantized]
    return [operation for operation in left if operation.is_product] if products_only else left


@contextmanager
def _ranges_optional(model: nn.Module) -> Iterator[None]:
    """A context in which uncalibrated quantizers take their range from the tensor, so that any model can be traced."""
    waiting = [quantizer for quantizer in quantizers(model).values() if quantizer.needs_calibration]
    with restore_after(attributes_of(waiting, "dynamic")):
        for quantizer in waiting:
            quantizer.dynamic = True
        yield


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", str(packet)).rstrip("_")


def is_product(name: str) -> bool:
    """Whether an operation of that name is one that quantized hardware would compute."""
    own = name.removeprefix("_")
    return name in _PRODUCTS or own.startswith(_PRODUCT_FAMILIES) or own.endswith(_PRODUCT_ENDINGS)


def _multiplications(node: fx.Node) -> int:
    """The multiply-accumulates of a product, from the shapes that the trace has seen."""
    name = _name(node)
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    factors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    fixed = all(isinstance(size, int) for factor in factors for size in factor.shape)
    if name in _LOOKUPS or not fixed or not isinstance(node.target, torch._ops.OpOverload):
        return 0
    target = node.target
    with torch.no_grad():
        return counted(name, lambda: target(*args, **kwargs), factors)[1]  # of fake tensors: only shapes


def counted(name: str, run: Callable[[], Any], factors: Sequence[torch.Tensor]) -> tuple[Any, int]:
    """The result of a product, and its multiply-accumulates.

    Args:
        name: of the operation.
        run: computes it.
        factors: its tensors.
    """
    with FlopCounterMode(display=False) as counter:
        output = run()
    if operations := counter.get_total_flops():
        return output, operations // 2
    first = output[0] if isinstance(output, (tuple, list)) else output
    attends = name.removeprefix("_").startswith(_ATTENTION)
    count = _attention if attends else _COUNTS.get(name, _along_last_axis)
    return output, 0 if name in _LOOKUPS else count(first.numel(), *factors)


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
    if not is_product(name):
        return [n for n in inputs if n not in constants]
    if name not in _FACTORS:
        return inputs
    # By position, because `inputs` names a tensor once that is passed twice.
    factors: Any = node.args[_FACTORS[name]]
    # An LSTM's state is a list, of which the products see the first tensor.
    factors = [n[0] if isinstance(n, (list, tuple)) else n for n in factors]
    return [n for n in factors if isinstance(n, fx.Node) and _is_float(n)]
