"""A tensor in its blocks: padded, split into groups, and put together again."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from .granularity import Shape


def padding(shape: Shape, blocks: Shape) -> list[int]:
    """The number of elements that each axis needs to end with a full block."""
    return [-n % b if b else 0 for n, b in zip(shape, blocks, strict=True)]


def pad_blocks(x: Tensor, blocks: Shape) -> Tensor:
    """x with zeros at the end of every axis whose last block is not full."""
    missing = padding(x.shape, blocks)
    return F.pad(x, [p for n in reversed(missing) for p in (0, n)]) if any(missing) else x


def blocked(x: Tensor, blocks: Shape) -> Tensor:
    """x [n0, n1, ...], padded to full blocks, with every axis that a block divides split into (groups, block)."""
    x = pad_blocks(x, blocks)
    split: list[int] = []
    for n, b in zip(x.shape, blocks, strict=True):
        split += [n // b, b] if b not in (1, n) else [n]
    return x if len(split) == x.dim() else x.reshape(split)


def unblocked(values: Tensor, shape: Shape, blocks: Shape) -> Tensor:
    """The tensor [shape] from which `blocked` made x."""
    missing = padding(shape, blocks)
    values = values.reshape([n + m for n, m in zip(shape, missing, strict=True)])
    for axis, m in enumerate(missing):
        if m:
            values = values.narrow(axis, 0, shape[axis])
    return values


def blocked_groups(values: Tensor, shape: Shape, blocks: Shape) -> Tensor:
    """Per-group values [groups, axes kept] shaped to broadcast with `blocked(x)`."""
    split: list[int] = []
    for groups, n, b in zip(values.shape, _padded(shape, blocks), blocks, strict=True):
        split += [groups, 1] if b not in (1, n) else [groups]
    return values if len(split) == values.dim() else values.reshape(split)


def block_axes(shape: Shape, blocks: Shape) -> tuple[int, ...]:
    """The axes of `blocked(x)` inside a block: a reduction per group runs over them."""
    axes: list[int] = []
    position = 0
    for n, b in zip(_padded(shape, blocks), blocks, strict=True):
        position += b not in (1, n)
        if b != 1:
            axes.append(position)
        position += 1
    return tuple(axes)


def over_blocks(values: Tensor, blocks: Shape, reduce: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Tensor:
    """Reduce every block, and repeat the result at each of its values.

    Args:
        values: any shape.
        blocks: the block size along every axis.
        reduce: takes `blocked(values)` and the axes of a block, and keeps these with size 1.

    >>> over_blocks(torch.tensor([1, 2, 3, 4]), (2,), lambda view, axes: view.sum(axes, True))
    tensor([3, 3, 7, 7])
    """
    axes = block_axes(values.shape, blocks)
    if not axes or not values.numel():
        return values
    view = blocked(values, blocks)
    return unblocked(reduce(view, axes).expand(view.shape), values.shape, blocks)


def _padded(shape: Shape, blocks: Shape) -> list[int]:
    return [n + m for n, m in zip(shape, padding(shape, blocks), strict=True)]
