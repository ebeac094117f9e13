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
from fakequant.model.run.outputs import record
from fakequant.ptq.weights import fixed_parameters, shared_parameters
from tests.support.bits import assert_same_bits, unchanged
from tests.support.functional_models import Calls

ELSEWHERE = "reads its weight outside of the layer"


def linear_layers(call: Callable[[Any, Tensor], Tensor], *names: str) -> Any:
    """Linear layers by their names, and a function that calls them."""
    return Calls(call, **{name: nn.Linear(16, 16) for name in names})


def tied_decoder() -> Any:
    """An autoencoder whose decoder is the encoder's weight, turned."""
    return linear_layers(
        lambda m, x: F.linear(m.middle(m.encoder(x).relu()), m.encoder.weight.t()), "encoder", "middle"
    )


def cosine_head() -> Any:
    """Logits are cosines, so that the head's weight is read for its length too."""
    return linear_layers(lambda m, x: m.encoder(m.body(x).relu()) / m.encoder.weight.norm(dim=1), "body", "encoder")


def tied() -> Any:
    """Two layers with one memory for their weights."""
    model = linear_layers(lambda m, x: m.last(m.encoder(x).relu()), "encoder", "last")
    model.last.weight.data = model.encoder.weight.data
    return model


def reuse() -> Any:
    """Calls one layer twice; between the calls another one reads what the second call reads."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.layer_norm(x + m.first(x).tanh(), (16,)) * outliers()
        return m.last(m.other(x).sigmoid() * m.first(x))

    return linear_layers(forward, "first", "other", "last")


def other_orders() -> Any:
    """Calls two layers that read one tensor in an order that depends on the batch."""

    def forward(m: Any, x: Tensor) -> Tensor:
        if len(x) % 2:
            return m.last(m.other(x).sigmoid() * m.first(x))
        return m.last(m.first(x) * m.other(x).sigmoid())

    return linear_layers(forward, "first", "other", "last")


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
@pytest.mark.parametrize("kind", [tied_decoder, cosine_head, tied])
def test_a_weight_that_something_else_reads_too_stays(kind: Callable[[], Any], preset: str, work: str) -> None:
    torch.manual_seed(0)
    model: Any = quantized(kind(), preset, batches())
    weight = model.encoder.weight.detach().clone()
    found = WORKS[work](model, batches())
    assert_same_bits(model.encoder.weight.detach(), weight)
    assert model.encoder.input_transform is None
    said = {layer.layer: layer.note for layer in found.layers}["encoder"] + " ".join(found.notes)
    assert ("share its weight" if kind is tied else ELSEWHERE) in said


def test_what_has_no_values_is_no_reading_of_a_weight() -> None:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.last(m.encoder(x.to(m.encoder.weight.dtype)).relu()[:, : m.encoder.weight.shape[0]])

    model = quantized(linear_layers(forward, "encoder", "last"), "INT8", batches())
    found = fq.ptq.improve(model, batches(), "fast", judge=[], progress=False)
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
@pytest.mark.parametrize("kind", [reuse, other_orders])
def test_a_layer_keeps_what_was_chosen_when_another_one_gets_its_input(
    kind: Callable[[], Any], steps: Any, preset: str
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
    call = {
        "improve": lambda: fq.ptq.improve(model, batches(), "fast", judge=[], progress=False),
        "reconstruct": lambda: fq.ptq.reconstruct(model, batches(), iterations=10, judge=[], progress=False),
    }
    with warnings.catch_warnings(), unchanged(model):
        warnings.simplefilter("error")
        with pytest.raises(CalibrationWarning, match="larger"):
            call[work]()


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


@pytest.mark.parametrize(("function", "is_fixed"), [(torch.zeros_like, False), (torch.neg, True)])
def test_a_bias_of_which_a_function_asks_the_shape_alone_may_be_corrected(function: Any, is_fixed: bool) -> None:
    model = linear_layers(lambda m, x: m.encoder(x) + function(m.encoder.bias), "encoder")
    model = fq.prepare(model, "INT8_WEIGHT_ONLY")
    found = fixed_parameters(model, record(model, lambda: model(torch.ones(2, 16))))
    assert (found.get(model.encoder.bias) == "several functions read it") is is_fixed
