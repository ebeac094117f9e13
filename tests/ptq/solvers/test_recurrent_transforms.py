"""Transforms of the input of recurrent layers: the same values as a layer of transformed inputs and weights has."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import fakequant as fq
from fakequant.model.weights import disabled
from fakequant.nn.transforms import make_transform
from tests.support.bits import assert_same_bits

IN, HIDDEN, N, STEPS = 16, 6, 7, 5
LARGE = torch.logspace(0, 3, IN)
"""Channels from 1 to 1,000: one scale for all of them rounds most of them to zero."""
LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "gru, both directions": (nn.GRU, {"bidirectional": True, "num_layers": 2}),
    "rnn": (nn.RNN, {"batch_first": True, "num_layers": 2}),
    "lstm cell": (nn.LSTMCell, {}),
    "gru cell": (nn.GRUCell, {}),
}
KINDS = [("channel_scale", {}), ("block_hadamard", {"block": 8}), ("scaled_hadamard", {"block": 16})]


class Model(nn.Module):
    """A recurrent layer or cell, of which the outputs alone are returned, of a packed sequence too."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        cls, options = LAYERS[name]
        self.own = cls(IN, HIDDEN, **options)
        self.head = nn.Linear(HIDDEN * (2 if options.get("bidirectional") else 1), 4)
        self.packs = False
        with torch.no_grad():
            for parameter, value in self.own.named_parameters():
                if parameter.startswith("weight_ih") and value.shape[1] == IN:
                    value /= LARGE

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.own, nn.RNNCellBase):
            y = self.own(x[0])
            return self.head(y[0] if isinstance(y, tuple) else y)
        y = self.own(pack_sequence([*x.unbind(1)], enforce_sorted=False) if self.packs else x)[0]
        return self.head(y.data if isinstance(y, PackedSequence) else y)


def batches(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(STEPS, N, IN, generator=generator) * LARGE for _ in range(count)]


def quantized(name: str, preset: str = "int8") -> Any:
    model = fq.prepare(Model(name).eval(), preset)
    fq.calibrate(model, batches(4), progress=False)
    return model


def improved(name: str, preset: str = "int8", steps: Any = ("smooth",)) -> tuple[Any, Any]:
    model = quantized(name, preset)
    return model, fq.ptq.improve(model, batches(8), steps, progress=False)


def error(model: Any, name: str) -> float:
    x, wanted = batches(1, seed=9)[0], Model(name).eval()
    return float((model(x) - wanted(x)).square().sum())


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("kind", "options"), KINDS)
@torch.no_grad()
def test_values_are_those_of_transformed_inputs_and_weights(name: str, kind: str, options: dict[str, int]) -> None:
    twin = quantized(name)
    model = copy.deepcopy(twin)
    transform = make_transform(kind, model.own, **options)
    if hasattr(transform, "scale"):
        transform.scale.copy_(1 / LARGE)
    for own in (model.own, twin.own):
        for parameter, value in own.named_parameters():
            if parameter.startswith("weight_ih") and value.shape[1] == IN:
                value.copy_(transform.into_weight(own, value))
    x = batches(1, seed=5)[0]
    before = Model(name).eval()(x)
    model.own.input_transform = transform
    for one, inputs in ((model, batches(4)), (twin, [transform(batch) for batch in batches(4)])):
        fq.calibrate(one, inputs, progress=False)
    assert_same_bits(model(x), twin(transform(x)))
    with disabled(model):
        torch.testing.assert_close(model(x), before)


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_improve_finds_one_where_channels_are_large(name: str) -> None:
    model, found = improved(name)
    assert model.own.input_transform is not None
    assert error(model, name) < 0.1 * error(quantized(name), name)
    tried = {row.layer for row in found.layers if "smooth" in row.steps}
    ends = ["ih_l0", "ih_l0_reverse"] if "both" in name else ["ih"] if "cell" in name else ["ih_l0"]
    assert {row for row in tried if row.startswith("own")} <= {f"own.{end}" for end in ends}
    assert f"own.{ends[0]}" in tried, "the other direction takes what was chosen with it"


@torch.no_grad()
def test_one_direction_in_float_keeps_the_other_without() -> None:
    name = "gru, both directions"
    model = fq.prepare(Model(name).eval(), "int8")
    model.own._l0_reverse_input_quantizer = None
    fq.calibrate(model, batches(4), progress=False)
    fq.ptq.improve(model, batches(8), ["smooth"], progress=False)
    assert model.own.input_transform is None


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_files_and_copies_keep_it_and_the_float_model_is_without_it(name: str, tmp_path: Path) -> None:
    model, _ = improved(name, steps=["smooth", "rotate"])
    x = batches(1, seed=3)[0]
    fq.save(model, tmp_path / "model.safetensors")
    loaded = fq.load(Model(name).eval(), tmp_path / "model.safetensors")
    for other in (loaded, copy.deepcopy(model)):
        assert_same_bits(other(x), model(x))
    fq.export_onnx(model, batches(1)[0], tmp_path / "model.onnx")
    found = fq.verify_onnx(tmp_path / "model.onnx", model, batches(2, seed=4))
    assert found.passed, str(found)
    twin = Model(name).eval()
    twin.load_state_dict(fq.float_state_dict(model))
    with disabled(model):
        torch.testing.assert_close(twin(x), model(x))


@torch.no_grad()
def test_a_packed_sequence_goes_through_it() -> None:
    model, _ = improved("gru, both directions")
    x = batches(1, seed=3)[0]
    wanted = model(x)
    model.packs = True
    assert_same_bits(model(x).sort(0).values, wanted.flatten(0, 1).sort(0).values)


def test_gradients_are_those_of_the_transformed_input() -> None:
    """With gradients quantized to float's own digits, those of the plain layer with the transform outside."""
    model, _ = improved("lstm")
    transform = model.own.input_transform
    twin = copy.deepcopy(model)
    twin.own.input_transform = None
    for own in (model.own, twin.own):
        own.gradient = fq.GradientConfig(fq.QuantSpec.parse("int8 per_tensor"))
    x = batches(1, seed=3)[0]
    model(x).square().sum().backward()
    twin(transform(x)).square().sum().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_bits(mine.grad, theirs.grad)


@torch.no_grad()
def test_a_normalisation_before_it_takes_the_factors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(IN), nn.LSTM(IN, HIDDEN)).eval()
    model[0].weight.copy_(LARGE)
    model[1].weight_ih_l0 /= LARGE
    x = [batch / LARGE for batch in batches(8)]
    first = lambda model, batch: model(batch)[0]  # noqa: E731
    model = fq.prepare(model, "int8")
    fq.calibrate(model, x, progress=False)
    fq.ptq.improve(model, x, ["smooth"], progress=False, forward=first)
    wanted = model(x[0])[0]
    assert "into 0" in str(fq.ptq.fold_scales(model, x[0]))
    assert model[1].input_transform is None
    torch.testing.assert_close(model(x[0])[0], wanted)
