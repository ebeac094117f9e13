"""What functions of torch do with values: one table, which targets, queries of a run and counts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Flag, auto
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


class Trait(Flag):
    """What a function does with the values of its tensors."""

    MOVES = auto()
    """It moves or picks values, which all engines compute on codes."""
    CODES = auto()
    """It moves, copies or cuts values: its result is quantized if its inputs are."""
    SCALES = auto()
    """f(s x) = s f(x) for s > 0, in eval mode. It may mix channels, as `mean`: callers check the model's output."""
    CHANNELS = auto()
    """With one tensor and numbers, it commutes with a rotation of channels; for some arguments alone, as `reshape`:
    callers check the model's output."""
    SUMS = auto()
    """It adds or joins tensors with the same channels."""
    FILLS = auto()
    """It writes values from elsewhere into a tensor."""
    EMPTY = auto()
    """It reads no values, and gives zeros, which every quantized format has, or nothing."""
    PRODUCT = auto()
    """An integer or low-precision unit would compute it. All others are elementwise, normalisations or reductions,
    which run in float on most engines."""
    SHAPE = auto()
    """It may be asked without a read of values. A call whose result holds a tensor counts as a read."""


_TABLE = """
contiguous dropout flatten permute reshape to transpose view | moves scales channels
clone detach expand float half bfloat16 double getitem repeat squeeze | moves channels
type_as unflatten unsqueeze | moves channels
type | moves channels shape
max_pool1d max_pool2d max_pool3d | moves scales
t split chunk unbind get select narrow slice index_select gather roll flip pad movedim moveaxis swapaxes | moves
swapdims tensor_split ravel T mT H mH data | moves
index unfold as_strided take_along_dim masked_select feature_dropout requires_grad cpu cuda | codes
atleast_1d atleast_2d atleast_3d broadcast_to broadcast_tensors view_as expand_as reshape_as | codes
clamp hardtanh relu6 | codes
relu | codes scales
repeat_interleave | codes channels
copy setitem | codes fills
index_copy index_fill index_put masked_fill masked_scatter scatter slice_scatter where | fills
leaky_relu avg_pool1d avg_pool2d avg_pool3d | scales
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d | scales
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d | scales
mean | scales channels
mul div | channels
add | sums
cat stack | codes sums
linear linear_cross_entropy conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d | product
convolution _convolution conv_tbc addmv addr _addmm_activation linalg_multi_dot | product
linalg_matrix_power matrix_power einsum tensordot dot vdot linalg_vecdot mv inner outer ger kron cdist | product
_cdist_forward _euclidean_dist bilinear _trilinear embedding embedding_bag _embedding_bag | product
lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell | product
linalg_solve linalg_solve_triangular linalg_lstsq linalg_lu_solve lu_solve cholesky_solve triangular_solve | product
_native_multi_head_attention _transformer_encoder_layer_fwd multi_head_attention_forward flex_attention | product
zeros zeros_like new_zeros empty empty_like new_empty zero | empty
size dim ndimension stride numel nelement is_contiguous is_floating_point is_complex element_size | shape
storage_offset get_device len | shape
"""


def _traits() -> dict[str, Trait]:
    table = dict[str, Trait]()
    for line in _TABLE.strip().splitlines():
        names, _, traits = line.partition(" | ")
        found = Trait(0)
        for trait in traits.split():
            found |= Trait[trait.upper()]
        assert table.keys().isdisjoint(names.split()), line
        table |= dict.fromkeys(names.split(), found | Trait.CODES if Trait.MOVES in found else found)
    return table


_TRAITS = _traits()
# Variants of products are known by their family: `_scaled_dot_product_flash_attention` is a `scaled_dot_product`.
_ATTENTION = ("scaled_dot_product", "flash_attention")
_PRODUCT_FAMILIES = (*_ATTENTION, "grouped_mm", "scaled_mm", "scaled_grouped_mm")
_PRODUCT_ENDINGS = ("mm", "matmul")


def having(trait: Trait) -> frozenset[str]:
    """The functions with a trait.

    >>> "relu" in having(Trait.SCALES)
    True
    """
    return frozenset(name for name, traits in _TRAITS.items() if trait in traits)


def has(name: str, trait: Trait) -> bool:
    """Whether a function, as a recording names it, has a trait.

    >>> has("transpose", Trait.CODES), has("baddbmm", Trait.PRODUCT), has("softmax", Trait.SCALES)
    (True, True, False)
    """
    name = name.partition(" ")[0]  # without the reason why the call cannot be a site
    if trait in _TRAITS.get(name, Trait(0)):
        return True
    own = name.removeprefix("_")
    return trait is Trait.PRODUCT and (own.startswith(_PRODUCT_FAMILIES) or own.endswith(_PRODUCT_ENDINGS))


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


def is_number(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds floats or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def factors_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The factors among the arguments of a product, without its bias, its mask and what it adds.

    >>> bias, matrix, vector = torch.ones(2), torch.ones(2, 3), torch.ones(3)
    >>> [list(factor.shape) for factor in factors_of("addmv", (bias, matrix, vector), {})]
    [[2, 3], [3]]
    """
    # An LSTM's state is a list, of which the products see the first tensor.
    named = [one[0] if isinstance(one, (list, tuple)) else one for one in args[_FACTORS.get(name, slice(0))]]
    tensors = [one for one in tree_leaves(named or (args, kwargs)) if isinstance(one, torch.Tensor)]
    return [tensor for tensor in tensors if is_number(tensor)]


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
