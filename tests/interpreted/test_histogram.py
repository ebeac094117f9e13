"""Ranges and counts of magnitudes equal the definition in every bit."""

from itertools import product

import pytest
import torch

from fakequant.calibration import calibrators, make_calibrator
from fakequant.numerics.histogram import Bins, observe_by_definition
from fakequant.ops import dispatch
from fakequant.ops.histogram import observe
from fakequant.ops.triton.backend import TritonBackend
from tests.support.backends import Calls
from tests.support.bits import assert_same_bits
from tests.support.histogram_cases import DTYPES, hostile
from tests.support.matrix import full, in_turn, sweep

# Groups of several programs, of which the last is not full; several groups in a program; one value.
SHAPES = [(1, 9_001), (3, 700), (40, 33), (70, 3), (2, 64), (1, 1)]


def assert_observes(values, bins, backend=None):
    backend = backend or Calls(TritonBackend("cpu", 512))
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


BINS = [None, 16, 4096]


@sweep("shape, bins, dtype", full(SHAPES, BINS, DTYPES), in_turn(product(SHAPES, BINS), DTYPES))
def test_equals_the_definition(dtype, shape, bins):
    values = hostile(shape, dtype)
    widths = 2.0 ** (torch.arange(shape[0], dtype=torch.float64) % 3 + 3)
    for inverse in (widths, torch.zeros(shape[0], dtype=torch.float64)):
        assert_observes(values, None if bins is None else Bins(inverse, bins))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_values_of_one_sign(dtype, sign):
    assert_observes(sign * hostile((3, 100), dtype).abs(), Bins(torch.ones(3, dtype=torch.float64), 16))
    assert_observes(sign * (hostile((3, 100), dtype).abs() + 1), Bins(torch.ones(3, dtype=torch.float64), 16))


PLACES, ODD = [0, 511, 512, 4999], [float("nan"), -float("nan"), float("inf"), -float("inf")]


@sweep("place, odd, dtype", full(PLACES, ODD, DTYPES), in_turn(PLACES, ODD, DTYPES))
def test_what_is_not_finite_is_said_of_its_group_alone(odd, place, dtype):
    values = hostile((2, 5000), dtype)
    values[1, place] = odd
    assert_observes(values, Bins(torch.full((2,), 4.0, dtype=torch.float64), 16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_at_the_ends(dtype):
    info = torch.finfo(dtype)
    values = torch.tensor([[info.max, -info.max, info.tiny, -info.smallest_normal / 2, -0.0, 0.0]], dtype=dtype)
    for exponent in (-1022.0, -126.0, 0.0, 126.0, 1022.0):
        assert_observes(values, Bins(torch.tensor([2.0**exponent], dtype=torch.float64), 64))
    assert_observes(torch.tensor([[-0.0, -0.0]], dtype=dtype), None)


def test_positions_beyond_32_bits(monkeypatch):
    """The kernel for 2**31 elements on a small tensor."""
    monkeypatch.setattr("fakequant.ops.triton.call.LARGEST_INT32", 7)
    bins = Bins(torch.full((3,), 8.0, dtype=torch.float64), 64)
    assert_observes(hostile((3, 700), torch.float32), bins, Calls(TritonBackend("cpu", 128)))


def test_calibrators_find_what_the_definition_finds(monkeypatch):
    batches = [torch.randn(6, 4, 8) * scale for scale in (0.0, 1.0, 1.1, 5.0, 0.1)]
    monkeypatch.setattr("fakequant.calibration.extrema.update", lambda *_: False)
    for method in calibrators():
        found = []
        for backends in ((Calls(TritonBackend("cpu", 64)), dispatch.REFERENCE), (dispatch.REFERENCE,)):
            monkeypatch.setattr(dispatch, "_backends", backends)
            found.append(make_calibrator(method, "int8 per_channel(1)"))
            for batch in batches:
                found[-1].observe(batch)
        for one, right in zip(*(calibrator.state_dict().values() for calibrator in found), strict=True):
            assert_same_bits(one, right)


def test_it_is_the_kernel_that_serves(monkeypatch):
    monkeypatch.setattr(dispatch, "_backends", (Calls(TritonBackend("cpu", 64)), dispatch.REFERENCE))
    monkeypatch.setattr("fakequant.ops.backend.observe_by_definition", None)
    assert observe(torch.tensor([[1.0, -2.0]])).range == (torch.tensor([-2.0]), torch.tensor([1.0]))


def test_the_checker_can_fail():
    class Off(TritonBackend):
        def observe(self, values, bins):
            found = super().observe(values, bins)
            return found._replace(counts=found.counts.roll(1, -1))

    with pytest.raises(AssertionError, match="elements differ"):
        assert_observes(hostile((2, 64), torch.float32), Bins(torch.ones(2, dtype=torch.float64), 16), Off("cpu", 64))
