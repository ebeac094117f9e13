"""What happens to one element: encoded, decoded, let through; and the parameters of its group."""

import triton
import triton.language as tl

from .rounding import computable, divide, round_to_format
from .scales import choose_params
from .stochastic import round_by_words


@triton.jit
def load_params(scale_or_whole, zero_point, low, high, group, inside, COMPUTE: tl.constexpr, CALL: tl.constexpr):
    """Scale, its reciprocal, zero point and range of groups, in the compute dtype; what is not needed is the scale.

    `scale_or_whole`: the scales; where `CALL.rule` finds them, the largest magnitude of all, or None. Then `low` and
    `high` are magnitudes, too, see ranges.py.
    """
    if CALL.rule is not None:
        farthest = tl.load(high + group, mask=inside, other=0.0)
        nearest = farthest
        if low is not None:
            nearest = tl.load(low + group, mask=inside, other=0.0)
        whole = farthest
        if scale_or_whole is not None:
            whole = tl.load(scale_or_whole)
        return choose_params(nearest, farthest, whole, CALL)
    else:
        return load_given(scale_or_whole, zero_point, low, high, group, inside, COMPUTE, CALL)


@triton.jit
def load_given(scale, zero_point, low, high, group, inside, COMPUTE: tl.constexpr, CALL: tl.constexpr):
    """Those of a quantization by given parameters."""
    given = tl.load(scale + group, mask=inside, other=1.0)
    s = computable(given, COMPUTE)
    inverse = s
    if CALL.arithmetic == "reciprocal":
        inverse = divide(tl.full(s.shape, 1.0, COMPUTE), s)
    z = s
    if zero_point is not None:
        z = computable(tl.load(zero_point + group, mask=inside, other=0), COMPUTE)
    lo, hi = s, s
    if CALL.mask == "clip":
        lo, hi = decode_ends(s, z, CALL)
    if CALL.mask == "input":
        if low is not None:
            lo = computable(tl.load(low + group, mask=inside, other=0.0), COMPUTE)
            hi = computable(tl.load(high + group, mask=inside, other=0.0), COMPUTE)
        else:
            # In the dtype of the scale, as the definition finds it.
            lo, hi = implied_range(given, zero_point, group, inside, CALL)
            lo, hi = lo.to(COMPUTE), hi.to(COMPUTE)
    return s, inverse, z, lo, hi


@triton.jit
def implied_range(scale, zero_point, group, inside, CALL: tl.constexpr):
    if CALL.symmetric:
        bound = tl.full(scale.shape, CALL.bound, scale.dtype)
        amax = divide(bound, scale) if CALL.arithmetic == "multiplier" else bound * scale
        return -amax, amax
    else:
        z = tl.zeros(scale.shape, scale.dtype)
        if zero_point is not None:
            z = tl.load(zero_point + group, mask=inside, other=0).to(scale.dtype)
        return (CALL.quant_min - z) * scale, (CALL.quant_max - z) * scale


@triton.jit
def decode_ends(s, z, CALL: tl.constexpr):
    """The values of the lowest and the highest code."""
    lowest = tl.full(s.shape, CALL.quant_min, s.dtype)
    highest = tl.full(s.shape, CALL.quant_max, s.dtype)
    return decode(lowest, s, z, CALL), decode(highest, s, z, CALL)


@triton.jit
def encode(v, params, table, words, CALL: tl.constexpr):
    """v in units of codes, then its code as if the format had no bounds."""
    s, inverse, z, _, _ = params
    if CALL.arithmetic == "divide":
        scaled = divide(v, s)
    elif CALL.arithmetic == "reciprocal":
        scaled = v * inverse
    else:
        scaled = v * s
    code = round_by_words(scaled, words, table, CALL) if CALL.stochastic else round_to_format(scaled, table, CALL)
    if CALL.has_zero_point:
        code = code + z
    return scaled, code


@triton.jit
def in_code_range(code, CALL: tl.constexpr):
    return (code >= CALL.quant_min) & (code <= CALL.quant_max)


@triton.jit
def decode(code, s, z, CALL: tl.constexpr):
    if CALL.arithmetic == "multiplier":
        return divide(code, s)
    elif CALL.has_zero_point:
        return (code - z) * s
    elif CALL.has_offset and not CALL.plain:
        # Integers have no negative zero: -0.0 + 0.0 is +0.0, every other value stays.
        return (code + 0.0) * s
    else:
        return code * s


@triton.jit
def lets_through(v, code, params, CALL: tl.constexpr):
    """Where the gradient reaches the input."""
    _, _, _, lo, hi = params
    if CALL.mask == "code":
        return in_code_range(code, CALL)
    elif CALL.mask == "clip":
        return (v > lo) & (v < hi)
    else:
        return (v >= lo) & (v <= hi)
