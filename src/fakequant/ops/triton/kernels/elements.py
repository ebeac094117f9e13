"""Encode and decode elements, mask their gradients, and load or compute the parameters of their groups.

Ranges of the finite values of groups are maxima of bit patterns.

Without its sign bit, a float is an integer that rises with the magnitude. Maxima of integers do not depend on the order
of the programs. A range treats inf and NaN as 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fakequant.ops.triton.kernels.rounding import (
    bits_of,
    clamp,
    computable,
    divide,
    number_of,
    reached_in_table,
    round_to_format,
    round_to_integer,
    to_dtype,
    with_sign,
)


@triton.jit
def four_words(counter, seed):
    """The random words of elements 4 * counter to 4 * counter + 3, uint32."""
    counter = counter.to(tl.int64)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    return tl.philox(seed, low, high, zero, zero)


@triton.jit
def draw_words(counter, seed):
    """`four_words` as one tensor [..., 2, 2]."""
    w0, w1, w2, w3 = four_words(counter, seed)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))


@triton.jit
def draw_word(position, seed):
    """The random word of the element at each position."""
    w0, w1, w2, w3 = four_words(position // 4, seed)
    number = position % 4
    return tl.where(number < 2, tl.where(number == 0, w0, w1), tl.where(number == 2, w2, w3))


@triton.jit
def load_seed(seed, seed_value):
    """The seed, from the tensor `seed`, or the number `seed_value` if `seed` is None."""
    if seed is not None:
        return tl.load(seed)
    else:
        return tl.full((), seed_value, tl.int64)


@triton.jit
def power_below(v):
    """2**floor(log2(|v|)), by clearing the mantissa bits."""
    if v.dtype == tl.float64:
        return number_of(bits_of(v) & 0x7FF0000000000000)
    else:
        return number_of(bits_of(v) & 0x7F800000)


@triton.jit
def cut_off(magnitude):
    """The floor of a magnitude, exact on every device."""
    nearest = round_to_integer(magnitude)
    return tl.where(nearest > magnitude, nearest - 1.0, nearest)


@triton.jit
def reached_by(share):
    """A probability in units of 2**-31, rounded to a whole number; 0 for NaN."""
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
    """Both neighbours of v in a table and the share of the distance, in float64 as in the definition."""
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
    """v rounded to one of its neighbours by its random word, with probabilities by distance."""
    if CALL.family == "table":
        near, far, share = neighbours_in_table(v, table, CALL)
    elif CALL.family == "float":
        near, far, share = neighbours_of_float(v, CALL)
    else:
        near, far, share = neighbours_of_integer(v)
    return tl.where((words >> 1).to(tl.int64) < reached_by(share), far, near)


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
    """2**e: e is the exponent of amax / divisor, plus `offset`, plus 1 from `up_from` on, minus 1 at `down_at`."""
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
    """The scale code * shared: shared = whole / (bound * largest code), code = amax / (bound * shared) rounded."""
    SCALES: tl.constexpr = RULE.scales
    shared = divide(whole, tl.full(whole.shape, RULE.divisor, whole.dtype))
    shared = at_least(smallest_normal(shared), shared)
    code = clamp(round_to_format(divide(amax, RULE.bound * shared), None, SCALES), SCALES)
    scale = tl.where(code > 0.0, code, RULE.smallest) * shared
    return at_least(smallest_normal(scale), scale)


@triton.jit
def choose_scale(amax, whole, RULE: tl.constexpr):
    """The scales of groups from their largest magnitudes; `whole` is the largest of the tensor."""
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
    """Scale and zero point of groups from their ranges, which contain 0."""
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
    """Scale, reciprocal, zero point and range of groups, from magnitudes of their lowest and highest values."""
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


@triton.jit
def load_params(scale_or_whole, zero_point, low, high, group, inside, COMPUTE: tl.constexpr, CALL: tl.constexpr):
    """Load or compute scale, reciprocal, zero point and range of groups; results without a use are copies of the scale.

    `scale_or_whole` is the scales, or, if `CALL.rule` computes them, the largest magnitude of the tensor, or None.
    Then `low` and `high` are magnitudes, too.
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
    """Load scale, reciprocal, zero point and range of groups, for scales that the caller passes."""
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
    """The values of the lowest and the highest code, which are the clip range."""
    lowest = tl.full(s.shape, CALL.quant_min, s.dtype)
    highest = tl.full(s.shape, CALL.quant_max, s.dtype)
    return decode(lowest, s, z, CALL), decode(highest, s, z, CALL)


@triton.jit
def encode(v, params, table, words, CALL: tl.constexpr):
    """v in units of codes, and its code before clamping."""
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
    """Where the gradient passes to x."""
    _, _, _, lo, hi = params
    if CALL.mask == "code":
        return in_code_range(code, CALL)
    elif CALL.mask == "clip":
        return (v > lo) & (v < hi)
    else:
        return (v >= lo) & (v <= hi)


@triton.jit
def first_element(BLOCK: tl.constexpr, TILING: tl.constexpr):
    """The position of the first element of the program's block."""
    program = tl.program_id(0)
    if TILING.wide:
        program = program.to(tl.int64)
    return program * BLOCK


