import numpy as np
import pytest
import torch

from fakequant import Arithmetic, QuantSpec, fake_quantize
from fakequant.calibration import MseCalibrator
from fakequant.numerics.formats import FloatFormat, Specials

FLOAT_CODES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def codes_of(name: str) -> list[float]:
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
    "normal": lambda: torch.randn(3000),
    "few": lambda: torch.randn(5),
    "outlier": lambda: torch.cat([torch.randn(3000), torch.tensor([-20.0])]),
    "relu": lambda: torch.randn(3000).relu(),
    "skewed": lambda: torch.nn.functional.gelu(torch.randn(3000) * 3),
    "heavy": lambda: torch.distributions.StudentT(2.0).sample((3000,)),
    "negative": lambda: -torch.rand(1000),
}
CASES = [
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
@pytest.mark.parametrize(("name", "symmetric"), CASES, ids=str)
def test_equals_definition(data, name, symmetric):
    spec = QuantSpec(name, symmetric=symmetric)
    calibrator = MseCalibrator(spec, num_bins=64)
    calibrator.observe(DATA[data]())
    histogram = calibrator.histogram()
    assert histogram is not None
    counts, width = histogram.counts[0].tolist(), histogram.width.item()
    lo, hi = histogram.range.lo.item() / width, histogram.range.hi.item() / width
    if symmetric and not spec.format.signed:
        lo, counts[0] = 0.0, []
    found = calibrator.compute_range()
    if max(-lo, hi) == 0:
        assert found.hi == 0
        return
    codes = codes_of(name)
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
