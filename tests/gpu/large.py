"""The hostile numbers of tests/support/cases.py, as many as a GPU has work with."""

from __future__ import annotations

import torch
from torch import Tensor

import fakequant as fq
from tests.support import cases
from tests.support.cases import FormatCase, GranularityCase, Numbers, hostile_gradient, neighbour

# Made by numpy; then repeated and moved; then repeated: to make 10 million anew takes longer than to compare them.
_MADE, _MOVED = 1 << 16, 1 << 20


def large(
    case: FormatCase, where: GranularityCase, arithmetic: fq.Arithmetic, dtype: torch.dtype, elements: int, axis: int
) -> Numbers:
    """At least `elements` numbers: a million that follow from those of `cases.hostile`, again and again.

    Of the million a quarter are these, a quarter lie one or two representable values beside them, and half of them are
    spread between 0.5 and 1.5 times as much."""
    if not where.shape:
        return cases.hostile(case, where, arithmetic, dtype)
    shape = list(where.shape)
    shape[axis] *= max(1, min(elements, _MADE) // torch.Size(shape).numel())
    made = GranularityCase(where.granularity, tuple(shape), where.granularity.block_shape(torch.Size(shape)))
    numbers = cases.hostile(case, made, arithmetic, dtype, seed=elements)
    numbers = _repeated(numbers, where.granularity, min(elements, _MOVED), axis)
    _move(numbers.x.narrow(axis, shape[axis], numbers.x.shape[axis] - shape[axis]))
    return _repeated(numbers, where.granularity, elements, axis)


def large_gradient(x: Tensor) -> Tensor:
    """`cases.hostile_gradient` of a million elements, again and again, the shape of x."""
    one = hostile_gradient(x.reshape(-1)[:_MOVED])
    return one.repeat(-(-x.numel() // max(1, one.numel())))[: x.numel()].view(x.shape)


def _repeated(numbers: Numbers, granularity: fq.Granularity, elements: int, axis: int) -> Numbers:
    """At least `elements` numbers; either they belong to the same groups, or each repetition has its own."""
    repeats = [1] * numbers.x.dim()
    repeats[axis] = -(-elements // numbers.x.numel())
    x, params = numbers.x.repeat(repeats), numbers.params
    if granularity.group_shape(x.shape) == tuple(params.scale.shape):
        return Numbers(x, params)
    zero_point = None if params.zero_point is None else params.zero_point.repeat(repeats)
    return Numbers(x, fq.QParams(params.scale.repeat(repeats), zero_point))


def _move(x: Tensor) -> None:
    random = torch.Generator().manual_seed(0)
    pick = torch.randint(0, 4, x.shape, generator=random, dtype=torch.int8)
    steps = torch.randint(-2, 3, x.shape, generator=random, dtype=torch.int8)
    spread = x * (torch.rand(x.shape, generator=random) + 0.5).to(x.dtype)
    beside = neighbour(x.contiguous(), steps)
    x.copy_(torch.where(pick == 0, x, torch.where(pick == 1, beside, spread)))
