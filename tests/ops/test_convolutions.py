"""Convolutions of codes, by the kernel and by oneDNN: bit for bit the definition in int64."""

import random

import pytest
import torch

from fakequant.numerics import products as reference
from fakequant.numerics.products import ConvParams, QuantizedOperand
from fakequant.ops import products
from fakequant.ops.products import PackedWeight, convolution, largest_inner_size
from tests.support.bits import assert_same_bits
from tests.support.processor import needs_convolutions, needs_exact_sums

needs_kernel = needs_convolutions()
WAYS = [pytest.param(True, id="kernel", marks=needs_kernel), pytest.param(False, id="onednn", marks=needs_exact_sums())]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    monkeypatch.setattr(products, "_has_kernel", lambda: request.param)


def codes(dtype, *shape):
    ends = torch.iinfo(dtype)
    found = torch.randint(ends.min, ends.max + 1, shape, dtype=dtype)
    found.view(-1)[::3] = ends.max
    found.view(-1)[1::5] = ends.min
    return found


def compare(x, weight, places, zero_point=None, bias=None):
    scale = torch.rand(weight.shape[0]) + 0.1
    given = QuantizedOperand(x, torch.tensor([0.013]), zero_point)
    found = convolution(given, PackedWeight(weight, places), scale, bias)
    assert_same_bits(found, reference.convolution(given, QuantizedOperand(weight, scale), bias, places))
    return found


def drawn(numbers):
    """Sizes and windows of one to three axes: single places, windows in padding alone, strides beyond the input."""
    axes, groups = numbers.choice([1, 2, 2, 3]), numbers.choice([1, 1, 2, 4])
    kernel = [numbers.choice([1, 2, 3, 5]) for _ in range(axes)]
    drawn = ((1, 1, 2, 3, 5, 20), (0, 1, 2, 4), (1, 1, 2, 3))
    windows = [[numbers.choice(some) for _ in range(axes)] for some in drawn]
    sizes = [numbers.choice([1, 2, 3, 8, 16, 17, 33] if axes < 3 else [1, 2, 9, 17]) for _ in range(axes)]
    shape = numbers.choice([1, 2, 5]), groups * numbers.choice([1, 3, 4, 9]), *sizes
    weight = groups * numbers.choice([1, 7, 8, 17]), shape[1] // groups, *kernel
    return shape, weight, ConvParams(*windows, groups)


def fits(shape, weight, places):
    ends = zip(shape[2:], weight[2:], places.padding, places.dilation, strict=True)
    return all(size + 2 * padding > dilation * (kernel - 1) for size, kernel, padding, dilation in ends)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("number", range(120))
def test_is_the_definition(number, dtype, way):
    numbers = random.Random(number)
    case = next(case for case in iter(lambda: drawn(numbers), None) if fits(*case))
    shape, weight_shape, places = case
    zero_point = torch.tensor(numbers.randrange(*((-128, 128) if dtype == torch.int8 else (256,))))
    bias = torch.randn(weight_shape[0]) if number % 2 else None
    x, weight = codes(dtype, *shape), codes(torch.int8, *weight_shape)
    for given in (x, x.movedim(1, -1).contiguous().movedim(-1, 1)):
        compare(given, weight, places, zero_point, bias)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("images", [1, 3, 8])
def test_threads_share_images_and_output_channels(images, threads, way):
    torch.set_num_threads(threads)
    compare(codes(torch.uint8, images, 5, 9, 18), codes(torch.int8, 45, 5, 3, 3), ConvParams([1, 1], [1, 1], [1, 1], 1))


@pytest.mark.parametrize("extreme", [(127, -128), (-128, -128), (-128, 127)], ids=str)
def test_sums_at_the_end_of_int32(extreme, way):
    """Counted from -128, as processors multiply, the sums leave int32 and come back."""
    channels = largest_inner_size(128, 128) // 9
    x = torch.full((1, channels, 3, 3), extreme[0], dtype=torch.int8)
    weight = torch.full((2, channels, 3, 3), extreme[1], dtype=torch.int8)
    compare(x, weight, ConvParams([1, 1], [1, 1], [1, 1], 1))


def test_groups_and_channels_last_lie_as_they_came(way):
    x, weight = codes(torch.int8, 2, 8, 6, 7), codes(torch.int8, 6, 4, 3, 3)
    assert compare(x, weight, ConvParams([1, 1], [1, 1], [1, 1], 2)).is_contiguous()
    last = x.to(memory_format=torch.channels_last)
    found = compare(last, codes(torch.int8, 6, 8, 3, 3), ConvParams([2, 1], [1, 1], [1, 1], 1))
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_one_scale_and_any_bias(way):
    x, weight = codes(torch.uint8, 2, 3, 6, 7), codes(torch.int8, 6, 3, 3, 3)
    places, bias = ConvParams([1, 1], [0, 0], [1, 1], 1), torch.randn(12)[::2].double()
    given = QuantizedOperand(x, torch.tensor([[[[0.5]]]]))
    found = convolution(given, PackedWeight(weight, places), torch.tensor([[[[0.25]]]]), bias)
    assert_same_bits(
        found, reference.convolution(given, QuantizedOperand(weight, torch.full((6,), 0.25)), bias.float(), places)
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 4, 6, 7), "3 channels, but got 4"),
        ((2, 3, 2, 7), "greater than actual input size"),
        ((2, 3, 7), "3 channels, but got 2"),
        ((2, 3, 7, 7, 7), "Expected 3D .unbatched. or 4D"),
    ],
)
def test_what_does_not_fit_is_refused_in_the_words_of_torch(shape, message, way):
    packed = PackedWeight(codes(torch.int8, 6, 3, 3, 3), ConvParams([1, 1], [0, 0], [1, 1], 1))
    with pytest.raises(RuntimeError, match=message):
        convolution(QuantizedOperand(codes(torch.uint8, *shape), torch.ones(1)), packed, torch.ones(6), None)


@needs_kernel
def test_no_images_are_no_work():
    packed = PackedWeight(codes(torch.int8, 6, 3, 3, 3), ConvParams([1, 1], [0, 0], [1, 1], 1))
    assert convolution(
        QuantizedOperand(torch.ones(0, 3, 7, 7, dtype=torch.uint8), torch.ones(1)), packed, torch.ones(6), None
    ).shape == (0, 6, 5, 5)


@pytest.mark.parametrize("shape", [(8, 8, 3, 3), (5, 3, 3, 3)], ids=["eights", "odd"])
def test_a_packed_weight_knows_its_codes(shape):
    given = codes(torch.int8, *shape)
    packed = PackedWeight(given, ConvParams([1, 1], [1, 1], [1, 1], 1))
    assert packed.is_of(given)
    assert packed.is_of(given.clone())
    assert packed.is_of(given.to(memory_format=torch.channels_last))
    assert not packed.is_of(given.reshape(-1, *shape[1:2], shape[2] * shape[3], 1))
    for place in (0, -1):
        other = given.clone()
        other.view(-1)[place] ^= 1
        assert not packed.is_of(other)
