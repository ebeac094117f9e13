"""The bounds that spare the mse search most thresholds never spare it the one that all evaluations would find."""

import numpy as np
import pytest
import torch

from fakequant.compat.pytorch_quantization import search
from fakequant.compat.pytorch_quantization.search import entropy_amax, mse_amax
from fakequant.compat.pytorch_quantization.specification import integer_format
from fakequant.compat.pytorch_quantization.tensor_quant import fake_quantize
from tests.support.compat_rules import entropy_by_loops


def at(bins, **counts):
    found = np.zeros(bins, dtype=np.int64)
    for place, count in counts.items():
        found[{"first": 0, "middle": bins // 2, "last": bins - 1}[place]] = count
    return found


def bell(bins):
    return (1e6 * np.exp(-12.5 * (np.arange(bins) / bins) ** 2)).astype(np.int64)


HISTOGRAMS = {
    "empty": lambda bins: at(bins),
    "zeros alone": lambda bins: at(bins, first=7),
    "one bin": lambda bins: at(bins, middle=7),
    "the last bin": lambda bins: at(bins, last=1),
    "huge zeros and an outlier": lambda bins: at(bins, first=2**60, last=1),
    "outlier": lambda bins: np.where(np.arange(bins) < bins // 4, 1000, 0) + at(bins, last=1),
    "bell": bell,
    "gaps": lambda bins: bell(bins) * (np.arange(bins) % 7 == 0),
    "flat": lambda bins: np.ones(bins, dtype=np.int64),
    "comb": lambda bins: 5 * (np.arange(bins) % max(1, bins // 16) == 0),
    "beyond 2**53": lambda bins: np.random.default_rng(0).integers(0, 2**55, bins),
    "sparse": lambda bins: np.random.default_rng(0).integers(0, 3, bins),
}
# Units of the middles' errors: usual, near float32's ends (squares overflow), below the smallest amax that has a scale.
UNITS = [1.0, 0.37, 3e-9, 1e18, 1e-12]


def edges_of(bins, unit):
    return (np.arange(bins + 1) * (5.0 * unit / bins)).astype(np.float32)


def by_every_threshold(counts, edges, num_bits, unsigned, stride, start_bin):
    weights, ends = torch.from_numpy(counts).float(), torch.from_numpy(edges)
    centers, fmt = (ends[1:] + ends[:-1]) / 2, integer_format(num_bits, unsigned)
    candidates = centers[start_bin::stride]
    errors = [((fake_quantize(centers, amax, fmt) - centers) ** 2 * weights).mean().item() for amax in candidates]
    return candidates[int(np.argmin(errors))].item()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", HISTOGRAMS)
def test_mse_finds_what_every_threshold_finds(name, unit):
    for bins in (1, 2, 3, 131):
        counts, edges = HISTOGRAMS[name](bins), edges_of(bins, unit)
        for num_bits, unsigned in ((8, False), (8, True), (2, False)):
            for start_bin, stride in ((0, 1), (5, 3)):
                if start_bin >= bins:
                    continue
                given = counts, edges, num_bits, unsigned
                found = mse_amax(*given, stride=stride, start_bin=start_bin).item()
                assert found == by_every_threshold(*given, stride, start_bin), (bins, num_bits, start_bin)


# The number of bins, the filled ones and their counts, the width of bins, the number of bits. A threshold that has a
# code for every filled bin has no error but by rounding.
NEARLY_EQUAL = {
    "prefix sums": (64, {12: 470, 37: 113}, 1.551025547514857, 3),
    "prefix sums, 8 bits": (64, {15: 460397166, 30: 586433499}, 1.8954114385660839, 8),
    "values": (64, {12: 165041860484}, 2.0, 5),
    "values, 8 bits": (64, {7: 1206691464}, 2.0, 8),
    "differences": (32, {10: 3764810219}, 1.5018495825470162, 3),
    "differences, 5 bits": (32, {9: 164998137634}, 1.5599550860379003, 5),
}


@pytest.mark.parametrize("name", NEARLY_EQUAL)
def test_thresholds_of_nearly_equal_errors_are_kept(name):
    bins, filled, width, num_bits = NEARLY_EQUAL[name]
    counts, edges = np.zeros(bins, dtype=np.int64), (np.arange(bins + 1) * width).astype(np.float32)
    counts[list(filled)] = list(filled.values())
    found = mse_amax(counts, edges, num_bits, False, start_bin=0).item()
    assert found == by_every_threshold(counts, edges, num_bits, False, 1, 0)


@pytest.mark.parametrize("unit", [0.495, 0.54, 0.605, 0.635, 0.945, 1.08, 1.27, 1.485])
def test_sums_of_float32_decide_between_nearly_equal_errors(unit):
    """In real numbers the thresholds 199 and 200 are equally good."""
    given = np.ones(300, dtype=np.int64), edges_of(300, unit), 2, False
    assert mse_amax(*given, start_bin=0).item() == by_every_threshold(*given, 1, 0)


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_irregular_middles_make_it_slow_and_not_wrong(name):
    counts = HISTOGRAMS[name](200)
    edges = np.cumsum(np.random.default_rng(1).random(201)).astype(np.float32)
    found = mse_amax(counts, edges, 8, False, start_bin=3).item()
    assert found == by_every_threshold(counts, edges, 8, False, 1, 3)


@pytest.mark.parametrize("bins", [129, 257, 2048, 8192])
def test_few_thresholds_are_computed(bins, monkeypatch):
    rows = []

    def counted(x, amax, fmt):
        rows.append(len(x))
        return fake_quantize(x, amax, fmt)

    monkeypatch.setattr(search, "fake_quantize", counted)
    mse_amax(bell(bins), edges_of(bins, 1.0), 8, False)
    assert sum(rows) < min(bins - 28, 500)


@pytest.mark.parametrize("name", HISTOGRAMS)
@pytest.mark.parametrize("bins", [16, 129, 258])
def test_entropy_finds_what_the_loops_find(name, bins):
    pytest.importorskip("scipy", reason="the loops of the original call scipy.stats.entropy")
    counts = np.minimum(HISTOGRAMS[name](bins), 2**40)
    edges = edges_of(bins, 1.0)
    if not counts[1:].any():
        pytest.skip("bin 0 counts as bin 1, so that nothing is left: the loops divide by 0")
    for num_bits in (4, 8):
        for start_bin, stride in ((2, 1), (5, 3)):
            found = entropy_amax(counts, edges, num_bits, False, stride=stride, start_bin=start_bin).item()
            assert found == entropy_by_loops(counts, edges, num_bits, False, stride, start_bin), (num_bits, start_bin)
