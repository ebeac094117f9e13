"""The kernel that measures and counts in one pass gives the numbers of the definition."""

from itertools import product

import pytest
import torch

from fakequant.calibration import make_calibrator
from fakequant.numerics.histogram import Bins, observe_by_definition
from fakequant.numerics.qparams import Range
from fakequant.ops.cpu.backend import load_kernels
from fakequant.ops.histogram import observe, update
from tests.support.bits import assert_same_bits
from tests.support.cases import each_way
from tests.support.histogram_cases import DTYPES, hostile
from tests.support.matrix import full, in_turn, sweep

pytestmark = pytest.mark.skipif(load_kernels() is not None, reason=f"no kernels: {load_kernels()}")

# One group of several parts and threads, groups of less than a part, groups of few values, one value.
SHAPES = [(1, 300_001), (3, 70_000), (40, 1_025), (700, 3), (1, 1)]
BINS = [None, 16, 4096]


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


@sweep(
    "shape, bins, dtype, threads", full(SHAPES, BINS, DTYPES, [1, 2]), in_turn(product(SHAPES, BINS), DTYPES, [2, 1])
)
def test_equals_the_definition(dtype, shape, bins, threads):
    values, before = hostile(shape, dtype), torch.get_num_threads()
    widths = 2.0 ** (torch.arange(shape[0], dtype=torch.float64) % 3 + 3)
    torch.set_num_threads(threads)
    try:
        for inverse in (widths, torch.zeros(shape[0], dtype=torch.float64)):
            for _ in each_way():
                # Few bins: what lies beyond the last is counted there, and not used.
                assert_same(values, None if bins is None else Bins(inverse, bins))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("share", [0, 255, 256, 257, 1023, 1024])
def test_chunks_with_more_and_fewer_zeros(share):
    values = torch.randn(1, 5 * 1024 + 7)
    for chunk in values[0].split(1024):
        chunk[torch.randperm(len(chunk))[:share]] = 0.0
    for _ in each_way():
        assert_same(values, Bins(torch.full((1,), 8.0, dtype=torch.float64), 64))


@pytest.mark.parametrize("zeros", [0, 100_000])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1023, 1024, 199_999])
def test_what_is_not_finite_is_said_of_its_group_alone(odd, place, zeros):
    values = torch.randn(2, 200_000)
    values[:, :zeros] = 0.0
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
    monkeypatch.setattr("fakequant.ops.backend.observe_by_definition", None)
    observe(torch.randn(2, 5).T.contiguous().T, Bins(torch.ones(2, dtype=torch.float64), 16))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_takes_in_what_the_definition_finds(dtype, shape, threads):
    values, before = hostile(shape, dtype), torch.get_num_threads()
    bins = Bins(2.0 ** (torch.arange(shape[0], dtype=torch.float64) % 3 + 3), 4096)
    wanted = observe_by_definition(values, bins)
    assert wanted.counts is not None
    torch.set_num_threads(threads)
    try:
        for kept in (wanted.counts.clone(), None):
            seen = Range(*(torch.zeros_like(end) for end in wanted.range))
            assert update(values, seen, bins, kept)
            assert_same_bits(seen.lo, wanted.range.lo.clamp(max=0.0) + 0.0)
            assert_same_bits(seen.hi, wanted.range.hi.clamp(min=0.0))
            assert kept is None or torch.equal(kept, 2 * wanted.counts)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("zeros", [0, 100_000])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 16.0, -16.0])
@pytest.mark.parametrize("place", [0, 1023, 1024, 199_999])
def test_takes_in_all_or_nothing(odd, place, zeros):
    values = torch.rand(2, 200_000)
    values[:, :zeros] = 0.0
    bins = Bins(torch.ones(2, dtype=torch.float64), 16)
    seen, counts = Range(torch.zeros(2), torch.zeros(2)), torch.zeros(2, 2, 16, dtype=torch.int64)
    values[1, place] = 15.9
    assert update(values, seen, bins, counts)
    before = counts.clone()
    values[1, place] = odd
    assert not update(values, seen, bins, counts)
    assert torch.equal(counts, before)
    assert seen.hi[1] == torch.tensor(15.9)
    # What was given up in the middle leaves nothing behind for the next.
    values[1, place] = 0.0
    assert update(values, seen, bins, counts)
    assert counts.sum() == 2 * values.numel()


def test_zeros_alone_have_one_bin_and_anything_else_none():
    bins = Bins(torch.zeros(1, dtype=torch.float64), 16)
    seen, counts = Range(torch.zeros(1), torch.zeros(1)), torch.zeros(1, 2, 16, dtype=torch.int64)
    assert update(torch.tensor([[0.0, -0.0]]), seen, bins, counts)
    assert not update(torch.tensor([[0.0, 1e-45]]), seen, bins, counts)
    assert counts.flatten().tolist() == [0] * 16 + [2] + [0] * 15


@pytest.mark.parametrize("method", ["max", "percentile"])
@pytest.mark.parametrize("spec", ["int8", "int8 per_channel(1)", "int8 per_token"])
def test_calibrators_see_the_same_without_the_kernel(method, spec, monkeypatch):
    torch.manual_seed(0)
    batches = [torch.randn(6, 4, 8) * scale for scale in (0.0, 1.0, 1.1, 5.0, 0.1, 5.0)]
    batches += [batches[1].transpose(0, 1).contiguous().transpose(0, 1), batches[2].half(), batches[3].double() * 9]
    fast, slow = make_calibrator(method, spec), make_calibrator(method, spec)
    for batch in batches:
        fast.observe(batch)
    monkeypatch.setattr("fakequant.calibration.extrema.update", lambda *_: False)
    for batch in batches:
        slow.observe(batch)
    for name, value in slow.state_dict().items():
        assert_same_bits(fast.state_dict()[name], value)


def test_a_merged_calibrator_does_not_share_what_it_saw():
    first, second = make_calibrator("percentile", "int8"), make_calibrator("percentile", "int8")
    second.observe(torch.tensor([1.0]))
    first.merge(second)
    for _ in range(2):
        first.observe(torch.tensor([1.5]))
    assert second.compute_range().hi == 1.0
    assert second.state_dict()["counts"].sum() == 1
