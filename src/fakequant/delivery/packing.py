"""Codes as a stream of bits along the last axis, the first code in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_TOGETHER = 8
"""Codes of n bits that end with a byte: they take n bytes."""


def pack(patterns: Tensor, bits: int) -> Tensor:
    """Numbers below 2**bits [..., n] as uint8 [..., ceil(n * bits / 8)].

    >>> pack(torch.tensor([1, 2, 3]), 4)
    tensor([33,  3], dtype=torch.uint8)
    """
    count = patterns.shape[-1]
    if bits == _TOGETHER:
        return patterns.to(torch.uint8).contiguous()
    parts = pad(patterns, (0, -count % _TOGETHER)).unflatten(-1, (-1, _TOGETHER))
    if bits == 4:
        parts = parts.to(torch.uint8)
        packed = parts[..., 0::2] | parts[..., 1::2] << 4
    else:
        parts = parts.to(torch.int64) << torch.arange(0, _TOGETHER * bits, bits)
        # Sums of numbers that share no bits.
        packed = parts.sum(-1, keepdim=True).view(torch.uint8)[..., :bits]
    return packed.flatten(-2)[..., : -(-count * bits // 8)].contiguous()


def unpack(stored: Tensor, bits: int, count: int) -> Tensor:
    """The first numbers of `pack`, as int32 [..., count].

    >>> unpack(torch.tensor([33, 3], dtype=torch.uint8), 4, 3)
    tensor([1, 2, 3], dtype=torch.int32)
    """
    whole = pad(stored, (0, -stored.shape[-1] % bits)).unflatten(-1, (-1, bits)).to(torch.int64)
    word = (whole << torch.arange(0, 8 * bits, 8)).sum(-1, keepdim=True)
    numbers = word >> torch.arange(0, _TOGETHER * bits, bits) & (1 << bits) - 1
    return numbers.flatten(-2)[..., :count].to(torch.int32)
