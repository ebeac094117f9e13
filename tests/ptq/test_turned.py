"""Layers of other kinds: transposed convolutions, Conv1D of transformers, and timm's that pad themselves."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from tests.support.bits import assert_same_bits
from tests.support.vision import import_torchvision
from tests.support.weight_specs import WEIGHTS


def transposed() -> nn.Sequential:
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(6, 8, 3, 2, padding=1, output_padding=1)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), up, nn.ReLU(), nn.ConvTranspose2d(8, 3, 2, bias=False))


def conv1d() -> nn.Sequential:
    layers = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    return nn.Sequential(layers.Conv1D(24, 12), nn.GELU(), layers.Conv1D(5, 24))


def batches(kind: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind == "conv1d":
        mix = torch.randn(12, 12, generator=generator)
        return [torch.randn(4, 16, 12, generator=generator) @ mix for _ in range(4)]
    return [torch.randn(8, 3, 8, 8, generator=generator).relu() for _ in range(4)]


NETS = {"transposed": transposed, "conv1d": conv1d}
TURNED = {"transposed": ["2", "4"], "conv1d": ["0", "2"]}


def improved(kind: str, weight: object, steps: str) -> tuple[nn.Sequential, fq.ptq.Improvement, Tensor]:
    """A model with chosen weights, what was chosen, and the output by rounding to nearest."""
    model = fq.prepare(NETS[kind](), fq.Config("test", (fq.Rule(weight=weight, input="int8"),)))  # type: ignore[arg-type]
    fq.calibrate(model, batches(kind), progress=False)
    with torch.no_grad():
        nearest = model(batches(kind)[0])
    return model, fq.ptq.improve(model, batches(kind), steps, judge=[], progress=False), nearest


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("kind", NETS)
def test_turned_weights_lose_less_and_keep_their_codes(kind: str, weight: str, tmp_path: Path) -> None:
    model, found, nearest = improved(kind, WEIGHTS[weight], "best")
    rows = {row.layer: row for row in found.layers}
    for name in TURNED[kind]:
        assert not rows[name].note
        assert rows[name].after <= rows[name].before
        layer = model.get_submodule(name)
        assert_same_bits(layer.weight_quantizer(layer.weight), layer.weight)
    x = batches(kind)[0]
    with torch.no_grad():
        wanted, y = NETS[kind]()(x), model(x)
        assert (y - wanted).square().sum() < (nearest - wanted).square().sum()
        assert_same_bits(copy.deepcopy(model)(x), y)
        assert_same_bits(fq.load(NETS[kind](), fq.save(model, tmp_path / "saved"))(x), y)


@pytest.mark.parametrize("kind", NETS)
def test_the_loss_of_a_turned_weight_is_that_of_its_output(kind: str) -> None:
    """With float inputs and without a drift, the loss is the error of the first turned layer's output."""
    model = nn.Sequential(NETS[kind]()[int(TURNED[kind][0])])
    channels = 12 if kind == "conv1d" else 6
    x = torch.randn((64, 16, channels) if kind == "conv1d" else (64, channels, 5, 5))
    quantized = fq.prepare(copy.deepcopy(model), fq.Config("test", (fq.Rule(weight=WEIGHTS["int4 channel"]),)))
    with torch.no_grad():
        wanted, nearest = model(x), quantized(x)
        found = fq.ptq.improve(quantized, [x], ["gptq"], progress=False).layers[0]
        chosen = quantized(x)
    assert found.after < found.before
    ratio = (chosen - wanted).square().sum() / (nearest - wanted).square().sum()
    torch.testing.assert_close(float(ratio), found.after / found.before, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("kind", NETS)
def test_a_file_holds_the_codes_of_turned_weights(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model, _, _ = improved(kind, "int4 per_channel(0)", "fast")
    fq.export_onnx(model, batches(kind)[0], tmp_path / "model.onnx")
    assert fq.verify_onnx(tmp_path / "model.onnx", model, batches(kind)[:1]).exact


@pytest.mark.parametrize("preset", ["INT8", "INT4_WEIGHT_ONLY"])
def test_layers_that_pad_themselves(preset: str) -> None:
    import_torchvision()
    same = pytest.importorskip("timm.layers").Conv2dSame
    torch.manual_seed(0)
    net = nn.Sequential(same(3, 8, 3, stride=2), nn.ReLU(), same(8, 8, 3, groups=8), same(8, 4, 4, dilation=2))
    given = [torch.randn(4, 3, 11, 9) for _ in range(4)]
    for steps in ("fast", "best"):
        model = fq.prepare(copy.deepcopy(net), preset)
        fq.calibrate(model, given, progress=False)
        found = fq.ptq.improve(model, given, steps, judge=[], progress=False)
        assert found.after < found.before
    assert set(fq.ptq.scores(net, given, [preset], progress=False).layers) == {"0", "2", "3"}
    assert not any(row.failed for row in fq.compare(net, given, [preset]).rows)
    for layer, x in ((net[0], given[0]), (net[2], net[:2](given[0]))):
        quantized = fq.prepare(nn.Sequential(copy.deepcopy(layer)), preset)[0]
        rows = quantized.products()[0].rows(x)
        products = torch.einsum("grc,goc->gro", rows, layer.weight.reshape(len(rows), -1, rows.shape[-1]))
        wanted = (layer(x) - layer.bias.view(-1, 1, 1)).movedim(1, -1).reshape(rows.shape[1], -1)
        torch.testing.assert_close(products.movedim(0, 1).reshape(wanted.shape), wanted, atol=1e-5, rtol=1e-5)
