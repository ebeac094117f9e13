"""Rounds the columns of a weight matrix one after the other; each compensates the errors of those before it."""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library

from .backend import ColumnGrid
from .dispatch import choose


def sweep(wanted: Tensor, left: Tensor, shares: Tensor, errors: Tensor, missed: Tensor, grid: ColumnGrid) -> None:
    """Round columns of a matrix, float32 [columns, rows], in place, from the last column to the first.

    Each product and each sum is rounded separately, and errors are added in the order of the columns, so that every
    backend gives the same bits.

    Args:
        wanted: the targets, with the errors of earlier blocks compensated; overwritten by the rounded values.
        left: the matrix before any compensation.
        shares: [columns, columns or more]; shares[c, k] is the part of column k's error that is added to column c.
        errors: output, left - values.
        missed: output, the compensated targets - values.
        grid: scales, zero points and offsets of the columns.
    """
    if choose(wanted, grid.spec).sweep(wanted, left, shares, errors, missed, grid):
        return
    for place in range(len(wanted) - 1, -1, -1):
        run = grid.runs[place : place + 1]
        scale, *others = (None if own is None else own.index_select(0, run).T for own in grid[2:7])
        assert scale is not None
        found = nearest(wanted[place][:, None], grid.spec, scale, *others)[:, 0]
        if grid.zeros is not None:
            found = found.masked_fill(grid.zeros[place], 0.0)
        missed[place] = wanted[place] - found
        errors[place] = left[place] - found
        wanted[:place] += shares[:place, place, None] * errors[place]
        wanted[place] = found


def nearest(
    values: Tensor,
    spec: QuantSpec,
    scale: Tensor,
    zero_point: Tensor | None,
    offset: Tensor | None,
    sign: Tensor | None,
    zero: Tensor | None,
) -> Tensor:
    """Round a matrix to the nearest values in its dtype; parameters have the matrix's shape, see `ColumnGrid`."""
    x = values.float() if offset is None else values.float() + offset
    x = x if sign is None else x * sign
    y = library.fake_quantize(x.contiguous(), QParams(scale, zero_point), spec)
    y = y if zero is None else torch.where(zero, 0.0, y)
    y = y if sign is None else y * sign
    return (y if offset is None else y - offset).to(values.dtype)
