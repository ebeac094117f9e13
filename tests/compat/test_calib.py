"""compat.pytorch_quantization.calib against the rules of the original, written as its slow loops.

The bounds that spare the mse search most thresholds never spare it the one that all evaluations would find.
"""

import logging

import numpy as np
import pytest
import torch
from torch import nn

from fakequant.compat.pytorch_quantization import calib
from fakequant.compat.pytorch_quantization.calib import entropy_amax, mse_amax
from fakequant.compat.pytorch_quantization.tensor_quant import fake_quantize, integer_format
from tests.support.compat_rules import (
    collected,
    entropy_by_loops,
    histogram_by_rules,
    mse_by_loops,
    percentile_by_rules,
    search_pairs,
    streams,
)

pytest.importorskip("scipy", reason="the loops of the original call scipy.stats.entropy")


@pytest.mark.parametrize("name", streams())
@pytest.mark.parametrize("bins", [256, 2048])
@pytest.mark.parametrize("skip_zeros", [False, True])
def test_histogram_grows_as_scripts_observe(name, bins, skip_zeros):
    calibrator = collected(streams()[name], num_bins=bins, skip_zeros=skip_zeros)
    counts, edges = histogram_by_rules(streams()[name], bins, skip_zeros)
    np.testing.assert_array_equal(calibrator._calib_hist.numpy(), counts)
    np.testing.assert_array_equal(calibrator._calib_bin_edges.numpy(), edges)
    assert calibrator._num_bins == len(counts)


@pytest.mark.parametrize("name", streams())
@pytest.mark.parametrize(
    ("num_bits", "unsigned", "stride", "start_bin"), [(8, False, 1, 128), (8, True, 2, 200), (4, False, 3, 5)]
)
def test_entropy_and_mse_equal_the_loops(name, num_bits, unsigned, stride, start_bin):
    tensors = [x.abs() for x in streams()[name]] if unsigned else streams()[name]
    calibrator = collected(tensors, num_bits, unsigned, num_bins=320)
    for method, found, wanted in search_pairs(calibrator, num_bits, unsigned, stride, start_bin):
        assert found == wanted, method
        amax = calibrator.compute_amax(method, stride=stride, start_bin=start_bin)
        assert (amax.shape, amax.dtype) == ((), torch.float32)


@pytest.mark.parametrize("name", streams())
@pytest.mark.parametrize("percentile", [0, 1.5, 50, 99, 99.99, 100])
def test_percentile_is_the_left_edge(name, percentile):
    calibrator = collected(streams()[name])
    counts, edges = calibrator._calib_hist.numpy(), calibrator._calib_bin_edges.numpy()
    amax = calibrator.compute_amax("percentile", percentile=percentile)
    assert amax.item() == percentile_by_rules(counts, edges, percentile)


def test_equal_divergences_give_the_last_edge():
    calibrator = collected([torch.tensor([0.25, 0.5, 0.75, 1.0])], num_bins=512)
    counts, edges = calibrator._calib_hist.numpy(), calibrator._calib_bin_edges.numpy()
    assert calibrator.compute_amax("entropy").item() == edges[-1] == entropy_by_loops(counts, edges, 8, False)
    before = counts.copy()
    calibrator.compute_amax("entropy")
    np.testing.assert_array_equal(calibrator._calib_hist.numpy(), before)


def test_equal_errors_give_the_first_middle():
    counts, edges = np.zeros(300, dtype=np.int64), np.arange(301, dtype=np.float32)
    counts[0] = 5  # which every threshold rounds to 0
    assert mse_amax(counts, edges, 2, False) == 128.5 == mse_by_loops(counts, edges, 2, False)


