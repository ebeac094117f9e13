"""Packs codes into bytes along the last axis, as a stream of bits with the first code in the lowest bits."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

Array = np.ndarray

_TOGETHER = 8
"""The number of codes of n bits that fill n whole bytes."""
_CHUNK = 1 << 17
"""Numbers that are packed at once: all steps find them in the cache of a core."""


def pack(patterns: Tensor, bits: int, plus: int = 0) -> Tensor:
    """Add `plus` to numbers [..., n], and pack the sums modulo 256, below 2**bits, to uint8 [..., ceil(n * bits / 8)].

    >>> pack(torch.tensor([1, 2, 3]), 4)
    tensor([33,  3], dtype=torch.uint8)
    """
    count = patterns.shape[-1]
    bytes_ = patterns.view(torch.uint8) if patterns.dtype is torch.int8 else patterns.to(torch.uint8)
    rows = bytes_.cpu().numpy().reshape(prod(patterns.shape[:-1]), count)
    packed = np.empty((len(rows), -(-count * bits // _TOGETHER)), np.uint8)
    step = max(1, _CHUNK // max(count, 1))
    wide = np.zeros((min(step, len(rows)), count + -count % _TOGETHER), np.uint8)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        np.add(part, np.uint8(plus % 256), out=wide[: len(part), :count])
        numbers, width = wide[: len(part)], bits
        if _TOGETHER % bits:
            word = numbers.view("<u8")
            for doubled in range(3):
                # Fields of n bits lie 8 * 2**doubled bits apart: each second one joins the one below it.
                size, apart = bits << doubled, _TOGETHER << doubled
                low = np.uint64(sum(((1 << size) - 1) << place for place in range(0, 64, 2 * apart)))
                second = word >> np.uint64(apart - size)
                second &= low << np.uint64(size)
                word &= low
                word |= second
            numbers = numbers.reshape(len(numbers), -1, _TOGETHER)[..., :bits].reshape(len(numbers), -1)
        else:
            while width < _TOGETHER:  # pairs become one byte until it is full
                pairs = numbers.view("<u2")
                pairs |= pairs >> np.uint16(_TOGETHER - width)
                numbers, width = pairs.astype(np.uint8), 2 * width
        packed[start : start + step] = numbers[:, : packed.shape[1]]
    return torch.from_numpy(packed).reshape(*patterns.shape[:-1], packed.shape[1])


def viewed(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory of `numbers` [..., n] viewed as numbers of another dtype, with the first byte in the lowest bits.

    >>> viewed(torch.tensor([[1, 1, 0, 0]], dtype=torch.uint8), torch.int32)
    tensor([[257]], dtype=torch.int32)
    """
    # Flat, because an axis of length 1 may have any stride, and a view asks for one that fits.
    size = numbers.shape[-1] * numbers.element_size() // dtype.itemsize
    return numbers.contiguous().flatten().view(dtype).reshape(*numbers.shape[:-1], size)


def unpack(stored: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` numbers that `pack` packed, as int32 [..., count].

    >>> unpack(torch.tensor([33, 3], dtype=torch.uint8), 4, 3)
    tensor([1, 2, 3], dtype=torch.int32)
    """
    return unpack_bytes(stored, bits, count).to(torch.int32)


def unpack_bytes(stored: Tensor, bits: int, count: int) -> Tensor:
    """Unpack the first `count` numbers that `pack` packed to uint8 [..., count] by torch alone, on their device."""
    if _TOGETHER % bits:
        parts = pad(stored, (0, -stored.shape[-1] % bits)).unflatten(-1, (-1, bits)).to(torch.int64)
        word = (parts << torch.arange(0, 8 * bits, 8, device=stored.device)).sum(-1, keepdim=True)
        numbers = word >> torch.arange(0, _TOGETHER * bits, bits, device=stored.device) & (1 << bits) - 1
        return numbers.flatten(-2).to(torch.uint8)[..., :count]
    width = _TOGETHER
    while width > bits:  # a number of two halves becomes two of one half, the lower one first
        width //= 2
        pairs = stored.to(torch.int16)
        pairs = (pairs | pairs << _TOGETHER - width) & ((1 << width) - 1) * 0x0101
        stored = viewed(pairs, torch.uint8)
    return stored[..., :count]
