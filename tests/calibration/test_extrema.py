import pytest
import torch

from fakequant import PerBlock, PerChannel, PerTensor, PerToken, QuantSpec
from fakequant.calibration import MaxCalibrator
from fakequant.calibration.extrema import ExtremaCalibrator, read_batch
from fakequant.numerics.qparams import measure
from tests.support.bits import assert_same_bits

GRANULARITIES = [PerTensor(), PerChannel(0), PerChannel(2), PerChannel(0, 2), PerToken(), PerBlock({0: 2, -1: 3})]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_equals_the_range_of_all_batches(granularity, dtype):
    x = torch.randn(4, 3, 5, 6).to(dtype)
    calibrator = MaxCalibrator(QuantSpec("int8", granularity))
    calibrator.observe(x)
    calibrator.observe(x * 2)
    expected = measure(x * 2, granularity)
    assert_same_bits(calibrator.compute_range().lo, expected.lo)
    assert_same_bits(calibrator.compute_range().hi, expected.hi)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_elements_are_ordered_by_group(granularity):
    x = torch.randn(4, 3, 5, 6)
    batch = read_batch(x, granularity)
    shape = granularity.group_shape(x.shape)
    assert batch.values.shape == (torch.Size(shape).numel(), x.numel() // torch.Size(shape).numel())
    assert_same_bits(batch.values.amax(1).clamp(min=0).reshape(shape), measure(x, granularity).hi)


def test_dense_tensors_are_not_copied():
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    batch = read_batch(x, PerTensor())
    assert batch.values.data_ptr() == x.data_ptr()


def test_zero_has_no_sign():
    for order in ([-0.0, 0.0], [0.0, -0.0]):
        calibrator = MaxCalibrator("int8")
        for value in order:
            calibrator.observe(torch.tensor([value]))
        found = calibrator.compute_range()
        assert_same_bits(torch.stack(found), torch.zeros(2, 1))


def test_a_subclass_sees_every_batch():
    class Maxima(ExtremaCalibrator):
        def __init__(self, spec):
            super().__init__(spec)
            self.maxima = []

        def _count(self, batch):
            self.maxima.append(batch.range.hi.item())

        _add = _count

        def compute_range(self):
            return self._seen

    calibrator = Maxima("int8")
    for largest in (4.0, 1.0, 2.0, 100.0, 3.0):
        calibrator.observe(torch.tensor([0.0, largest]))
    assert calibrator.maxima == [4.0, 1.0, 2.0, 100.0, 3.0]


@pytest.mark.parametrize("axis", [0, 1])
def test_batches_of_two_axes(axis):
    calibrator = MaxCalibrator(QuantSpec("int8", PerChannel(axis)))
    batches = [torch.randn(4, 4) * factor for factor in (1.0, 3.0, 0.5)]
    for batch in batches:
        calibrator.observe(batch)
    found, wanted = calibrator.compute_range(), measure(torch.cat(batches, 1 - axis), PerChannel(axis))
    assert_same_bits(found.lo, wanted.lo)
    assert_same_bits(found.hi, wanted.hi)