def test_the_numpy_histogram():
    tensors = [torch.rand(3000) + 0.5, torch.rand(3000) * 4 + 0.5, -torch.rand(3000)]
    calibrator = collected(tensors, torch_hist=False)
    counts, edges = np.histogram(tensors[0].numpy(), bins=2048)
    width = edges[1] - edges[0]
    edges = np.hstack([edges, np.arange(edges[-1] + width, tensors[1].numpy().max() + width, width)])
    for x in tensors[1:]:
        found = np.histogram(x.abs().numpy(), bins=edges)[0]
        found[: len(counts)] += counts
        counts = found
    np.testing.assert_array_equal(calibrator._calib_hist, counts)
    np.testing.assert_array_equal(calibrator._calib_bin_edges, edges)
    amax = calibrator.compute_amax("percentile", percentile=90)
    assert amax.item() == np.float32(percentile_by_rules(counts, edges, 90))


@pytest.mark.parametrize("torch_hist", [True, False])
def test_memory_is_bounded(torch_hist):
    tensors = [torch.rand(1000) * 1e-6, torch.rand(1000), torch.rand(1000) * 1e6, torch.rand(1000) * 1e30]
    calibrator = collected(tensors, torch_hist=torch_hist)
    counts, edges = (torch.as_tensor(each) for each in (calibrator._calib_hist, calibrator._calib_bin_edges))
    assert 1 << 15 < counts.numel() <= (1 << 16) + 2
    assert counts.sum() == 4000
    assert edges.numel() == counts.numel() + 1
    assert edges[-1] >= tensors[-1].max()
    assert counts[0] == 3000
    largest = max(calibrator.compute_amax("percentile", percentile=100).item(), 1)
    assert largest == pytest.approx(tensors[-1].max().item(), rel=1e-4)


@pytest.mark.parametrize("torch_hist", [True, False])
def test_the_largest_value_always_has_a_bin(torch_hist):
    for first in torch.rand(100) + 0.1:
        calibrator = collected([torch.stack([torch.tensor(0.0), first])], num_bins=7, torch_hist=torch_hist)
        width = calibrator._calib_bin_edges[1]
        for i, later in enumerate(
            [9 * width, 23 * width, torch.nextafter(torch.as_tensor(30 * width), torch.tensor(99.0))]
        ):
            calibrator.collect(torch.as_tensor(later))
            edges = calibrator._calib_bin_edges
            assert len(edges) == len(calibrator._calib_hist) + 1
            assert edges[-1] >= later
            assert calibrator._calib_hist.sum() == 3 + i
            assert edges[-2] < later or not torch_hist


def test_counts_do_not_saturate():
    calibrator = collected([torch.full((1 << 25,), 0.25), torch.ones(3)])
    assert calibrator._calib_hist.sum() == (1 << 25) + 3
    assert calibrator._calib_hist.max() == 1 << 25


def test_zeros_first_then_data():
    zeros, x = torch.zeros(100), torch.randn(100)
    calibrator = collected([zeros])
    assert [calibrator.compute_amax(method) for method in ("percentile", "entropy", "mse")] == [0, 0, 0]
    calibrator.collect(x)
    both = collected([x, zeros])
    assert torch.equal(calibrator._calib_hist, both._calib_hist)
    assert torch.equal(calibrator._calib_bin_edges, both._calib_bin_edges)
    skipping = collected([zeros], skip_zeros=True)
    assert skipping.compute_amax("mse") is None


def test_a_far_group_of_values_is_not_taken_for_the_best_because_nothing_is_below():
    calibrator = collected([torch.cat([torch.zeros(1000), torch.linspace(9, 10, 500)])])
    assert calibrator.compute_amax("entropy") > 9


def test_nan_does_not_count_and_inf_is_an_error(caplog):
    x = torch.randn(1000)
    with caplog.at_level(logging.WARNING):
        calibrator = collected([torch.cat([x, torch.tensor([torch.nan])]), torch.tensor([torch.nan])])
    assert caplog.text.count("NaN, which does not count") == 1
    assert torch.equal(calibrator._calib_hist, collected([x])._calib_hist)
    with pytest.raises(OverflowError, match="cannot hold inf"):
        calibrator.collect(torch.tensor([-torch.inf]))
    with pytest.raises(RuntimeError, match="nothing to collect"):
        calibrator.collect(torch.zeros(0))


