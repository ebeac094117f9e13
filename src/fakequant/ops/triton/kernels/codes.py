"""Codes as they are stored, and the way back to values."""

import triton
import triton.language as tl

from .elements import decode
from .places import first_element, lanes, params_of_block
from .rounding import bits_of, reached_in_table, to_dtype


@triton.jit
def to_code(code, table, CALL: tl.constexpr):
    """A clamped code as an integer; NaN becomes the format's, or the lowest code."""
    if CALL.family == "table":
        return reached_in_table(code, table, CALL)
    elif CALL.family == "float":
        return float_pattern(code, CALL)
    else:
        return tl.where(code == code, code, CALL.quant_min).to(tl.int32)


@triton.jit
def float_pattern(code, CALL: tl.constexpr):
    """The bits of a small float: those of the wide one, cut and counted from another exponent; subnormals in steps."""
    magnitude = tl.abs(code)
    if code.dtype == tl.float64:
        cut = (bits_of(magnitude) >> (52 - CALL.mantissa_bits)).to(tl.int32)
        normal = cut - ((CALL.min_exponent - 1 + 1023) << CALL.mantissa_bits)
    else:
        cut = bits_of(magnitude) >> (23 - CALL.mantissa_bits)
        normal = cut - ((CALL.min_exponent - 1 + 127) << CALL.mantissa_bits)
    is_small = magnitude < CALL.smallest_normal
    steps = (tl.where(is_small, magnitude, 0.0) * CALL.steps_in_one).to(tl.int32)
    negative = bits_of(code) < 0
    if not CALL.negative_zero:
        negative = negative & (code != 0.0)
    pattern = tl.where(is_small, steps, normal) | tl.where(negative, 1 << (CALL.code_bits - 1), 0)
    return tl.where(code == code, pattern, CALL.nan_pattern)


@triton.jit
def from_code(stored, table, COMPUTE: tl.constexpr, CALL: tl.constexpr):
    """What `to_code` stored, as a number."""
    if CALL.family == "table":
        return tl.load(table + stored.to(tl.int32))
    elif CALL.family == "float":
        return float_of_pattern(stored.to(tl.int32) & ((1 << CALL.code_bits) - 1), CALL).to(COMPUTE)
    else:
        return stored.to(COMPUTE)


@triton.jit
def float_of_pattern(pattern, CALL: tl.constexpr):
    """The value of a code's bits in float64, which has the exponents of all small floats."""
    magnitude = pattern & ((1 << (CALL.code_bits - 1)) - 1)
    binade = tl.maximum(magnitude >> CALL.mantissa_bits, 1)
    mantissa = magnitude - ((binade - 1) << CALL.mantissa_bits)
    exponent = (binade + (CALL.min_exponent - 1 - CALL.mantissa_bits)).to(tl.int64)
    value = mantissa.to(tl.float64) * ((exponent + 1023) << 52).to(tl.float64, bitcast=True)
    value = tl.where(value > CALL.quant_max, float("nan"), value)
    value = tl.where(magnitude == CALL.infinity_pattern, float("inf"), value)
    # By its bit, because `-value` is 0 - value in some versions of triton, and +0.0 for 0.0.
    sign = (pattern >> (CALL.code_bits - 1)).to(tl.int64) << 63
    value = (value.to(tl.int64, bitcast=True) | sign).to(tl.float64, bitcast=True)
    if not CALL.negative_zero:
        value = tl.where(pattern == (1 << (CALL.code_bits - 1)), float("nan"), value)
    return value


@triton.jit(do_not_specialize=["columns", "period"], do_not_specialize_on_alignment=["run"])
def dequantize_kernel(
    codes, y, scale, zero_point, low, high, table, n, run, columns, period,
    CALL: tl.constexpr, TILING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y of codes."""
    COMPUTE: tl.constexpr = tl.float64 if y.dtype.element_ty == tl.float64 else tl.float32
    start = first_element(BLOCK, TILING)
    position = start + lanes(BLOCK)
    code = from_code(tl.load(codes + position, mask=position < n, other=0), table, COMPUTE, CALL)
    params = params_of_block(scale, zero_point, low, high, start, n, run, columns, period, CALL, TILING, BLOCK, COMPUTE)
    value = decode(code, params[0], params[2], CALL)
    tl.store(y + position, to_dtype(value, y.dtype.element_ty), mask=position < n)
