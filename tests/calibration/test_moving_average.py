"""The moving average against torch.ao's observers, bit for bit."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.ao.quantization.observer import MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver

import fakequant as fq
from fakequant.calibration import MovingAverageCalibrator, make_calibrator
from fakequant.errors import CalibrationError, ConfigError
from tests.support.bits import assert_same_bits

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def stream(dtype: torch.dtype) -> list[torch.Tensor]:
    """Batches [n, 5, 7] whose ranges rise, fall, leave out 0.0 and touch it; some without elements."""
    torch.manual_seed(0)
    batches = [torch.randn(4, 5, 7) * width for width in (1.0, 30.0, 0.01, 1e-30)]
    batches += [torch.rand(2, 5, 7) + 3, -torch.rand(3, 5, 7) - 2, torch.empty(0, 5, 7), torch.randn(1, 5, 7).relu()]
    batches += [torch.zeros(2, 5, 7), torch.randn(9, 7, 5).transpose(1, 2)]
    return [batch.to(dtype) for batch in batches * 3]


@pytest.mark.parametrize("first", range(10))
@pytest.mark.parametrize("constant", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_per_tensor_equals_torch_ao(dtype, constant, first):
    ours = MovingAverageCalibrator("int8 per_tensor asymmetric", averaging_constant=constant)
    theirs = MovingAverageMinMaxObserver(averaging_constant=constant, dtype=torch.qint8)
    for batch in stream(dtype)[first:]:
        ours.observe(batch)
        theirs(batch)
        if ours.observed:
            average = ours.state_dict()
            # torch.ao keeps the sign of whichever zero it met; a range seen here has +0.0 alone.
            assert_same_bits(average["average_lo"].reshape(()), theirs.min_val + 0.0, "lo")
            assert_same_bits(average["average_hi"].reshape(()), theirs.max_val + 0.0, "hi")
    found = ours.compute_range()
    assert_same_bits(found.lo.reshape(()), theirs.min_val.clamp(max=0.0) + 0.0)
    assert_same_bits(found.hi.reshape(()), theirs.max_val.clamp(min=0.0) + 0.0)


@pytest.mark.parametrize("first", range(0, 10, 3))
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("constant", [0.01, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_per_channel_equals_torch_ao(dtype, constant, axis, first):
    ours = MovingAverageCalibrator(f"int8 per_channel({axis})", averaging_constant=constant)
    theirs = MovingAveragePerChannelMinMaxObserver(ch_axis=axis, averaging_constant=constant, dtype=torch.qint8)
    for batch in stream(dtype)[first:]:
        if batch.numel() == 0:
            continue
        batch = batch[:1].expand(4, 5, 7) if axis == 0 else batch  # as many channels in every batch
        ours.observe(batch)
        theirs(batch)
        average = ours.state_dict()
        assert_same_bits(average["average_lo"].reshape(-1), theirs.min_val + 0.0, "lo")
        assert_same_bits(average["average_hi"].reshape(-1), theirs.max_val + 0.0, "hi")


def test_the_default_constant_is_that_of_torch_ao():
    assert MovingAverageCalibrator("int8").averaging_constant == MovingAverageMinMaxObserver().averaging_constant


@pytest.mark.parametrize("constant", [0, -0.1, 1.1, float("nan")])
def test_constants_out_of_bounds(constant):
    with pytest.raises(ConfigError, match=r"averaging_constant .*expected a number above 0 and at most 1"):
        make_calibrator("moving_average", "int8", averaging_constant=constant)


def test_a_refused_batch_changes_nothing():
    calibrator = MovingAverageCalibrator("int8 per_channel(1)")
    calibrator.observe(torch.tensor([[1.0, -2.0]]))
    before = calibrator.state_dict()
    with pytest.raises(CalibrationError, match="1 NaN and 0 inf"):
        calibrator.observe(torch.tensor([[5.0, float("nan")]]))
    for name, value in calibrator.state_dict().items():
        assert_same_bits(value, before[name], name)


def test_ends_near_the_largest_number_stay_finite():
    calibrator, largest = MovingAverageCalibrator("int8", averaging_constant=0.5), torch.finfo(torch.float32).max
    calibrator.observe(torch.tensor([-largest, -largest]))
    calibrator.observe(torch.tensor([largest, largest]))
    assert_same_bits(torch.stack(calibrator.compute_range()), torch.zeros(2, 1))
    calibrator.observe(torch.tensor([largest]))
    assert calibrator.compute_range().hi == largest / 2


def test_float64_batches_are_averaged_in_float64():
    calibrator = MovingAverageCalibrator("int8", averaging_constant=0.5)
    for value in (1.0, 1.0 + 2.0**-40):
        calibrator.observe(torch.tensor([value], dtype=torch.float64))
    assert calibrator.compute_range().hi == 1.0 + 2.0**-41


def test_threads_lose_no_batch():
    first, later = torch.tensor([1.0, -1.0]), torch.tensor([5.0, -3.0])
    one, several = MovingAverageCalibrator("int8"), MovingAverageCalibrator("int8")
    for calibrator in (one, several):
        calibrator.observe(first)
    for _ in range(200):
        one.observe(later)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(several.observe, later) for _ in range(200)]:
            done.result()
    assert_same_bits(torch.stack(several.compute_range()), torch.stack(one.compute_range()))


def test_calibrate_finds_the_scales_of_the_average():
    model, batches = fq.prepare(nn.Sequential(nn.Linear(8, 4)), "INT8"), [torch.randn(16, 8) for _ in range(5)]
    theirs = MovingAverageMinMaxObserver(averaging_constant=0.1, dtype=torch.qint8)
    used = fq.calibrate(model, batches, "moving_average", averaging_constant=0.1, progress=False)
    for batch in batches:
        theirs(batch)
    amax = torch.maximum(-theirs.min_val, theirs.max_val)
    quantizer = model[0]._input_quantizer
    assert used["0._input_quantizer"].method == "moving_average"
    assert_same_bits(quantizer.scale.reshape(()), (amax / quantizer.spec.format.bound).reshape(()))


def test_weights_can_be_calibrated_by_it_too():
    model = fq.prepare(nn.Sequential(nn.Linear(8, 4)), "INT8")
    other = fq.prepare(nn.Sequential(nn.Linear(8, 4)), "INT8")
    other.load_state_dict(model.state_dict())
    for network, method in ((model, "moving_average"), (other, "max")):
        fq.calibrate(network, [torch.ones(2, 8)] * 3, weight_method=method, progress=False)
    assert_same_bits(model[0]._weight_quantizer.scale, other[0]._weight_quantizer.scale)
