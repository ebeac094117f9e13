"""The exact range of groups, and histograms of magnitudes.

If the magnitude bits of negative numbers are inverted, the bits of floats are integers in the order of the numbers,
from NaN with a sign over -inf, -0.0, 0.0 and inf to NaN without. The largest of these keys tells the highest value, and
whether all values are finite; the largest inverted key tells the lowest value. Maxima and sums of integers do not
depend on the order.
"""

import triton
import triton.language as tl

from .rounding import bits_of, computable, number_of


@triton.jit
def key_of(bits):
    """The key of a float's bits, an integer in the order of the floats; also the bits of a key."""
    if bits.dtype == tl.int64:
        return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def place_of_program(elements, WIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    """The groups [ROWS] of the program, and the position in each group where the program begins."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    parts = (elements + WIDTH * STEPS - 1) // (WIDTH * STEPS)
    return program // parts * ROWS + tl.arange(0, ROWS), program % parts * (STEPS * WIDTH)


@triton.jit
def bin_of(v, inverse, BINS: tl.constexpr):
    """The bin of |v|; the last bin for NaN and for magnitudes beyond it."""
    scaled = tl.abs(v) * inverse
    return tl.where(scaled < BINS - 1, scaled, BINS - 1).to(tl.int32)


@triton.jit
def observe_kernel(
    x, low, high, counts, inverse, groups, elements, BINS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Raise the keys [groups] of lowest and highest values, and add to counts [groups, 2, BINS] if not None.

    The first bins of either sign hold zeros, half of all values after a ReLU. They are summed before the atomic
    addition, because atomic additions to one address wait for each other.
    """
    COMPUTE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    KEY: tl.constexpr = high.dtype.element_ty
    LEAST: tl.constexpr = -9223372036854775808 if tl.int64 == KEY else -2147483648
    lowest, highest = tl.full((ROWS, WIDTH), LEAST, KEY), tl.full((ROWS, WIDTH), LEAST, KEY)
    group, start = place_of_program(elements, WIDE, ROWS, WIDTH, STEPS)
    # 64 bits, because there may be more bins of all groups than elements.
    line = group.to(tl.int64) * 2 * BINS
    if counts is not None:
        factor = tl.load(inverse + group, mask=group < groups, other=0.0)[:, None]
        below, above = tl.zeros((ROWS, WIDTH), tl.int32), tl.zeros((ROWS, WIDTH), tl.int32)
    for step in range(STEPS):
        column = start + step * WIDTH + tl.arange(0, WIDTH)
        there = (group < groups)[:, None] & (column < elements)[None, :]
        v = computable(tl.load(x + (group[:, None] * elements + column[None, :]), mask=there, other=0.0), COMPUTE)
        key = key_of(bits_of(v))
        lowest = tl.maximum(lowest, tl.where(there, ~key, LEAST))
        highest = tl.maximum(highest, tl.where(there, key, LEAST))
        if counts is not None:
            index = bin_of(v, factor, BINS)
            below += (there & (v < 0) & (index == 0)).to(tl.int32)
            above += (there & (v >= 0) & (index == 0)).to(tl.int32)
            place = line[:, None] + tl.where(v < 0, index, BINS + index)
            tl.atomic_add(counts + place, there.to(tl.int64), mask=there & (index > 0), sem="relaxed")
    tl.atomic_max(high + group, tl.max(highest, axis=1), mask=group < groups, sem="relaxed")
    tl.atomic_max(low + group, tl.max(lowest, axis=1), mask=group < groups, sem="relaxed")
    if counts is not None:
        zeros = counts + line
        tl.atomic_add(zeros, tl.sum(below, axis=1).to(tl.int64), mask=group < groups, sem="relaxed")
        tl.atomic_add(zeros + BINS, tl.sum(above, axis=1).to(tl.int64), mask=group < groups, sem="relaxed")


@triton.jit
def end_of(key):
    """The number of a key; -0.0 becomes 0.0, and numbers that are not finite become NaN."""
    v = number_of(key_of(key))
    return tl.where(tl.abs(v) < float("inf"), v + 0.0, float("nan"))


@triton.jit
def ends_kernel(low, high, lo, hi, groups, BLOCK: tl.constexpr):
    """The range [groups] from the keys of both ends; both are NaN if either is."""
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    lowest = end_of(~tl.load(low + group, mask=inside, other=0))
    highest = end_of(tl.load(high + group, mask=inside, other=0))
    finite = (lowest == lowest) & (highest == highest)
    tl.store(lo + group, tl.where(finite, lowest, float("nan")), mask=inside)
    tl.store(hi + group, tl.where(finite, highest, float("nan")), mask=inside)