@triton.jit
def lanes(BLOCK: tl.constexpr):
    """The positions within a block [BLOCK // 8, 8], in which a row has one byte of the mask."""
    return tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def group_of_run(run_index, columns, period, TILING: tl.constexpr):
    """The group of a run of memory; TILING is a `Tiling` or a `Sweep`."""
    if TILING.one_row:
        return run_index
    elif TILING.one_plane:
        return run_index % columns
    else:
        return run_index // period * columns + run_index % columns


@triton.jit
def group_of_element(position, run, columns, period, TILING: tl.constexpr):
    if TILING.columns:
        return position % TILING.columns
    else:
        return group_of_run(position // run, columns, period, TILING)


@triton.jit
def params_of_block(
    scale_or_whole, zero_point, low, high, start, n, run, columns, period, CALL: tl.constexpr, TILING: tl.constexpr,
    BLOCK: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Scale, its inverse, zero point, low and high of a block's elements: scalars, [BLOCK // 8, 1] or [BLOCK]."""
    if TILING.kind == "single":
        return load_params(scale_or_whole, zero_point, low, high, 0, start < n, COMPUTE, CALL)
    elif TILING.kind == "whole":
        group = group_of_run(start // run, columns, period, TILING)
        return load_params(scale_or_whole, zero_point, low, high, group, start < n, COMPUTE, CALL)
    elif TILING.kind == "long":
        number = start // run
        group = group_of_run(number, columns, period, TILING)
        s, inverse, z, lo, hi = load_params(scale_or_whole, zero_point, low, high, group, start < n, COMPUTE, CALL)
        after = (number + 1) * run
        group = group_of_run(number + 1, columns, period, TILING)
        s1, inverse1, z1, lo1, hi1 = load_params(scale_or_whole, zero_point, low, high, group, after < n, COMPUTE, CALL)
        before = lanes(BLOCK) < tl.minimum(after - start, BLOCK).to(tl.int32)
        s, inverse, z = tl.where(before, s, s1), tl.where(before, inverse, inverse1), tl.where(before, z, z1)
        return s, inverse, z, tl.where(before, lo, lo1), tl.where(before, hi, hi1)
    elif TILING.kind == "eights":
        position = start + tl.arange(0, BLOCK // 8) * 8
        number = position // (TILING.run if TILING.run else run)
        group = group_of_run(number, columns, period, TILING)
        # Loaded as a line: of a column, triton takes another layout, and computes each element in both.
        s, inverse, z, lo, hi = load_params(scale_or_whole, zero_point, low, high, group, position < n, COMPUTE, CALL)
        return s[:, None], inverse[:, None], z[:, None], lo[:, None], hi[:, None]
    else:
        position = start + lanes(BLOCK)
        group = group_of_element(position, run, columns, period, TILING)
        return load_params(scale_or_whole, zero_point, low, high, group, position < n, COMPUTE, CALL)


@triton.jit
def magnitudes(v, inside):
    """The bit patterns of magnitudes of finite values (else 0), and whether each value is negative."""
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
    """Positions in a block [rows, width] and groups of the reduced block, each followed by flags that mark valid items.

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
    """Update maxima [groups] of |x| as bits: `high` for x >= 0, `low` for x < 0; without `low`, `high` for all x."""
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


@triton.jit
def words_of_rows(words, seed, seed_value, first, position, there, WIDTH: tl.constexpr):
    """A random word for every element [rows, width // 8, 8]; rows begin at `first`, a multiple of 8."""
    if words is not None:
        return tl.load(words + position, mask=there, other=0).to(tl.uint32, bitcast=True)
    else:
        counter = first[:, None] // 4 + tl.arange(0, WIDTH // 4)[None, :]
        return tl.reshape(draw_words(counter, load_seed(seed, seed_value)), position.shape)


@triton.jit(do_not_specialize=["seed_value", "runs"])
def quantize_runs_kernel(
    x, y, bits, table, words, seed, seed_value: tl.int64, runs, run,
    CALL: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Fake-quantize runs of x by their ranges: write y and the mask if not None; a run is a multiple of 8 <= WIDTH."""
    COMPUTE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    number = program * ROWS + tl.arange(0, ROWS)
    byte = tl.arange(0, WIDTH // 8)
    column = (byte * 8)[:, None] + tl.arange(0, 8)[None, :]
    position = (number * run)[:, None, None] + column[None, :, :]
    there = (number < runs)[:, None, None] & (column < run)[None, :, :]
    v = computable(tl.load(x + position, mask=there, other=0.0), COMPUTE)
    pattern, negative = magnitudes(v, there)
    low = pattern
    if not CALL.symmetric:
        low = tl.where(negative, pattern, 0)
        pattern = tl.where(negative, 0, pattern)
    highest = number_of(tl.max(tl.max(pattern, axis=2), axis=1))
    lowest = number_of(tl.max(tl.max(low, axis=2), axis=1))
    s, inverse, z, lo, hi = choose_params(lowest, highest, highest, CALL)
    params = (
        s[:, None, None], inverse[:, None, None], z[:, None, None], lo[:, None, None], hi[:, None, None]
    )  # fmt: skip
    drawn = v
    if CALL.stochastic:
        drawn = words_of_rows(words, seed, seed_value, number * run, position, there, WIDTH)
    _, unclamped = encode(v, params, table, drawn, CALL)
    value = decode(clamp(unclamped, CALL), params[0], params[2], CALL)
    tl.store(y + position, to_dtype(value, y.dtype.element_ty), mask=there)
    if CALL.mask != "none":
        flags = lets_through(v, unclamped, params, CALL).to(tl.int32) << tl.arange(0, 8)[None, None, :]
        place = (number * run // 8)[:, None] + byte[None, :]
        stored = (number < runs)[:, None] & (byte * 8 < run)[None, :]
        tl.store(bits + place, tl.sum(flags, axis=2).to(tl.uint8), mask=stored)


@triton.jit
def to_code(code, table, CALL: tl.constexpr):
    """A clamped code as stored integer; NaN becomes the NaN of the format, or its lowest code."""
    if CALL.family == "table":
        return reached_in_table(code, table, CALL)
    elif CALL.family == "float":
        return float_pattern(code, CALL)
    else:
        return tl.where(code == code, code, CALL.quant_min).to(tl.int32)


@triton.jit
def float_pattern(code, CALL: tl.constexpr):
    """The bit pattern of a small float: normal numbers get another exponent bias, subnormals are counts of steps."""
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
    """The number of a code that `to_code` stored."""
    if CALL.family == "table":
        return tl.load(table + stored.to(tl.int32))
    elif CALL.family == "float":
        return float_of_pattern(stored.to(tl.int32) & ((1 << CALL.code_bits) - 1), CALL).to(COMPUTE)
    else:
        return stored.to(COMPUTE)


@triton.jit
def float_of_pattern(pattern, CALL: tl.constexpr):
    """The value of a small float's bit pattern in float64, which has all of its exponents."""
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
    """Write the decoded values of codes to y."""
    COMPUTE: tl.constexpr = tl.float64 if y.dtype.element_ty == tl.float64 else tl.float32
    start = first_element(BLOCK, TILING)
    position = start + lanes(BLOCK)
    code = from_code(tl.load(codes + position, mask=position < n, other=0), table, COMPUTE, CALL)
    params = params_of_block(scale, zero_point, low, high, start, n, run, columns, period, CALL, TILING, BLOCK, COMPUTE)
    value = decode(code, params[0], params[2], CALL)
    tl.store(y + position, to_dtype(value, y.dtype.element_ty), mask=position < n)


@triton.jit
def pack_bits(inside):
    """Pack flags [rows, 8] into bytes: bit i is flag i of the row."""
    return tl.sum(inside.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)


@triton.jit
def words_of_block(words, seed, seed_value, start, position, n, BLOCK: tl.constexpr):
    """A random word for every element: drawn if the kernel's order is row-major, else loaded from `words`."""
    if words is not None:
        return tl.load(words + position, mask=position < n, other=0).to(tl.uint32, bitcast=True)
    else:
        counter = start // 4 + tl.arange(0, BLOCK // 4)
        return tl.reshape(draw_words(counter, load_seed(seed, seed_value)), position.shape)


@triton.jit(do_not_specialize=["seed_value", "columns", "period"], do_not_specialize_on_alignment=["run"])
def quantize_kernel(
    x, y, bits, odd, scale_or_whole, zero_point, low, high, table, words, seed, seed_value: tl.int64,
    n, run, columns, period, CALL: tl.constexpr, TILING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write y and, if not None, the mask `bits` of x; `odd` becomes 1 if anything is NaN. Parameters: `load_params`."""
    COMPUTE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    start = first_element(BLOCK, TILING)
    position = start + lanes(BLOCK)
    v = computable(tl.load(x + position, mask=position < n, other=0.0), COMPUTE)
    params = params_of_block(
        scale_or_whole, zero_point, low, high, start, n, run, columns, period, CALL, TILING, BLOCK, COMPUTE
    )
    drawn = v
    if CALL.stochastic:
        drawn = words_of_block(words, seed, seed_value, start, position, n, BLOCK)
    _, unclamped = encode(v, params, table, drawn, CALL)
    code = clamp(unclamped, CALL)
    if CALL.emit == "value":
        value = decode(code, params[0], params[2], CALL)
        tl.store(y + position, to_dtype(value, y.dtype.element_ty), mask=position < n)
    else:
        tl.store(y + position, to_code(code, table, CALL).to(y.dtype.element_ty), mask=position < n)
    if odd is not None:
        has_nan = tl.max(tl.max((v != v).to(tl.int32), axis=1), axis=0)
        # Hardly ever, because all programs would wait for one address.
        tl.atomic_max(odd, has_nan, mask=has_nan != 0, sem="relaxed")
    if CALL.mask != "none":
        inside = lets_through(v, unclamped, params, CALL) & (position < n)
        byte = start // 8 + tl.arange(0, BLOCK // 8)
        tl.store(bits + byte, pack_bits(inside), mask=byte * 8 < n)
