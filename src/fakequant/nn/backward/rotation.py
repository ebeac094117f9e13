"""Rotation of the operands of a backward product along the axis of its sum."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant.nn.transforms import hadamard
from fakequant.ops.tracing import needs_tracing

_SIGNS = 0x9E3779B97F4A7C15
"""Random signs of 64 rows, which repeat in larger blocks: the digits of the golden ratio. One vector serves all layers,
as NVIDIA's recipe has it."""


def rotated(x: Tensor, block: int, axis: int = 0) -> Tensor:
    """x with blocks of an axis, the first or second, times a Hadamard matrix with random signs; zeros fill the last.

    The matrix is orthogonal: rounding aside, a sum of products along the axis stays what it is.

    >>> x = torch.tensor([[8.0], [0.0], [0.0]])
    >>> rotated(x, 4).flatten()
    tensor([-4., -4., -4., -4.])
    """
    if torch.compiler.is_compiling():
        return torch.ops.fakequant.rotate(x, block, axis)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    missing = -x.shape[axis] % block
    made = _signed_hadamard if needs_tracing(x) else _made_once
    matrix, device = made(block, wide.dtype, x.device), x.device.type
    # A backward pass that begins within autocast would multiply in half precision.
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        if axis:
            wide = wide.movedim(1, -1)
            wide = F.pad(wide, (0, missing)) if missing else wide  # a copy
            return (wide.unflatten(-1, (-1, block)) @ matrix.T).flatten(-2).movedim(-1, 1).to(x.dtype)
        wide = wide.reshape(x.shape[0], math.prod(x.shape[1:]))
        wide = F.pad(wide, (0, 0, 0, missing)) if missing else wide
        y = (matrix @ wide.unflatten(0, (-1, block))).flatten(0, 1).to(x.dtype)
    return y.unflatten(1, x.shape[1:])


def _signed_hadamard(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    signs = torch.tensor([1.0 - 2.0 * (_SIGNS >> row % 64 & 1) for row in range(block)])
    return (hadamard(block) * signs).to(device, dtype)


_made_once = lru_cache(maxsize=64)(_signed_hadamard)  # 60 us of the 90 us that a matrix of 128 x 128 took on a CPU


# One node of a compiled graph: as operations of torch the matrix is made anew at each step.
@torch.library.custom_op("fakequant::rotate", mutates_args=(), schema="(Tensor x, int block, int axis) -> Tensor")
def _rotate(x: Tensor, block: int, axis: int) -> Tensor:
    y = rotated(x, block, axis)
    declared = _declared(x, block, axis)
    return y if y.stride() == declared.stride() else declared.copy_(y)


@_rotate.register_fake
def _declared(x: Tensor, block: int, axis: int) -> Tensor:
    """A tensor as the rotated one lies: row by row, with the axis that is rotated last if it is the second."""
    n = x.shape[axis]
    if not axis:
        return x.new_empty((n + -n % block, *x.shape[1:]))
    return x.new_empty((x.shape[0], *x.shape[2:], n + -n % block)).movedim(-1, 1)
