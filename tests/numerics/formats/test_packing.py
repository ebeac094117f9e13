"""Streams of bits: against numpy, for every width, also where a row ends within a byte."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fakequant.numerics.formats.packing import pack, unpack

SHAPES = [(3, 5), (2, 64), (4, 33), (1, 1), (7,), (2, 3, 40), (0, 8), (3, 0), (5, 60001), (300, 1001)]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("shape", SHAPES)
def test_bits(bits: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    numbers = torch.randint(0, 1 << bits, shape, dtype=torch.uint8)
    before = numbers.clone()
    packed = pack(numbers, bits)
    assert torch.equal(numbers, before)
    spread = (numbers.numpy()[..., None] >> np.arange(bits)) & 1
    expected = np.packbits(spread.astype(np.uint8).reshape(*shape[:-1], shape[-1] * bits), axis=-1, bitorder="little")
    assert np.array_equal(packed.numpy(), expected)
    assert torch.equal(unpack(packed, bits, shape[-1]), numbers.int())
    assert torch.equal(pack(numbers.long(), bits), packed)


@pytest.mark.parametrize("bits", range(1, 9))
def test_signed_numbers_are_shifted_while_they_are_packed(bits: int) -> None:
    half = 1 << bits - 1
    numbers = torch.arange(-half, half, dtype=torch.int8).repeat(3, 5)
    expected = pack(numbers.int() + half, bits)
    assert torch.equal(pack(numbers, bits, half), expected)
    assert torch.equal(pack(numbers.int(), bits, half - 256), expected)


@pytest.mark.parametrize("shape", [(1, 8), (1, 5), (8, 1), (2, 0), (0, 8), (3, 1, 16)])
@pytest.mark.parametrize("bits", [1, 3, 4, 7, 8])
def test_odd_shapes_and_slices_are_packed(shape, bits):
    """Sizes of 1 have any stride, and a slice starts at any byte."""
    whole = torch.randint(0, 1 << bits, (math.prod(shape) + 3,), dtype=torch.uint8)
    numbers = whole[3:].view(shape)
    for own in (numbers, numbers.transpose(0, -1).contiguous().transpose(0, -1)):
        assert torch.equal(unpack(pack(own, bits), bits, shape[-1]), numbers.to(torch.int32))
    assert torch.equal(whole[3:].view(shape), numbers)
