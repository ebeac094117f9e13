"""Quantization by given parameters in one pass: values or codes, and the packed mask of where gradients pass."""

import triton
import triton.language as tl

from .codes import to_code
from .elements import decode, encode, lets_through
from .places import first_element, lanes, params_of_block
from .rounding import clamp, computable, to_dtype
from .stochastic import draw_words, load_seed


@triton.jit
def pack_bits(inside):
    """The bytes of flags [rows, 8]: bit i of each is flag i of its row."""
    return tl.sum(inside.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)


@triton.jit
def words_of_block(words, seed, seed_value, start, position, n, BLOCK: tl.constexpr):
    """A random word for every element: those given, in the kernel's order, or drawn where that is row-major."""
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
    """y and, where given, the mask `bits` of x; `odd` is set to 1 if anything is NaN. Parameters: `load_params`."""
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
