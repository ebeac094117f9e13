"""Layers that a batch calls several times, and inputs that a model writes into after a layer has read them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationWarning
from fakequant.model.run.outputs import OutputDistance
from fakequant.nn import QuantizedLayer, quantizers, quantizes
from fakequant.nn.quantized.layers import _layers
from fakequant.ptq import reconstruction
from fakequant.ptq.collector import Collector
from fakequant.ptq.stream import NOT_REPEATED, Stage
from tests.support.bits import assert_same_bits
from tests.support.kept import kept
from tests.support.loops import Loop, batches
from tests.support.vision import import_torchvision


def error_left(model: nn.Module, preset: str, work: Callable[[nn.Module], object], given: list[Tensor]) -> float:
    """The share of the output's error that is left, on the same batches."""
    error = OutputDistance(model, kept(given))
    quantized = fq.prepare(copy.deepcopy(model), preset)
    fq.calibrate(quantized, given, progress=False)
    before = error.of(quantized).mean
    work(quantized)
    return error.of(quantized).mean / before


@pytest.mark.parametrize("steps", ["fast", "best"])
@pytest.mark.parametrize("preset", ["INT8", "INT4_WEIGHT_ONLY"])
def test_a_layer_that_is_called_often_loses_less(preset: str, steps: str) -> None:
    assert error_left(Loop(), preset, lambda m: fq.ptq.improve(m, batches(), steps, progress=False), batches()) < 0.9


def test_the_range_of_an_input_is_chosen_by_all_calls() -> None:
    """The last inputs are many times as large as the first ones, whose range alone would clip them."""
    model, seen = fq.prepare(Loop(12), "INT8"), list[float]()
    fq.calibrate(model, batches(), progress=False)
    fq.ptq.improve(model, batches(), ["input"], progress=False)
    model.again.register_forward_pre_hook(lambda _, args: seen.append(float(args[0].abs().max())))
    model(batches()[0])
    assert seen[-1] > 5 * seen[0]
    assert 127 * float(model.again.input_quantizer.scale) > 0.5 * seen[-1]


def test_the_range_of_an_input_holds_the_batch_with_the_largest_values() -> None:
    """Half of the batches are judged; the one that clipping costs most is always among them."""
    given = batches()
    given[1][0, :4] = 40.0
    assert error_left(Loop(1), "INT8", lambda m: fq.ptq.improve(m, given, ["input"], progress=False), given) <= 1


@pytest.fixture(scope="module")
def albert() -> nn.Module:
    """A transformer that calls one block six times."""
    import_torchvision()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "embedding_size": 16, "hidden_size": 64, "intermediate_size": 128}
    config = transformers.AlbertConfig(num_hidden_layers=6, num_attention_heads=4, **sizes)
    model = transformers.AlbertModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)  # new weights are so small that attention is uniform
    return model


def tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 100, (4, 16), generator=generator) for _ in range(8)]


@pytest.mark.parametrize("preset", ["INT8", "INT4_WEIGHT_ONLY"])
def test_a_transformer_that_shares_its_layers_loses_less(albert: nn.Module, preset: str) -> None:
    assert error_left(albert, preset, lambda m: fq.ptq.improve(m, tokens(), "fast", progress=False), tokens()) < 0.7


@pytest.mark.parametrize("preset", ["INT8", "INT4_WEIGHT_ONLY"])
def test_a_transformer_that_shares_its_layers_learns(albert: nn.Module, preset: str) -> None:
    def learn(model: nn.Module) -> None:
        found = fq.ptq.reconstruct(model, tokens(), iterations=64, progress=False)
        assert [note[:16] for note in found.notes] == ["2 of 6 blocks, f"]

    assert error_left(albert, preset, learn, tokens()) < 0.8


