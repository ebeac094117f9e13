"""The gradients of scale and zero point: sums of dy * slope that do not depend on the order of addition.

numerics/reference.py explains the digits. Atomic additions of integers are exact, so that the order of programs does
not matter. There are two passes over memory, because the first digit depends on the largest product of a group.
"""

import triton
import triton.language as tl

from fakequant.ops.triton.kernels.elements import draw_word, load_seed, places_of_sweep, zeros_of

from .elements import encode, in_code_range, load_params
from .rounding import clamp, computable, divide


@triton.jit
def limited(v):
    """v clamped to finite numbers; NaN stays."""
    if v.dtype == tl.float64:
        v = tl.where(v > 1.7976931348623157e308, 1.7976931348623157e308, v)
        return tl.where(v < -1.7976931348623157e308, -1.7976931348623157e308, v)
    else:
        v = tl.where(v > 3.4028234663852886e38, 3.4028234663852886e38, v)
        return tl.where(v < -3.4028234663852886e38, -3.4028234663852886e38, v)


@triton.jit
def slopes_of(v, scaled, code, params, CALL: tl.constexpr):
    """The derivatives of y with respect to scale and zero point, as `_slopes` in reference.py computes them."""
    s, _, z, lo, hi = params
    offset = z if CALL.has_zero_point else tl.zeros_like(s)
    if CALL.mask == "clip":
        low, high = v <= lo, v >= hi
        outside = low | high
        slope = tl.where(low, CALL.quant_min - offset, tl.where(high, CALL.quant_max - offset, 0.0))
    else:
        inside = in_code_range(code, CALL)
        outside = inside == 0
        slope = tl.where(inside, code - offset - scaled, clamp(code, CALL) - offset)
    if CALL.arithmetic == "multiplier":
        slope = limited(divide(divide(-slope, s), s))
    return slope, tl.where(outside, -s, 0.0)


@triton.jit
def product_of(dy, slope, there):
    """dy * slope in float64, which is exact for float32 factors; 0 where the slope is 0, even if dy is inf or NaN."""
    finite = tl.abs(dy) < float("inf")
    return tl.where(there & ((slope != 0) | finite), dy.to(tl.float64) * slope.to(tl.float64), 0.0)


