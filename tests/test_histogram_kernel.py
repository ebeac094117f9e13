"""The kernel that measures and counts in one pass gives the numbers of the definition."""

import pytest
import torch
from bits import assert_same_bits

from fakequant.ops import histogram
from fakequant.ops.cpu.backend import load_kernels
from fakequant.ops.histogram import Bins, observe, observe_by_definition

pytestmark = pytest.mark.skipif(load_kernels() is not None, reason=f"no kernels: {load_kernels()}")

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# One group of several parts and threads, groups of less than a part, groups of few values, one value.
SHAPES = [(1, 300_001), (3, 70_000), (40, 1_025), (700, 3), (1, 1)]


def hostile(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    flat = x.view(-1)
    flat[::3] = 0.0
    flat[1::17] = -0.0
    flat[2::5] = (flat[2::5] * 64).round() / 64  # on the edges of bins
    flat[4::101] = torch.tensor(torch.finfo(dtype).smallest_normal).double() / 4
    return x.to(dtype)


def assert_same(values, bins):
    got, wanted = observe(values, bins), observe_by_definition(values, bins)
    for one, other in zip(got.range, wanted.range, strict=True):
        assert_same_bits(one, other)
    if bins is None:
        assert got.counts is None
    else:
        assert got.counts is not None
        assert wanted.counts is not None
        assert torch.equal(got.counts, wanted.counts)
        assert got.counts.sum() == values.numel()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bins", [None, 16, 4096])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_definition(dtype, shape, bins, threads):
    values, before = hostile(shape, dtype), torch.get_num_threads()
    widths = 2.0 ** (torch.arange(shape[0], dtype=torch.float64) % 3 + 3)
    torch.set_num_threads(threads)
    try:
        for inverse in (widths, torch.zeros(shape[0], dtype=torch.float64)):
            # Few bins: what lies beyond the last is counted there, and not used.
            assert_same(values, None if bins is None else Bins(inverse, bins))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1023, 1024, 199_999])
def test_what_is_not_finite_is_said_of_its_group_alone(odd, place):
    values = torch.randn(2, 200_000)
    values[1, place] = odd
    found = observe(values, Bins(torch.ones(2, dtype=torch.float64), 16))
    wanted = observe_by_definition(values)
    assert_same_bits(found.range.lo, wanted.range.lo)
    assert found.range.hi[1].isnan()
    assert not found.range.hi[0].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_at_the_ends(dtype):
    info = torch.finfo(dtype)
    values = torch.tensor([[info.max, -info.max, info.tiny, info.smallest_normal / 2, -0.0, 0.0]], dtype=dtype)
    for exponent in (-1022.0, -126.0, 0.0, 126.0, 1022.0):
        assert_same(values, Bins(torch.tensor([2.0**exponent], dtype=torch.float64), 64))


def test_the_kernel_serves(monkeypatch):
    monkeypatch.setattr(histogram, "observe_by_definition", None)
    observe(torch.randn(2, 5).T.contiguous().T, Bins(torch.ones(2, dtype=torch.float64), 16))
