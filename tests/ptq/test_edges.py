"""Inputs, weights and models at the edges: right, or an error that names the layer and leaves the model as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError
from tests.support.bits import assert_same_bits

INT3 = fq.Config("test", (fq.Rule(weight="int3 per_channel(0)"),))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3))


def with_odd_columns(kind: str) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        if kind == "singular":
            x[:, 6:] = x[:, :6]
        elif kind == "dead":
            x[:, ::3] = 0
        elif kind == "constant":
            x[:] = torch.linspace(-1, 1, 12)
        elif kind == "nearly dependent":
            x[:, 6:] = x[:, :6] * (1 + 1e-6)
        elif kind == "huge":
            x[:, 0] *= 1e15
        elif kind == "tiny":
            x *= 1e-20
        elif kind == "nothing":
            x.zero_()
        return x

    return change


def batches(kind: str, examples: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [with_odd_columns(kind)(torch.randn(examples, 12, generator=generator)) for _ in range(4)]


KINDS = ["singular", "dead", "constant", "nearly dependent", "huge", "tiny", "nothing"]


@pytest.mark.parametrize("steps", ["fast", "best"])
@pytest.mark.parametrize("kind", KINDS)
def test_odd_inputs_of_a_model(kind: str, steps: str) -> None:
    model = fq.prepare(net(), INT3)
    found = fq.ptq.improve(model, batches(kind), steps, progress=False)
    assert [layer.layer for layer in found.layers] == ["0", "2", "4"]
    assert all(layer.after <= layer.before for layer in found.layers)
    for place in (0, 2, 4):
        layer = model[place]
        assert bool(layer.weight.isfinite().all())
        assert bool(layer.bias.isfinite().all())
        assert_same_bits(layer.weight_quantizer(layer.weight), layer.weight)


@pytest.mark.parametrize("examples", [1, 2])
@pytest.mark.parametrize("steps", ["fast", "best"])
def test_a_row_without_another_that_judges_chooses_no_codes(steps: str, examples: int) -> None:
    """One row has a singular matrix of moments, and is its own mean."""
    model, x = fq.prepare(net(), INT3), batches("as it is", examples)[:1]
    nearest = {name: model[int(name)].weight_quantizer(model[int(name)].weight).detach() for name in ("0", "2", "4")}
    found = fq.ptq.improve(model, x, steps, progress=False)
    assert all(layer.after <= layer.before for layer in found.layers)
    assert any("times as many examples" in note for note in found.notes)
    if steps == "fast" and examples == 1:
        for name, weight in nearest.items():
            assert_same_bits(model.get_submodule(name).weight, weight, name)


class Inside(nn.Module):
    """Makes NaN or inf between its layers where an input is negative."""

    def __init__(self, value: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.value = nn.Linear(12, 10), nn.Linear(10, 3), value

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(torch.where((x[:, :1] > 3), self.value, y))


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> None:
    assert model.state_dict().keys() == before.keys()
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name], name)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("steps", ["fast", "best", ["ranges"], ["gptq"], ["descend"], ["bias"]])
def test_what_a_layer_gets_is_named(value: float, steps: str | list[str]) -> None:
    given = batches("as it is")
    given[2][3, 0] = 5.0
    model = fq.prepare(Inside(value), INT3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CalibrationError, match=r"^second, batch 3: an input holds NaN or inf; leave the batch out$"):
        fq.ptq.improve(model, given, steps, progress=False)
    unchanged(model, before)


@pytest.mark.parametrize(("what", "value"), [("weight", torch.nan), ("weight", torch.inf), ("bias", torch.nan)])
def test_parameters_that_are_not_finite_are_named(what: str, value: float) -> None:
    model = fq.prepare(net(), INT3)
    with torch.no_grad():
        getattr(model[2], what).view(-1)[1] = value
    before = copy.deepcopy(model.state_dict())
    named = "^2: its weight holds NaN or inf" if what == "weight" else "^4, batch 1: an input holds NaN or inf"
    with pytest.raises(CalibrationError, match=named):
        fq.ptq.improve(model, batches("as it is"), "fast", progress=False)
    unchanged(model, before)


def test_nan_in_tokens_that_do_not_count_is_no_error() -> None:
    x = torch.randn(4, 5, 12, generator=torch.Generator().manual_seed(0))
    counts = torch.arange(5)[None] < torch.tensor([5, 2, 3, 1])[:, None]
    models = []
    for filler in (0.0, torch.nan):
        model = fq.prepare(net(), fq.Config("test", (fq.Rule(input="int8", weight="int3 per_channel(0)"),)))
        padded = [{"input": torch.where(counts[..., None], x, filler), "counts": counts}]
        how = {"inputs": lambda batch: batch["input"], "mask": "counts", "progress": False}
        fq.calibrate(model, padded, **how)
        fq.ptq.improve(model, padded, "fast", **how)
        models.append(model)
    unchanged(models[1], models[0].state_dict())


class Reused(nn.Module):
    """One layer under two names that runs twice, and one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = self.again = nn.Linear(12, 12)
        self.left, self.right = nn.Linear(12, 12), nn.Linear(12, 12)
        self.right.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(self.again(self.first(x).tanh()).tanh()).tanh())


