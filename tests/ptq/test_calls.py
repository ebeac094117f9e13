"""Layers that a batch calls several times, and inputs that a model writes into after a layer has read them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationWarning
from fakequant.nn import QuantizedLayer, quantizers, quantizes
from fakequant.nn.quantized.layers import _layers
from fakequant.ptq import reconstruction
from fakequant.ptq.collector import Collector
from fakequant.ptq.stream import NOT_REPEATED, Stage
from tests.support.bits import assert_same_bits, assert_same_state
from tests.support.functional_models import Calls
from tests.support.kept import error_left
from tests.support.loops import Loop, batches
from tests.support.vision import import_torchvision


@pytest.mark.parametrize("steps", ["fast", "best"])
@pytest.mark.parametrize("preset", ["INT8", "INT4_WEIGHT_ONLY"])
def test_a_layer_that_is_called_often_loses_less(preset: str, steps: str) -> None:
    assert error_left(Loop(), preset, batches(), lambda m: fq.ptq.improve(m, batches(), steps, progress=False)) < 0.9


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
    assert error_left(Loop(1), "INT8", given, lambda m: fq.ptq.improve(m, given, ["input"], progress=False)) <= 1


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
    assert error_left(albert, preset, tokens(), lambda m: fq.ptq.improve(m, tokens(), "fast", progress=False)) < 0.7


@pytest.mark.parametrize("preset", ["INT8", "INT4_WEIGHT_ONLY"])
def test_a_transformer_that_shares_its_layers_learns(albert: nn.Module, preset: str) -> None:
    def learn(model: nn.Module) -> None:
        found = fq.ptq.reconstruct(model, tokens(), iterations=64, progress=False)
        assert [note[:16] for note in found.notes] == ["2 of 6 blocks, f"]

    assert error_left(albert, preset, tokens(), learn) < 0.8


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
    assert_same_state(*models)


def branches(*, in_place: bool) -> nn.Module:
    """Two layers that read one tensor, before and after a function that may write into it."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x * 1.0
        y = m.one(x)
        return y + m.other(x.exp_() if in_place else x.exp())

    return Calls(forward, one=nn.Linear(16, 16), other=nn.Linear(16, 16))


MODELS = {"a loop": lambda in_place: Loop(in_place=in_place), "branches": lambda in_place: branches(in_place=in_place)}


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

    parts = {"one": nn.Linear(16, 16), "other": nn.Linear(16, 4)}
    noisy = Calls(lambda m, x: m.other(m.one(x) + next(numbers)), **parts)
    found = fq.ptq.improve(fq.prepare(noisy, "INT4_WEIGHT_ONLY"), batches(), "fast", progress=False)
    assert found.notes == [
        f'"drift" was left out: {NOT_REPEATED}',
        f"the error of the model's output was not measured: {NOT_REPEATED}",
    ]
    assert (found.before, found.after) == (None, None)


