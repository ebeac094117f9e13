"""Rounding with ties to even: to the values of a format, without clamping to its ends, and to the dtype of a result.

All operations give the same bits in the interpreter and on GPUs: IEEE + * /, and operations on integers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mask_kernel(dy, bits, dx, n, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """dx = dy where the mask is set, else 0, on bit patterns, so that NaN keeps its bits."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    byte = program * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    eight = tl.arange(0, 8)[None, :]
    position = (byte * 8)[:, None] + eight
    passing = tl.load(bits + byte, mask=byte * 8 < n, other=0).to(tl.int32)
    keeps = ((passing[:, None] >> eight) & 1) != 0
    pattern = tl.load(dy + position, mask=position < n, other=0)
    tl.store(dx + position, tl.where(keeps, pattern, 0), mask=position < n)


# The interpreter cuts bfloat16 off, where GPUs round it to nearest even, and takes its subnormal numbers for others.
BFLOAT16_BY_BITS = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def divide(a, b):
    """a / b, correctly rounded, which the operator `/` is not in float32."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def bits_of(v):
    if v.dtype == tl.float64:
        return v.to(tl.int64, bitcast=True)
    else:
        return v.to(tl.int32, bitcast=True)


@triton.jit
def number_of(bits):
    if bits.dtype == tl.int64:
        return bits.to(tl.float64, bitcast=True)
    else:
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def with_sign(magnitude, v):
    if v.dtype == tl.float64:
        return number_of(bits_of(magnitude) | (bits_of(v) & -9223372036854775808))
    else:
        return number_of(bits_of(magnitude) | (bits_of(v) & -2147483648))


@triton.jit
def round_to_integer(v):
    magnitude = tl.abs(v)
    if v.dtype == tl.float64:
        beyond: tl.constexpr = 4503599627370496.0
    else:
        beyond: tl.constexpr = 8388608.0
    # From 2**23 (2**52) on, numbers are integers; of NaN the comparison is false.
    rounded = tl.where(magnitude < beyond, (magnitude + beyond) - beyond, magnitude)
    return with_sign(rounded, v)


@triton.jit
def round_plainly(v):
    """`round_to_integer` for |v| < 2**22, without keeping the sign of zero."""
    if v.dtype == tl.float64:
        return (v + 6755399441055744.0) - 6755399441055744.0
    else:
        return (v + 12582912.0) - 12582912.0


@triton.jit
def round_to_float(v, CALL: tl.constexpr):
    """Round to multiples of 2**(e - M) for 2**e <= |v| < 2**(e + 1), by adding and subtracting c = 2**(e + 23 - M).

    Floats just above c have this spacing. First |v| is limited to twice the largest value, so that c is finite.
    """
    magnitude = tl.abs(v)
    limit: tl.constexpr = 2.0 * CALL.quant_max
    limited = tl.where(magnitude > limit, limit, magnitude)
    if v.dtype == tl.float64:
        exponent = bits_of(limited) & 0x7FF0000000000000
        least: tl.constexpr = (CALL.min_exponent + 1023) * 4503599627370496
        shift: tl.constexpr = (52 - CALL.mantissa_bits) * 4503599627370496
    else:
        exponent = bits_of(limited) & 0x7F800000
        least: tl.constexpr = (CALL.min_exponent + 127) * 8388608
        shift: tl.constexpr = (23 - CALL.mantissa_bits) * 8388608
    c = number_of(tl.maximum(exponent, least) + shift)
    rounded = with_sign((limited + c) - c, v)
    if CALL.negative_zero:
        return rounded
    else:
        return rounded + 0.0


@triton.jit
def reached_in_table(v, table, CALL: tl.constexpr):
    """The index of the last value whose start, the smallest number that rounds to it, is at most v; else 0."""
    reached = tl.zeros(v.shape, tl.int32)
    for i in tl.static_range(8):
        tried = reached + (128 >> i)
        start = tl.load(table + (CALL.table_size - 1) + tried, mask=tried < CALL.table_size, other=float("inf"))
        reached = tl.where((tried < CALL.table_size) & (v >= start), tried, reached)
    return reached


@triton.jit
def round_to_table(v, table, CALL: tl.constexpr):
    """v rounded to a value of the table; v itself beyond the ends and for NaN."""
    size: tl.constexpr = CALL.table_size
    # Few values are compared in turn, which needs no load that waits for a comparison.
    if size <= 16:
        value = tl.load(table) + tl.zeros_like(v)
        for i in tl.static_range(1, size):
            reached = v >= tl.load(table + (size + i - 1))
            value = tl.where(reached, tl.load(table + i), value)
    else:
        value = tl.load(table + reached_in_table(v, table, CALL))
    return tl.where((v >= CALL.quant_min) & (v <= CALL.quant_max), value, v)


@triton.jit
def round_to_format(v, table, CALL: tl.constexpr):
    if CALL.family == "table":
        return round_to_table(v, table, CALL)
    elif CALL.family == "float":
        return round_to_float(v, CALL)
    elif CALL.plain:
        return round_plainly(v)
    else:
        return round_to_integer(v)


@triton.jit
def clamp(code, CALL: tl.constexpr):
    """The code clamped to the bounds of the format; NaN and -0.0 stay."""
    code = tl.where(code < CALL.quant_min, CALL.quant_min, code)
    return tl.where(code > CALL.quant_max, CALL.quant_max, code)


@triton.jit
def computable(v, COMPUTE: tl.constexpr):
    """A stored number in the dtype of computation, exactly."""
    if BFLOAT16_BY_BITS and v.dtype == tl.bfloat16:
        return (v.to(tl.uint16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True).to(COMPUTE)
    else:
        return v.to(COMPUTE)


@triton.jit
def to_dtype(v, DTYPE: tl.constexpr):
    """v rounded once to the dtype of a result."""
    if BFLOAT16_BY_BITS and tl.bfloat16 == DTYPE:
        bits = v.to(tl.int32, bitcast=True)
        # To nearest, ties to even; NaN stays NaN. In 64 bits, in which nothing overflows.
        whole = bits.to(tl.int64) & 0xFFFFFFFF
        rounded = (whole + 0x7FFF + ((whole >> 16) & 1)) >> 16
        pattern = tl.where(v == v, rounded, 0x7FC0)
        return pattern.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return v.to(DTYPE)