def test_drift_is_left_out_from_such_a_layer_on_and_said() -> None:
    model = fq.prepare(Loop(), "INT4_WEIGHT_ONLY")
    found = fq.ptq.improve(model, batches(), "fast", progress=False)
    assert found.notes == [
        '"drift" was left out for 2 of 3 layers, from again on: a batch calls it several times, and its '
        "weight is chosen before the last call"
    ]
    assert found.notes[0] in str(found)
    assert found.notes[0].replace('"', "&quot;") in found._repr_html_()
    without = fq.prepare(Loop(), "INT4_WEIGHT_ONLY")
    fq.ptq.improve(without, batches(), ["smooth", "input", "ranges", "gptq", "bias"], progress=False)
    for name in ("again", "last"):
        assert_same_bits(model.get_submodule(name).weight, without.get_submodule(name).weight)


def same_as_without_writes(
    work: Callable[[nn.Module], object], make: Callable[[bool], nn.Module], preset: str = "INT8"
) -> None:
    models = [fq.prepare(make(in_place), preset) for in_place in (False, True)]
    for model in models:
        fq.calibrate(model, [x.clone() for x in batches()], progress=False)
        work(model)
    for one, other in zip(*(model.state_dict().values() for model in models), strict=True):
        assert_same_bits(one, other)


class Branches(nn.Module):
    """Two layers that read one tensor, before and after a function that may write into it."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.in_place = nn.Linear(16, 16), nn.Linear(16, 16), in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        y = self.one(x)
        x = x.exp_() if self.in_place else x.exp()
        return y + self.other(x)


MODELS = {"a loop": lambda in_place: Loop(in_place=in_place), "branches": lambda in_place: Branches(in_place=in_place)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("steps", ["fast", ["smooth", "input", "gptq", "drift"]])
def test_writes_into_inputs_change_nothing_in_improve(model: str, steps: str | list[str]) -> None:
    same_as_without_writes(lambda m: fq.ptq.improve(m, batches(), steps, progress=False), MODELS[model])


def test_writes_into_inputs_change_nothing_in_reconstruct() -> None:
    same_as_without_writes(
        lambda model: fq.ptq.reconstruct(model, batches(), ["first", "again"], iterations=40, progress=False),
        MODELS["a loop"],
        "INT4_WEIGHT_ONLY",
    )


def test_a_model_that_keeps_values_elsewhere_gets_no_drift() -> None:
    numbers = count()

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.one(x) + next(numbers))

    found = fq.ptq.improve(fq.prepare(Noisy(), "INT4_WEIGHT_ONLY"), batches(), "fast", progress=False)
    assert found.notes == [
        f'"drift" was left out: {NOT_REPEATED}',
        f"the error of the model's output was not measured: {NOT_REPEATED}",
    ]
    assert (found.before, found.after) == (None, None)


def test_the_error_of_the_output_is_measured_before_and_after() -> None:
    model = fq.prepare(Loop(1), "INT4_WEIGHT_ONLY")
    error = OutputDistance(Loop(1), kept(batches()[:4]))
    before = error.of(model).mean
    found = fq.ptq.improve(model, batches(), "fast", judge=[], progress=False)
    assert (found.before, found.after) == (before, error.of(model).mean)
    assert f"on 4 batches that chose, too, and new data may lose more: {before:.2e} -> {found.after:.2e}" in str(found)


def test_layers_that_share_an_input_in_the_first_batch_alone_choose_by_themselves() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.query, self.value, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            return self.last(self.query(x) + self.value(context))

    def run(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return model(*pair)

    given = [(x, x if place == 0 else x * 4**place) for place, x in enumerate(batches(4))]
    models = []
    for order in (given, given[::-1]):
        model = fq.prepare(Cross(), "INT8")
        fq.calibrate(model, order, forward=run, progress=False)
        fq.ptq.improve(model, order, ["input"], forward=run, progress=False)
        models.append(model)
    for one, other in zip(*(quantizers(model).values() for model in models), strict=True):
        assert one.scale is not None
        assert torch.allclose(one.scale, other.scale, rtol=0.2)


class Orders(nn.Module):
    """Calls two layers in the one or the other order, by the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.one, self.other) if len(x) % 2 else (self.other, self.one)
        return self.last(second(first(x).relu()))


