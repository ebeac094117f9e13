"""What functions of torch are to quantized hardware: products, with factors and counts, or moves of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fakequant.model.targets.table import MOVES

# Operations that an integer or low-precision unit would compute. All others are elementwise, normalisations or
# reductions, which run in float on most engines.
# Variants are known by their family: `_scaled_dot_product_flash_attention` is a `scaled_dot_product`.
_PRODUCTS = frozenset(
    """
    linear linear_cross_entropy conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
    _convolution conv_tbc addmv addr _addmm_activation linalg_multi_dot linalg_matrix_power matrix_power einsum
    tensordot dot vdot linalg_vecdot mv inner outer ger kron cdist _cdist_forward _euclidean_dist bilinear _trilinear
    embedding embedding_bag _embedding_bag lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _native_multi_head_attention _transformer_encoder_layer_fwd multi_head_attention_forward flex_attention
    """.split()  # noqa: SIM905
)
_ATTENTION = ("scaled_dot_product", "flash_attention")
_PRODUCT_FAMILIES = (*_ATTENTION, "grouped_mm", "scaled_mm", "scaled_grouped_mm")
_PRODUCT_ENDINGS = ("mm", "matmul")
_UNCOUNTED = frozenset({"flex_attention"})  # fails under torch's counter
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
    "flex_attention": _attention,
    "addmv": lambda outputs, _, matrix, *__: outputs * matrix.shape[-1],
    "addbmm": lambda outputs, _, first, *__: outputs * first.shape[0] * first.shape[-1],
    "bilinear": lambda outputs, _, __, weight, *___: outputs * weight[0].numel(),
    "conv_tbc": lambda outputs, _, weight, *__: outputs * weight[..., 0].numel(),
}
# As engines move values: a result is quantized if all that it is made of is.
_KEEPS = MOVES | frozenset(
    """
    copy setitem index unfold as_strided take_along_dim masked_select feature_dropout repeat_interleave
    cat stack relu clamp hardtanh relu6 requires_grad cpu cuda atleast_1d atleast_2d atleast_3d broadcast_to
    broadcast_tensors view_as expand_as reshape_as
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Operation:
    """One operation of a model that computes on float tensors.

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


def is_product(name: str) -> bool:
    """Whether an operation of that name is one that quantized hardware would compute."""
    own = name.removeprefix("_")
    return name in _PRODUCTS or own.startswith(_PRODUCT_FAMILIES) or own.endswith(_PRODUCT_ENDINGS)


def keeps_quantized(name: str) -> bool:
    """Whether the result of a function is quantized if its inputs are, because it only moves or cuts values."""
    return name in _KEEPS


def factors_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The factors among the arguments of a product, without its bias, its mask and what it adds.

    >>> bias, matrix, vector = torch.ones(2), torch.ones(2, 3), torch.ones(3)
    >>> [list(factor.shape) for factor in factors_of("addmv", (bias, matrix, vector), {})]
    [[2, 3], [3]]
    """
    # An LSTM's state is a list, of which the products see the first tensor.
    named = [one[0] if isinstance(one, (list, tuple)) else one for one in args[_FACTORS.get(name, slice(0))]]
    tensors = [one for one in tree_leaves(named or (args, kwargs)) if isinstance(one, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def counted(name: str, run: Callable[[], Any], factors: Sequence[torch.Tensor]) -> tuple[Any, int]:
    """The result of a product, and its multiply-accumulates.

    Args:
        name: of the operation.
        run: computes it.
        factors: its tensors.
    """
    if name in _UNCOUNTED:
        output = run()
    else:
        with FlopCounterMode(display=False) as counter:
            output = run()
        if operations := counter.get_total_flops():
            return output, operations // 2
    first = output[0] if isinstance(output, (tuple, list)) else output
    attends = name.removeprefix("_").startswith(_ATTENTION)
    count = _attention if attends else _COUNTS.get(name, _along_last_axis)
    return output, 0 if name in _LOOKUPS else count(first.numel(), *factors)
