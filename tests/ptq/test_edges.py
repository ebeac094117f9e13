"""Inputs, weights and models at the edges: right, or an error that names the layer and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError
from fakequant.ptq.weights import shared_parameters
from tests.support.bits import assert_same_bits, assert_same_state, unchanged
from tests.support.functional_models import Calls

INT3 = fq.Config("test", (fq.Rule(weight="int3 per_channel(0)"),))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3))


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "singular": lambda x: x[:, :6].repeat(1, 2),
    "dead": lambda x: x * (torch.arange(12) % 3 > 0),
    "constant": lambda x: torch.linspace(-1, 1, 12).expand_as(x).contiguous(),
    "nearly dependent": lambda x: x[:, :6].repeat(1, 2) * torch.where(torch.arange(12) < 6, 1.0, 1 + 1e-6),
    "huge": lambda x: x * torch.where(torch.arange(12) == 0, 1e15, 1.0),
    "tiny": lambda x: x * 1e-20,
    "nothing": torch.zeros_like,
}


def batches(examples: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(examples, 12, generator=generator) for _ in range(4)]


@pytest.mark.parametrize("steps", ["fast", "best"])
@pytest.mark.parametrize("kind", ODD)
def test_odd_inputs_of_a_model(kind: str, steps: str) -> None:
    model = fq.prepare(net(), INT3)
    found = fq.ptq.improve(model, [ODD[kind](x) for x in batches()], steps, progress=False)
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
    model, x = fq.prepare(net(), INT3), batches(examples)[:1]
    nearest = {name: model[int(name)].weight_quantizer(model[int(name)].weight).detach() for name in ("0", "2", "4")}
    found = fq.ptq.improve(model, x, steps, progress=False)
    assert all(layer.after <= layer.before for layer in found.layers)
    assert any("times as many examples" in note for note in found.notes)
    if steps == "fast" and examples == 1:
        for name, weight in nearest.items():
            assert_same_bits(model.get_submodule(name).weight, weight, name)


def inside(value: float) -> nn.Module:
    """Makes a value, as NaN, between its layers where an input is large."""
    torch.manual_seed(0)
    first, second = nn.Linear(12, 10), nn.Linear(10, 3)
    return Calls(lambda m, x: m.second(torch.where(x[:, :1] > 3, value, m.first(x))), first=first, second=second)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("steps", ["fast", "best", ["ranges"], ["gptq"], ["descend"], ["bias"]])
def test_what_a_layer_gets_is_named(value: float, steps: str | list[str]) -> None:
    given = batches()
    given[2][3, 0] = 5.0
    model, named = fq.prepare(inside(value), INT3), "^second, batch 3: an input holds NaN or inf; leave the batch out$"
    with unchanged(model), pytest.raises(CalibrationError, match=named):
        fq.ptq.improve(model, given, steps, progress=False)


@pytest.mark.parametrize(("what", "value"), [("weight", torch.nan), ("weight", torch.inf), ("bias", torch.nan)])
def test_parameters_that_are_not_finite_are_named(what: str, value: float) -> None:
    model = fq.prepare(net(), INT3)
    with torch.no_grad():
        getattr(model[2], what).view(-1)[1] = value
    named = "^2: its weight holds NaN or inf" if what == "weight" else "^4, batch 1: an input holds NaN or inf"
    with unchanged(model), pytest.raises(CalibrationError, match=named):
        fq.ptq.improve(model, batches(), "fast", progress=False)


@pytest.mark.parametrize("mask", ["counts", lambda batch: batch["counts"]])
@pytest.mark.parametrize("other", [100.0, torch.nan])
def test_tokens_that_do_not_count_change_nothing(other: float, mask: Any) -> None:
    x = torch.randn(4, 5, 12, generator=torch.Generator().manual_seed(0))
    counts = torch.arange(5)[None] < torch.tensor([5, 2, 3, 1])[:, None]
    models = []
    for filler in (0.0, other):
        model = fq.prepare(net(), fq.Config("test", (fq.Rule(input="int8", weight="int3 per_channel(0)"),)))
        padded = [{"input": torch.where(counts[..., None], x, filler), "counts": counts}]
        how = {"inputs": lambda batch: batch["input"], "mask": mask, "progress": False}
        fq.calibrate(model, padded, **how)
        fq.ptq.improve(model, padded, "fast", **how)
        models.append(model)
    assert_same_state(*models)


def reused() -> Any:
    """One layer under two names that runs twice, and one weight in two layers."""
    torch.manual_seed(0)
    first, left, right = (nn.Linear(12, 12) for _ in range(3))
    right.weight = left.weight
    parts = {"first": first, "again": first, "left": left, "right": right}
    return Calls(lambda m, x: m.right(m.left(m.again(m.first(x).tanh()).tanh()).tanh()), **parts)


def test_layers_used_twice_and_weights_shared() -> None:
    model = fq.prepare(reused(), INT3)
    shared = model.left.weight.detach().clone()
    found = fq.ptq.improve(model, batches(), judge=[], progress=False)
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
    found = fq.ptq.improve(model, [batch.to(dtype) for batch in batches()], progress=False)
    assert found.remaining_error < 0.7
    for place in (0, 2, 4):
        assert model[place].weight.dtype == dtype
        assert_same_bits(model[place].weight_quantizer(model[place].weight), model[place].weight)


def test_float64_is_refused() -> None:
    """Steps of a grid are products in float32, and those of float64 are others."""
    model = fq.prepare(net().double(), INT3)
    said = r"^[024]: its quantizer .* changes values .* convert the model to float32"
    with unchanged(model), pytest.raises(CalibrationError, match=said):
        fq.ptq.improve(model, [batch.double() for batch in batches()], "fast", progress=False)


def test_a_quantizer_that_calibration_turned_off_needs_no_range() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        """Joins some columns with others, of which there are none, as where all columns of a head are rotated."""
        hidden = m.first(x)
        return m.last(torch.cat([hidden[:, :10].tanh(), hidden[:, 10:]], 1))

    net, given = Calls(forward, first=nn.Linear(12, 10), last=nn.Linear(10, 3)), batches()
    model = fq.prepare(net, "INT8", given[0], target="onnxruntime")
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


STRUCTURES = {
    "2:4": lambda w: w * (w.abs().unflatten(1, (-1, 4)).argsort(-1).argsort(-1) > 1).flatten(1),
    "rows": lambda w: w * (torch.arange(len(w)) % 2)[:, None],
    "blocks": lambda w: w * torch.kron(torch.rand(len(w) // 8, w.shape[1] // 8).gt(0.5), torch.ones(8, 8)),
}


def pruned(structure: str, preset: str, batches: list[Tensor]) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(STRUCTURES[structure](layer.weight))
    fq.prepare(model.eval(), preset)
    fq.calibrate(model, batches, progress=False)
    return model, [model[place].weight == 0 for place in (0, 2)]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    ("preset", "steps"),
    [("int8", "best"), ("int4_group32", "fast"), ("int4_group32", ["adaround"]), ("nvfp4_weight_only", "best")],
)
def test_zeros_that_are_a_structure_stay(structure: str, preset: str, steps: Any) -> None:
    batches = [torch.randn(64, 32, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    model, zeros = pruned(structure, preset, batches)
    found = fq.ptq.improve(model, batches, steps, judge=[], progress=False)
    for place, before in zip((0, 2), zeros, strict=True):
        assert bool((model[place].weight[before] == 0).all())
    assert sum("its zeros stay" in remark for row in found.layers for remark in row.remarks) == 2
    assert found.remaining_error < 1


@pytest.mark.parametrize(("start", "is_shared"), [(5, False), (4, True)])
def test_memory_of_weights_that_overlaps_by_an_element(start: int, is_shared: bool) -> None:
    memory = torch.randn(10)
    model = nn.ModuleList([nn.Linear(5, 1, bias=False), nn.Linear(5, 1, bias=False)])
    model[0].weight.data, model[1].weight.data = memory[:5].view(1, 5), memory[start : start + 5].view(1, 5)
    assert shared_parameters(model) == ({*model.parameters()} if is_shared else set())
