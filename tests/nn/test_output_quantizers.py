"""Quantizers of results, which any layer can have by a rule."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from tests.support.bits import assert_same_bits
from tests.support.copies import assert_compiled_alike, each_copier

X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))
OUTPUTS = fq.Config("outputs", fq.Rule("*", input="int8", weight="int8 per_channel(0)", output="int8"))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)).eval()


def quantized(config: Any = OUTPUTS) -> nn.Module:
    model = fq.prepare(network(), config)
    fq.calibrate(model, [X], "max")
    return model


@pytest.fixture(scope="module")
def made() -> nn.Module:
    torch.set_num_threads(1)
    return quantized()


def test_results_are_those_of_the_layer_quantized(made: nn.Module) -> None:
    without = quantized("int8")
    layer, plain = made[0], without[0]
    assert layer.output_quantizer is layer._output_quantizer
    assert_same_bits(layer(X), layer.output_quantizer(plain(X)))
    assert layer.output_quantizer.scale.item() == (plain.float_class.forward(network()[0], X).abs().max() / 127).item()


def test_without_a_rule_there_is_none() -> None:
    assert all(layer.output_quantizer is None for layer in quantized("int8") if hasattr(layer, "output_quantizer"))


def test_an_output_quantizer_can_be_put_there_and_taken_away() -> None:
    model = quantized("int8")
    before = model(X)
    model[4].output_quantizer = fq.nn.Quantizer("int4", dynamic=True)
    assert_same_bits(model(X), fq.fake_quantize(before, "int4"))
    model[4].output_quantizer = None
    assert_same_bits(model(X), before)


def test_blocks_lie_along_channels() -> None:
    config = fq.Config("blocks", fq.Rule("*", layers=("Conv2d", "Linear"), output="int8 per_block(-1:2,pad)"))
    scales = [layer.output_quantizer.scale.shape for layer in quantized(config) if hasattr(layer, "output_quantizer")]
    assert scales[0][1] == 2
    assert scales[-1][-1] == 3


def test_first_of_several_results() -> None:
    config = fq.Config("outputs", fq.Rule("*", weight="int8", output="int8"))
    layer = fq.prepare(nn.MultiheadAttention(8, 2), config)
    x = torch.randn(3, 2, 8)
    fq.calibrate(layer, [(x, x, x)], "max")
    y, weights = layer(x, x, x)
    assert_same_bits(y, layer.output_quantizer(y))
    assert weights.shape == (2, 3, 3)


@each_copier
def test_copies(made: nn.Module, copier: Any) -> None:
    assert_same_bits(copier(made)(X), made(X))


def test_checkpoints(made: nn.Module, tmp_path: Path) -> None:
    again = fq.load(network(), fq.save(made, tmp_path))
    assert_same_bits(again(X), made(X))
    assert_same_bits(again[4].output_quantizer.scale, made[4].output_quantizer.scale)


def test_rules_are_stored() -> None:
    assert fq.Config.from_dict(OUTPUTS.to_dict()) == OUTPUTS
    assert not fq.Rule("*", output="int8").leaves_in_float


def test_summary(made: nn.Module) -> None:
    lines = str(fq.summary(made)).splitlines()
    assert lines[0].split() == ["layer", "type", "input", "weight", "output", "execution", "state"]
    assert "output" not in str(fq.summary(quantized("int8")))


def test_every_quantizer_is_measured(made: nn.Module) -> None:
    assert "0._output_quantizer" in fq.layer_sqnr(made, [X])
    assert len(fq.sensitivity(made, [X])) == 3


def test_training_moves_learned_scales() -> None:
    model = quantized()
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    model(X).square().sum().backward()
    assert model[0].output_quantizer.learned.step.grad.abs() > 0


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs(made: nn.Module, strict: bool) -> None:
    with torch.no_grad():
        assert_same_bits(torch.export.export(made, (X,), strict=strict).module()(X), made(X))


def test_compiled(made: nn.Module) -> None:
    assert_compiled_alike(made, X)


def test_onnx(made: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    record = fq.export_onnx(made, X, tmp_path / "model.onnx")
    assert "0._output_quantizer" in [quantizer.quantizer for quantizer in record.quantizers]
    assert fq.verify_onnx(tmp_path / "model.onnx", made)


def test_graphs(made: nn.Module) -> None:
    with torch.no_grad():
        assert_same_bits(fq.ir.capture(made, X).run(X), made(X))


def test_a_symbolic_trace_quantizes_once(made: nn.Module) -> None:
    class Counts(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Counts.calls += 1
            return x

    model = quantized()
    traced = torch.fx.symbolic_trace(model)
    model[4].output_quantizer = Counts()
    traced(X)
    assert Counts.calls == 1