def test_reset_and_errors():
    calibrator = calib.HistogramCalibrator(8, None, False, num_bins=100)
    assert calibrator.compute_amax("percentile") is None
    with pytest.raises(TypeError, match="Unknown calibration method median"):
        calibrator.compute_amax("median")
    with pytest.raises(TypeError):
        calibrator.compute_amax()
    with pytest.raises(ValueError, match="Invalid percentile 101"):
        calibrator.compute_amax("percentile", percentile=101)
    calibrator.collect(torch.rand(10))
    for method in ("entropy", "mse"):
        with pytest.raises(ValueError, match="100 bins and start_bin is 128"):
            calibrator.compute_amax(method)
    calibrator.collect(torch.rand(10) * 10)
    calibrator.reset()
    assert str(calibrator) == "HistogramCalibrator(calib_bin_edges=None)"
    calibrator.collect(torch.rand(10))
    assert len(calibrator._calib_hist) == 100
    with pytest.raises(NotImplementedError, match="only supports per tensor"):
        calib.HistogramCalibrator(8, 0, False)
    floats = collected([torch.rand(10)], num_bits=(4, 3))
    with pytest.raises(TypeError, match="not of floats"):
        floats.compute_amax("mse")


def test_printed_forms():
    calibrator = calib.HistogramCalibrator(8, None, False)
    empty = "HistogramCalibrator(num_bits=8 axis=None unsigned=False calib_bin_edges=None calib_hist=None)"
    assert repr(calibrator) == empty
    calibrator.collect(torch.tensor([0.0, 1.0]))
    assert str(calibrator) == "HistogramCalibrator(calib_bin_edges=[0.000, ..., 1.000](2049))"
    calibrator = calib.MaxCalibrator(8, None, False)
    assert str(calibrator) == "MaxCalibrator(track_amax=False)"
    assert repr(calibrator) == "MaxCalibrator(num_bits=8 axis=None unsigned=False calib_amax=None track_amax=False)"
    tracking = calib.MaxCalibrator(4, (0,), True, track_amax=True)
    assert repr(tracking).endswith("calib_amax=None track_amax=True amaxs=[])")


@pytest.mark.parametrize(
    ("axis", "reduced", "shape"),
    [
        (None, (0, 1, 2), ()),
        (0, (1, 2), (2, 1, 1)),
        ((0, 2), (1,), (2, 1, 4)),
        (-1, (0, 1), (1, 1, 4)),
        ([1], (0, 2), (1, 3, 1)),
    ],
)
def test_max_is_the_largest_of_all_batches(axis, reduced, shape):
    calibrator = calib.MaxCalibrator(8, axis, False, track_amax=True)
    assert calibrator.compute_amax() is None
    batches = [torch.randn(2, 3, 4) for _ in range(3)]
    for x in batches:
        calibrator.collect(x)
    wanted = torch.stack(batches).abs().amax([0, *(i + 1 for i in reduced)], keepdim=True)[0].reshape(shape)
    amax = calibrator.compute_amax()
    assert torch.equal(amax, wanted)
    assert len(calibrator.amaxs) == 3
    np.testing.assert_array_equal(np.max(calibrator.amaxs, axis=0), wanted.numpy())
    calibrator.collect(0 * batches[0])
    calibrator.compute_amax().zero_()
    assert torch.equal(calibrator.compute_amax(), wanted)
    calibrator.collect(10 * batches[0])
    assert torch.equal(amax, wanted)
    calibrator.reset()
    assert calibrator.compute_amax() is None