def test_layers_that_share_an_input_in_the_first_batch_alone_choose_by_themselves() -> None:
    def cross() -> nn.Module:
        torch.manual_seed(0)
        parts = {"query": nn.Linear(16, 16), "value": nn.Linear(16, 16), "last": nn.Linear(16, 4)}
        return Calls(lambda m, x, context: m.last(m.query(x) + m.value(context)), **parts)

    def run(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return model(*pair)

    given = [(x, x if place == 0 else x * 4**place) for place, x in enumerate(batches(4))]
    models = []
    for order in (given, given[::-1]):
        model = fq.prepare(cross(), "INT8")
        fq.calibrate(model, order, forward=run, progress=False)
        fq.ptq.improve(model, order, ["input"], forward=run, progress=False)
        models.append(model)
    for one, other in zip(*(quantizers(model).values() for model in models), strict=True):
        assert one.scale is not None
        assert torch.allclose(one.scale, other.scale, rtol=0.2)


def orders() -> nn.Module:
    """Calls two layers in the one or the other order, by the number of rows."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        first, second = (m.one, m.other) if len(x) % 2 else (m.other, m.one)
        return m.last(second(first(x).relu()))

    return Calls(forward, one=nn.Linear(16, 16), other=nn.Linear(16, 16), last=nn.Linear(16, 4))


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
    found = fq.ptq.improve(fq.prepare(orders(), "INT4_WEIGHT_ONLY"), given, "fast", judge=[], progress=False)
    assert any(note.startswith("one: chosen by a part of the batches") for note in found.notes)
    model, inputs = orders(), []
    model.last.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    for x in given:
        model(x)
    for x, y in zip(seen["last._weight_quantizer"], inputs, strict=True):
        assert_same_bits(x, y)


def test_blocks_learn_the_outputs_of_float_weights_where_batches_take_other_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[Tensor]] = []
    own = reconstruction.reconstruct_block

    def learn(block: nn.Module, inputs: Any, targets: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        seen.append([y.clone() for y in targets])
        return own(block, inputs, targets, *args, **kwargs)

    monkeypatch.setattr(reconstruction, "reconstruct_block", learn)
    names, model, outputs = ["one", "other", "last"], orders(), list[Tensor]()
    quantized = fq.prepare(copy.deepcopy(model), "INT4_WEIGHT_ONLY")
    fq.ptq.reconstruct(quantized, in_two_orders(), names, "omniquant", iterations=100, judge=[], progress=False)
    model.last.register_forward_hook(lambda *call: outputs.append(call[2].detach()))
    for x in in_two_orders():
        model(x)
    for y, wanted in zip(seen[-1], outputs, strict=True):
        assert_same_bits(y, wanted)


def test_an_output_that_gets_another_shape_is_said() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        return y if torch.equal(m.layer.weight, first) else y[1:]

    model = fq.prepare(Calls(forward, layer=nn.Linear(16, 4)), "INT4_WEIGHT_ONLY")
    first = model.layer.weight.detach().clone()
    with pytest.warns(CalibrationWarning, match="error of the model's output larger, .* -> inf"):
        fq.ptq.improve(model, batches(), "fast", judge=[], progress=False)


def test_a_single_batch_is_judged_in_parts() -> None:
    """What one part has beyond the others counts, as it will for new data."""
    generator = torch.Generator().manual_seed(0)
    new = [torch.randn(64, 16, generator=generator) for _ in range(8)]
    how = partial(fq.ptq.improve, batches=batches(1), steps=["smooth", "input"], progress=False)
    assert error_left(Loop(1), "INT8", batches(1), how, new) < 1.5


def film(layer: nn.Module, one_by_one: bool) -> nn.Module:
    """A layer that gets a tensor of any number of axes."""
    return Calls(lambda m, x: torch.stack([m.layer(part) for part in x]) if one_by_one else m.layer(x), layer=layer)


@pytest.mark.parametrize(
    ("layer", "shape", "one_by_one"),
    [
        (nn.Linear(16, 8), (6, 16), True),  # one axis
        (nn.Linear(16, 8), (2, 3, 4, 16), False),
        (nn.Linear(16, 8), (2, 0, 16), False),
        (nn.Conv1d(4, 8, 3), (6, 4, 9), True),  # no axis of examples
        (nn.Conv2d(4, 8, 3, groups=2), (6, 4, 5, 5), True),
        (nn.ConvTranspose2d(4, 8, 3), (6, 4, 5, 5), True),
        (nn.Conv3d(2, 4, 2), (6, 2, 4, 4, 4), True),
    ],
    ids=str,
)
@pytest.mark.parametrize("preset", ["INT8", "INT8_PER_TOKEN", "INT4_WEIGHT_ONLY"])
def test_inputs_of_all_numbers_of_axes_are_chosen(
    layer: nn.Module, shape: tuple[int, ...], one_by_one: bool, preset: str
) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(shape) for _ in range(4)]
    model = fq.prepare(film(copy.deepcopy(layer), one_by_one), preset)
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


class Adds(nn.Linear):
    """It adds its bias itself."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.mT + self.bias


@pytest.mark.parametrize(
    ("cls", "args"),
    [(SamePadding, (4, 4, 3)), (SamePadding, (4, 4, 3, 1, 0, 1, 4)), (Twice, (4, 4, 3)), (Adds, (6, 6))],
)
def test_registered_layers_with_a_forward_of_their_own(cls: type[Any], args: Any, monkeypatch: Any) -> None:
    class Quantized(QuantizedLayer, cls):
        def forward(self, input: Tensor) -> Tensor:
            own, weight = self.quantized_input(input), self.quantized_weight()
            if cls is Adds:
                return own @ weight.mT + self.bias
            y = F.conv2d(F.pad(own, (1, 1, 1, 1)), weight, self.bias, self.stride, 0, 1, self.groups)
            return y + input if cls is Twice else y

    monkeypatch.setattr(cls.forward, "__module__", "another.package")
    Quantized.forward.__module__ = "another.package"
    quantizes(cls)(Quantized)
    try:
        torch.manual_seed(0)
        model = fq.prepare(nn.Sequential(cls(*args)), "INT4_WEIGHT_ONLY")
        (row,) = fq.ptq.improve(model, [torch.randn(4, 4, 6, 6) for _ in range(4)], judge=[]).layers
    finally:
        del _layers[cls]
    refused = "nearest: its own forward computes something else than one product of its weight"
    assert row.note == (refused if cls is Twice else "")
    assert (row.after < row.before) == (cls is not Twice)


def test_weights_of_functions_are_chosen_beside_layers() -> None:
    model, x = nn.Sequential(SamePadding(4, 4, 3), nn.Conv2d(4, 4, 1)), torch.randn(4, 4, 6, 6)
    config = fq.presets.INT4_WEIGHT_ONLY
    model = fq.prepare(model, config.with_rule(fq.Rule("*", config, ops=("conv",))), x)
    rows = {row.layer: row for row in fq.ptq.improve(model, [x]).layers}
    assert {name: row.note for name, row in rows.items()} == {"0._sites.conv2d_0": "", "1": ""}
    assert all(row.after < row.before for row in rows.values())
