"""From the range of groups to their scales and zero points: the formulas of numerics/qparams.py and scales.py."""

import triton
import triton.language as tl

from .rounding import bits_of, clamp, divide, round_to_format, round_to_integer


@triton.jit
def smallest_normal(v):
    if v.dtype == tl.float64:
        return tl.full(v.shape, 2.2250738585072014e-308, tl.float64)
    else:
        return tl.full(v.shape, 1.1754943508222875e-38, tl.float32)


@triton.jit
def at_least(bound, v):
    return tl.where(v < bound, bound, v)


@triton.jit
def at_most(bound, v):
    return tl.where(v > bound, bound, v)


@triton.jit
def power_of_two_scale(amax, RULE: tl.constexpr):
    """2**(exponent of amax / divisor + offset), 1 more from the mantissa `up_from` on, 1 less at `down_at`."""
    v = divide(amax, tl.full(amax.shape, RULE.divisor, amax.dtype))
    lifted = v < smallest_normal(v)
    if v.dtype == tl.float64:
        bits = bits_of(tl.where(lifted, v * 9007199254740992.0, v))
        fraction = (bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000
        exponent = (bits >> 52) - 1022 - tl.where(lifted, 53, 0)
        mantissa = fraction.to(tl.float64, bitcast=True)
    else:
        bits = bits_of(tl.where(lifted, v * 16777216.0, v))
        fraction = (bits & 0x7FFFFF) | 0x3F000000
        exponent = ((bits >> 23) - 126 - tl.where(lifted, 24, 0)).to(tl.int64)
        mantissa = fraction.to(tl.float32, bitcast=True)
    mantissa = tl.where(v > 0.0, mantissa, 0.0)
    exponent += RULE.offset + (mantissa >= RULE.up_from).to(tl.int64) - (mantissa == RULE.down_at).to(tl.int64)
    exponent = tl.minimum(tl.maximum(exponent, RULE.lowest), RULE.highest)
    exponent = tl.where(v > 0.0, exponent, RULE.lowest)
    # A normal float64 in any case; the cast is exact.
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True).to(v.dtype)


@triton.jit
def scale_under_a_scale(amax, whole, RULE: tl.constexpr):
    """code * shared, with shared = whole / (bound * largest code) and code = amax / (bound * shared) rounded."""
    SCALES: tl.constexpr = RULE.scales
    shared = divide(whole, tl.full(whole.shape, RULE.divisor, whole.dtype))
    shared = at_least(smallest_normal(shared), shared)
    code = clamp(round_to_format(divide(amax, RULE.bound * shared), None, SCALES), SCALES)
    scale = tl.where(code > 0.0, code, RULE.smallest) * shared
    return at_least(smallest_normal(scale), scale)


@triton.jit
def choose_scale(amax, whole, RULE: tl.constexpr):
    """The scale of groups by their largest magnitude; `whole`: the largest of all."""
    bound = tl.full(amax.shape, RULE.bound, amax.dtype)
    if RULE.kind == "multiplier":
        scale = divide(bound, amax)
        scale = at_least(RULE.least_multiplier, scale)
        return at_most(RULE.largest_multiplier, scale)
    elif RULE.kind == "power_of_two":
        return power_of_two_scale(amax, RULE)
    elif RULE.kind == "under_a_scale":
        return at_most(RULE.limit, scale_under_a_scale(amax, whole, RULE))
    else:
        scale = divide(amax, bound)
        return at_most(RULE.limit, at_least(smallest_normal(scale), scale))


@triton.jit
def choose_asymmetric(lo, hi, RULE: tl.constexpr, CALL: tl.constexpr):
    """Scale and zero point of groups by their range, which contains 0."""
    steps = tl.full(lo.shape, RULE.bound, lo.dtype)
    # Halved before the subtraction, so that hi - lo cannot overflow; exact in binary.
    scale = divide(hi * 0.5 - lo * 0.5, steps) * 2.0
    scale = at_most(RULE.largest_number, at_least(smallest_normal(scale), scale))
    zero_point = clamp(CALL.quant_min - round_to_integer(divide(lo, scale)), CALL)
    farthest = at_least(CALL.quant_max - zero_point, zero_point - CALL.quant_min)
    largest = tl.full(lo.shape, RULE.limit, lo.dtype)
    return at_most(divide(largest, farthest), scale), zero_point


@triton.jit
def choose_params(low, high, whole, CALL: tl.constexpr):
    """Scale, its reciprocal, zero point and range of groups, by the magnitudes of their lowest and highest values."""
    RULE: tl.constexpr = CALL.rule
    if CALL.symmetric:
        s = choose_scale(high, whole, RULE)
        z = s
        lo, hi = -high, high
    else:
        lo, hi = 0.0 - low, high
        s, z = choose_asymmetric(lo, hi, RULE, CALL)
    inverse = s
    if CALL.arithmetic == "reciprocal":
        inverse = divide(tl.full(s.shape, 1.0, s.dtype), s)
    return s, inverse, z, lo, hi
