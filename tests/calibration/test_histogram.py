import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakequant import Arithmetic, PerBlock, QuantSpec, fake_quantize
from fakequant.calibration import EntropyCalibrator, HistogramCalibrator, MseCalibrator, PercentileCalibrator
from fakequant.calibration.histogram import cheapest, used_bins
from fakequant.errors import CalibrationError, ConfigError
from fakequant.numerics.formats import FloatFormat, Specials
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
        assert histogram.counts[0, 1].nonzero().item() >= 2048


def test_zeros_first():
    zeros_first, zeros_last, x = counter(), counter(), torch.tensor([1e-3, -2e-3])
    zeros_first.observe(torch.zeros(10))
    histogram = zeros_first.histogram()
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
    assert (histogram.counts.sum((1, 2)) == shape[1]).all()
    for row in (0, 1, shape[0] // 2, shape[0] - 1):
        counts, exponent = expected_counts(x[row].tolist(), 64)
        assert histogram.counts[row].tolist() == counts
        assert histogram.exponent[row] == exponent


def test_float64_keeps_its_own_exponents():
    calibrator = counter()
    calibrator.observe(torch.tensor([1e-300, -3e-301], dtype=torch.float64))
    histogram = calibrator.histogram()
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
    histogram.counts.zero_()
    histogram.range.hi.zero_()
    again = calibrator.histogram()
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
    with pytest.raises(CalibrationError, match=r"calibrator.* state .*expected"):
        calibrator.load_state_dict(before | {name: lie(before[name])})
    after = calibrator.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    calibrator.load_state_dict(before)


def found(x, percentile, spec="int8", num_bins=64):
    calibrator = PercentileCalibrator(spec, percentile=percentile, num_bins=num_bins)
    calibrator.observe(x)
    histogram = calibrator.histogram()
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
def test_percentile_equals_its_definition(percentile, spec, n, sign):
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


FLOAT_CODES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def values_of(name: str) -> list[float]:
    """Every value of a format, found without the package."""
    if name in FLOAT_CODES:
        values = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(FLOAT_CODES[name]).double()
        return values[values.isfinite()].tolist()
    bits = int(name.strip("uint"))
    low = 0 if name.startswith("u") else -(2 ** (bits - 1))
    return [float(code) for code in range(low, low + 2**bits)]


def squared_error(counts: list[list[int]], lo: float, hi: float, codes: list[float], symmetric: bool) -> float:
    """Counts times the squared distance of each bin's middle to the nearest value, in units of bins."""
    if symmetric:
        scale, zero_point = max(-lo, hi) / codes[-1], 0
    else:
        # In float32: of a range with lo = -hi the zero point lies half way between two codes.
        scale = np.float32(hi - lo) / np.float32(codes[-1] - codes[0])
        zero_point = min(max(codes[0] - float(np.rint(np.float32(lo) / scale)), codes[0]), codes[-1])
        scale = float(scale)
    values = [(code - zero_point) * scale for code in codes]
    total = 0.0
    for sign, side in ((-1, counts[0]), (1, counts[1])):
        for k, count in enumerate(side):
            if count:
                middle = sign * (k + 0.5)
                total += count * min((middle - value) ** 2 for value in values)
    return total


DATA = {
    "normal": lambda: torch.randn(20000),
    "few": lambda: torch.randn(60),
    "outlier": lambda: torch.cat([torch.randn(5000), torch.tensor([30.0])]),
    "relu": lambda: torch.randn(20000).relu(),
    "skewed": lambda: torch.nn.functional.gelu(torch.randn(20000) * 3),
    "heavy": lambda: torch.distributions.StudentT(2.0).sample((20000,)),
    "negative": lambda: -torch.rand(1000),
    "two_values": lambda: torch.tensor([1.0, 1.0, 1.0, -7.0]),
    "steps": lambda: torch.randint(-5, 6, (500,)) * 0.5,
}
FORMATS = [
    ("int8", True),
    ("int4", True),
    ("int2", True),
    ("int4", False),
    ("uint4", False),
    ("uint4", True),
    ("float8_e4m3fn", True),
    ("float8_e5m2", True),
]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("name", "symmetric"), FORMATS, ids=str)
def test_mse_equals_its_definition(data, name, symmetric):
    spec = QuantSpec(name, symmetric=symmetric)
    calibrator = MseCalibrator(spec, num_bins=64)
    calibrator.observe(DATA[data]())
    histogram = calibrator.histogram()
    counts, width = histogram.counts[0].tolist(), histogram.width.item()
    lo, hi = histogram.range.lo.item() / width, histogram.range.hi.item() / width
    if symmetric and not spec.format.signed:
        lo, counts[0] = 0.0, []
    found = calibrator.compute_range()
    if max(-lo, hi) == 0:
        assert found.hi == 0
        return
    codes = values_of(name)
    last = max(k + 1 for side in counts for k, count in enumerate(side) if count)
    errors = {n: squared_error(counts, max(lo, -n), min(hi, n), codes, symmetric) for n in range(1, last + 1)}
    # The search computes values in float32: 2**-24 of a value on either side of the error's difference.
    best = min(errors.values()) * (1 + 1e-4)
    kept = calibrator.find_clip(histogram).item()
    assert errors[kept] <= best
    assert (found.lo / width, found.hi / width) == (max(lo, -kept), min(hi, kept))