def in_two_orders() -> list[Tensor]:
    return [x[: 30 + place % 2] for place, x in enumerate(batches(6))]


def test_drift_is_measured_by_float_weights_where_batches_take_other_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    given = in_two_orders()
    seen: dict[str, list[Tensor]] = {}
    own = Collector.choose

    def choose(self: Collector, stage: Stage, wanted: Stage | None, *args: Any) -> Any:
        assert wanted is not None
        seen[stage.name] = [call.first.clone() for calls in wanted.calls.values() for call in calls]
        return own(self, stage, wanted, *args)

    monkeypatch.setattr(Collector, "choose", choose)
    fq.ptq.improve(fq.prepare(Orders(), "INT4_WEIGHT_ONLY"), given, "fast", judge=[], progress=False)
    model, inputs = Orders(), []
    model.last.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    for x in given:
        model(x)
    for x, y in zip(seen["last._weight_quantizer"], inputs, strict=True):
        assert_same_bits(x, y)


def test_layers_that_a_part_of_the_batches_chooses_are_named() -> None:
    found = fq.ptq.improve(fq.prepare(Orders(), "INT4_WEIGHT_ONLY"), in_two_orders(), "fast", progress=False)
    assert [note for note in found.notes if note.startswith("one: chosen by a part of the batches")]


def test_blocks_learn_the_outputs_of_float_weights_where_batches_take_other_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[Tensor]] = []
    own = reconstruction.reconstruct_block

    def learn(block: nn.Module, inputs: Any, targets: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        seen.append([y.clone() for y in targets])
        return own(block, inputs, targets, *args, **kwargs)

    monkeypatch.setattr(reconstruction, "reconstruct_block", learn)
    names, model, outputs = ["one", "other", "last"], Orders(), list[Tensor]()
    quantized = fq.prepare(copy.deepcopy(model), "INT4_WEIGHT_ONLY")
    fq.ptq.reconstruct(quantized, in_two_orders(), names, "omniquant", iterations=100, judge=[], progress=False)
    model.last.register_forward_hook(lambda *call: outputs.append(call[2].detach()))
    for x in in_two_orders():
        model(x)
    for y, wanted in zip(seen[-1], outputs, strict=True):
        assert_same_bits(y, wanted)


def test_an_output_that_gets_another_shape_is_said() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(16, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y if torch.equal(self.layer.weight, self.first) else y[1:]

    model = fq.prepare(Chosen(), "INT4_WEIGHT_ONLY")
    model.first = model.layer.weight.detach().clone()
    with pytest.warns(CalibrationWarning, match="error of the model's output larger, .* -> inf"):
        fq.ptq.improve(model, batches(), "fast", judge=[], progress=False)


def test_a_single_batch_is_judged_in_parts() -> None:
    """What one part has beyond the others counts, as it will for new data."""
    generator = torch.Generator().manual_seed(0)
    new = [torch.randn(64, 16, generator=generator) for _ in range(8)]
    model = fq.prepare(Loop(1), "INT8")
    fq.calibrate(model, batches(1), progress=False)
    error = OutputDistance(Loop(1), kept(new))
    before = error.of(model).mean
    fq.ptq.improve(model, batches(1), ["smooth", "input"], progress=False)
    assert error.of(model).mean < 1.5 * before


class Film(nn.Module):
    """A layer that gets a tensor of any number of axes, and one that is not asked for."""

    def __init__(self, layer: nn.Module, axes: int) -> None:
        super().__init__()
        self.layer, self.axes = layer, axes

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(part) for part in x]) if self.axes else self.layer(x)


