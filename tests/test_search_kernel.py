"""What the kernels say that thresholds cost is what the definition says, but for the order of sums."""

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch

from fakequant.calibration import calibrators, make_calibrator
from fakequant.calibration.entropy import _SAME
from fakequant.calibration.histogram import HistogramCalibrator
from fakequant.calibration.mse import _SquaredError
from fakequant.calibration.search import settle
from fakequant.numerics.formats import INT8
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Arithmetic, QuantSpec, Rounding
from fakequant.ops import dispatch
from fakequant.ops.cpu.backend import load_kernels
from fakequant.ops.search import cross_entropies, cumulative_moments, squared_errors
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.skipif(load_kernels() is not None, reason=f"no kernels: {load_kernels()}")


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


DATA = {
    "normal": lambda: random(20_000),
    "relu": lambda: random(20_000).relu(),
    "negative": lambda: -random(20_000).abs(),
    "few": lambda: random(5),
    "one value": lambda: torch.full((100,), 2.5),
    "outlier": lambda: torch.cat([random(20_000), torch.tensor([-2000.0])]),
    "grid": lambda: (random(20_000) * 64).round() / 64,
    "subnormal": lambda: random(1000) * 1e-40,
    "huge": lambda: random(1000) * 3e37,
    "zeros": lambda: torch.zeros(10),
}
SPECS = [
    "int8",
    "int4",
    "int1",
    "int[-100,37]",
    "int12",
    "uint8",
    "uint4 symmetric",
    "int4 asymmetric",
    "int8 multiplier",
    "int4 reciprocal",
    "float8_e4m3fn",
    "float8_e5m2",
    "float4_e2m1fn",
    "nf4",
]


def calibrator_of(method, spec, data, **options):
    calibrator: Any = make_calibrator(method, QuantSpec.parse(spec), **options)
    calibrator.observe(DATA[data]())
    return calibrator


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("spec", SPECS)
def test_squared_errors_lie_between_their_bounds(spec, data):
    for bins in (64, 4096):
        calibrator = calibrator_of("mse", spec, data, num_bins=bins)
        histogram = calibrator.histogram()
        assert histogram is not None
        error = _SquaredError(calibrator, histogram)
        kept = torch.arange(1, bins + 1, 1 if bins == 64 else 13)[None]
        sums = error.sums()
        if sums is None:
            assert bins == 64, "there are more codes than bins"
            continue
        bounds = error.bounds(kept, *sums)
        assert bounds is not None
        exact, (low, high) = error(kept), bounds
        assert ((low <= exact) & (exact <= high)).all()
        # Close enough to decide: 2**-20 of the error, and what the sum of squares is rounded by.
        assert ((high - low) <= exact * 2.0**-19 + sums[0][:, 2, -1:] * 2.0**-37 + 1e-30).all()


@pytest.mark.parametrize("arithmetic", Arithmetic)
@pytest.mark.parametrize("threads", [1, 2])
def test_squared_errors_without_what_lies_between_codes(threads, arithmetic):
    spec = QuantSpec(INT8, arithmetic=arithmetic)
    centers = torch.arange(300) + 0.5
    counts = torch.randint(0, 1000, (3, 300), generator=torch.Generator().manual_seed(1))
    steps = torch.linspace(0.1, 3.0, 3 * 70)
    params = QParams((1 / steps if arithmetic is Arithmetic.MULTIPLIER else steps)[:, None])
    sums = cumulative_moments(centers, counts)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # Wherever rounding puts a boundary, it is found: 512 fill a chunk, with one they are more.
        found = [
            squared_errors(centers, sums, torch.arange(n, dtype=torch.float64) * spacing, params, spec)
            for n, spacing in ((0, 1.0), (1, 0.5), (127, 1.0), (511, 0.25), (512, 0.25), (513, 0.25), (2000, 0.1))
        ]
    finally:
        torch.set_num_threads(before)
    for one, other in pairwise(found):
        assert one is not None
        assert other is not None
        assert ((one - other).abs() <= sums[:, 2, -1:] * 2.0**-44).all()


def test_what_draws_has_no_kernel():
    spec = QuantSpec("int8", rounding=Rounding.STOCHASTIC)
    centers = torch.arange(16) + 0.5
    sums = cumulative_moments(centers, torch.ones(1, 16, dtype=torch.int64))
    assert squared_errors(centers, sums, torch.zeros(1, dtype=torch.float64), QParams(torch.ones(1, 1)), spec) is None


