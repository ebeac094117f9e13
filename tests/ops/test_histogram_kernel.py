"""The kernels that measure and count in one pass give the numbers of the definition.

In triton's interpreter, which test_triton.py starts, those for GPUs.
"""

from itertools import product

import pytest
import torch

from fakequant.calibration import calibrators, make_calibrator
from fakequant.numerics.qparams import Range
from fakequant.numerics.reference import Bins, observe_by_definition
from fakequant.ops import dispatch
from fakequant.ops.cpu.backend import load_kernels
from fakequant.ops.library import observe, update
from tests.support.backends import Calls
from tests.support.bits import assert_same_bits
from tests.support.cases import each_way
from tests.support.kernel_comparisons import INTERPRETED, each_backend, interpreted, only_interpreted, skip_unavailable
from tests.support.matrix import full, in_turn, sweep

needs_kernels = pytest.mark.skipif(load_kernels() is not None, reason=f"no kernels: {load_kernels()}")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
BINS = [None, 16, 4096]
# One group of several parts and threads, groups of less than a part, groups of few values, one value.
SHAPES = [(1, 300_001), (3, 70_000), (40, 1_025), (700, 3), (1, 1)]
if INTERPRETED:  # groups of several programs, of which the last is not full; several groups in a program; one value
    SHAPES = [(1, 9_001), (3, 700), (40, 33), (70, 3), (2, 64), (1, 1)]


