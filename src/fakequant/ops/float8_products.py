"""Products of float8 codes by `torch._scaled_mm`, whose sums are rounded: how, only the device knows.

    sums = sum of x_code * w_code              rounded to float32 or less, in an order of the device's
    y    = sums * (x_scale * w_scale) + bias   each operation rounded to float32

The operator would apply scales and bias too, but rounds them where it likes, takes no bias with a float32 result, and
on some cards returns bfloat16 alone where rows have scales. So it is asked for sums in float32, with scales of one.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fakequant.numerics.products import Factor

from .products import padded, scaled, trial

# What cuBLASLt wants to divide the inner size and the number of columns.
_DIVISOR = 16
# Where the operator runs and is not used. On the CPU it takes 0.38 ms for 64x256 by 256x256 and 10 ms for 512x768 by
# 768x768, where the product of float32 numbers takes 0.09 and 6.3 ms (one thread, torch 2.13).
NO_FASTER: dict[str, str] = {"cpu": "float8 products are no faster than float32 ones on the CPU"}


def linear_unavailable(device: torch.device, x: torch.dtype, weight: torch.dtype) -> str | None:
    """Why `linear` is not used on a device for codes of these dtypes, or None."""
    return NO_FASTER.get(device.type) or _refused(device, x, weight)


@cache
def _refused(device: torch.device, x: torch.dtype, weight: torch.dtype) -> str | None:
    if device.type not in ("cpu", "cuda"):
        return f"float8 products are for CUDA, not for {device.type}"
    # Sums up to 40 * 49 < 2**11, which are exact in any order, and in the 14 bits too that Hopper may sum in. Many need
    # more than the 8 bits of bfloat16, which an operator may round to.
    random = torch.Generator().manual_seed(0)
    codes, others = (torch.randint(8, (n, 40), generator=random, dtype=torch.float32, device="cpu") for n in (32, 24))
    others[::2] *= -1
    there = others.to(weight).to(device)
    rows = codes.to(x).to(device)
    # One row as well, for which kernels of another kind are chosen.
    return trial(
        "torch._scaled_mm",
        lambda a: _sums(a, there),
        (rows, rows[:1]),
        lambda a: a.cpu().double() @ others.double().t(),
    )


def linear(x: Factor, weight: Factor, bias: Tensor | None) -> Tensor:
    """x [..., in] times the transposed weight [out, in] in float8, plus bias [out]; float32 [..., out].

    Args:
        x: scale per tensor or per row.
        weight: scale per tensor or per output.
        bias: of any floating dtype.

    The error of a sum is at most in * 2**-24 times the sum of its products' magnitudes where it is summed in float32.
    """
    *axes, inner = x.codes.shape
    y = scaled(_sums(x.codes.reshape(-1, inner), weight.codes), x.scale, weight.scale, bias)
    return y if len(axes) == 1 else y.reshape(*axes, weight.codes.shape[0])


def _sums(a: Tensor, b: Tensor) -> Tensor:
    """float32 [n, m] of codes [n, k] and [m, k]."""
    inner, columns = a.shape[1], b.shape[0]
    one = torch.ones((), dtype=torch.float32, device=a.device)
    sums = torch._scaled_mm(
        _padded(a, 0, -inner % _DIVISOR),
        _padded(b, -columns % _DIVISOR, -inner % _DIVISOR).t(),  # by columns, as Hopper reads it
        one,
        one,
        out_dtype=torch.float32,
        use_fast_accum=False,
    )
    return sums[:, :columns].contiguous()


def _padded(codes: Tensor, rows: int, columns: int) -> Tensor:
    """As `products.padded`, by rows; torch cannot pad its 8-bit floats. The byte 0 is 0.0 in all of them."""
    return padded(codes.contiguous().view(torch.uint8), rows, columns).view(codes.dtype)
