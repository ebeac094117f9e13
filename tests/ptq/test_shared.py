"""Weights, biases and inputs that more than one layer reads; and what a call leaves in the model when it fails."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationWarning
from fakequant.ptq.weights import shared_parameters
from tests.support.bits import assert_same_bits

ELSEWHERE = "reads its weight outside of the layer"


class TiedDecoder(nn.Module):
    """An autoencoder whose decoder is the encoder's weight, turned."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.middle(self.encoder(x).relu()), self.encoder.weight.t())


class CosineHead(nn.Module):
    """Logits are cosines, so that the head's weight is read for its length too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.encoder = nn.Linear(16, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).relu()
        return self.encoder(hidden) / self.encoder.weight.norm(dim=1)


class AsksForDtype(nn.Module):
    """Reads of the weight what has no values."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(x.to(self.encoder.weight.dtype)).relu()[:, : self.encoder.weight.shape[0]])


class Tied(nn.Module):
    """Two layers with one memory for their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight.data = self.encoder.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(x).relu())


class Reuse(nn.Module):
    """Calls one layer twice; between the calls another one reads what the second call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.other, self.last = nn.LayerNorm(16), *(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.first(x).tanh()) * outliers()
        return self.last(self.other(x).sigmoid() * self.first(x))


class OtherOrders(nn.Module):
    """Calls two layers that read one tensor in an order that depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.last = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) % 2:
            return self.last(self.other(x).sigmoid() * self.first(x))
        return self.last(self.first(x) * self.other(x).sigmoid())


def outliers() -> Tensor:
    scale = torch.ones(16)
    scale[5] = 40
    return scale


def batches(rows: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 16, generator=generator) * outliers() for _ in range(4)]


def quantized(net: nn.Module, preset: str, given: list[Tensor]) -> nn.Module:
    model = fq.prepare(net.eval(), preset)
    fq.calibrate(model, given, progress=False)
    return model


WORKS: dict[str, Callable[[nn.Module, list[Tensor]], Any]] = {
    "fast": lambda model, given: fq.ptq.improve(model, given, "fast", progress=False),
    "best": lambda model, given: fq.ptq.improve(model, given, "best", progress=False),
    "reconstruct": lambda model, given: fq.ptq.reconstruct(model, given, ["encoder"], iterations=20, progress=False),
}


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("preset", ["INT8", "MXFP4", "INT4_WEIGHT_ONLY"])
@pytest.mark.parametrize("kind", [TiedDecoder, CosineHead, Tied])
def test_a_weight_that_something_else_reads_too_stays(kind: type[nn.Module], preset: str, work: str) -> None:
    torch.manual_seed(0)
    model: Any = quantized(kind(), preset, batches())
    weight = model.encoder.weight.detach().clone()
    found = WORKS[work](model, batches())
    assert_same_bits(model.encoder.weight.detach(), weight)
    assert model.encoder.input_transform is None
    said = {layer.layer: layer.note for layer in found.layers}["encoder"] + " ".join(found.notes)
    assert ("share its weight" if kind is Tied else ELSEWHERE) in said


def test_what_has_no_values_is_no_reading_of_a_weight() -> None:
    torch.manual_seed(0)
    found = fq.ptq.improve(quantized(AsksForDtype(), "INT8", batches()), batches(), "fast", judge=[], progress=False)
    assert [layer.note for layer in found.layers] == ["", ""]


def test_parameters_in_one_memory_are_shared() -> None:
    net = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))
    whole = torch.randn(20, 8)
    net[1].weight.data, net[2].weight.data = whole[:8], whole[8:16]  # side by side
    net[3].weight.data, net[4].weight.data = whole[12:20], torch.empty(0, 8)
    assert shared_parameters(net) == {net[2].weight, net[3].weight}


def test_a_parameter_without_a_shape_yet_has_no_memory() -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(16, 16), nn.LazyLinear(4)), "w4a16", skip=["1"])
    assert fq.ptq.improve(model, batches(), "fast", progress=False).remaining_error < 1


@pytest.mark.parametrize("shared", [True, False])
def test_a_shared_bias_stays(shared: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    if shared:
        net[2].bias = net[0].bias
    model: Any = quantized(net, "INT4_WEIGHT_ONLY", batches())
    bias = model[0].bias.detach().clone()
    found = fq.ptq.improve(model, batches(), ["bias"], judge=[], progress=False)
    assert torch.equal(bias, model[0].bias) == shared
    assert any("layers share its bias" in note for note in found.notes) == shared


@pytest.mark.parametrize("preset", ["INT8", "INT4"])
@pytest.mark.parametrize("steps", ["fast", ["smooth", "ranges", "gptq"]])
@pytest.mark.parametrize("kind", [Reuse, OtherOrders])
def test_a_layer_keeps_what_was_chosen_when_another_one_gets_its_input(
    kind: type[nn.Module], steps: Any, preset: str
) -> None:
    torch.manual_seed(0)
    given = batches(256)
    given[-1] = given[-1][:-1]  # calls the layers in the other order
    model: Any = quantized(kind(), preset, given)
    fq.ptq.improve(model, given, steps, progress=False)
    assert model.other.input_transform is not None  # or the case is none
    for layer in (model.first, model.other, model.last):
        assert_same_bits(layer.weight_quantizer(layer.weight).detach(), layer.weight.detach())


@pytest.mark.parametrize("work", ["improve", "reconstruct"])
def test_a_warning_that_is_an_error_leaves_the_model_as_it_was(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fakequant.ptq.judging.ALIKE", 0.0)  # whatever is chosen is warned of
    torch.manual_seed(0)
    model = quantized(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), "INT4", batches())
    before = copy.deepcopy(model.state_dict())
    call = {
        "improve": lambda: fq.ptq.improve(model, batches(), "fast", judge=[], progress=False),
        "reconstruct": lambda: fq.ptq.reconstruct(model, batches(), iterations=10, judge=[], progress=False),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CalibrationWarning, match="larger"):
            call[work]()
    after = model.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert_same_bits(value, after[name])


@pytest.mark.parametrize("work", ["fast", "reconstruct"])
def test_a_model_can_be_trained_and_loaded_after_inference_mode(work: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model = fq.prepare(nn.ModuleDict({"encoder": net})["encoder"], "INT8")
    with torch.inference_mode():
        fq.calibrate(model, batches(), progress=False)
        if work == "reconstruct":
            fq.ptq.reconstruct(model, batches(), iterations=10, progress=False)
        else:
            WORKS[work](model, batches())
    assert not [name for name, value in model.state_dict().items() if value.is_inference()]
    model(batches()[0]).sum().backward()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
