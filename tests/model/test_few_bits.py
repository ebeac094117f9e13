"""Weights in fewer than 4 bits: what is there without a further argument."""

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant import qat

FEW = ["binary per_channel(0)", "int2 per_tensor", "int2_midrise per_block(-1:36,pad)", "int3_narrow per_channel(0)"]


def _error(spec: str, method: str | None) -> float:
    """The squared error of a weight as a share of its energy, by a method of calibration."""
    torch.manual_seed(0)
    weight = torch.randn(8, 72)
    model = nn.Sequential(nn.Linear(72, 8))
    model[0].weight.data.copy_(weight)
    fq.prepare(model, fq.Config((fq.Rule(weight=fq.TensorConfig(spec)),)))
    fq.calibrate(model, weight_method=method)
    error = model[0].quantized_weight().detach() - weight
    return float(error.square().sum() / weight.square().sum())


@pytest.mark.parametrize("spec", FEW)
def test_scales_of_few_bits_are_those_of_the_least_error(spec: str) -> None:
    assert _error(spec, None) == _error(spec, "mse") < 0.7 * _error(spec, "max")


@pytest.mark.parametrize("spec", ["int4 per_channel(0)", "nf4 per_block(-1:36,pad)", "int2 per_channel(0) multiplier"])
def test_others_have_the_largest_magnitude(spec: str) -> None:
    assert _error(spec, None) == _error(spec, "max")


def test_binary_weights_begin_at_their_mean_magnitude() -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(64, 8)), fq.Config((fq.Rule(weight=fq.TensorConfig(FEW[0])),)))
    qat.set_scales(model, qat.Scales.LEARNED)
    expected = model[0].weight.abs().mean(1)
    torch.testing.assert_close(model[0]._weight_quantizer.learned.step.flatten(), expected)


def test_the_recipe_trains_all_parameters() -> None:
    torch.manual_seed(0)
    rule = fq.Rule(input=fq.TensorConfig("uint2"), weight=fq.TensorConfig("int2_midrise per_channel(0)"))
    model = fq.prepare(nn.Sequential(nn.Linear(4, 3)), fq.Config((rule,)))
    batches = [(torch.rand(8, 4), torch.arange(8) % 3) for _ in range(4)]
    fq.calibrate(model, batches)
    before = {name: value.clone() for name, value in model.named_parameters()}
    history = qat.finetune(model, batches, nn.functional.cross_entropy, *qat.few_bits(original_epochs=2))
    assert len(history) == 12
    assert history[-1] < history[0]
    after = dict(model.named_parameters())
    assert not any(torch.equal(after[name], value) for name, value in before.items())
    assert {"0._weight_quantizer.lsq.step", "0._input_quantizer.lsq.step"} <= set(after)
