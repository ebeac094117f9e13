"""Wrappers of torch around a model or inside one: their names are in no path, file or message."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from torch import nn

from fakequant.restore import restore_after

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


def unwraps(function: Callable[P, Result]) -> Callable[P, Result]:
    """Have a function of a model first get it without wrappers, and return the wrapped one where it returns the model.

    The processes of DistributedDataParallel stay those of its argument `group`.
    """
    groups = "group" in inspect.signature(function).parameters

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Result:
        model: Any = args[0] if args else None
        if not isinstance(model, nn.Module) or not _is_wrapped(model):
            return function(*args, **kwargs)
        if groups and kwargs.get("group") is None and "process_group" in vars(model):
            kwargs["group"] = model.process_group
        with unwrapped(model) as inner:
            result: Any = cast("Any", function)(inner, *args[1:], **kwargs)
        return cast("Result", model if result is inner else result)

    return called


def _is_wrapped(model: nn.Module) -> bool:
    return any(inside(module) is not module for module in model.modules())
