"""One pass over the batches serves every method."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.calibration import make_calibrator
from fakequant.nn import quantizers
from tests.support.bits import assert_same_bits

HISTOGRAMS = ["percentile", "entropy", "mse"]


def prepared():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return fq.prepare(model, "INT8"), [torch.randn(32, 8) ** 3 for _ in range(4)]


@pytest.mark.parametrize("first", HISTOGRAMS)
@pytest.mark.parametrize("then", ["max", *HISTOGRAMS])
def test_gives_the_ranges_of_a_pass_of_its_own(first, then):
    model, batches = prepared()
    other = copy.deepcopy(model)
    options: dict[str, Any] = {"percentile": 97.0} if then == "percentile" else {}
    used = fq.calibrate(model, batches, first, progress=False)
    before = {name: calibrator.state_dict() for name, calibrator in used.items()}
    adopted = fq.recalibrate(model, used, then, **options)
    fq.calibrate(other, batches, then, progress=False, **options)
    assert {calibrator.method for calibrator in adopted.values()} == {then}
    for got, wanted in zip(quantizers(model).values(), quantizers(other).values(), strict=True):
        assert got.scale is not None
        assert wanted.scale is not None
        assert_same_bits(got.scale, wanted.scale)
    for name, calibrator in used.items():
        for key, value in calibrator.state_dict().items():
            assert_same_bits(value, before[name][key])


def test_what_was_not_collected_is_refused_and_nothing_changed():
    model, batches = prepared()
    used = fq.calibrate(model, batches, "max", progress=False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(fq.FakeQuantError, match=r"0\._input_quantizer.*EntropyCalibrator.*MaxCalibrator.*lo, hi"):
        fq.recalibrate(model, used, "entropy")
    with pytest.raises(fq.FakeQuantError, match="nothing of the kind"):
        fq.recalibrate(model, {"nothing of the kind": next(iter(used.values()))}, "max")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(("first", "then"), [("max", "moving_average"), ("moving_average", "max")])
def test_an_average_and_a_range_seen_are_not_taken_for_each_other(first, then):
    model, batches = prepared()
    used = fq.calibrate(model, batches, first, progress=False)
    with pytest.raises(fq.FakeQuantError, match=r"0\._input_quantizer.*cannot use what"):
        fq.recalibrate(model, used, then)


def test_another_specification_or_resolution_is_refused():
    x = torch.randn(100)
    entropy = make_calibrator("entropy", "int8", num_bins=1024)
    entropy.observe(x)
    with pytest.raises(fq.FakeQuantError, match="uint8"):
        make_calibrator("mse", "uint8").load_from(entropy)
    with pytest.raises(fq.FakeQuantError, match="num_bins"):
        make_calibrator("mse", "int8").load_from(entropy)
    adopted = make_calibrator("mse", "int8", num_bins=1024)
    adopted.load_from(entropy)
    adopted.observe(3 * x)
    entropy.observe(3 * x)
    assert_same_bits(adopted.state_dict()["counts"], entropy.state_dict()["counts"])
    adopted.load_from(make_calibrator("percentile", "int8"))
    assert not adopted.observed


@pytest.mark.parametrize("then", ["max", *HISTOGRAMS])
def test_goes_on_from_what_the_model_keeps(then):
    model, batches = prepared()
    other = copy.deepcopy(model)
    used = fq.calibrate(model, batches, "entropy", progress=False)
    model = copy.deepcopy(model)  # a copy keeps it too
    fq.recalibrate(model, method=then)
    fq.calibrate(other, batches, "entropy", progress=False)
    fq.recalibrate(other, used, then)
    for got, wanted in zip(quantizers(model).values(), quantizers(other).values(), strict=True):
        assert got.scale is not None
        assert wanted.scale is not None
        assert_same_bits(got.scale, wanted.scale)


def test_only_the_last_calibration_is_kept():
    model, batches = prepared()
    fq.calibrate(model, batches, "entropy", progress=False)
    fq.calibrate(model, [10 * x for x in batches], "max", progress=False)
    assert [q.collected is None for q in quantizers(model).values()] == [False, True, False, True]
    scale = model[0].input_quantizer.scale
    fq.recalibrate(model, method="max")
    assert_same_bits(model[0].input_quantizer.scale, scale)
    with pytest.raises(fq.FakeQuantError, match=r"0\._input.*Run fakequant.calibrate\(model, batches, 'entropy'\)"):
        fq.recalibrate(model, method="entropy")


def test_what_is_not_kept_is_asked_for(tmp_path):
    model, batches = prepared()
    with pytest.raises(
        fq.FakeQuantError, match=r"2 of 2 input quantizers have no counts of calibrate.* run fakequant.calibrate"
    ):
        fq.recalibrate(model, method="max")
    fq.calibrate(model, batches, "entropy", progress=False)
    restored = fq.load(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), fq.save(model, tmp_path))
    with pytest.raises(
        fq.FakeQuantError, match=r"the first is 0\._input_quantizer \(a checkpoint does not hold counts"
    ):
        fq.recalibrate(restored, method="max")
    with pytest.raises(fq.FakeQuantError, match=r"write recalibrate\(model, method='max'\)"):
        fq.recalibrate(model, "max")
    for wrong in (batches, torch.ones(2, 8), iter(batches)):
        with pytest.raises(fq.FakeQuantError, match=r"a mapping of names, got .* call calibrate\(model, batches\)"):
            fq.recalibrate(model, wrong)


def test_ranges_are_on_the_device_to_which_the_model_moved():
    model, batches = prepared()
    fq.calibrate(model, batches, "max", progress=False)
    model.to("meta")
    fq.recalibrate(model, method="max")
    assert {q.scale.device.type for q in quantizers(model).values() if q.scale is not None} == {"meta"}
