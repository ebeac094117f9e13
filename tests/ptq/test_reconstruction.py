"""Learning blocks by the error of their outputs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError, ConfigError
from fakequant.nn.quantizer import quantizers
from fakequant.ptq import PRESETS, Preset, find_blocks, reconstruct_block
from tests.support.bits import assert_same_bits, assert_same_state, unchanged
from tests.support.functional_models import Calls

WEIGHTS = {
    "int4 channel": "int4 per_channel(0)",
    "int3 group": "int3 per_block(-1:8,pad)",
    "uint4 asymmetric": fq.QuantSpec("uint4", fq.PerBlock({1: 8}, pad=True), symmetric=False),
    "fp8": "float8_e4m3fn per_channel(0)",
    "mxfp4": "float4_e2m1fn per_block(-1:32,pad) scale=float8_e8m0fnu:floor",
    "nvfp4": "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor",
    "nf4 tiles": "nf4 per_block(0:4,-1:8,pad)",
    "int8 tensor": "int8",
}


class Residual(nn.Module):
    """Writes into its input, returns a tuple, and takes an argument by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 1, bias=False)
        self.norm, self.activation, self.dropout = nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.5)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, int]:
        y = self.dropout(self.second(F.gelu(self.first(self.activation(x)))))
        return self.norm(x + scale * y), 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=0.5)[0]
        return self.head(x.mean((2, 3)))


def batches(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, 6, 6, generator=generator) for _ in range(count)]


def prepared(weight: Any = "int3 per_channel(0)", **fields: Any) -> Net:
    model = fq.prepare(Net().eval(), fq.Config("test", (fq.Rule(weight=weight, **fields),)))
    fq.calibrate(model, batches(), progress=False)
    return model


