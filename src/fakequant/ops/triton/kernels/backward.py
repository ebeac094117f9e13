"""The gradient of the input: dy where the mask is set, else zero."""

import triton
import triton.language as tl


@triton.jit
def mask_kernel(dy, bits, dx, n, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """dx of the bit patterns dy, integers, in the order of the mask: what is NaN stays the same NaN."""
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
