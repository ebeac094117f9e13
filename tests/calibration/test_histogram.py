import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakequant import PerBlock, QuantSpec
from fakequant.calibration import HistogramCalibrator, PercentileCalibrator
from fakequant.errors import CalibrationError, ConfigError
from tests.support.bits import assert_same_bits

SMALLEST_EXPONENT = -126


def counter(num_bins: int | None = 16, spec: QuantSpec | str = "int8") -> PercentileCalibrator:
    return PercentileCalibrator(spec, percentile=100, num_bins=num_bins)


def expected_counts(values: list[float], bins: int) -> tuple[list[list[int]], int | None]:
    """The definition in plain Python: the smallest power of two as width, then a bin per value."""
    counts = [[0] * bins, [0] * bins]
    amax = max(map(abs, values))
    if amax == 0:
        counts[1][0] = len(values)
        return counts, None
    exponent = SMALLEST_EXPONENT
    while amax >= math.ldexp(bins, exponent):
        exponent += 1
    for value in values:
        counts[int(value >= 0)][int(math.ldexp(abs(value), -exponent))] += 1
    return counts, exponent


HOSTILE = [0.0, -0.0, 1e-45, -1e-45, 1e-38, -(2.0**-126), 2.0**-115, 1e-3, 15.999999, 16.0, -16.0, -1e6, 3.4028234e38]
VALUES = st.one_of(st.sampled_from(HOSTILE), st.floats(width=32, allow_nan=False, allow_infinity=False))


@given(st.lists(st.lists(VALUES, min_size=1, max_size=6), min_size=1, max_size=5))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_equals_definition_however_it_was_cut(batches):
    calibrator = counter()
    for batch in batches:
        calibrator.observe(torch.tensor(batch, dtype=torch.float32))
    values = torch.tensor([value for batch in batches for value in batch], dtype=torch.float32).tolist()
    counts, exponent = expected_counts(values, 16)
    histogram = calibrator.histogram()
    assert histogram is not None
    assert histogram.counts[0].tolist() == counts
    if exponent is not None:
        assert histogram.exponent.tolist() == [exponent]
        assert histogram.width.tolist() == [math.ldexp(1, exponent)]


def test_bounded_memory_for_any_range():
    calibrator = counter(num_bins=None)
    calibrator.observe(torch.full((100,), 1e-3))
    small = {name: value.nbytes for name, value in calibrator.state_dict().items()}
    calibrator.observe(torch.full((50,), -1e6))
    calibrator.observe(torch.tensor([3e38]))
    state = calibrator.state_dict()
    assert {name: value.nbytes for name, value in state.items()} == small
    assert state["counts"].shape == (1, 2, 4096)
    assert sum(small.values()) == 2 * 4096 * 8 + 4 + 4 + 4
    assert state["counts"].sum() == 151
    assert calibrator.compute_range().hi == torch.tensor(3e38)


def test_largest_value_falls_into_the_upper_half():
    for value in (1e-30, 0.75, 1.0, 1.5, 65504.0, 3e38):
        calibrator = counter(num_bins=4096)
        calibrator.observe(torch.tensor([value]))
        histogram = calibrator.histogram()
        assert histogram is not None
        assert histogram.counts[0, 1].nonzero().item() >= 2048


def test_zeros_first():
    zeros_first, zeros_last, x = counter(), counter(), torch.tensor([1e-3, -2e-3])
    zeros_first.observe(torch.zeros(10))
    histogram = zeros_first.histogram()
    assert histogram is not None
    assert histogram.width.item() == 0
    assert histogram.counts[0, 1, 0] == 10
    zeros_first.observe(x)
    zeros_last.observe(x)
    zeros_last.observe(torch.zeros(10))
    for name, value in zeros_first.state_dict().items():
        assert_same_bits(value, zeros_last.state_dict()[name], name)


def test_exact_beyond_two_to_the_24():
    calibrator = counter()
    calibrator.observe(torch.tensor([1.0]))
    state = calibrator.state_dict()
    state["counts"] *= 2**40
    calibrator.load_state_dict(state)
    calibrator.observe(torch.tensor([1.0, -0.25]))
    calibrator.merge(calibrator)
    histogram = calibrator.histogram()
    assert histogram is not None
    assert histogram.counts[histogram.counts > 0].tolist() == [2, 2 * (2**40 + 1)]


def test_more_equal_values_than_float32_counts():
    calibrator = counter()
    chunk = torch.full((2**20,), 3.0).expand(17, -1)
    calibrator.observe(chunk)
    calibrator.observe(torch.tensor([[3.0]]))
    assert calibrator.state_dict()["counts"].max() == 17 * 2**20 + 1


