"""Layers calibrated on what they get from earlier ones that are quantized already."""

import copy

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import CalibrationError
from fakequant.nn import Mode, quantizers
from tests.support.bits import assert_same_bits


def prepared(execution="auto"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 4))
    return fq.set_execution(fq.prepare(model, "INT4"), execution), [torch.randn(32, 8) for _ in range(3)]


@pytest.mark.parametrize("execution", ["simulate", "auto"])
def test_later_layers_see_the_quantized_outputs_of_earlier_ones(execution):
    model, batches = prepared(execution)
    in_float = copy.deepcopy(model)
    fq.calibrate(in_float, batches, "max", progress=False)
    for name in ("0", "2", "4"):
        with torch.no_grad():
            seen = torch.cat([model[: int(name)](x) for x in batches])
        used = fq.calibrate(model, batches, "max", pattern=name, progress=False)
        assert set(used) == {f"{name}._input_quantizer", f"{name}._weight_quantizer"}
        scale = model[int(name)]._input_quantizer.scale
        assert_same_bits(scale, fq.choose_qparams(seen, model[int(name)]._input_quantizer.spec).scale)
        assert torch.equal(scale, in_float[int(name)]._input_quantizer.scale) is (name == "0")
    assert all(q.mode is Mode.QUANTIZE for q in quantizers(model).values())


def test_a_layer_that_is_off_stays_off():
    model, batches = prepared()
    fq.calibrate(model, batches, "max", pattern="0", progress=False)
    model[0]._input_quantizer.mode = model[0]._weight_quantizer.mode = Mode.OFF
    with torch.no_grad():
        seen = torch.cat([model[:2](x) for x in batches])
    fq.calibrate(model, batches, "max", pattern="2", progress=False)
    assert_same_bits(model[2]._input_quantizer.scale, fq.choose_qparams(seen, model[2]._input_quantizer.spec).scale)


def test_layers_without_ranges_are_in_float_meanwhile():
    model, batches = prepared()
    with fq.disabled(model), torch.no_grad():
        seen = torch.cat([model[:4](x) for x in batches])
    fq.calibrate(model, batches, "max", pattern="4", progress=False)
    assert_same_bits(model[4]._input_quantizer.scale, fq.choose_qparams(seen, model[4]._input_quantizer.spec).scale)
    with pytest.raises(CalibrationError, match="has not been calibrated"):
        model(batches[0])
