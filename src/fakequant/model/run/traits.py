"""What functions of torch do with values: one table, which targets, queries of a run and counts share.

Which values of a recorded run carry the numbers of a mask, which no scale of the other numbers can hold.

A mask adds -inf, or a number such as -10000 or the least float, where a softmax shall give 0. A range over such numbers
and the scores rounds all scores to one value.

Which layers read the output of which module in a recorded run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from fakequant.errors import CalibrationWarning, warn_user
from fakequant.model.run.recorded import EXTREME, FunctionCall, ModuleCall, Recording, RunStep
from fakequant.nn.paths import layer_of
from fakequant.nn.sites.functions import NO_TRAITS, SITE_FUNCTIONS, Trait, called_as, read_traits
from fakequant.nn.sites.sites import Site, arguments_of
from fakequant.numerics.qparams import Range
from fakequant.text import listed

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


_STILL_LARGE = EXTREME / 100
"""What is left of a mask behind a temperature or a factor."""


def masked_values(recording: Recording) -> set[int]:
    """The values that carry numbers of a mask, until a function has removed them.

    A value is a mask if it holds zeros and extreme numbers alone, or if a function wrote extreme numbers into another
    value. A function of such a value carries the mask on while its result has large numbers; a product does not. Scores
    with extreme numbers before a softmax, and the mask argument of an attention, are such values too.
    """
    sizes = [value.size for value in recording.values]
    found = set(recording.masks)
    for call in recording.calls:
        if call.is_product:
            continue
        carries = not found.isdisjoint(call.inputs)
        if carries or (has(call.function, Trait.FILLS) and not any(sizes[value] >= EXTREME for value in call.inputs)):
            least = _STILL_LARGE if carries else EXTREME
            found.update(value for value in call.outputs if least <= sizes[value] < math.inf)
    scores: set[int] = set()  # values that reach a softmax
    for call in reversed(recording.calls):
        if has(call.function, Trait.ATTENTION):
            scores.update(value for value in call.inputs if value not in call.factors)
        elif not call.is_product and (has(call.function, Trait.SOFTMAX) or not scores.isdisjoint(call.outputs)):
            scores.update(call.inputs)
    return found | {value for value in scores if EXTREME <= sizes[value] < math.inf}


def warn_of_masks(model: nn.Module, ranges: Mapping[str, Range]) -> None:
    """Warn of functions whose calibrated ranges hold numbers of a mask, which the example of `prepare` did not have.

    Args:
        model: a prepared model.
        ranges: by the path of the quantizer.
    """
    low: dict[str, float] = {}
    functions: set[str] = set()
    for name, range in ranges.items():
        site = model.get_submodule(layer_of(name))
        if isinstance(site, Site) and not has(site.function, Trait.PRODUCT) and range.lo.numel():
            lowest = range.lo.min().item()
            if lowest <= -EXTREME:
                low[name] = lowest
                functions.add(site.function)
    if low:
        first = next(iter(low))
        warn_user(
            f"the range of {listed(low, 1)} reaches {low[first]:.3g}, as with the numbers of an attention mask: its "
            "scale rounds all scores to one value. Give prepare(..., example=) an input with a mask, which leaves "
            f"these functions in float; or leave them in float by Rule('*', ops={(*sorted(functions),)})",
            CalibrationWarning,
        )


@dataclass
class Neighbors:
    """The modules that make tensors, and the layers that read them.

    Attributes:
        readers: for each maker, the layers whose first argument is its output, or a function of it that is followed.
        calls: how often the makers and layers are called.
        elsewhere: makers whose output, or a parameter of theirs, something else reads or keeps, too.
    """

    readers: dict[nn.Module, list[nn.Module]] = field(default_factory=dict)
    calls: Counter[nn.Module] = field(default_factory=Counter)
    elsewhere: set[nn.Module] = field(default_factory=set)


def find_neighbors(
    model: nn.Module,
    recording: Recording,
    makers: Set[nn.Module],
    layers: Set[nn.Module],
    through: Set[str] | None = None,
) -> Neighbors:
    """Follow the outputs of makers, also through functions such as ReLU.

    Args:
        model: as it ran.
        recording: of the run.
        makers: the modules whose outputs are followed.
        layers: those that may read them.
        through: functions that outputs are followed through; by default those that keep scales.

    >>> from fakequant.model.run.outputs import record
    >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(1, 4)
    >>> layers = {model[0], model[2]}
    >>> found = find_neighbors(model, record(model, lambda: model(x)), layers, layers)
    >>> found.readers[model[0]] == [model[2]]
    True
    """
    walk = _NeighborWalk(model, recording, makers, layers, having(Trait.SCALES) if through is None else through)
    for step, one in recording.steps():
        if step is RunStep.CALL:
            walk.call(one)
        else:
            walk.module(one, entered=step is RunStep.ENTER)
    walk.read({*recording.outputs, *recording.kept})
    return walk.found


class _NeighborWalk:
    """Goes through a run and notes which modules read the outputs of makers, as for `find_neighbors`."""

    def __init__(
        self,
        model: nn.Module,
        recording: Recording,
        makers: Set[nn.Module],
        layers: Set[nn.Module],
        through: Set[str],
    ) -> None:
        self.found = Neighbors()
        self._makers, self._layers, self._through = makers, layers, through
        self._modules = dict(model.named_modules())
        numbers: dict[nn.Parameter | None, int] = {**recording.numbers(model)}
        held = ((p, module) for module in makers | layers for p in module._parameters.values())
        self._owners = {numbers[p]: module for p, module in held if p in numbers}
        self._made: dict[int, nn.Module] = {}
        self._running: list[nn.Module] = []

    def read(self, values: Iterable[int]) -> None:
        """Note that something else than a layer reads or keeps values."""
        self.found.elsewhere.update(self._made[value] for value in values if value in self._made)

    def call(self, call: FunctionCall) -> None:
        """Note what a function reads; within makers and layers only parameters of others count."""
        owners = [self._owners[value] for value in call.read if value in self._owners]
        self.found.elsewhere.update(owner for owner in owners if owner not in self._running)
        if not self._running:
            maker = self._take(call.read, followed=call.function in self._through and len(call.outputs) == 1)
            if maker is not None:
                self._made[call.outputs[0]] = maker

    def module(self, one: ModuleCall, *, entered: bool) -> None:
        """Note the start or the end of a module's call."""
        module = self._modules[one.path]
        if module not in self._makers and module not in self._layers:
            return
        if entered:
            self.found.calls[module] += 1
            if (maker := self._take(one.inputs, followed=module in self._layers)) is not None:
                self.found.readers.setdefault(maker, []).append(module)
            self._running.append(module)
            return
        self._running.pop()
        if module in self._makers and one.output is not None:
            self._made[one.output] = module

    def _take(self, values: tuple[int, ...], *, followed: bool) -> nn.Module | None:
        """The maker of the first value, if it is followed; the others are read elsewhere."""
        maker = self._made.get(values[0]) if followed and values else None
        self.read(values if maker is None else values[1:])
        return maker