@pytest.mark.parametrize("shape", [(3, 200_001), (70_001, 2), (4097, 33)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_long_and_many_groups(shape, dtype):
    x = torch.randn(shape).to(dtype)
    calibrator = counter(64, "int8 per_channel(0)")
    calibrator.observe(x)
    histogram = calibrator.histogram()
    assert histogram is not None
    assert (histogram.counts.sum((1, 2)) == shape[1]).all()
    for row in (0, 1, shape[0] // 2, shape[0] - 1):
        counts, exponent = expected_counts(x[row].tolist(), 64)
        assert histogram.counts[row].tolist() == counts
        assert histogram.exponent[row] == exponent


def test_float64_keeps_its_own_exponents():
    calibrator = counter()
    calibrator.observe(torch.tensor([1e-300, -3e-301], dtype=torch.float64))
    histogram = calibrator.histogram()
    assert histogram is not None
    assert histogram.counts[0].nonzero().tolist() == [[0, 3], [1, 10]]
    # Here 1 / width is beyond float32.
    calibrator.observe(torch.zeros(2))
    assert calibrator.state_dict()["counts"][0, 1, 0] == 2
    calibrator.observe(torch.tensor([1e300], dtype=torch.float64))
    assert calibrator.compute_range().hi.item() == 1e300


@pytest.mark.parametrize("groups", [1, 1024, 4096, 40_000])
def test_default_bins_bound_the_memory_of_many_groups(groups):
    calibrator = counter(None, QuantSpec("int8", PerBlock({-1: 2})))
    calibrator.observe(torch.randn(groups, 2))
    bins = calibrator.state_dict()["counts"].shape[2]
    assert bins == {1: 4096, 1024: 4096, 4096: 1024, 40_000: 128}[groups]


@pytest.mark.parametrize("num_bins", [0, 8, 100, -4096, 1 << 17])
def test_bad_bins(num_bins):
    with pytest.raises(ConfigError, match=f"power of two from 16 to 65536, such as 4096; got {num_bins}"):
        counter(num_bins)


def test_bins_must_agree():
    a, b = counter(16), counter(32)
    b.observe(torch.ones(3))
    for first in (False, True):
        if first:
            a.observe(torch.ones(3))
        before = a.state_dict()
        with pytest.raises(ConfigError, match="cannot merge counts of 32 bins into 16"):
            a.merge(b)
        with pytest.raises(CalibrationError, match=r"\[1, 2, 32\].*expected torch.int64 of shape \[1, 2, 16\]"):
            a.load_state_dict(b.state_dict())
        assert str(a.state_dict()) == str(before)


def test_line_runs_from_the_lowest_to_the_highest():
    calibrator = counter()
    calibrator.observe(torch.tensor([-16.0, -0.5, 0.0, 0.5, 3.0, 31.0]))
    histogram = calibrator.histogram()
    assert histogram is not None
    edges, counts = histogram.line()
    assert edges[0].tolist() == [2.0 * k for k in range(-16, 17)]
    assert {edges[0, k].item(): counts[0, k].item() for k in counts[0].nonzero()[:, 0]} == {
        -18.0: 1,
        -2.0: 1,
        0.0: 2,
        2.0: 1,
        30.0: 1,
    }
    assert (histogram.range.lo.tolist(), histogram.range.hi.tolist()) == ([-16.0], [31.0])


def test_histogram_is_a_copy():
    calibrator = counter()
    calibrator.observe(torch.ones(3))
    histogram = calibrator.histogram()
    assert histogram is not None
    histogram.counts.zero_()
    histogram.range.hi.zero_()
    again = calibrator.histogram()
    assert again is not None
    assert again.counts.sum() == 3
    assert again.range.hi == 1


def test_a_new_method_is_one_small_class():
    class Half(HistogramCalibrator):
        def find_clip(self, histogram):
            return torch.full((histogram.counts.shape[0],), histogram.bins // 2)

    calibrator = Half("uint8", num_bins=16)
    calibrator.observe(torch.tensor([-0.25, 15.0]))
    found = calibrator.compute_range()
    assert (found.lo.item(), found.hi.item()) == (-0.25, 8.0)


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        ("counts", lambda counts: -counts),
        ("counts", lambda counts: counts.index_fill(2, torch.tensor([3]), -1)),
        ("counts", torch.zeros_like),
        ("counts", lambda counts: counts.double()),
        ("counts", lambda counts: counts * float("nan")),
        ("counts", lambda counts: counts[:, :, :8]),
        ("counts", lambda counts: counts[:1]),
        ("exponent", lambda exponent: exponent.float() + 0.5),
        ("exponent", lambda exponent: exponent[:1]),
        ("lo", lambda lo: lo * float("nan")),
    ],
)
def test_states_that_no_data_gives_are_refused_and_nothing_is_replaced(name, lie):
    calibrator = counter(spec="int8 per_channel(0)")
    calibrator.observe(torch.randn(2, 100))
    before = calibrator.state_dict()
    with pytest.raises(CalibrationError, match=r"a calibrator state with .*expected"):
        calibrator.load_state_dict(before | {name: lie(before[name])})
    after = calibrator.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    calibrator.load_state_dict(before)
