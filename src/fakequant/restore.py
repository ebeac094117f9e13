"""Give a model back what a function changed for a while, whatever ends the function and whenever it ends.

The changes are made inside `restore_after` or `restore_on_error`, so that what is to be restored is known before the
first change. An interrupt (Ctrl-C) can also come while the restoring itself runs; then that runs again from its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Restore = Callable[[], object]
"""Gives back what was there before. It assigns values, so that it can run twice."""


@contextmanager
def restore_after(restore: Restore) -> Iterator[None]:
    """A context after which `restore` has run.

    >>> layer = nn.Dropout()
    >>> with restore_after(attributes_of([layer], "training", "p")):
    ...     layer.eval().p = 0.1
    >>> layer.training, layer.p
    (True, 0.5)
    """
    try:
        try:
            yield
        finally:
            restore()
    except BaseException:
        restore()
        raise


class restore_on_error:
    """A context that keeps all changes made inside, or, if anything is raised, none: then `restore` has run.

    A class, unlike `restore_after`: an interrupt just before the end of a generator's context ends the generator only
    when the traceback is freed. Its `restore` would run then, after that of an outer context, and spoil it.
    """

    def __init__(self, restore: Restore) -> None:
        self._restore = restore

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            try:
                self._restore()
            except BaseException:
                self._restore()
                raise


def attributes_of(objects: Iterable[object], *names: str) -> Restore:
    """A function that gives objects back the values which their attributes have now."""
    held = [(thing, name, getattr(thing, name)) for thing in objects for name in names]

    def restore() -> None:
        for thing, name, value in held:
            setattr(thing, name, value)

    return restore


def structure_of(modules: Iterable[nn.Module]) -> Restore:
    """A function that gives modules and those in them back their classes, attributes, parameters, buffers and hooks.

    Values of tensors are not copied, see `state_of`.

    >>> model = nn.Sequential(nn.Linear(4, 4))
    >>> restore = structure_of([model])
    >>> prepared = prepare(model, "INT8")
    >>> restore()
    >>> model
    Sequential(
      (0): Linear(in_features=4, out_features=4, bias=True)
    )
    """
    held: list[tuple[nn.Module, type[nn.Module], dict[str, Any], list[tuple[Any, Any]]]] = []
    for module in _parts(modules):
        attributes = dict(vars(module))
        # torch keeps parameters, hooks and the like in containers, which others refer to: their contents come back.
        containers = [(one, one.copy()) for one in attributes.values() if isinstance(one, (dict, set))]
        held.append((module, type(module), attributes, containers))

    def restore() -> None:
        for module, kind, attributes, containers in held:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for container, content in containers:
                container.clear()
                container.update(content)

    return restore


def state_of(modules: Iterable[nn.Module], device: str | None = None) -> Restore:
    """As `structure_of`, with the values of parameters and buffers, which are copied, by default where they are."""
    modules = list(modules)
    structure = structure_of(modules)
    parts = _parts(modules)
    tensors = {id(t): t for part in parts for t in (*part.parameters(recurse=False), *part.buffers(recurse=False))}
    values = [(tensor, tensor.detach().to(device or tensor.device, copy=True)) for tensor in tensors.values()]

    def restore() -> None:
        structure()
        for tensor, value in values:
            if not torch.equal(tensor.to(value.device), value):
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(value)

    return restore


def _parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list(dict.fromkeys(part for whole in modules for part in whole.modules()))
