"""The range of the finite values of groups, by maxima of bit patterns.

Without its sign bit, a float is an integer that rises with the magnitude. Maxima of integers come out the same in any
order, so that programs may add theirs in any. inf and NaN count as 0.
"""

import triton
import triton.language as tl

from .places import group_of_run
from .rounding import bits_of, computable


@triton.jit
def magnitudes(v, inside):
    """The patterns of the magnitudes of finite values, and which are of negative ones."""
    bits = bits_of(v)
    if bits.dtype == tl.int64:
        pattern = bits & 0x7FFFFFFFFFFFFFFF
        finite = pattern < 0x7FF0000000000000
    else:
        pattern = bits & 0x7FFFFFFF
        finite = pattern < 0x7F800000
    return tl.where(finite & inside, pattern, 0), bits < 0


@triton.jit
def places_of_sweep(step, n, run, columns, period, steps, SWEEP: tl.constexpr):
    """Positions of a block [rows, width] and which are there; the groups of what is left of it, and which are there.

    The groups [rows] or [width] are the same in every step.
    """
    program = tl.program_id(0)
    if SWEEP.wide:
        program = program.to(tl.int64)
        # Below 2**31 they come in 32 bits, which their sums and products exceed.
        run, columns, period = tl.cast(run, tl.int64), tl.cast(columns, tl.int64), tl.cast(period, tl.int64)
    down, along = tl.arange(0, SWEEP.rows), tl.arange(0, SWEEP.width)
    if SWEEP.across:
        width = columns * run
        height = period // columns
        across = (width + SWEEP.width - 1) // SWEEP.width
        parts = (height + SWEEP.rows * steps - 1) // (SWEEP.rows * steps)
        plane = program // (across * parts)
        row = (program // across % parts * steps + step) * SWEEP.rows + down
        column = program % across * SWEEP.width + along
        position = (plane * height + row)[:, None] * width + column[None, :]
        there = (row < height)[:, None] & (column < width)[None, :]
        return position, there, plane * columns + column // run, column < width
    else:
        parts = (run + SWEEP.width * steps - 1) // (SWEEP.width * steps)
        number = program // parts * SWEEP.rows + down
        column = (program % parts * steps + step) * SWEEP.width + along
        position = number[:, None] * run + column[None, :]
        there = (number * run < n)[:, None] & (column < run)[None, :]
        return position, there, group_of_run(number, columns, period, SWEEP), number * run < n


@triton.jit
def zeros_of(SWEEP: tl.constexpr, DTYPE: tl.constexpr):
    """Zeros [rows, width]."""
    ROWS: tl.constexpr = SWEEP.rows
    WIDTH: tl.constexpr = SWEEP.width
    return tl.zeros((ROWS, WIDTH), DTYPE)


@triton.jit(do_not_specialize=["n", "period", "steps"])
def measure_kernel(x, low, high, whole, n, run, columns, period, steps, SWEEP: tl.constexpr):
    """Raises patterns [groups] to the magnitudes of highest and lowest values, without `low` of both; `whole` too."""
    COMPUTE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    lowest = zeros_of(SWEEP, high.dtype.element_ty)
    highest = zeros_of(SWEEP, high.dtype.element_ty)
    for step in range(steps):
        position, there, _, _ = places_of_sweep(step, n, run, columns, period, steps, SWEEP)
        v = computable(tl.load(x + position, mask=there, other=0.0), COMPUTE)
        pattern, negative = magnitudes(v, there)
        if low is not None:
            lowest = tl.maximum(lowest, tl.where(negative, pattern, 0))
            pattern = tl.where(negative, 0, pattern)
        highest = tl.maximum(highest, pattern)
    _, _, group, there = places_of_sweep(0, n, run, columns, period, steps, SWEEP)
    found = tl.max(highest, axis=SWEEP.reduced)
    tl.atomic_max(high + group, found, mask=there, sem="relaxed")
    if low is not None:
        tl.atomic_max(low + group, tl.max(lowest, axis=SWEEP.reduced), mask=there, sem="relaxed")
    if whole is not None:
        tl.atomic_max(whole, tl.max(found, axis=0), sem="relaxed")