@pytest.mark.parametrize("arithmetic", [Arithmetic.DIVIDE, Arithmetic.RECIPROCAL, Arithmetic.MULTIPLIER], ids=str)
@pytest.mark.parametrize("name", ["int4", "int3", "float8_e4m3fn", "int[-100,37]"])
def test_near_the_best_threshold_for_the_data(name, arithmetic):
    spec = QuantSpec(name, arithmetic=arithmetic)
    x = torch.distributions.Laplace(0, 1).sample((20_000,))
    calibrator = MseCalibrator(spec)
    calibrator.observe(x)

    def error(amax):
        return (fake_quantize(x, spec, amax=amax) - x).square().mean().item()

    best = min(error(float(x.abs().max()) * k / 200) for k in range(1, 201))
    assert error(calibrator.compute_range().amax) <= best * 1.01


def test_beats_max_where_codes_are_few():
    x = torch.randn(20_000)
    calibrator = MseCalibrator("int4")
    calibrator.observe(x)
    found = calibrator.compute_range().amax
    # The optimal uniform quantizer of 15 levels for a normal distribution clips near 2.7 (Max, 1960, table II).
    assert 2.2 < found < 3.0
    error = (fake_quantize(x, "int4", amax=found) - x).square().mean()
    assert error < 0.5 * (fake_quantize(x, "int4") - x).square().mean()


def test_negative_values_count_where_the_format_has_them():
    x = torch.cat([-torch.rand(2000) * 10, torch.rand(100)])
    for spec, hi in (("int8", 1.0), ("int8 per_tensor asymmetric", 1.0), ("uint8 per_tensor symmetric", 1.0)):
        calibrator = MseCalibrator(spec)
        calibrator.observe(x)
        found = calibrator.compute_range()
        assert found.hi == pytest.approx(hi, abs=0.05)
        assert (found.lo == 0) if "symmetric" in spec.split() and spec.startswith("uint8") else (found.lo < -9.5)


def test_any_format_that_fake_quantize_knows():
    fmt = FloatFormat("a_float_of_mine", 2, 1, Specials.NONE)
    x = torch.randn(5000)
    calibrator = MseCalibrator(QuantSpec(fmt))
    calibrator.observe(x)
    found = calibrator.compute_range().amax
    assert 2.0 < found < 4.5
    int16 = MseCalibrator("int16")
    int16.observe(x)
    assert int16.compute_range().amax > 0.95 * x.abs().max()


def test_huge_and_tiny_units_find_the_same_threshold():
    x = torch.randn(2000)
    found = []
    for exponent in (-100, 0, 100):
        calibrator = MseCalibrator("int4")
        calibrator.observe(x * 2.0**exponent)
        found.append(calibrator.compute_range().hi.item() * 2.0**-exponent)
    assert found[0] == found[1] == found[2]


def codes_of(name: str, symmetric: bool) -> list[Fraction]:
    """The magnitudes that a format can hold, in units of its scale."""
    values = values_of(name)
    first = 0 if symmetric else values[0]
    return sorted({Fraction(value - first) for value in values if value >= first})