@pytest.mark.parametrize(
    ("layer", "shape", "one_by_one"),
    [
        (nn.Linear(16, 8), (6, 16), 1),  # one axis
        (nn.Linear(16, 8), (2, 3, 4, 16), 0),
        (nn.Linear(16, 8), (2, 0, 16), 0),
        (nn.Conv1d(4, 8, 3), (6, 4, 9), 1),  # no axis of examples
        (nn.Conv2d(4, 8, 3, groups=2), (6, 4, 5, 5), 1),
        (nn.ConvTranspose2d(4, 8, 3), (6, 4, 5, 5), 1),
        (nn.Conv3d(2, 4, 2), (6, 2, 4, 4, 4), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("preset", ["INT8", "INT8_PER_TOKEN", "INT4_WEIGHT_ONLY"])
def test_inputs_of_all_numbers_of_axes_are_chosen(
    layer: nn.Module, shape: tuple[int, ...], one_by_one: int, preset: str
) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(shape) for _ in range(4)]
    model = fq.prepare(Film(copy.deepcopy(layer), one_by_one), preset)
    fq.calibrate(model, [*batches, torch.randn(3, *shape[1:])] if 0 not in shape else [torch.randn(2, 3, 16)], "max")
    found = fq.ptq.improve(model, batches, judge=[])
    if 0 not in shape:
        assert found.layers[0].after <= found.layers[0].before
        assert found.layers[0].note == ""


class SamePadding(nn.Conv2d):
    """It pads by itself, as convolutions of vision packages do."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(F.pad(input, (1, 1, 1, 1)), self.weight, self.bias, self.stride, 0, 1, self.groups)


class Twice(SamePadding):
    """Not one product."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input


@pytest.mark.parametrize("cls", [SamePadding, Twice])
@pytest.mark.parametrize("groups", [1, 4])
def test_registered_convolutions_with_a_forward_of_their_own(cls: type[Any], groups: int) -> None:
    class Quantized(QuantizedLayer, cls):
        def forward(self, input: Tensor) -> Tensor:
            own, weight = self.quantized_input(input), self.quantized_weight()
            padded = F.pad(own, (1, 1, 1, 1))
            y = F.conv2d(padded, weight, self.bias, self.stride, 0, 1, self.groups)
            return y + input if cls is Twice else y

    quantizes(cls)(Quantized)
    try:
        torch.manual_seed(0)
        batches = [torch.randn(4, 4, 6, 6) for _ in range(4)]
        model = fq.prepare(nn.Sequential(cls(4, 4, 3, groups=groups)), "INT4_WEIGHT_ONLY")
        (row,) = fq.ptq.improve(model, batches, judge=[]).layers
        if cls is Twice:
            assert row.note == "nearest: its own forward computes something else than one product of its weight"
        else:
            assert row.note == ""
            assert row.after < row.before
    finally:
        del _layers[cls]


def test_weights_of_functions_are_chosen_beside_layers() -> None:
    model, x = nn.Sequential(SamePadding(4, 4, 3), nn.Conv2d(4, 4, 1)), torch.randn(4, 4, 6, 6)
    config = fq.presets.INT4_WEIGHT_ONLY
    model = fq.prepare(model, config.with_rule(fq.Rule("*", config, ops=("conv",))), x)
    rows = {row.layer: row for row in fq.ptq.improve(model, [x]).layers}
    assert {name: row.note for name, row in rows.items()} == {"0._sites.conv2d_0": "", "1": ""}
    assert all(row.after < row.before for row in rows.values())


def test_a_forward_of_its_own_may_add_its_bias_itself() -> None:
    class Adds(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input @ self.weight.mT + self.bias

    class Quantized(QuantizedLayer, Adds):
        def forward(self, input: Tensor) -> Tensor:
            return self.quantized_input(input) @ self.quantized_weight().mT + self.bias

    Adds.forward.__module__ = Quantized.forward.__module__ = "another.package"
    quantizes(Adds)(Quantized)
    try:
        torch.manual_seed(0)
        model = fq.prepare(nn.Sequential(Adds(8, 8)), "INT4_WEIGHT_ONLY")
        (row,) = fq.ptq.improve(model, [torch.randn(32, 8) for _ in range(4)], judge=[]).layers
        assert row.note == ""
        assert row.after < row.before
    finally:
        del _layers[Adds]
