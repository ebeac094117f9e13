"""Wrappers of torch around a model or inside one: their names are in no path, file or message."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from torch import nn

from fakequant.distributed import is_moved
from fakequant.nn.quantizer import Kind, WeightCache, quantizers
from fakequant.restore import attributes_of, restore_after, state_of

# By name, because importing them all takes long, and the attribute that holds the wrapped module.
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "AveragedModel": "module",
}
_KEPT = {"FullyShardedDataParallel": "module"}
"""Wrappers that stay: without this one the module inside has parameters of no shape."""

P = ParamSpec("P")
Result = TypeVar("Result")


def inside(module: nn.Module, *, kept: bool = False) -> nn.Module:
    """The module in all wrappers that compute the same; with `kept` also in those that it cannot do without.

    >>> layer = nn.Linear(2, 2)
    >>> inside(torch.compile(nn.DataParallel(layer))) is layer
    True
    """
    known = _WRAPPERS | _KEPT if kept else _WRAPPERS
    for cls in type(module).__mro__:
        if cls.__name__ in known and cls.__module__.startswith("torch."):
            return inside(module._modules[known[cls.__name__]] or module, kept=kept)
    return module


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """A context in which a model, which it gives, and all modules inside it are without their wrappers."""
    inner = inside(model)
    found = [
        (module, name, child)
        for module in inner.modules()
        for name, child in module._modules.items()
        if child is not None and inside(child) is not child
    ]

    def restore() -> None:
        for module, name, child in found:
            module._modules[name] = child

    with restore_after(restore):
        for module, name, child in found:
            module._modules[name] = inside(child)
        yield inner


def accepts_wrapped_model(function: Callable[P, Result]) -> Callable[P, Result]:
    """Have a function of a model first get it without wrappers, and return the wrapped one where it returns the model.

    The processes of DistributedDataParallel stay those of its argument `group`.
    """
    groups = "group" in inspect.signature(function).parameters

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Result:
        model: Any = args[0] if args else None
        is_wrapped = isinstance(model, nn.Module) and any(inside(own) is not own for own in model.modules())
        if not is_wrapped:
            return function(*args, **kwargs)
        if groups and kwargs.get("group") is None and "process_group" in vars(model):
            kwargs["group"] = model.process_group
        with unwrapped(model) as inner:
            result: Any = cast("Any", function)(inner, *args[1:], **kwargs)
        return cast("Result", model if result is inner else result)

    return called


class Role(Enum):
    """What a tensor is to its layer; the values are the names of a rule's fields."""

    INPUT = "input"
    WEIGHT = "weight"
    OUTPUT = "output"


class Kernel(NamedTuple):
    """The positions of a kernel, which a product sums over with the channels."""

    window: Mapping[int, int]
    """Their axes, counted from the end, with the kernel's lengths; those of length 1 are left out."""
    length: int | None = None
    """The number of channels in one sum of a weight; None for an input, whose blocks lie along its channels alone."""

    @classmethod
    def of(cls, sizes: Sequence[int], length: int | None = None) -> Kernel:
        """The kernel with these lengths along the last axes of a tensor."""
        window = {axis - len(sizes): size for axis, size in enumerate(sizes) if size != 1}
        return cls(window, length)


NO_KERNEL = Kernel({})


class Operand(NamedTuple):
    """A tensor of a layer that a quantizer belongs to."""

    role: Role
    reduction: int = -1
    """The axis that the product sums over, which axis -1 of a rule stands for; of an output, that of its channels."""
    channels: int = 0
    """The axis of a weight that holds output channels; a rule calls it axis 0."""
    weight: str = ""
    """Where the layer holds a weight: "weight", or "out_proj.weight" for that of a submodule."""
    is_stack: bool = False
    """Whether a weight is a stack of weights along its first axis, each with its own ranges; its other axes are counted
    from the end."""
    optional: bool = False
    """Whether calls may do without it: calibration takes the quantizer away if no call of its layer used it."""
    kernel: Kernel = NO_KERNEL
    """That of a convolution."""

    def axes(self) -> dict[int, int]:
        """From the axes that a rule names by their role to those of the tensor."""
        if self.role is not Role.WEIGHT:
            return {-1: self.reduction}
        named = {0: self.channels, -1: self.reduction}
        return {**named, -2: self.channels, 1: self.reduction} if self.is_stack else named


@contextmanager
def fixed_ranges(model: nn.Module) -> Iterator[None]:
    """A context in which learned ranges are constants, as exporters need them; then they are learned again."""
    learned = [quantizer for quantizer in quantizers(model).values() if quantizer.learned is not None]
    with restore_after(state_of(learned)):
        for quantizer in learned:
            quantizer.stop_learning()
        yield


@contextmanager
def cached_weights(model: nn.Module) -> Iterator[None]:
    """A context in which each weight is quantized once: for evaluation and inference.

    The first use quantizes the weight, and later ones get the same values or codes again, with the same bits. Weights,
    scales and specifications must not change inside, as within `torch.nn.utils.parametrize.cached`: a change that torch
    counts raises a `CallError` at the next use of the weight. Torch does not count what is written through
    `weight.data` or a NumPy array, nor the steps of fused optimizers.

    Where weights are sharded or offloaded, where a gradient of the weight is wanted, where a range is learned or
    rounding is stochastic, and in compiled models, weights are quantized at every call. Copies and pickles of the model
    hold no quantized weights.

    >>> layer = nn.Linear(4, 4)
    >>> layer.weight_quantizer = fq.nn.Quantizer("int8 per_channel(0)", kind=Kind.WEIGHT)
    >>> with cached_weights(layer), torch.no_grad():
    ...     first, again = (layer.weight_quantizer(layer.weight) for _ in range(2))
    >>> first.data_ptr() == again.data_ptr()
    True
    """
    # Weights that come for each call anew are other tensors each time.
    own = {} if is_moved(model) else quantizers(model)
    found = [quantizer for quantizer in own.values() if quantizer.kind is Kind.WEIGHT]
    with restore_after(attributes_of(found, "_cache")):
        for quantizer in found:
            quantizer._cache = WeightCache(quantizer)
        yield