def divergence(sides: list[list[int]], kept: int, codes: list[Fraction], symmetric: bool) -> float:
    """KL(P || Q) by loops over bins, as the definition says it."""
    used = [max((k + 1 for k, count in enumerate(side) if count), default=0) for side in sides]
    ends = [min(kept, u) for u in used]
    width = Fraction(kept if symmetric else sum(ends)) / codes[-1]
    p_all, q_all = [], []
    for side, end in zip(sides, ends, strict=True):
        counts = [side[1], *side[1:]]
        p = [float(c) for c in counts[:end]]
        clipped = sum(counts[end:])
        filled = [k for k in range(end) if counts[k]]
        if clipped and not filled:
            return math.inf
        if clipped:
            p[filled[-1]] += clipped
        cells: dict[int, list[int]] = {}
        code = 0
        for k in range(end):
            while code + 1 < len(codes) and (codes[code] + codes[code + 1]) / 2 * width <= k + Fraction(1, 2):
                code += 1
            cells.setdefault(code, []).append(k)
        q = [0.0] * end
        for members in cells.values():
            nonempty = [k for k in members if counts[k]]
            for k in nonempty:
                q[k] = sum(counts[j] for j in members) / len(nonempty)
        p_all += p
        q_all += q
    p_sum, q_sum = sum(p_all), sum(q_all)
    return sum(p / p_sum * math.log((p / p_sum) / (q / q_sum)) for p, q in zip(p_all, q_all, strict=True) if p)


def calibrated(spec: QuantSpec, num_bins: int, *batches: torch.Tensor) -> tuple[EntropyCalibrator, list[list[int]]]:
    calibrator = EntropyCalibrator(spec, num_bins=num_bins)
    for batch in batches:
        calibrator.observe(batch)
    histogram = calibrator.histogram()
    negative, positive = histogram.counts[0].tolist()
    if not spec.symmetric:
        return calibrator, [negative, positive]
    if not spec.format.signed:
        return calibrator, [positive]
    return calibrator, [[a + b for a, b in zip(negative, positive, strict=True)]]


CASES = [
    ("int8", True, 256),
    ("int4", True, 64),
    ("int2", True, 16),
    ("int4", False, 64),
    ("uint4", False, 64),
    ("uint4", True, 128),
    ("uint8", False, 256),
    ("float8_e4m3fn", True, 256),
    ("float8_e5m2", True, 128),
]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("name", "symmetric", "bins"), CASES, ids=str)
def test_entropy_equals_its_definition(data, name, symmetric, bins):
    spec = QuantSpec(name, symmetric=symmetric)
    calibrator, sides = calibrated(spec, bins, DATA[data]())
    histogram = calibrator.histogram()
    kept = calibrator.find_clip(histogram).item()
    last = max(k + 1 for side in sides for k in range(bins) if side[k]) if any(map(sum, sides)) else 0
    if last == 0:
        assert kept == 0
        return
    codes = codes_of(name, symmetric)
    filled = [sum(1 for side in sides for count in [side[1], *side[1:]][:n] if count) for n in range(bins + 1)]
    first = next((n for n in range(bins + 1) if filled[n] >= len(codes)), last)
    candidates = range(min(first, last), last + 1)
    if not any(sum([side[1], *side[1:]]) for side in sides):
        assert kept == last
        return
    divergences = {n: divergence(sides, n, codes, symmetric) for n in candidates}
    smallest = min(divergences.values())
    # 1e-12 is far above the rounding of float64 and far below any difference that matters; of equal ones the largest.
    assert kept == max(n for n, value in divergences.items() if value <= smallest + 1e-12)


@pytest.mark.parametrize(("name", "symmetric"), [("int8", True), ("uint8", False), ("float8_e4m3fn", True)])
def test_divergence_at_full_resolution_is_near_the_best(name, symmetric):
    spec = QuantSpec(name, symmetric=symmetric)
    calibrator, sides = calibrated(spec, 2048, torch.distributions.Laplace(0, 1).sample((200_000,)))
    histogram = calibrator.histogram()
    codes = codes_of(name, symmetric)
    found = divergence(sides, calibrator.find_clip(histogram).item(), codes, symmetric)
    others = [divergence(sides, n, codes, symmetric) for n in range(len(codes), 2048, 61)]
    assert found <= min(others)


@pytest.mark.parametrize("name", ["int8", "uint8", "int4", "uint4"])
def test_few_distinct_values_are_kept(name):
    """Where every value has a code of its own, Q equals P whatever is clipped: nothing must be."""
    calibrator, _ = calibrated(QuantSpec(name), 4096, torch.arange(7) / 7.0, torch.zeros(50))
    assert calibrator.compute_range().hi == torch.tensor(6 / 7.0)