@triton.jit
def params_of_sweep(
    scale, zero_point, low, high, n, run, columns, period, steps, CALL: tl.constexpr, SWEEP: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """The parameters of the groups of a sweep, shaped to broadcast with its blocks."""
    _, _, group, there = places_of_sweep(0, n, run, columns, period, steps, SWEEP)
    s, inverse, z, lo, hi = load_params(scale, zero_point, low, high, group, there, COMPUTE, CALL)
    if SWEEP.across:
        return s[None, :], inverse[None, :], z[None, :], lo[None, :], hi[None, :]
    else:
        return s[:, None], inverse[:, None], z[:, None], lo[:, None], hi[:, None]


@triton.jit
def products_of_step(
    step, dy, x, params, table, words, seed, seed_value, n, run, columns, period, steps, CALL: tl.constexpr,
    SWEEP: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The products of dy with the slopes by scale and by zero point, for the elements of a block."""
    position, there, _, _ = places_of_sweep(step, n, run, columns, period, steps, SWEEP)
    v = computable(tl.load(x + position, mask=there, other=0.0), COMPUTE)
    gradient = computable(tl.load(dy + position, mask=there, other=0.0), COMPUTE)
    drawn = v
    if CALL.stochastic:
        if words is not None:
            drawn = tl.load(words + position, mask=there, other=0).to(tl.uint32, bitcast=True)
        else:
            drawn = draw_word(position, load_seed(seed, seed_value))
    scaled, code = encode(v, params, table, drawn, CALL)
    by_scale, by_zero_point = slopes_of(v, scaled, code, params, CALL)
    return product_of(gradient, by_scale, there), product_of(gradient, by_zero_point, there)


@triton.jit
def kinds_of(product):
    """The exponent fields of finite products, and for each other product a flag: 1 for inf, 2 for -inf, 4 for NaN."""
    pattern = product.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    field = tl.where(pattern < 0x7FF0000000000000, pattern >> 52, 0)
    kind = tl.where(product == float("inf"), 1, 0) | tl.where(product == -float("inf"), 2, 0)
    return field, (kind | tl.where(product != product, 4, 0)).to(tl.int64)


@triton.jit
def raise_largest(sums, field, kind, group, there, groups, REDUCED: tl.constexpr):
    """Raise row 0 of sums [6, groups] to the largest exponent field, and set flags of inf and NaN in row 5."""
    tl.atomic_max(sums + group, tl.max(field, axis=REDUCED), mask=there, sem="relaxed")
    kinds = tl.max(kind & 1, axis=REDUCED) | tl.max(kind & 2, axis=REDUCED) | tl.max(kind & 4, axis=REDUCED)
    tl.atomic_or(sums + 5 * groups + group, kinds, mask=there & (kinds != 0), sem="relaxed")


@triton.jit(do_not_specialize=["seed_value", "groups", "n", "period", "steps"])
def largest_kernel(
    dy, x, by_scale, by_zero_point, scale, zero_point, low, high, table, words, seed, seed_value: tl.int64,
    groups: tl.int64, n, run, columns, period, steps, CALL: tl.constexpr, SWEEP: tl.constexpr,
):  # fmt: skip
    """The first pass: the largest exponent of each group's products, which decides the place of the first digit."""
    COMPUTE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    params = params_of_sweep(scale, zero_point, low, high, n, run, columns, period, steps, CALL, SWEEP, COMPUTE)
    field0 = zeros_of(SWEEP, tl.int64)
    kind0, field1, kind1 = field0, field0, field0
    for step in range(steps):
        p0, p1 = products_of_step(
            step, dy, x, params, table, words, seed, seed_value, n, run, columns, period, steps, CALL, SWEEP, COMPUTE
        )
        if by_scale is not None:
            field, kind = kinds_of(p0)
            field0, kind0 = tl.maximum(field0, field), kind0 | kind
        if by_zero_point is not None:
            field, kind = kinds_of(p1)
            field1, kind1 = tl.maximum(field1, field), kind1 | kind
    _, _, group, there = places_of_sweep(0, n, run, columns, period, steps, SWEEP)
    if by_scale is not None:
        raise_largest(by_scale, field0, kind0, group, there, groups, SWEEP.reduced)
    if by_zero_point is not None:
        raise_largest(by_zero_point, field1, kind1, group, there, groups, SWEEP.reduced)


@triton.jit
def power_of(field):
    """The least p for which 2**(30 * p) is above all float64 numbers whose exponent field is `field`."""
    return (field - 1022 + 29 + 1020) // 30 - 34  # + 1020 makes `//` round down


@triton.jit
def power_of_two(exponent):
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def halved_scale(sums, group, there, SWEEP: tl.constexpr):
    """The square root of a power of two that scales a group's products: their integer parts are then first digits."""
    half = power_of_two((1 - power_of(tl.load(sums + group, mask=there, other=0))) * 15)
    if SWEEP.across:
        return half[None, :]
    else:
        return half[:, None]


@triton.jit
def with_digits(digits, product, half):
    """The sums of digits of 30 bits plus the digits of a product that is scaled by `half` twice."""
    d0, d1, d2, d3 = digits
    finite = tl.abs(product) < float("inf")
    rest = tl.where(finite, product, 0.0) * half * half
    digit = rest.to(tl.int64)
    d0 += digit
    rest = (rest - digit.to(tl.float64)) * 1073741824.0
    digit = rest.to(tl.int64)
    d1 += digit
    rest = (rest - digit.to(tl.float64)) * 1073741824.0
    digit = rest.to(tl.int64)
    d2 += digit
    rest = (rest - digit.to(tl.float64)) * 1073741824.0
    return d0, d1, d2, d3 + rest.to(tl.int64)


@triton.jit
def add_digits(sums, digits, group, there, groups, REDUCED: tl.constexpr):
    """Add digits to rows 1 to 4 of sums [6, groups], atomically."""
    d0, d1, d2, d3 = digits
    tl.atomic_add(sums + groups + group, tl.sum(d0, axis=REDUCED), mask=there, sem="relaxed")
    tl.atomic_add(sums + 2 * groups + group, tl.sum(d1, axis=REDUCED), mask=there, sem="relaxed")
    tl.atomic_add(sums + 3 * groups + group, tl.sum(d2, axis=REDUCED), mask=there, sem="relaxed")
    tl.atomic_add(sums + 4 * groups + group, tl.sum(d3, axis=REDUCED), mask=there, sem="relaxed")


@triton.jit(do_not_specialize=["seed_value", "groups", "n", "period", "steps"])
def digits_kernel(
    dy, x, by_scale, by_zero_point, scale, zero_point, low, high, table, words, seed, seed_value: tl.int64,
    groups: tl.int64, n, run, columns, period, steps, CALL: tl.constexpr, SWEEP: tl.constexpr,
):  # fmt: skip
    """The second pass: the sums of the digits of products."""
    COMPUTE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    params = params_of_sweep(scale, zero_point, low, high, n, run, columns, period, steps, CALL, SWEEP, COMPUTE)
    _, _, group, there = places_of_sweep(0, n, run, columns, period, steps, SWEEP)
    zeros = zeros_of(SWEEP, tl.int64)
    digits0, digits1 = (zeros, zeros, zeros, zeros), (zeros, zeros, zeros, zeros)
    if by_scale is not None:
        half0 = halved_scale(by_scale, group, there, SWEEP)
    if by_zero_point is not None:
        half1 = halved_scale(by_zero_point, group, there, SWEEP)
    for step in range(steps):
        p0, p1 = products_of_step(
            step, dy, x, params, table, words, seed, seed_value, n, run, columns, period, steps, CALL, SWEEP, COMPUTE
        )
        if by_scale is not None:
            digits0 = with_digits(digits0, p0, half0)
        if by_zero_point is not None:
            digits1 = with_digits(digits1, p1, half1)
    if by_scale is not None:
        add_digits(by_scale, digits0, group, there, groups, SWEEP.reduced)
    if by_zero_point is not None:
        add_digits(by_zero_point, digits1, group, there, groups, SWEEP.reduced)


@triton.jit(do_not_specialize=["groups"])
def total_kernel(sums, total, groups: tl.int64, BLOCK: tl.constexpr):
    """Write the total of each group from its digits in base 2**30; carries first make |digit| <= 2**29."""
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = group < groups
    number = tl.zeros((BLOCK,), tl.float64)
    carry = tl.zeros((BLOCK,), tl.int64)
    for k in tl.static_range(3):
        digit = tl.load(sums + (4 - k) * groups + group, mask=there, other=0) + carry
        carry = (digit + 536870912) >> 30
        number = (number + (digit - (carry << 30)).to(tl.float64)) * 9.313225746154785e-10
    number = number + (tl.load(sums + groups + group, mask=there, other=0) + carry).to(tl.float64)
    back = power_of_two((power_of(tl.load(sums + group, mask=there, other=0)) - 1) * 15)
    kinds = tl.load(sums + 5 * groups + group, mask=there, other=0)
    others = tl.where(kinds == 1, float("inf"), tl.where(kinds == 2, -float("inf"), float("nan")))
    number = number * back * back
    number = tl.where(kinds == 0, number, others)
    tl.store(total + group, number.to(total.dtype.element_ty), mask=there)