def hostile(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    flat = x.view(-1)
    flat[::3] = 0.0
    flat[1::17] = -0.0
    flat[2::5] = (flat[2::5] * 64).round() / 64  # on the edges of bins
    flat[4::101] = torch.tensor(torch.finfo(dtype).smallest_normal).double() / 4
    return x.to(dtype)


def assert_same(backend, values, bins):
    skip_unavailable(backend)
    found, wanted = backend.observe(values, bins), observe_by_definition(values, bins)
    for end, right in zip(found.range, wanted.range, strict=True):
        assert_same_bits(end, right)
    if bins is None:
        assert found.counts is None
        return
    finite = ~wanted.range.lo.isnan()
    assert found.counts.shape == wanted.counts.shape
    assert_same_bits(found.counts[finite], wanted.counts[finite])
    assert (found.counts[finite].sum((1, 2)) == values.shape[1]).all()


def ones(groups, factor=1.0, bins=16):
    return Bins(torch.full((groups,), factor, dtype=torch.float64), bins)


@each_backend
@sweep(
    "shape, bins, dtype, threads", full(SHAPES, BINS, DTYPES, [1, 2]), in_turn(product(SHAPES, BINS), DTYPES, [2, 1])
)
def test_equals_the_definition(backend, dtype, shape, bins, threads):
    torch.set_num_threads(threads)
    values, widths = hostile(shape, dtype), 2.0 ** (torch.arange(shape[0], dtype=torch.float64) % 3 + 3)
    for inverse in (widths, torch.zeros(shape[0], dtype=torch.float64)):
        for _ in each_way():
            # Few bins: what lies beyond the last is counted there, and not used.
            assert_same(backend, values, None if bins is None else Bins(inverse, bins))


@each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_values_of_one_sign(backend, dtype, sign):
    for more in (0, 1):
        assert_same(backend, sign * (hostile((3, 100), dtype).abs() + more), ones(3))


@each_backend
@pytest.mark.parametrize("share", [0, 255, 256, 257, 1023, 1024])
def test_chunks_with_more_and_fewer_zeros(backend, share):
    values = torch.randn(1, 5 * 1024 + 7)
    for chunk in values[0].split(1024):
        chunk[torch.randperm(len(chunk))[:share]] = 0.0
    for _ in each_way():
        assert_same(backend, values, ones(1, 8.0, 64))


COUNT, ODD = 5_000 if INTERPRETED else 200_000, [float("nan"), -float("nan"), float("inf"), -float("inf")]
PLACES = [0, 511, 512, 1023, 1024, COUNT - 1]


@each_backend
@sweep("place, odd, dtype", full(PLACES, ODD, DTYPES), in_turn(product(PLACES, ODD), DTYPES))
def test_what_is_not_finite_is_said_of_its_group_alone(backend, odd, place, dtype):
    values = hostile((2, COUNT), dtype)
    values[:, : COUNT // 2 * (place % 2)] = 0.0
    values[1, place] = odd
    assert_same(backend, values, ones(2, 4.0))


@each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_at_the_ends(backend, dtype):
    info = torch.finfo(dtype)
    values = torch.tensor([[info.max, -info.max, info.tiny, -info.smallest_normal / 2, -0.0, 0.0]], dtype=dtype)
    for exponent in (-1022.0, -126.0, 0.0, 126.0, 1022.0):
        assert_same(backend, values, ones(1, 2.0**exponent, 64))
    assert_same(backend, torch.tensor([[-0.0, -0.0]], dtype=dtype), None)


@each_backend
def test_the_kernel_serves(backend, monkeypatch):
    skip_unavailable(backend)
    monkeypatch.setattr(dispatch, "_backends", (backend, dispatch.REFERENCE))
    monkeypatch.setattr("fakequant.ops.backend.observe_by_definition", None)
    assert observe(torch.tensor([[1.0, -2.0]])).range == (torch.tensor([-2.0]), torch.tensor([1.0]))
    observe(torch.randn(2, 5).T.contiguous().T, ones(2))


@only_interpreted
@each_backend
def test_positions_beyond_32_bits(backend, monkeypatch):
    monkeypatch.setattr("fakequant.ops.triton.call.LARGEST_INT32", 7)
    assert_same(interpreted(128), hostile((3, 700), torch.float32), ones(3, 8.0, 64))


@each_backend
def test_the_comparison_can_fail(backend):
    class Off(Calls):
        def observe(self, values, bins):
            found = self.backend.observe(values, bins)
            return found._replace(counts=found.counts.roll(1, -1))

    with pytest.raises(AssertionError, match="elements differ"):
        assert_same(Off(backend.backend), hostile((2, 64), torch.float32), ones(2))


@each_backend
@pytest.mark.parametrize("method", calibrators())
@pytest.mark.parametrize("spec", ["int8", "int8 per_channel(1)", "int8 per_token"])
def test_calibrators_find_what_the_definition_finds(backend, method, spec, monkeypatch):
    skip_unavailable(backend)
    batches = [torch.randn(6, 4, 8) * scale for scale in (0.0, 1.0, 1.1, 5.0, 0.1, 5.0)]
    batches += [batches[1].transpose(0, 1).contiguous().transpose(0, 1), batches[2].half(), batches[3].double() * 9]
    found = []
    for backends in ((backend, dispatch.REFERENCE), (dispatch.REFERENCE,)):
        monkeypatch.setattr(dispatch, "_backends", backends)
        found.append(make_calibrator(method, spec))
        for batch in batches:
            found[-1].observe(batch)
        monkeypatch.setattr("fakequant.calibration.extrema.update", lambda *_: False)
    for one, right in zip(*(calibrator.state_dict().values() for calibrator in found), strict=True):
        assert_same_bits(one, right)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_takes_in_what_the_definition_finds(dtype, shape, threads):
    values = hostile(shape, dtype)
    bins = Bins(2.0 ** (torch.arange(shape[0], dtype=torch.float64) % 3 + 3), 4096)
    wanted = observe_by_definition(values, bins)
    assert wanted.counts is not None
    torch.set_num_threads(threads)
    for kept in (wanted.counts.clone(), None):
        seen = Range(*(torch.zeros_like(end) for end in wanted.range))
        assert update(values, seen, bins, kept)
        assert_same_bits(seen.lo, wanted.range.lo.clamp(max=0.0) + 0.0)
        assert_same_bits(seen.hi, wanted.range.hi.clamp(min=0.0))
        assert kept is None or torch.equal(kept, 2 * wanted.counts)


@needs_kernels
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


@needs_kernels
def test_zeros_alone_have_one_bin_and_anything_else_none():
    bins = Bins(torch.zeros(1, dtype=torch.float64), 16)
    seen, counts = Range(torch.zeros(1), torch.zeros(1)), torch.zeros(1, 2, 16, dtype=torch.int64)
    assert update(torch.tensor([[0.0, -0.0]]), seen, bins, counts)
    assert not update(torch.tensor([[0.0, 1e-45]]), seen, bins, counts)
    assert counts.flatten().tolist() == [0] * 16 + [2] + [0] * 15
