from fractions import Fraction

import pytest
import torch

from fakequant.calibration import PercentileCalibrator
from fakequant.errors import ConfigError


def found(x, percentile, spec="int8", num_bins=64):
    calibrator = PercentileCalibrator(spec, percentile=percentile, num_bins=num_bins)
    calibrator.observe(x)
    histogram = calibrator.histogram()
    assert histogram is not None
    return calibrator.compute_range(), histogram


def expected_threshold(counts: list[int], percentile: str, width: float, amax: float) -> float:
    """The definition: the first right edge below which the share is reached."""
    total, below = sum(counts), 0
    if total == 0:
        return 0.0
    for k, count in enumerate(counts):
        below += count
        if count and Fraction(below, total) >= Fraction(percentile) / 100:
            return min((k + 1) * width, amax)
    raise AssertionError


@pytest.mark.parametrize("percentile", ["1.0001", "2", "50", "90", "99", "99.9", "99.99", "100"])
@pytest.mark.parametrize("spec", ["int8", "uint8", "uint8 per_tensor symmetric", "float8_e4m3fn"])
@pytest.mark.parametrize("n", [1, 7, 100, 1000])
@pytest.mark.parametrize("sign", ["both", "positive", "negative"])
def test_equals_definition(percentile, spec, n, sign):
    x = torch.distributions.Laplace(0, 1).sample((n,))
    x = {"both": x, "positive": x.abs(), "negative": -x.abs()}[sign]
    r, histogram = found(x, float(percentile), spec)
    only_positive = "symmetric" in spec
    counts = histogram.counts[0, 1] if only_positive else histogram.counts[0].sum(0)
    amax = x.clamp(min=0).max().item() if only_positive else x.abs().max().item()
    limit = expected_threshold(counts.tolist(), percentile, histogram.width.item(), amax)
    assert r.hi.item() == min(limit, max(x.max().item(), 0.0))
    assert r.lo.item() == (0.0 if only_positive else max(-limit, min(x.min().item(), 0.0)))


def test_hundred_is_the_exact_extreme():
    x = torch.randn(1000)
    for spec in ("int8", "uint8"):
        r, _ = found(x, 100, spec)
        assert (r.lo.item(), r.hi.item()) == (x.min().item(), x.max().item())
    r, _ = found(torch.arange(100.0), 100)
    assert r.hi == 99


@pytest.mark.parametrize(("percentile", "total", "clipped"), [(99.9, 1000, 1), (99.99, 2**34 * 10**4, 2**34)])
def test_share_is_exact(percentile, total, clipped):
    calibrator = PercentileCalibrator("int8", percentile=percentile, num_bins=16)
    calibrator.observe(torch.tensor([1.0, 15.0]))
    state = calibrator.state_dict()
    for more, hi in ((0, 2.0), (1, 15.0)):
        state["counts"][0, 1, 1], state["counts"][0, 1, 15] = total - clipped - more, clipped + more
        calibrator.load_state_dict(state)
        assert calibrator.compute_range().hi == hi


def test_clips_both_ends_at_one_magnitude():
    x = torch.cat([torch.linspace(-1, 1, 10001), torch.tensor([100.0])])
    r, _ = found(x, 99.0, "uint8", 4096)
    assert -r.lo == r.hi
    assert 0.98 < r.hi < 1.06
    r, _ = found(torch.cat([x.clamp(min=-0.17), x]), 99.0, "uint8", 4096)
    assert r.hi > 0.9


@pytest.mark.parametrize("percentile", [0, -1, 0.999, 0.0001, 1, 1.0, 100.0001, float("nan"), float("inf")])
def test_bad_percentiles_and_shares_are_refused(percentile):
    with pytest.raises(ConfigError, match=f"^percentile {percentile}: expected a percentage above 1, such as 99.9"):
        PercentileCalibrator("int8", percentile=percentile)
