"""Codes as a stream of bits along the last axis, the first code in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_TOGETHER = 8
"""Codes of n bits that end with a byte: they take n bytes."""
_CHUNK = 1 << 17
"""Numbers that are packed at once: all steps find them in the cache of a core."""


def pack(patterns: Tensor, bits: int) -> Tensor:
    """Numbers below 2**bits [..., n] as uint8 [..., ceil(n * bits / 8)].

    >>> pack(torch.tensor([1, 2, 3]), 4)
    tensor([33,  3], dtype=torch.uint8)
    """
    count = patterns.shape[-1]
    if bits == _TOGETHER:
        return patterns.to(torch.uint8).contiguous()
    size = -(-count * bits // _TOGETHER)
    rows = patterns.flatten(0, -2) if patterns.dim() > 1 else patterns[None]
    packed = torch.empty((len(rows), size), dtype=torch.uint8, device=patterns.device)
    together = max(1, _CHUNK // max(count, 1))
    for start in range(0, len(rows), together):
        packed[start : start + together] = _packed(rows[start : start + together], bits)[:, :size]
    return packed.reshape(*patterns.shape[:-1], size)


def _packed(rows: Tensor, bits: int) -> Tensor:
    # A copy, because it is written, and because a view of eight bytes needs a start that eight divides.
    wide = rows.to(torch.uint8, copy=True)
    if left := -rows.shape[-1] % _TOGETHER:
        wide = pad(wide, (0, left))
    word = viewed(wide, torch.int64)
    for step in range(3):
        # Fields of n bits lie 8 * 2**step bits apart: each second one joins the one below it.
        size, apart = bits << step, _TOGETHER << step
        low = sum(((1 << size) - 1) << place for place in range(0, 64, 2 * apart))
        second = word >> (apart - size)
        second &= low << size
        word &= low
        word |= second
    return word.unsqueeze(-1).view(torch.uint8)[..., :bits].flatten(-2)


def viewed(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers [..., n] as those of a type of another size, the first byte in the lowest bits.

    >>> viewed(torch.tensor([[1, 1, 0, 0]], dtype=torch.uint8), torch.int32)
    tensor([[257]], dtype=torch.int32)
    """
    # Flat, because an axis of length 1 may have any stride, and a view asks for one that fits.
    size = numbers.shape[-1] * numbers.element_size() // dtype.itemsize
    return numbers.contiguous().flatten().view(dtype).reshape(*numbers.shape[:-1], size)


def unpack(stored: Tensor, bits: int, count: int) -> Tensor:
    """The first numbers of `pack`, as int32 [..., count].

    >>> unpack(torch.tensor([33, 3], dtype=torch.uint8), 4, 3)
    tensor([1, 2, 3], dtype=torch.int32)
    """
    whole = pad(stored, (0, -stored.shape[-1] % bits)).unflatten(-1, (-1, bits)).to(torch.int64)
    word = (whole << torch.arange(0, 8 * bits, 8)).sum(-1, keepdim=True)
    numbers = word >> torch.arange(0, _TOGETHER * bits, bits) & (1 << bits) - 1
    return numbers.flatten(-2)[..., :count].to(torch.int32)
