"""What functions of torch do with values: one table, which targets, queries of a run and counts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from fakequant.nn.sites.functions import SITE_FUNCTIONS, called_as
from fakequant.nn.sites.sites import arguments_of
from fakequant.nn.sites.traits import NO_TRAITS, Trait, read_traits

# Functions that cannot be sites; `nn/sites/functions.py` has the others.
_TRAITS = read_traits("""
contiguous dropout | moves scales channels identity
flatten permute reshape to transpose view | moves scales channels
detach clone | moves channels identity
expand float half bfloat16 double getitem repeat squeeze | moves channels
type_as unflatten unsqueeze | moves channels
type | moves channels shape
max_pool1d max_pool2d max_pool3d | moves scales
t split chunk unbind get select narrow slice index_select gather roll flip pad movedim moveaxis swapaxes | moves
swapdims tensor_split ravel T mT H mH data | moves
dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout | moves identity
index unfold as_strided take_along_dim masked_select requires_grad cpu cuda | codes
atleast_1d atleast_2d atleast_3d broadcast_to broadcast_tensors view_as expand_as reshape_as | codes
clamp | codes
repeat_interleave | codes channels
copy setitem | codes fills
index_copy index_fill index_put masked_fill masked_scatter scatter slice_scatter where | fills
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d | scales
linear_cross_entropy convolution _convolution _addmm_activation | product
linalg_matrix_power matrix_power linalg_matrix_exp matrix_exp linalg_householder_product ormqr cov corrcoef | product
cdist pdist _cdist_forward _euclidean_dist _trilinear affine_grid affine_grid_generator | product
_embedding_bag | product lookup
lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell | product
linalg_solve linalg_solve_triangular linalg_lstsq linalg_lu_solve lu_solve cholesky_solve triangular_solve | product
linalg_solve_ex linalg_ldl_solve linalg_tensorsolve | product
_native_multi_head_attention _transformer_encoder_layer_fwd multi_head_attention_forward | product
flex_attention | product attention
zeros zeros_like new_zeros empty empty_like new_empty zero | empty
size dim ndimension stride numel nelement is_contiguous is_floating_point is_complex element_size | shape
storage_offset get_device len | shape
""")
# Variants of products are known by their family: `_scaled_dot_product_flash_attention` is a `scaled_dot_product`.
_ATTENTION = ("scaled_dot_product", "flash_attention")
_PRODUCT_FAMILIES = (*_ATTENTION, "grouped_mm", "scaled_mm", "scaled_grouped_mm")
_PRODUCT_ENDINGS = ("mm", "matmul")


def having(trait: Trait) -> frozenset[str]:
    """The functions with a trait.

    >>> "relu" in having(Trait.SCALES)
    True
    """
    known = _TRAITS | {name: function.traits for name, function in SITE_FUNCTIONS.items()}
    return frozenset(name for name, traits in known.items() if trait in traits)


def has(name: str, trait: Trait) -> bool:
    """Whether a function, as a recording names it, has a trait.

    >>> has("transpose", Trait.CODES), has("baddbmm", Trait.PRODUCT), has("softmax", Trait.SCALES)
    (True, True, False)
    """
    name = name.partition(" ")[0]  # without the reason why the call cannot be a site
    if name in SITE_FUNCTIONS:
        return trait in SITE_FUNCTIONS[name].traits
    if trait in _TRAITS.get(name, NO_TRAITS):
        return True
    own = name.removeprefix("_")
    return trait is Trait.PRODUCT and (own.startswith(_PRODUCT_FAMILIES) or own.endswith(_PRODUCT_ENDINGS))


# Where a product's factors are among its tensors; the rest is a bias. All of them where nothing is said.
_FACTORS = {
    **dict.fromkeys(("convolution", "_grouped_mm", "grouped_mm", "_scaled_mm", "_scaled_grouped_mm"), slice(2)),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), slice(4)),
    "linear_cross_entropy": slice(2),
    "_addmm_activation": slice(1, 3),
    "flex_attention": slice(3),  # a mask is no factor
}


def _attention(outputs: int, query: torch.Tensor, key: torch.Tensor, *_: torch.Tensor) -> int:
    return (query.numel() + outputs) * key.shape[-2]


def _recurrent(_: int, x: torch.Tensor, *others: torch.Tensor) -> int:
    return x[..., 0].numel() * sum(weight.numel() for weight in others if weight.dim() == 2)


# The number of multiply-accumulates for a given number of outputs, for products that torch's counter does not know.
_COUNTS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
}


def is_number(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds floats or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def factors_of(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The factors among the arguments of a product, without its bias, its mask and what it adds.

    >>> bias, matrix, vector = torch.ones(2), torch.ones(2, 3), torch.ones(3)
    >>> [list(factor.shape) for factor in factors_of(torch.addmv, "addmv", (bias, matrix, vector), {})]
    [[2, 3], [3]]
    """
    called = called_as(func)
    if called is not None:
        held = [one for one in arguments_of(called, args, kwargs).values() if isinstance(one, torch.Tensor)]
        held = [one for one in held if is_number(one) and one.dim() > 0]
        return held if len(held) >= called.function.fewest else []
    # An LSTM's state is a list, of which the products see the first tensor.
    named = [one[0] if isinstance(one, (list, tuple)) else one for one in args[_FACTORS.get(name, slice(0))]]
    tensors = [one for one in tree_leaves(named or (args, kwargs)) if isinstance(one, torch.Tensor)]
    return [tensor for tensor in tensors if is_number(tensor)]


def counted(name: str, run: Callable[[], Any], factors: Sequence[torch.Tensor]) -> tuple[Any, int]:
    """The result of a product, and its multiply-accumulates.

    Args:
        name: of the operation.
        run: computes it.
        factors: its tensors, as of `factors_of`.
    """
    attends = has(name, Trait.ATTENTION)
    if attends:  # flex_attention fails under torch's counter
        output = run()
    else:
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _NoModules()
        with counter:
            output = run()
        if operations := counter.get_total_flops():
            return output, operations // 2
    first = output[0] if isinstance(output, (tuple, list)) else output
    attends = attends or name.removeprefix("_").startswith(_ATTENTION)
    count = _attention if attends else _COUNTS.get(name, _along_reduction(name))
    return output, 0 if has(name, Trait.LOOKUP) else count(first.numel(), *factors)


class _NoModules(ModuleTracker):
    """Counts under no module: hooks of all modules would stay after an interrupt that comes as the counter ends."""

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *_: object) -> None: ...


def _along_reduction(name: str) -> Callable[..., int]:
    """The count of a product from the table of sites, or of one that sums over the last axis of its first factor."""
    function = SITE_FUNCTIONS.get(name)
    if function is not None and function.multiplications is not None:
        return function.multiplications
    axis = function.operands[0].reduction if function is not None and function.operands else -1
    return lambda outputs, first, *_: outputs * first.shape[axis]