def test_moments_are_those_of_plain_torch():
    centers, counts = torch.arange(-8, 8) + 0.5, torch.randint(0, 2**40, (3, 16))
    kernel = cumulative_moments(centers, counts)
    x = centers.double()
    wanted = (counts[:, None].double() * torch.stack([torch.ones_like(x), x, x * x])).cumsum(-1)
    assert_same_bits(kernel[..., 1:], wanted)
    assert (kernel[..., 0] == 0).all()


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("spec", ["int8", "int2", "uint8", "int4 asymmetric", "float8_e4m3fn", "float4_e2m1fn"])
def test_divergences_are_nearly_those_of_the_definition(spec, data):
    calibrator = calibrator_of("entropy", spec, data)
    histogram = calibrator.histogram()
    assert histogram is not None
    counts = calibrator._sides(histogram)
    used = (counts > 0).mul(torch.arange(1, counts.shape[-1] + 1)).amax(-1)
    divergence = calibrator._divergence(counts, used)
    kept = torch.arange(1, counts.shape[-1] + 1, 7)[None]
    exact, nearly = divergence(kept), divergence.nearly(kept)
    assert nearly is not None
    assert torch.equal(exact.isinf(), nearly.isinf())
    finite = exact.isfinite()
    # A hundredth of what is taken for the same.
    assert (exact[finite] - nearly[finite]).abs().max() <= _SAME / 100


def test_logarithms_at_their_ends():
    """One cell: the sum is mass log mass."""
    masses = torch.cat([2.0 ** torch.arange(63), torch.tensor([3.0, 2.0**60 - 2.0**8, 1.4142135, 1.4142136, 0.7072])])
    mass = torch.stack([torch.zeros(len(masses)), masses], 1).double()[:, None]
    filled = torch.tensor([0.0, 1.0]).double().expand(len(masses), 1, 2)
    ones = torch.ones(len(masses), 1, 1, dtype=torch.float64)
    found = cross_entropies(mass, filled, torch.empty(0, dtype=torch.float64), 1.0, ones, ones.long(), ones * 0)
    assert found is not None
    torch.testing.assert_close(found, torch.xlogy(mass, mass)[..., 1:], rtol=1e-15, atol=1e-15)


SEARCHING = [name for name in sorted(calibrators()) if isinstance(make_calibrator(name, "int8"), HistogramCalibrator)]


@pytest.mark.parametrize("method", SEARCHING)
def test_several_are_searched_together_with_the_bits_of_each(method):
    made = [
        calibrator_of(method, spec, data) for spec in ("int8", "int8 multiplier", "int4 asymmetric") for data in DATA
    ]
    made += [calibrator_of(method, "int8", "normal", num_bins=bins) for bins in (4096, 1024)]
    for spec in ("int8 per_channel(1)", "int8"):
        made.append(make_calibrator(method, spec))
        made[-1].observe(random(200, 7).double() * torch.arange(-1, 6))
    if method == "percentile":
        made.append(calibrator_of(method, "int8", "normal", percentile=90.0))
    together = HistogramCalibrator.compute_ranges(made)
    assert len(together) == len(made)
    for calibrator, found in zip(made, together, strict=True):
        alone = calibrator.compute_range()
        assert_same_bits(found.lo, alone.lo)
        assert_same_bits(found.hi, alone.hi)


def test_calibrators_that_say_no_key_are_searched_apart():
    class Share(HistogramCalibrator):
        share = 1.0

        def find_clip(self, histogram):
            return torch.full_like(histogram.exponent, int(histogram.bins * self.share), dtype=torch.int64)

    half, whole = Share("int8"), Share("int8")
    half.share = 0.5
    for calibrator in (half, whole):
        calibrator.observe(DATA["normal"]())
    found = HistogramCalibrator.compute_ranges([half, whole])
    assert found[0].hi < found[1].hi
    assert_same_bits(found[0].hi, half.compute_range().hi)


@pytest.mark.parametrize("method", ["entropy", "mse"])
@pytest.mark.parametrize("data", DATA)
def test_searches_find_what_they_find_without_kernels(data, method):
    for spec in ("int8", "int4", "int[-100,37]", "int4 asymmetric", "float4_e2m1fn", "int8 multiplier"):
        calibrator = calibrator_of(method, spec, data)
        found = calibrator.compute_range()
        with (
            mock.patch.object(dispatch, "_backends", (dispatch.REFERENCE,)),
            mock.patch("fakequant.calibration.entropy.cross_entropies", return_value=None),
        ):
            wanted = calibrator.compute_range()
        assert_same_bits(found.lo, wanted.lo)
        assert_same_bits(found.hi, wanted.hi)


def test_exact_costs_are_asked_only_where_bounds_leave_a_choice():
    asked = []

    def cost(candidates):
        asked.append(candidates.tolist())
        return -candidates.double()

    candidates = torch.tensor([[4, 3, 2], [4, 4, 1], [4, 3, 2], [9, 8, 7]])
    low = torch.tensor([[1.0, 3.0, 3.0], [1.0, 1.0, 5.0], [1.0, 1.0, 9.0], [torch.nan, 1.0, 1.0]])
    exact = [(slice(i, i + 1), cost) for i in range(4)]
    for alone in (True, False):
        costs = settle(candidates, (low, low + 1.0), exact, alone=alone)
        # The first is clear, the second has one candidate twice, of the last nothing is known.
        assert costs.argmin(1).tolist() == [0, 0, 0, 0]
        assert costs.isinf().tolist() == [[False, True, True], [False, False, True], [False, False, True], [False] * 3]
    assert asked == [[[4, 3]], [[9, 8, 7]], [[4, 3, 2]], [[9, 8, 7]]]
