"""Stochastic rounding: numerics/philox.py and Format.round_stochastically."""

import triton
import triton.language as tl

from .rounding import bits_of, divide, number_of, round_to_integer, with_sign


@triton.jit
def four_words(counter, seed):
    """The words of elements 4 * counter to 4 * counter + 3, uint32."""
    counter = counter.to(tl.int64)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    return tl.philox(seed, low, high, zero, zero)


@triton.jit
def draw_words(counter, seed):
    """`four_words` [..., 2, 2]: the last two axes number them."""
    w0, w1, w2, w3 = four_words(counter, seed)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))


@triton.jit
def draw_word(position, seed):
    """The word of the element at each position."""
    w0, w1, w2, w3 = four_words(position // 4, seed)
    number = position % 4
    return tl.where(number < 2, tl.where(number == 0, w0, w1), tl.where(number == 2, w2, w3))


@triton.jit
def load_seed(seed, seed_value):
    """The seed: from the device, or the number that came with the call."""
    if seed is not None:
        return tl.load(seed)
    else:
        return tl.full((), seed_value, tl.int64)


@triton.jit
def power_below(v):
    """2**floor(log2(|v|)): the mantissa bits are cleared."""
    if v.dtype == tl.float64:
        return number_of(bits_of(v) & 0x7FF0000000000000)
    else:
        return number_of(bits_of(v) & 0x7F800000)


@triton.jit
def cut_off(magnitude):
    """floor of a magnitude; exact, whatever the instruction for it does."""
    nearest = round_to_integer(magnitude)
    return tl.where(nearest > magnitude, nearest - 1.0, nearest)


@triton.jit
def reached_by(share):
    """The share in units of 2**-31, rounded; 0 for NaN."""
    return round_to_integer(tl.where(share == share, share, 0.0) * 2147483648.0).to(tl.int64)


@triton.jit
def neighbours_of_integer(v):
    magnitude = tl.abs(v)
    near = cut_off(magnitude)
    return with_sign(near, v), with_sign(near + 1.0, v), magnitude - near


@triton.jit
def neighbours_of_float(v, CALL: tl.constexpr):
    below = power_below(v)
    spacing = tl.where(below < CALL.smallest_normal, CALL.smallest_normal, below) * CALL.step
    steps = tl.abs(divide(v, spacing))
    near = cut_off(steps)
    infinite = tl.abs(v) == float("inf")
    lower = tl.where(infinite, v, with_sign(near * spacing, v))
    upper = tl.where(infinite, v, with_sign((near + 1.0) * spacing, v))
    if not CALL.negative_zero:
        lower, upper = lower + 0.0, upper + 0.0
    return lower, upper, steps - near


@triton.jit
def neighbours_in_table(v, table, CALL: tl.constexpr):
    """By the values themselves, in float64, in which their differences are exact enough: the definition's."""
    code = tl.zeros(v.shape, tl.int32)
    for i in tl.static_range(8):
        tried = code + (128 >> i)
        start = tl.load(table + tried, mask=tried < CALL.table_size - 1, other=float("inf"))
        code = tl.where((tried < CALL.table_size - 1) & (v >= start), tried, code)
    below, above = tl.load(table + code), tl.load(table + code + 1)
    beyond = (v > CALL.quant_max) | (v < CALL.quant_min) | (v != v)
    wide = below.to(tl.float64)
    share = tl.where(beyond, 0.0, (v.to(tl.float64) - wide) / (above.to(tl.float64) - wide))
    return tl.where(beyond, v, below), tl.where(beyond, v, above), share


@triton.jit
def round_by_words(v, words, table, CALL: tl.constexpr):
    """The neighbour of v that its word chooses, each with the probability of its nearness."""
    if CALL.family == "table":
        near, far, share = neighbours_in_table(v, table, CALL)
    elif CALL.family == "float":
        near, far, share = neighbours_of_float(v, CALL)
    else:
        near, far, share = neighbours_of_integer(v)
    return tl.where((words >> 1).to(tl.int64) < reached_by(share), far, near)