def test_layers_used_twice_and_weights_shared() -> None:
    model = fq.prepare(Reused(), INT3)
    shared = model.left.weight.detach().clone()
    found = fq.ptq.improve(model, batches("as it is"), judge=[], progress=False)
    assert {layer.layer: layer.note for layer in found.layers} == {
        "left": "nearest: layers share its weight",
        "right": "nearest: layers share its weight",
        "first": "",
    }
    first = next(layer for layer in found.layers if layer.layer == "first")
    assert first.after < first.before
    assert model.first is model.again
    assert_same_bits(model.left.weight, shared)
    assert model.left.weight is model.right.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_of_other_dtypes(dtype: torch.dtype) -> None:
    model = fq.prepare(net().to(dtype), INT3)
    given = [batch.to(dtype) for batch in batches("as it is")]
    found = fq.ptq.improve(model, given, progress=False)
    assert found.remaining_error < 0.7
    for place in (0, 2, 4):
        assert model[place].weight.dtype == dtype
        assert_same_bits(model[place].weight_quantizer(model[place].weight), model[place].weight)


def test_float64_is_refused() -> None:
    """Steps of a grid are products in float32, and those of float64 are others."""
    model = fq.prepare(net().double(), INT3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CalibrationError, match=r"^[024]: its quantizer changes values .* convert the model to float32"):
        fq.ptq.improve(model, [batch.double() for batch in batches("as it is")], "fast", progress=False)
    unchanged(model, before)


class WithPassingColumns(nn.Module):
    """Joins some columns with others, of which there are none, as where all columns of a head are rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(torch.cat([hidden[:, :10].tanh(), hidden[:, 10:]], 1))


def test_a_quantizer_that_calibration_turned_off_needs_no_range() -> None:
    given = batches("usual")
    model = fq.prepare(WithPassingColumns(), "INT8", given[0], target="onnxruntime")
    fq.calibrate(model, given, progress=False, unseen="float")
    assert fq.ptq.improve(model, given, "fast", judge=[], progress=False).remaining_error_of_layers < 1


def test_groups_of_whole_kernels_are_improved_and_exported_to_the_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ConvTranspose2d(8, 6, 3))
    model, batches = fq.prepare(net, "INT4_GROUP32").eval(), [torch.randn(4, 3, 9, 9) for _ in range(4)]
    found = fq.ptq.improve(model, batches)
    assert all(layer.after <= layer.before for layer in found.layers)
    assert found.remaining_error < 0.9
    file = fq.export_onnx(model, batches[0], tmp_path / "model.onnx").path
    assert fq.verify_onnx(file, model).exact
