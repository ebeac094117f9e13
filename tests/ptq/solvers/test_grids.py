"""Which codes the search for ranges reaches: the largest value of float4 blocks, and the lowest code of integers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.ops import library
from fakequant.ptq.solvers.problem import WeightGrid
from tests.support.bits import assert_same_bits


def model_of(weight: Tensor, rule: str) -> nn.Sequential:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data = weight
    return fq.prepare(nn.Sequential(layer), fq.Config("test", (fq.Rule(weight=fq.TensorConfig(rule)),)))


def inputs(features: int) -> list[Tensor]:
    return [torch.randn(64, features, generator=torch.Generator().manual_seed(0))]


def codes(model: nn.Sequential) -> Tensor:
    """The weight in steps of its scales [out, groups, columns of a group]."""
    layer = model[0]
    scale = layer.weight_quantizer.qparams(layer.weight).scale
    return (layer.weight.detach().unflatten(1, (scale.shape[1], -1)) / scale[..., None]).round(decimals=4)


NVFP4 = "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor"
FOUR = [10.0] + [7.5, -5.0, 3.75] * 5
"""Steps of 2.5 hold it: 4, 3, 2 and 1.5 of them. With 10 as the code 6, 7.5 lies between two codes."""
SIX = [6.0] + [4.0, -3.0, 2.0] * 5


def test_a_block_of_nvfp4_takes_4_or_6_as_its_largest_value() -> None:
    weight = torch.tensor([FOUR + SIX, SIX + FOUR])
    model = model_of(weight.clone(), NVFP4)
    assert codes_of_nearest(model) == [[6.0, 6.0], [6.0, 6.0]]
    found = fq.ptq.improve(model, inputs(32), ["ranges"], progress=False)
    assert codes(model).abs().amax(-1).tolist() == [[4.0, 6.0], [6.0, 4.0]]
    assert found.layers[0].after < 0.1 * found.layers[0].before


def codes_of_nearest(model: nn.Sequential) -> list[list[float]]:
    layer = model[0]
    quantizer = layer.weight_quantizer
    scale = quantizer.qparams(layer.weight).scale
    values = quantizer(layer.weight).detach().unflatten(1, (scale.shape[1], -1))
    return (values / scale[..., None]).abs().amax(-1).round(decimals=4).tolist()


@pytest.mark.parametrize("steps", [["ranges"], ["ranges", "gptq"], "best"])
def test_int4_uses_the_code_minus_8(steps: str | list[str], tmp_path: Path) -> None:
    weight = torch.arange(-8.0, 8.0).repeat(4, 1)
    weight[1] *= 0.5
    model = model_of(weight.clone(), "int4 per_channel(0)")
    x = inputs(16)
    found = fq.ptq.improve(model, x, steps, progress=False)
    assert codes(model).amin((1, 2)).tolist() == [-8.0] * 4
    assert found.layers[0].after < 0.2 * found.layers[0].before
    y = model(x[0])
    assert_same_bits(fq.load(nn.Sequential(nn.Linear(16, 4)), fq.save(model, tmp_path / "saved"))(x[0]), y)
    pytest.importorskip("onnxruntime")
    fq.export_onnx(model, x[0], tmp_path / "model.onnx")
    assert fq.verify_onnx(tmp_path / "model.onnx", model, x).exact


def test_int4_narrow_has_no_code_minus_8() -> None:
    model = model_of(torch.arange(-8.0, 8.0).repeat(4, 1), "int4_narrow per_channel(0)")
    fq.ptq.improve(model, inputs(16), progress=False)
    assert codes(model).amin() >= -7.0


@pytest.mark.parametrize("preset", ["Q4_K", "Q2_K", "Q6_K", "Q4_0", "IQ4_NL", "IQ4_XS", "Q8_0", "TQ2_0"])
def test_a_grid_has_the_values_of_the_operator_for_negative_and_zero_scales_and_offsets(preset: str) -> None:
    spec = fq.presets.presets()[f"GGUF_{preset}"].rules[0].weight.spec  # type: ignore[union-attr]
    weight = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    weight[2, :256] = 0.0
    weight[3, 64:96] *= 1e-9
    params = fq.choose_qparams(weight, spec)
    assert not params.scale.all()
    grid, wanted = WeightGrid(spec, params, weight.shape), library.fake_quantize(weight, params, spec)
    assert torch.equal(grid.nearest(weight), wanted)
    assert torch.equal(torch.stack([grid.column(place, weight[:, place]) for place in range(512)], 1), wanted)
    assert torch.equal(grid.rows(slice(2, 4)).nearest(weight[2:4]), wanted[2:4])
