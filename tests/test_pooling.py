"""Maxima by torch's kernel for channels-last: the bits, gradients and strides of the other one."""

import itertools

import pytest
import torch
from bits import assert_same_bits

from fakequant.ops import pooling
from fakequant.ops.pooling import max_pool2d

NUMBERS = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, 1.0, -1.0, 1e-45, -1e-45]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WINDOWS = list(itertools.product((1, 2, 3), (1, 2, 3), (0, 1), (1, 2), (False, True)))


def hostile(shape, dtype, seed=0):
    """Mostly ties, with NaN, infinities, both zeros and subnormals."""
    random = torch.Generator().manual_seed(seed)
    return torch.tensor(NUMBERS)[torch.randint(0, len(NUMBERS), shape, generator=random)].to(dtype)


def assert_same(x, window, label):
    torchs = torch.ops.aten.max_pool2d.default
    dy = hostile(torchs(x, *window).shape, x.dtype, seed=1)
    results = []
    for function in (max_pool2d, torchs):
        leaf = x.detach().requires_grad_()
        y = function(leaf, *window)
        with torch.no_grad():
            results.append((y, *torch.autograd.grad(y, leaf, dy), function(leaf, *window)))
    for got, wanted in zip(*results, strict=True):
        assert_same_bits(got, wanted, label)
        assert got.stride() == wanted.stride(), label


@pytest.fixture
def _serves_the_smallest(monkeypatch):
    monkeypatch.setattr(pooling, "_LEAST_ELEMENTS", 1)
    monkeypatch.setattr(pooling, "_LEAST_CHANNELS", 1)


@pytest.mark.usefixtures("_serves_the_smallest")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_torch(dtype):
    shapes = [(2, 8, 6, 7), (1, 17, 5, 5), (2, 33, 5, 4), (3, 1, 5, 5), (2, 9, 6, 3), (0, 8, 5, 4)]
    for turn, (kernel, stride, padding, dilation, ceil) in enumerate(WINDOWS):
        window = [kernel, kernel], [stride, stride], [min(padding, kernel // 2)] * 2, [dilation, 1], ceil
        for shape in (shapes[turn % len(shapes)], shapes[(turn + 1) % len(shapes)]):
            x = hostile(shape, dtype, seed=turn)
            assert_same(x, window, (shape, window))


@pytest.mark.usefixtures("_serves_the_smallest")
@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (2, 9, 1, 1), (1, 9, 4, 1), (1, 1, 1, 1), (2, 9, 4, 4)])
def test_axes_of_one_element_get_the_strides_that_torch_gives(shape):
    for format in (torch.channels_last, torch.contiguous_format):
        x = hostile(shape, torch.float32).to(memory_format=format)
        assert_same(x, ([1, 1], [2, 2]), (shape, format))


def test_the_kernel_for_channels_serves_what_is_large_and_contiguous():
    x = torch.randn(2, 16, 32, 32)
    assert pooling._is_faster_by_channels(x)
    refused = (x[:, :4].contiguous(), x[:1, :8, :8].contiguous(), x.to(memory_format=torch.channels_last), x[..., ::2])
    assert not any(map(pooling._is_faster_by_channels, refused))
    for given in (x, *refused, x[0]):
        assert_same(given, ([2, 2],), tuple(given.shape))
        assert_same(given, ([3, 3], [2, 2], [1, 1]), tuple(given.shape))


def test_windows_that_do_not_fit_are_refused_in_the_words_of_torch():
    x = torch.randn(2, 16, 32, 32)
    for given in (x, x.requires_grad_()):
        with pytest.raises(RuntimeError, match="Output size is too small"):
            max_pool2d(given, [33, 33])


def test_threads_and_transforms():
    x = hostile((8, 64, 24, 24), torch.float32)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert_same(x, ([3, 3], [1, 1], [1, 1]), count)
    finally:
        torch.set_num_threads(threads)
    rows = torch.func.vmap(lambda image: max_pool2d(image[None], [2, 2])[0])(x)
    assert_same_bits(rows, torch.max_pool2d(x, 2))
    finite = torch.randn(2, 8, 32, 32, dtype=torch.float64, requires_grad=True)

    def second(function):
        (dx,) = torch.autograd.grad(function(finite, [2, 2]).square().sum(), finite, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), finite)[0]

    assert_same_bits(second(max_pool2d), second(torch.ops.aten.max_pool2d.default))
