"""Exact sums of products, and codes of them by integers of a fixed point, against numerics/products.py."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant.numerics import products as definition
from fakequant.numerics.products import ConvParams, FixedPoint
from fakequant.ops import products
from fakequant.ops.cpu.backend import load_kernels
from fakequant.ops.products import PackedWeight
from tests.support.processor import needs_convolutions

CONVOLUTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
WINDOWS = [  # sizes, channels, outputs, groups, kernel, stride, padding, dilation
    ([7, 9], 5, 6, 1, [3, 3], [1, 1], [1, 1], [1, 1]),
    ([7, 9], 6, 6, 6, [3, 3], [1, 1], [1, 1], [1, 1]),
    ([8, 41], 6, 12, 6, [3, 3], [2, 2], [1, 0], [1, 1]),
    ([11, 20], 3, 3, 3, [5, 2], [3, 4], [2, 1], [2, 3]),
    ([3, 3], 4, 4, 4, [3, 3], [2, 2], [0, 0], [1, 1]),
    ([1, 2], 4, 4, 4, [1, 1], [1, 1], [4, 5], [1, 1]),
    ([5, 6], 8, 4, 2, [3, 3], [1, 1], [1, 1], [1, 1]),
    ([50], 4, 4, 4, [5], [2], [3], [2]),
    ([50], 3, 8, 1, [5], [2], [3], [1]),
    ([4, 5, 6], 4, 4, 4, [3, 3, 3], [1, 1, 1], [1, 1, 1], [1, 1, 1]),
]


def random_codes(dtype: torch.dtype, *shape: int) -> Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, shape, dtype=dtype)


@needs_convolutions()
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("by_channels", [False, True])
def test_convolutions_have_exact_sums(window: tuple, dtype: torch.dtype, by_channels: bool) -> None:
    torch.manual_seed(0)
    sizes, channels, outputs, groups, kernel, stride, padding, dilation = window
    codes = random_codes(dtype, 2, channels, *sizes)
    if by_channels:
        codes = codes.movedim(1, -1).contiguous().movedim(-1, 1)
    weight = random_codes(torch.int8, outputs, channels // groups, *kernel)
    zero_point, places = 17, ConvParams(stride, padding, dilation, groups)
    found = products.convolution_sums(codes, zero_point, PackedWeight(weight, places))
    wanted = CONVOLUTIONS[len(sizes)](codes.long() - zero_point, weight.long(), None, *places)
    assert found is not None
    assert torch.equal(found.long(), wanted)
    assert found.dtype in (torch.int32, torch.float32)


@needs_convolutions()
def test_largest_sums_of_a_channel() -> None:
    codes, weight = torch.zeros(1, 2, 40, 40, dtype=torch.uint8), torch.full((2, 1, 5, 5), -128, dtype=torch.int8)
    codes[:, 1] = 255
    for zero_point in (0, 255):
        found = products.convolution_sums(
            codes, zero_point, PackedWeight(weight, ConvParams([1, 1], [2, 2], [1, 1], 2))
        )
        wanted = F.conv2d(codes.long() - zero_point, weight.long(), None, 1, 2, 1, 2)
        assert torch.equal(found.long(), wanted)  # type: ignore[union-attr]


def test_sums_that_no_unit_computes() -> None:
    places = ConvParams([1, 1], [0, 0], [1, 1], 1)
    weight = PackedWeight(random_codes(torch.int8, 4, 3, 3, 3), places)
    for codes in (
        random_codes(torch.uint8, 0, 3, 5, 5),  # empty
        random_codes(torch.uint8, 1, 3, 2, 5),  # smaller than the window
        random_codes(torch.uint8, 1, 2, 5, 5),  # other channels
        random_codes(torch.int16, 1, 3, 5, 5),
    ):
        assert products.convolution_sums(codes, 0, weight) is None
    large = torch.ones(1, 70_000, dtype=torch.int8)  # whose sums may leave int32
    assert products.linear_sums(torch.ones(1, 70_000, dtype=torch.uint8), 0, large) is None


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 300), (17,)])
def test_linear_layers_have_exact_sums(shape: tuple[int, ...]) -> None:
    codes, weight = random_codes(torch.uint8, *shape), random_codes(torch.int8, 7, shape[-1])
    found = products.linear_sums(codes, 200, weight)
    assert found is not None
    assert torch.equal(found.long(), (codes.long() - 200) @ weight.long().t())


def steps(*shape: int) -> FixedPoint:
    """Steps of exact powers of two and of odd factors, so that there are ties."""
    size = math.prod(shape)
    constant = torch.randint(-5000, 5000, (size,)).double()
    down = torch.exp2(-torch.randint(0, 6, (size,)).double())
    factor = torch.where(torch.arange(size) % 2 == 0, 0.5, torch.randint(1024, 2048, (size,)) / 2.0**14)
    return FixedPoint(*(one.double().reshape(shape) for one in (constant, down, factor)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
@pytest.mark.parametrize(("low", "high"), [(0, 255), (-128, 127), (3, 200), (7, 7), (-5, 100)])
@pytest.mark.parametrize(
    ("shape", "of"),
    [
        ((2, 5, 3, 7), (1, 5, 1, 1)),
        ((2, 5, 33), (1, 5, 1)),
        ((9, 6), (1, 6)),
        ((1, 1, 70), (1, 1, 1)),
        ((3, 4, 5), ()),
        ((0, 5, 3), (1, 5, 1)),
        ((), ()),
    ],
)
def test_codes_are_those_of_the_definition(
    shape: tuple[int, ...], of: tuple[int, ...], low: int, high: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    sums = torch.randint(-9000, 9000, shape).to(dtype)
    by = steps(*of)
    found = products.fixed_point(sums, by, low, high)
    wanted = definition.fixed_point(sums, by, low, high)
    assert torch.equal(found.double(), wanted)
    assert load_kernels() is not None or found.dtype == (torch.uint8 if low >= 0 else torch.int8)


def test_codes_of_channels_last_lie_so() -> None:
    sums = torch.randint(-9000, 9000, (2, 5, 6, 7)).float().contiguous(memory_format=torch.channels_last)
    by = steps(1, 5, 1, 1)
    found = products.fixed_point(sums, by, 0, 255)
    assert torch.equal(found.double(), definition.fixed_point(sums, by, 0, 255))
    assert found.stride() == sums.stride()


def test_codes_of_extremes() -> None:
    ends = torch.iinfo(torch.int32)
    sums = torch.tensor([ends.min, ends.max, 0, -1, 1], dtype=torch.int32)
    for constant, down, factor in product((-(2.0**40), 0.0, 2.0**40), (1.0, 2.0**-31), (2.0**-40, 1.0, 2.0**20)):
        by = FixedPoint(*(torch.tensor(one, dtype=torch.float64) for one in (constant, down, factor)))
        found = products.fixed_point(sums, by, -128, 127)
        assert torch.equal(found.double(), definition.fixed_point(sums, by, -128, 127))


def test_codes_wider_than_8_bits_are_floats() -> None:
    sums, by = torch.arange(-9, 2000, dtype=torch.int32), steps()
    found = products.fixed_point(sums, by, 0, 256)
    assert found.dtype == torch.float64
    assert torch.equal(found, definition.fixed_point(sums, by, 0, 256))