def test_clips_an_outlier_and_not_the_data():
    x = torch.randn(100_000)
    calibrator, _ = calibrated(QuantSpec("int8"), 4096, x, torch.tensor([25.0]))
    assert 3.0 < calibrator.compute_range().hi < 6.0


def test_zeros_do_not_pull_the_threshold():
    x = torch.randn(100_000)
    without, _ = calibrated(QuantSpec("int8"), 2048, x[x > 0.01])
    with_zeros, _ = calibrated(QuantSpec("int8"), 2048, x[x > 0.01], torch.zeros(10**6))
    assert without.compute_range().hi == with_zeros.compute_range().hi


def test_largest_of_equal_divergences():
    # Every bin alike in its cell: no threshold loses anything that is not clipped, and the last clips nothing.
    calibrator, _ = calibrated(QuantSpec("int4"), 64, torch.arange(1.0, 64.0).repeat_interleave(10))
    assert calibrator.compute_range().hi == 63


@pytest.mark.parametrize(
    ("name", "options", "bins"),
    [("int16", {}, 4096), ("uint13", {}, 4096), ("int8", {"num_bins": 64}, 64), ("uint8", {"num_bins": 128}, 128)],
)
def test_more_codes_than_bins(name, options, bins):
    with pytest.raises(ConfigError, match=f"{name} has more such codes than the {bins} bins; use the method mse"):
        EntropyCalibrator(name, **options)


def test_formats_are_known_by_their_grid():
    e5m10 = FloatFormat("a_float_of_mine", 5, 10, Specials.IEEE)
    with pytest.raises(ConfigError, match="mse or percentile"):
        EntropyCalibrator(QuantSpec(e5m10))
    e4m3 = FloatFormat("another_float", 4, 3, Specials.NAN_ONLY)
    x = torch.randn(5000)
    mine, _ = calibrated(QuantSpec(e4m3), 256, x)
    known, _ = calibrated(QuantSpec("float8_e4m3fn"), 256, x)
    assert mine.compute_range() == known.compute_range()
    assert EntropyCalibrator("int12", num_bins=4096).spec.format.bits == 12


def test_many_groups_keep_enough_bins():
    calibrator = EntropyCalibrator("int8 per_channel(0)")
    calibrator.observe(torch.randn(8000, 4))
    assert calibrator.state_dict()["counts"].shape == (8000, 2, 1024)


def test_used_bins():
    counts = torch.tensor([[[1, 0, 0], [0, 0, 0]], [[0, 2, 0], [0, 0, 2**40]]])
    assert used_bins(counts).tolist() == [[1, 0], [2, 3]]


@pytest.mark.parametrize(("bins", "coarse"), [(64, 64), (512, 512), (16, 1000)])
def test_tries_all_where_they_are_few(bins, coarse):
    table = torch.rand(5, bins + 1, dtype=torch.float64)
    last = torch.tensor([bins, bins - 1, bins // 2, 3, 1])
    best = cheapest(lambda n: table.gather(1, n), 2, last, bins=bins, coarse=coarse)
    for row in range(5):
        first = min(2, last[row].item())
        assert best[row] == first + table[row, first : last[row] + 1].argmin()


@pytest.mark.parametrize("coarse", [8, 16, 64, 512])
def test_refines_to_the_bottom_of_a_valley(coarse):
    valleys = torch.tensor([1, 2, 500, 2049, 4095, 4096, 4000])
    last = torch.tensor([4096, 4096, 2048, 4096, 4096, 4096, 3000])
    best = cheapest(lambda n: (n - valleys[:, None]).abs().double(), 1, last, bins=4096, coarse=coarse)
    assert best.tolist() == torch.minimum(valleys, last).tolist()


@pytest.mark.parametrize("coarse", [8, 64, 512])
def test_largest_of_equals(coarse):
    last = torch.tensor([512, 300, 0])
    assert cheapest(lambda n: torch.zeros(n.shape), 10, last, bins=512, coarse=coarse).tolist() == [512, 300, 0]
    steps = cheapest(lambda n: (n > 100).double(), 1, last[:2], bins=512, coarse=coarse)
    assert steps.tolist() == [100, 100]


def test_asks_for_few_candidates():
    asked = []

    def cost(n):
        asked.append(n.shape[1])
        return (n - 77.0).abs()

    cheapest(cost, 1, torch.tensor([4096]), bins=4096, coarse=64)
    assert asked == [65, 17, 17]
