"""From codes to values."""

import triton
import triton.language as tl

from .elements import decode
from .places import first_element, lanes, params_of_block
from .rounding import to_dtype


@triton.jit
def dequantize_kernel(
    codes, y, scale, zero_point, low, high, n, run, columns, period,
    CALL: tl.constexpr, TILING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y of integer codes."""
    COMPUTE: tl.constexpr = tl.float64 if y.dtype.element_ty == tl.float64 else tl.float32
    start = first_element(BLOCK, TILING)
    position = start + lanes(BLOCK)
    code = tl.load(codes + position, mask=position < n, other=0).to(COMPUTE)
    params = params_of_block(scale, zero_point, low, high, start, n, run, columns, period, CALL, TILING, BLOCK, COMPUTE)
    value = decode(code, params[0], params[2], CALL)
    tl.store(y + position, to_dtype(value, y.dtype.element_ty), mask=position < n)