def block_of(model: Net) -> tuple[nn.Module, list[Any], list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    inputs = [((torch.randn(4, 8, 5, 5, generator=generator),), {"scale": 0.7}) for _ in range(3)]
    block = model.blocks[0]
    with fq.disabled(block), torch.no_grad():
        targets = [block(*copy.deepcopy(args), **kwargs)[0] for args, kwargs in inputs]
    return block, inputs, targets


def error(model: nn.Module) -> float:
    x = torch.cat(batches(8)[4:])
    with torch.no_grad():
        return float((model(x) - Net().eval()(x)).square().mean())


def loss(block: nn.Module, inputs: list[Any], targets: list[Tensor]) -> float:
    with torch.no_grad():
        each = [
            (block(*copy.deepcopy(a), **k)[0] - y).square().mean() for (a, k), y in zip(inputs, targets, strict=True)
        ]
    return float(sum(each) / len(each)) / (sum(float(y.square().mean()) for y in targets) / len(targets))


@pytest.mark.parametrize("preset", ["autoround", "brecq"])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_block_of_any_format_loses_less_and_keeps_its_values(weight: str, preset: str) -> None:
    block, inputs, targets = block_of(prepared(WEIGHTS[weight]))
    kept = copy.deepcopy(inputs)
    before = loss(block, inputs, targets)
    found = reconstruct_block(block, inputs, targets, preset, iterations=60)
    assert found.before == pytest.approx(before, rel=1e-5)
    assert found.after < 0.97 * found.before
    assert loss(block, inputs, targets) == pytest.approx(found.after, rel=1e-5)
    for layer in (block.first, block.second):
        assert_same_bits(layer.weight_quantizer(layer.weight), layer.weight)
        assert layer.weight.grad is None
        assert layer.weight_quantizer.scale is not None
    for (one, _), (other, _) in zip(inputs, kept, strict=True):
        assert_same_bits(one[0], other[0])


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_loses_less_and_gives_the_same_bits_again(preset: str) -> None:
    blocks = []
    for _ in range(2):
        block, inputs, targets = block_of(prepared("int3 per_channel(0)", input="int4"))
        block.train()
        block.dropout.eval()
        block.norm.eval()
        names, bias = list(block.state_dict()), block.first.bias.detach().clone()
        found = reconstruct_block(block, inputs, targets, preset, iterations=64, seed=3)
        assert found.after < 0.97 * found.before
        assert block.training
        held = [name for name in block.state_dict() if not name.endswith(".fixed_codes")]
        assert held == names or not PRESETS[preset].inputs
        assert all(quantizer.learned is None for quantizer in quantizers(block).values())
        assert_same_bits(block.first.bias, bias)
        blocks.append(block)
    assert_same_state(*blocks)


def test_blocks_learn_by_gradients_in_float() -> None:
    blocks = []
    for gradient in (None, fq.GradientConfig("int4 stochastic")):
        block, inputs, targets = block_of(prepared("int3 per_channel(0)", input="int4", gradient=gradient))
        reconstruct_block(block, inputs, targets, iterations=20)
        assert block.first.gradient == gradient
        blocks.append(block)
    assert_same_state(*blocks)


def test_what_nothing_makes_better_stays_as_it_was() -> None:
    block, inputs, _ = block_of(prepared())
    with torch.no_grad():
        reached = [block(*copy.deepcopy(args), **kwargs)[0] for args, kwargs in inputs]
    with unchanged(block):
        found = reconstruct_block(block, inputs, reached, iterations=8)
    assert found.before == found.after == 0


@pytest.mark.parametrize("weight", ["int3 per_channel(0)", WEIGHTS["nvfp4"]])
def test_blocks_of_a_model_lose_less_and_are_saved(weight: str, tmp_path: Path) -> None:
    model = prepared(weight)
    assert list(find_blocks(model)) == ["stem", "blocks.0", "blocks.1", "head"]
    nearest = error(model)
    model.blocks[1].train()
    found = fq.ptq.reconstruct(model, batches(), iterations=64, progress=False)
    assert model.blocks[1].training
    model.eval()
    assert [layer.layer for layer in found.layers] == ["stem", "blocks.0", "blocks.1", "head"]
    assert all(layer.after <= layer.before for layer in found.layers)
    assert error(model) < 0.9 * nearest
    assert not model.blocks[0]._forward_pre_hooks
    y = model(batches()[0])
    assert_same_bits(fq.load(Net().eval(), fq.save(model, tmp_path / "saved"))(batches()[0]), y)


@pytest.mark.parametrize("skip", [[], ["table"]])
def test_shared_weights_and_blocks_that_no_batch_reaches_stay(skip: list[str]) -> None:
    parts = {"table": nn.Embedding(7, 4), "body": nn.Sequential(nn.Linear(4, 4)), "head": nn.Linear(4, 7)}
    parts["head"].weight = parts["table"].weight
    tied = Calls(lambda m, x: m.head(m.body(m.table(x))), **parts, idle=nn.Linear(4, 4))
    model = fq.prepare(tied, "INT4_WEIGHT_ONLY", skip=skip)
    before = model.head.weight.detach().clone()
    found = fq.ptq.reconstruct(model, [torch.arange(7)], iterations=8, progress=False)
    assert {layer.layer: layer.note for layer in found.layers} == {
        **{name: "nothing of it can be learned by this preset" for name in ("table", "head") if name not in skip},
        **{"body.0": "", "idle": "no batch that chooses weights reaches it"},
    }
    assert_same_bits(model.head.weight, before)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"preset": "autoruond"}, ConfigError, r"unknown preset 'autoruond'; did you mean autoround"),
        ({"blocks": ["block.0"]}, ConfigError, r"the model has no module 'block.0' for blocks=; did you mean blocks.0"),
        ({"blocks": ["blocks.0", "blocks.0.first"]}, ConfigError, "the block 'blocks.0.first' is inside of 'blocks.0'"),
        ({"blocks": ["blocks.0.norm"]}, ConfigError, "the block 'blocks.0.norm' holds no quantized weights"),
        ({"blocks": "stem"}, ConfigError, "give a list of names"),
        ({"batches": []}, CalibrationError, "reconstruct needs batches, and got none"),
        ({"batches": torch.ones(3, 3)}, ConfigError, r"give a list: \[tensor\]"),
        ({"model": Net()}, ConfigError, "call fakequant.prepare"),
        ({"model": fq.prepare(Net(), "int8")}, CalibrationError, "call fakequant.calibrate"),
        ({"iterations": 0}, ConfigError, "4 inputs, 4 targets and 0 iterations"),
        (
            {"batches": [*batches(), batches()[0] * torch.nan]},
            CalibrationError,
            r"^stem: the error of the block's output is not",
        ),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(
    change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {"model": prepared("int4"), "batches": batches(), **change}
    with unchanged(given["model"]), pytest.raises(kind, match=message):
        fq.ptq.reconstruct(**given, judge=[], progress=False)


def test_a_preset_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave ranges at 0"):
        Preset("relaxed", ranges=0.5)
