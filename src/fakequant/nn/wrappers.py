"""Wrappers of torch around models and modules, which are left out of paths, files and messages."""

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

# The attribute of the wrapped module by the wrapper's class name, because importing the classes takes long.
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "AveragedModel": "module",
}
_KEPT = {"FullyShardedDataParallel": "module"}
"""Wrappers that cannot be removed: without FSDP the parameters of the module inside have no shapes."""

P = ParamSpec("P")
Result = TypeVar("Result")


def inside(module: nn.Module, *, kept: bool = False) -> nn.Module:
    """The module inside all wrappers that do not change what it computes; with `kept`, also inside FSDP.

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
    """A context that removes the wrappers of a model and of all modules inside it, and yields the bare model."""
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
    """A decorator of functions of a model: the function gets the model without wrappers.

    If the function returns the model, the caller gets the wrapper. The process group of a DistributedDataParallel
    becomes the function's argument `group`.
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
    """The role of a tensor in its layer; the values are the names of fields of `Rule`."""

    INPUT = "input"
    WEIGHT = "weight"
    OUTPUT = "output"


class Kernel(NamedTuple):
    """The axes of a convolution's kernel. A convolution sums over them and over the channels."""

    window: Mapping[int, int]
    """The axes, counted from the end, with the sizes of the kernel; without axes of size 1."""
    length: int | None = None
    """The count of channels in one sum of a weight; None for an input, whose blocks lie along channels only."""

    @classmethod
    def of(cls, sizes: Sequence[int], length: int | None = None) -> Kernel:
        """The kernel with these sizes along the last axes of a tensor."""
        window = {axis - len(sizes): size for axis, size in enumerate(sizes) if size != 1}
        return cls(window, length)


NO_KERNEL = Kernel({})


class Operand(NamedTuple):
    """Describes a tensor of a layer that has or may get a quantizer: its role and the meaning of its axes."""

    role: Role
    reduction: int = -1
    """The axis that the product sums over, which a rule calls axis -1; for an output, the axis of channels."""
    channels: int = 0
    """The axis of output channels in a weight, which a rule calls axis 0."""
    weight: str = ""
    """The path of the weight in the layer: "weight", or "out_proj.weight" for the weight of a submodule."""
    is_stack: bool = False
    """Whether a weight is a stack of weights along its first axis, each with separate ranges; other axes are counted
    from the end."""
    optional: bool = False
    """Whether a call may leave the tensor out: calibration removes the quantizer if no call of its layer used it."""
    kernel: Kernel = NO_KERNEL
    """The kernel of a convolution, else NO_KERNEL."""

    def axes(self) -> dict[int, int]:
        """The tensor's axes by the numbers that a rule uses for them: -1 for the axis of the sum, for example."""
        if self.role is not Role.WEIGHT:
            return {-1: self.reduction}
        named = {0: self.channels, -1: self.reduction}
        return {**named, -2: self.channels, 1: self.reduction} if self.is_stack else named


@contextmanager
def fixed_ranges(model: nn.Module) -> Iterator[None]:
    """A context in which learned ranges are fixed, as exporters need; they are learned again after it."""
    learned = [quantizer for quantizer in quantizers(model).values() if quantizer.learned is not None]
    with restore_after(state_of(learned)):
        for quantizer in learned:
            quantizer.stop_learning()
        yield


@contextmanager
def cached_weights(model: nn.Module) -> Iterator[None]:
    """A context for evaluation and inference in which each weight is quantized only once.

    The first use quantizes the weight, and later uses get the same values or codes, bit for bit. Weights, scales and
    specifications must not change inside, as within `torch.nn.utils.parametrize.cached`: a change that torch counts
    raises a `CallError` at the next use of the weight. Torch does not count what is written through `weight.data` or a
    NumPy array, nor the steps of fused optimizers.

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
