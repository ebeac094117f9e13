import math
from fractions import Fraction

import pytest
import torch

from fakequant import QuantSpec
from fakequant.calibration import EntropyCalibrator
from fakequant.errors import ConfigError
from fakequant.numerics.formats import FloatFormat, Specials

FLOAT_CODES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def codes_of(name: str, symmetric: bool) -> list[Fraction]:
    """The magnitudes that a format can hold, found without the package."""
    if name in FLOAT_CODES:
        values = torch.arange(128, dtype=torch.uint8).view(FLOAT_CODES[name]).double()
        return [Fraction(value) for value in values[values.isfinite()].tolist()]
    bits = int(name.strip("uint"))
    largest = 2**bits - 1 if name.startswith("u") or not symmetric else 2 ** (bits - 1) - 1
    return [Fraction(code) for code in range(largest + 1)]


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
    assert histogram is not None
    negative, positive = histogram.counts[0].tolist()
    if not spec.symmetric:
        return calibrator, [negative, positive]
    if not spec.format.signed:
        return calibrator, [positive]
    return calibrator, [[a + b for a, b in zip(negative, positive, strict=True)]]


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
def test_equals_definition(data, name, symmetric, bins):
    spec = QuantSpec(name, symmetric=symmetric)
    calibrator, sides = calibrated(spec, bins, DATA[data]())
    histogram = calibrator.histogram()
    assert histogram is not None
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
    assert histogram is not None
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
    with pytest.raises(ConfigError, match=f"{name} has more codes on a side than the histogram's {bins} bins; use the"):
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
