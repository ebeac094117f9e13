"""Restore a model after temporary changes, also after an error or Ctrl-C.

Make the restoring function before the first change, and give it to `restore_after` or `restore_on_error`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import nn

from fakequant.memory import separate, write_back

Value = TypeVar("Value")
Restore = Callable[[], object]
"""A function that restores an earlier state."""
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, set, list)
"""Classes whose contents are restored. Subclasses are not: the frozen dict of diffusers may refuse a change."""


@contextmanager
def restore_after(restore: Restore) -> Iterator[None]:
    """A context that calls `restore` when the block ends, also after an error.

    >>> layer = nn.Dropout()
    >>> with restore_after(attributes_of([layer], "training", "p")):
    ...     layer.eval().p = 0.1
    >>> layer.training, layer.p
    (True, 0.5)
    """
    try:
        yield
    finally:
        restore()


@contextmanager
def restore_on_error(restore: Restore) -> Iterator[None]:
    """A context that calls `restore` if the block raises, so that either all its changes stay or none."""
    try:
        yield
    except BaseException:
        restore()
        raise


@contextmanager
def set_to(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """A context in which a context variable has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def attributes_of(objects: Iterable[object], *names: str) -> Restore:
    """Return a function that resets attributes of objects to their present values."""
    saved = [(thing, name, getattr(thing, name), name in vars(thing)) for thing in objects for name in names]

    def restore() -> None:
        for thing, name, value, is_own in saved:
            setattr(thing, name, value)
            if not is_own:  # its class has it
                vars(thing).pop(name, None)

    return restore


def forwards_of(modules: Iterable[nn.Module]) -> Restore:
    """Return a function that restores each module's `forward`: the method of its class, or an attribute of the module.

    >>> layer = nn.ReLU()
    >>> with restore_after(forwards_of([layer])):
    ...     vars(layer)["forward"] = torch.neg
    >>> "forward" in vars(layer)
    False
    """
    saved = [(vars(module), vars(module).get("forward")) for module in modules]

    def restore() -> None:
        for attributes, own in saved:
            attributes.pop("forward", None)
            if own is not None:
                attributes["forward"] = own

    return restore


def structure_of(modules: Iterable[nn.Module]) -> Restore:
    """Return a function that restores the classes, attributes, parameters, buffers and hooks of modules and submodules.

    It does not restore the values of tensors; `state_of` does.

    >>> model = nn.Sequential(nn.Linear(4, 4))
    >>> restore = structure_of([model])
    >>> prepared = prepare(model, "INT8")
    >>> restore()
    >>> model
    Sequential(
      (0): Linear(in_features=4, out_features=4, bias=True)
    )
    """
    saved: list[tuple[nn.Module, type[nn.Module], dict[str, Any], list[tuple[Any, Any]]]] = []
    for module in _parts(modules):
        if isinstance(module, torch.jit.ScriptModule):  # which nothing here changes, and which would lose its content
            continue
        attributes = dict(vars(module))
        # torch keeps parameters and hooks in containers that other objects refer to, so their contents are restored.
        containers = [(value, value.copy()) for value in attributes.values() if type(value) in _CONTAINERS]
        saved.append((module, type(module), attributes, containers))

    def restore() -> None:
        for module, kind, attributes, containers in saved:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for container, content in containers:
                container.clear()
                (container.extend if type(container) is list else container.update)(content)

    return restore


def state_of(modules: Iterable[nn.Module], device: str | None = None) -> Restore:
    """Return a function that restores what `structure_of` restores, and the values of parameters and buffers.

    Tensors whose elements share memory get new memory by `separate`, so that the changes can write them.

    Args:
        modules: the modules to restore.
        device: the device for copies of the values, by default the device of each tensor.
    """
    modules = list(modules)
    structure = structure_of(modules)
    parts = _parts(modules)
    tensors = {id(t): t for part in parts for t in (*part.parameters(recurse=False), *part.buffers(recurse=False))}
    held = [tensor for tensor in tensors.values() if not tensor.is_meta]
    separate(held)
    values = [(tensor, tensor.detach().to(device or tensor.device, copy=True)) for tensor in held]

    def restore() -> None:
        structure()
        for tensor, value in values:
            # Each process compares its part of a sharded tensor: other processes may be elsewhere.
            own, before = (getattr(one.detach(), "to_local", one.detach)() for one in (tensor, value))
            if not torch.equal(own.to(before.device), before):
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    write_back(tensor, value)

    return restore


def state_of_parts(model: nn.Module, touched: Iterable[nn.Module | nn.Parameter]) -> Restore:
    """Return a function that restores a model in which only the modules and parameters `touched` get other values.

    Copies of the values are on the CPU, because a GPU may have no room for a second copy.
    """
    touched = list(touched)
    structure = structure_of([model])
    values = state_of((one for one in touched if isinstance(one, nn.Module)), "cpu")
    held = [one for one in touched if isinstance(one, nn.Parameter)]
    separate(held)
    parameters = [(one, one.detach().to("cpu", copy=True)) for one in held]

    def restore_parameters() -> None:
        for parameter, value in parameters:
            parameter.data.copy_(value)

    return in_order(structure, values, restore_parameters)


def in_order(*restores: Restore) -> Restore:
    """Return a function that calls several restoring functions, one after the other."""

    def restore() -> None:
        for one in restores:
            one()

    return restore


def _parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list(dict.fromkeys(part for whole in modules for part in whole.modules()))
