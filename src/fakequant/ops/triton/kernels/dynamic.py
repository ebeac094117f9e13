"""Quantization by the range of the tensor itself in one pass, where groups are short runs of memory."""

import triton
import triton.language as tl

from .elements import decode, encode, lets_through
from .ranges import magnitudes
from .rounding import clamp, computable, number_of, to_dtype
from .scales import choose_params
from .stochastic import draw_words, load_seed


@triton.jit
def words_of_rows(words, seed, seed_value, first, position, there, WIDTH: tl.constexpr):
    """A random word for every element [rows, width // 8, 8]; `first`: where rows begin, at a multiple of 8."""
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
    """y and, where given, the mask of x, which are runs of a multiple of 8 elements, at most WIDTH."""
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
