"""Rounds the columns of a weight matrix one after the other, with the roundings and order of sums of ops/sweep.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fakequant.ops.triton.kernels.elements import decode, encode, load_given
from fakequant.ops.triton.kernels.rounding import bits_of, clamp, number_of


@triton.jit
def nearest_of_column(
    v, group, position, there, scale, zero_point, offset, sign, zero, zeros, table, CALL: tl.constexpr
):  # fmt: skip
    """Round a column to nearest; `group` are the positions of its parameters in memory, `position` of its elements."""
    x = v
    if offset is not None:
        x = x + tl.load(offset + group, mask=there, other=0.0)
    if sign is not None:
        x = x * tl.load(sign + group, mask=there, other=1.0)
    params = load_given(scale, zero_point, None, None, group, there, tl.float32, CALL)
    _, code = encode(x, params, table, x, CALL)
    y = decode(clamp(code, CALL), params[0], params[2], CALL)
    if zero is not None:
        y = tl.where(tl.load(zero + group, mask=there, other=0) != 0, 0.0, y)
    if sign is not None:
        y = y * tl.load(sign + group, mask=there, other=1.0)
    if offset is not None:
        y = y - tl.load(offset + group, mask=there, other=0.0)
    if zeros is not None:
        y = tl.where(tl.load(zeros + position, mask=there, other=0) != 0, 0.0, y)
    return y


@triton.jit(do_not_specialize=["rows", "columns", "stride"])
def sweep_kernel(
    wanted, left, shares, errors, missed, runs, scale, zero_point, offset, sign, zero, zeros, table,
    rows, columns, stride, CALL: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Round ROWS rows of [columns, rows]; each column compensates the errors of those before it; COLUMNS >= columns."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there, place = row < rows, tl.arange(0, COLUMNS)
    positions = place.to(tl.int64)[:, None] * rows + row[None, :]
    tile = tl.load(wanted + positions, mask=(place < columns)[:, None] & there[None, :], other=0.0)
    for step in range(columns):
        k = columns - 1 - step
        # One column of the tile, which lies in registers: as a sum of patterns, which keeps the sign of zero.
        v = number_of(tl.sum(tl.where((place == k)[:, None], bits_of(tile), 0), axis=0).to(tl.int32))
        position = tl.cast(k, tl.int64) * rows + row
        group = tl.load(runs + k) * rows + row
        y = nearest_of_column(v, group, position, there, scale, zero_point, offset, sign, zero, zeros, table, CALL)
        error = tl.load(left + position, mask=there, other=0.0) - y
        tl.store(missed + position, v - y, mask=there)
        tl.store(errors + position, error, mask=there)
        tl.store(wanted + position, y, mask=there)
        share = tl.load(shares + place * stride + k, mask=place < k, other=0.0)
        tile = tl.where((place < k)[:, None], tile + share[:, None] * error[None, :], tile)
