"""The values of tensors that the transforms of torch.func wrap: `vmap` lets no function look at them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]  a room of torch without type stubs


@contextmanager
def outside_of_transforms(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """A context in which no transform of torch.func runs, with plain tensors that hold the values of the given ones.

    Those of all members of a `vmap` are one tensor [members, *shape]; others keep their shape.

    >>> def see(row):
    ...     with outside_of_transforms(row) as (x,):
    ...         print(x.tolist())
    ...     return row
    >>> y = torch.vmap(see)(torch.ones(2, 3))
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    if not torch._C._are_functorch_transforms_active():
        yield [*tensors]
        return
    unwrapped = [*map(_unwrapped, tensors)]  # while the transforms run, to which the wrappers belong
    with temporarily_clear_interpreter_stack():
        yield [_members(x, axes) for x, axes in unwrapped]


def _unwrapped(x: Tensor) -> tuple[Tensor, list[int]]:
    """The tensor inside the wrappers of transforms, and the axis that each `vmap` adds, the inner ones first."""
    axes: list[int] = []
    while _functorch.is_functorch_wrapped_tensor(x):
        if (axis := _functorch.maybe_get_bdim(x)) >= 0:
            axes.insert(0, axis)
        x = _functorch.get_unwrapped(x)
    return x, axes


def _members(x: Tensor, axes: list[int]) -> Tensor:
    for place, axis in enumerate(axes):
        x = x.movedim(axis + place, place)
    return x.flatten(0, len(axes) - 1) if axes else x