def test_max_of_unusual_tensors(caplog):
    calibrator = calib.MaxCalibrator(8, 0, True)
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        calibrator.collect(torch.tensor([[-3.0], [torch.nan]]))
        calibrator.collect(torch.tensor([[1.0], [1.0]]))
    assert "negative values" in caplog.text
    assert "NaN" in caplog.text
    amax = calibrator.compute_amax()
    assert amax[0] == 3
    assert amax[1].isnan()
    assert not amax.is_inference()
    with pytest.raises(RuntimeError, match=r"amax shape changed! It was \[2, 1\] and is \[3, 1\]"):
        calibrator.collect(torch.rand(3, 4))
    with pytest.raises(RuntimeError, match="no largest magnitude"):
        calibrator.collect(torch.rand(2, 0))
    with pytest.raises(IndexError, match="axis 2 is out of range"):
        calib.MaxCalibrator(8, 2, False).collect(torch.rand(2, 3))


def weighted(layer, num_bits=8):
    """A layer with what calibrate_weights looks for."""
    layer.weight_quantizer = nn.Identity()
    layer.weight_quantizer.num_bits, layer.weight_quantizer.unsigned = num_bits, False
    return layer


@pytest.mark.parametrize("perchannel", [True, False])
@pytest.mark.parametrize("method", ["max", "percentile", "mse"])
def test_calibrate_weights(method, perchannel):
    layers = weighted(nn.Conv2d(3, 4, 3), 4), weighted(nn.Linear(30, 7)), weighted(nn.ConvTranspose2d(3, 5, 2))
    modules = nn.ModuleList([*layers, nn.Linear(2, 2)])
    with torch.no_grad():
        modules[1].weight[2] = 0
    calib.calibrate_weights(modules, method, perchannel, percentile=95, num_bins=300)
    for module, axis in zip(modules, (0, 0, 1), strict=False):
        magnitudes = module.weight.detach().abs().numpy()
        channels = np.moveaxis(magnitudes, axis, 0) if perchannel else magnitudes[None]
        wanted = []
        for channel in channels:
            counts, edges = np.histogram(channel, bins=300, range=(0, channel.max()))
            if channel.max() == 0:
                wanted.append(0.0)
            elif method == "max":
                wanted.append(channel.max())
            elif method == "mse":
                wanted.append(mse_by_loops(counts, edges, module.weight_quantizer.num_bits, False))
            else:
                wanted.append(percentile_by_rules(counts, edges, 95))
        amax = module.weight_quantizer.amax
        shape = [len(wanted) if i == axis else 1 for i in range(magnitudes.ndim)] if perchannel else []
        assert list(amax.shape) == shape
        np.testing.assert_array_equal(amax.ravel(), np.float32(wanted))
    with pytest.raises(TypeError, match="Unsupported calibration method entropy"):
        calib.calibrate_weights(modules, "entropy")


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

    monkeypatch.setattr(calib, "fake_quantize", counted)
    mse_amax(bell(bins), edges_of(bins, 1.0), 8, False)
    assert sum(rows) < min(bins - 28, 500)


@pytest.mark.parametrize(("bins", "num_bits", "confusing"), [(500, 8, 0), (1023, 2, 1), (2048, 4, 0)])
def test_all_that_sums_in_float32_may_confuse_are_kept(bins, num_bits, confusing, monkeypatch):
    nearly_least, found, several = calib._nearly_least, [], 0
    monkeypatch.setattr(calib, "_nearly_least", lambda *given: found.append(nearly_least(*given)) or found[-1])
    for name in ("bell", "flat", "gaps", "sparse", "comb", "outlier"):
        counts, ends = HISTOGRAMS[name](bins), torch.from_numpy(edges_of(bins, 1.0))
        mse_amax(counts, ends.numpy(), num_bits, False)
        centers, weights = (ends[1:] + ends[:-1]) / 2, torch.from_numpy(counts).double()
        amax = centers[128:]
        y = fake_quantize(centers.expand(len(amax), -1), amax[:, None], integer_format(num_bits))
        errors = (y.double() - centers).square() @ weights
        # A third of what 128 additions and five more roundings can move.
        alike = (errors <= errors.min() * (1 + 2.0**-18)).nonzero()[:, 0].tolist()
        several += len(alike) > 1
        assert set(alike) <= set(found[-1].tolist())
    assert several >= confusing, "nothing is there to be confused"


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
