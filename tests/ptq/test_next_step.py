"""What a report advises was tried: it lowers the error on other data, and the model is as it was."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.data.batches import HeldOut
from fakequant.model.presets import find_preset
from fakequant.model.run.outputs import OutputDistance
from fakequant.nn.quantizer import quantizers
from fakequant.ptq.next_step import AdviceContext, made_by, next_step, weight_methods_of
from fakequant.ptq.trial import Aim, Change, ChangeTrials
from tests.support.advised import deep, given, perceptron, rows, run, tried_on
from tests.support.bits import unchanged
from tests.support.functional_models import Calls
from tests.support.kept import kept


def recurrent() -> nn.Module:
    """An LSTM whose inputs are loud in some steps and quiet in others, as of a voice."""
    parts = {"lstm": nn.LSTM(8, 32, 2, batch_first=True), "head": nn.Linear(32, 16)}
    with torch.no_grad():
        for parameter in parts["lstm"].parameters():
            parameter.mul_(4)  # as training does, so that quiet steps move it, too
    return Calls(lambda m, x: m.head(m.lstm(x)[0].mean(1)), **parts)


def encode(m: Any, x: Tensor) -> Tensor:
    return m.head(nn.functional.layer_norm(x + m.down(torch.relu(m.up(x))), (16,)))


def encoder_net() -> nn.Module:
    """Tokens of which the first is far larger than the others, as in trained transformers."""
    return Calls(encode, up=nn.Linear(16, 64), down=nn.Linear(64, 16), head=nn.Linear(16, 4))


def table_and_head() -> nn.Module:
    """A table with nearly all weights, before a small head."""
    parts = {"table": nn.Embedding(512, 32), "head": nn.Linear(32, 64)}
    return Calls(lambda m, ids: m.head(torch.tanh(m.table(ids).mean(1))), **parts)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def steps(seed: int) -> Tensor:
    return drawn(seed, 8, 12, 8) * torch.where(torch.arange(12) % 6 == 0, 300.0, 1.0)[:, None]


def tokens(seed: int) -> Tensor:
    return drawn(seed, 8, 12, 16) * torch.where(torch.arange(12) == 0, 200.0, 1.0)[:, None]


SIZES = torch.logspace(0, 3, 16)
"""Of the columns of inputs, of which a scale of 8 bits for all columns leaves the small ones nothing."""


def columns(seed: int) -> Tensor:
    return drawn(seed, 32, 16) * SIZES


def uneven() -> nn.Module:
    model = perceptron()
    with torch.no_grad():
        model[0].weight.div_(SIZES)
    return model


def images(seed: int) -> Tensor:
    return drawn(seed, 8, 4, 8, 8)


def words(seed: int) -> Tensor:
    return torch.randint(512, (64, 4), generator=torch.Generator().manual_seed(seed))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 8)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], str, str]] = {
    "recurrent, int8": (recurrent, steps, "int8", "Take the preset int8_per_token"),
    "encoder, int8": (encoder_net, tokens, "int8", "Take the preset int8_per_token"),
    "perceptron, int4": (perceptron, rows, "int4_group32", "Choose the weights by the error of their layers"),
    "perceptron, int4 inputs": (perceptron, rows, "int4", ""),
    "uneven columns, int8": (uneven, columns, "int8", "Take the preset fp8, with weights of float8_e4m3fn: "),
    "convolutions, int4": (convolutions, images, "int4_weight_only", "Choose the weights by the error"),
}


def calibrated(exact: nn.Module, preset: str, batches: list[Tensor], *example: Tensor, **how: Any) -> Any:
    model = fq.prepare(copy.deepcopy(exact), preset, *example, **how)
    fq.calibrate(model, batches, progress=False)
    return model


def error(model: nn.Module, exact: nn.Module, batches: list[Tensor]) -> float:
    return OutputDistance(exact, kept(batches, run)).of(model).mean


def reported(model: nn.Module, batches: list[Any], folder: Path, **how: Any) -> dict[str, Any]:
    return json.loads(fq.report(model, batches, folder / "r.html", **how).with_suffix(".json").read_text())


@pytest.mark.parametrize(
    ("target", "tried"),
    [("tensorrt", ["fp8"]), ("openvino", ["int8_affine"]), ("onnxruntime", ["int8_affine", "int8_per_token"])],
)
def test_presets_are_tried_that_the_target_runs(target: str, tried: list[str]) -> None:
    torch.manual_seed(0)
    batches = [columns(0), columns(1)]
    found = next_step(calibrated(uneven(), "int8", batches), given(batches), AdviceContext(target=target))
    assert found is not None
    presets = [one.what.split()[3].rstrip(",") for one in found.tried if one.what.startswith("Take the preset")]
    assert presets == tried


@pytest.mark.parametrize("name", MODELS)
def test_what_is_advised_lowers_the_error_on_other_data(name: str, tmp_path: Path) -> None:
    make, batch, preset, said = MODELS[name]
    torch.manual_seed(0)
    exact, batches, others = make().eval(), [batch(seed) for seed in range(4)], [batch(seed) for seed in range(50, 54)]
    model = calibrated(exact, preset, batches)
    found = reported(model, batches, tmp_path)
    assert found["next"].startswith(said)
    best = found["advice"]["tried"][found["advice"]["best"]]
    assert f"from {found['advice']['error']:.2e} to {best['after']:.2e} of its energy" in found["next"]
    assert "on 2 batches held back, with 2 batches to make it" in found["next"]
    before, scope = error(model, exact, others), {"fq": fq, "model": model, "batches": batches}
    exec(found["code"], scope | {"float_model": copy.deepcopy(exact)}, scope)
    assert error(scope["model"], exact, others) < 0.95 * before


def encoder(preset: str = "int8", batches: int = 4, **how: Any) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    given = [tokens(seed) for seed in range(batches)]
    return calibrated(encoder_net().eval(), preset, given, **how), given


def test_a_large_layer_is_made_smaller_before_a_layer_is_left_in_float(tmp_path: Path) -> None:
    torch.manual_seed(0)
    exact, batches = table_and_head().eval(), [words(seed) for seed in range(4)]
    model = fq.prepare(copy.deepcopy(exact), "int4_group32", skip=["table"])
    found = reported(model, batches, tmp_path)
    assert found["next"].startswith(
        "Give table, which has 98% of the bytes of all layers, the weights int8 per_channel(0)"
    )
    scope: dict[str, Any] = {"fq": fq, "batches": batches, "float_model": copy.deepcopy(exact)}
    exec(found["code"], scope)
    assert fq.summary(scope["model"]).bytes_quantized < 0.5 * fq.summary(model).bytes_quantized
    assert error(scope["model"], exact, batches) <= 1.02 * error(model, exact, batches)


def test_where_the_metric_lost_nothing_the_error_is_not_touched(tmp_path: Path) -> None:
    model, batches = encoder()
    found = reported(model, batches, tmp_path, metric=lambda _: 90.0)
    assert found["next"] == "Nothing stands out: export the model and verify the file."
    assert found["advice"]["tried"] == []
    lost = reported(model, batches, tmp_path, metric=lambda net: float(net(batches[0]).abs().sum()))
    assert lost["advice"]["little"] or lost["advice"]["tried"]


def test_a_change_that_costs_the_metric_is_not_advised() -> None:
    model, batches = encoder()
    plain = Change("halve", "", lambda _: fq.recalibrate(model, method="max"), Aim.ENGINE)
    assert ChangeTrials(model, HeldOut.of(given(batches), 2), lambda _: 1.0, 1.0).of(plain).helps
    worse = ChangeTrials(model, HeldOut.of(given(batches), 2), lambda _: 0.9, 1.0).of(plain)
    assert (worse.helps, worse.metric) == (False, 0.9)


def test_a_single_batch_judges_what_it_made_and_the_page_says_so(tmp_path: Path) -> None:
    model, batches = encoder(batches=1)
    assert "on the one batch there is, which also made it." in reported(model, batches, tmp_path)["next"]
    assert "on 1 batch held back, with 1 batch to make it." in reported(model, [*batches, tokens(9)], tmp_path)["next"]


@pytest.mark.parametrize("preset", ["int8", "int4_group32"])
@pytest.mark.filterwarnings("error::fakequant.errors.StaleScaleWarning")
def test_the_model_is_as_it_was(preset: str, tmp_path: Path) -> None:
    model, batches = encoder(preset)
    model.head.train()
    held = [(name, type(m), m.training, set(vars(m))) for name, m in model.named_modules()]
    before, random = model(batches[0]), torch.random.get_rng_state()
    with unchanged(model):
        assert next_step(model, given(batches)).tried
    assert torch.equal(torch.random.get_rng_state(), random)
    assert held == [(name, type(m), m.training, set(vars(m))) for name, m in model.named_modules()]
    assert torch.equal(model(batches[0]), before)
    assert torch.equal(model.eval()(batches[0]), before)


def test_the_number_of_runs_does_not_grow_with_the_layers() -> None:
    def runs(blocks: int) -> int:
        torch.manual_seed(0)
        batches = [rows(seed) for seed in range(4)]
        model = calibrated(deep(blocks), "int4", batches)
        worst = [found.layer for found in fq.sensitivity(model, batches[:1], progress=False)]
        calls = []
        model[0].register_forward_pre_hook(lambda *_: calls.append(1))
        assert len(next_step(model, given(batches), AdviceContext(worst=worst)).tried) == 5
        return len(calls)

    assert runs(3) == runs(6) < 60


def test_what_fails_is_a_row_with_the_reason() -> None:
    model, batches = encoder()

    def fail(_: list[Any]) -> None:
        fq.recalibrate(model, method="nothing")

    found = ChangeTrials(model, HeldOut.of(given(batches), 2)).of(Change("try", "", fail))
    assert not found.helps
    assert "unknown calibrator 'nothing'" in found.failed


def test_weights_that_were_chosen_are_not_thrown_away() -> None:
    model, batches = encoder()
    fq.ptq.improve(model, batches, ["ranges", "gptq", "drift", "bias"], progress=False)  # ranges of inputs stay
    assert {one.what for one in next_step(model, given(batches)).tried} == {
        f"Calibrate the inputs by '{name}'" for name in ("max", "percentile")
    }


def normed() -> Any:
    """Which torch.fx can trace."""
    return nn.Sequential(OrderedDict(conv=nn.Conv2d(4, 8, 3), norm=nn.BatchNorm2d(8), act=nn.ReLU()))


def test_batch_normalisations_that_engines_fold_are_no_ready_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    exact, batches = normed().eval(), [images(seed) for seed in range(4)]
    nn.init.uniform_(exact.norm.weight, 0.5, 2.0)
    model = calibrated(exact, "int8", batches)
    found = reported(model, batches, tmp_path)
    assert found["next"].startswith("Fold 1 batch normalisation into the layers before, as engines do: the error")
    scope = {"fq": fq, "batches": batches, "example": batches[0], "float_model": copy.deepcopy(exact)}
    exec(found["code"], scope)
    assert isinstance(scope["model"].norm, nn.Identity)
    assert reported(scope["model"], batches, tmp_path)["next"].startswith("Nothing stands out: export")
    assert isinstance(model.norm, nn.BatchNorm2d)


def test_batch_normalisations_after_layers_in_float_stay() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(normed(), nn.Flatten(), nn.Linear(288, 4)).eval()
    model = calibrated(net, "int8", [images(0)], skip=["0.conv"])
    assert not any("normalisation" in one.what for one in tried_on(model, [images(0), images(1)]).tried)


@pytest.mark.parametrize(
    ("how", "said"), [({"inputs": 0}, "inputs=0"), ({"forward": lambda net, pair: net(pair[0])}, "forward=forward")]
)
def test_the_code_calls_the_model_as_the_report_did(how: dict[str, Any], said: str, tmp_path: Path) -> None:
    model, batches = encoder()
    found = reported(model, [(batch, torch.ones(8)) for batch in batches], tmp_path, **how)
    assert f"fq.calibrate(model, batches, {said})" in found["code"]


def test_nothing_is_tried_where_it_is_not_wanted(tmp_path: Path) -> None:
    model, batches = encoder()
    found = reported(model, batches, tmp_path, advise=False)
    assert (found["advice"], found["code"]) == (None, "")
    assert "No change was tried: advise=False" in found["next"]


class Own(nn.Linear):
    """A layer with a forward of its own, which `prepare` quantizes by an example."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight) + self.bias


def loud(number: int, seed: int, spread: float) -> list[Tensor]:
    """Batches whose tokens differ in size by orders, so that a few of them have nearly all energy."""
    generator = torch.Generator().manual_seed(seed)
    draw = (torch.randn(8, 20, size, generator=generator) for _ in range(number) for size in (16, 1))
    return [x * torch.exp(spread * size) for x, size in zip(draw, draw, strict=True)]


@pytest.mark.parametrize(
    ("activation", "spread", "seed"),
    [(nn.ReLU, 2.0, 1), (nn.GELU, 1.0, 1), (nn.GELU, 1.5, 1), (nn.GELU, 1.5, 2), (nn.ReLU, 2.0, 3), (nn.GELU, 1.0, 2)],
)
def test_no_method_is_advised_for_the_batches_that_made_it(activation: Any, spread: float, seed: int) -> None:
    torch.manual_seed(seed)
    exact = nn.Sequential(Own(16, 64), activation(), nn.Linear(64, 16)).eval()
    batches, others = loud(24, 1 + seed, spread), loud(60, 991, spread)
    model = calibrated(exact, "int8", batches, batches[0])
    advice, before = tried_on(model, batches), error(model, exact, others)
    if advice.best is not None and "calibrate(model" in (code := advice.tried[advice.best].code):
        exec(code, {"fq": fq, "model": model, "batches": batches})
        assert error(model, exact, others) < before
    own = calibrated(exact, "int8", batches[0:8:2], batches[0])
    assert advice.error == error(own, exact, batches[1:8:2])


def test_methods_are_not_compared_where_the_model_does_not_keep_what_it_saw() -> None:
    model, batches = encoder()
    for one in quantizers(model).values():
        one.collected = None
    tried = tried_on(model, batches).tried
    assert tried[0].what == "Calibrate the inputs by another method"
    assert "call fq.calibrate(model, batches, 'mse'), or with another method, and" in tried[0].failed
    names = "int8_per_token", "w8a8_dynamic", "w8a8_transformers"
    dynamic = [f"Take the preset {name}, which takes ranges at run time" for name in names]
    of_floats = "Take the preset fp8_dynamic, which takes ranges at run time, with weights of float8_e4m3fn"
    assert [one.what for one in tried[1:]] == [*dynamic, of_floats]


@pytest.mark.parametrize("count", [16, 3, 2])
def test_folded_batch_normalisations_have_the_error_of_the_model(count: int) -> None:
    torch.manual_seed(0)
    exact, batches = normed().eval(), [images(seed) * 2.0**seed for seed in range(count)]
    nn.init.uniform_(exact.norm.weight, 0.5, 2.0)
    model = fq.prepare(exact, "int8")
    fq.calibrate(model, batches, "max", progress=False)
    advice = next_step(model, given(batches), AdviceContext(lost=0.0))
    assert advice is not None
    (fold,) = [one for one in advice.tried if one.what.startswith("Fold")]
    assert fold.code.splitlines()[-1] == 'used = fq.calibrate(model, batches, method="max")'
    assert fold.after == pytest.approx(advice.error, rel=0.05)


@pytest.mark.parametrize("skipped", ["2", "4"])
def test_code_that_leaves_a_layer_in_float_keeps_what_the_example_quantized(skipped: str) -> None:
    torch.manual_seed(0)
    exact = nn.Sequential(Own(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    batches = [rows(seed) for seed in range(4)]
    model = calibrated(exact, "int4", batches, batches[0])
    code = tried_on(model, batches, "4").tried[-1].code.replace('"4"', f'"{skipped}"')
    assert code.startswith("# float_model: the model before prepare; config: what prepare got; example: one input")
    scope = {"fq": fq, "batches": batches, "example": batches[0], "float_model": exact, "config": "int4"}
    exec(code, scope)
    assert quantizers(scope["model"]).keys() == {name for name in quantizers(model) if not name.startswith(skipped)}


@pytest.mark.parametrize(
    ("again", "method"),
    [
        *((False, "mse"), (True, "max"), (False, "entropy"), (True, "percentile")),
        *((False, "max"), (False, "percentile"), (True, "mse"), (True, "entropy")),
    ],
)
def test_the_method_of_a_model_is_not_advised_and_its_code_keeps_it(again: bool, method: str) -> None:
    torch.manual_seed(0)
    model, batches = fq.prepare(perceptron(), "int4"), [rows(seed) for seed in range(4)]
    fq.calibrate(model, batches, "mse" if again else method, progress=False, weight_method="mse")
    if again:
        fq.recalibrate(model, method=method)
    tried = tried_on(model, batches, "4").tried
    named = {name for name in ("mse", "max", "percentile") if any(f"by {name!r}" in t.what for t in tried)}
    assert method not in named
    assert named  # the highest percentile may be the maximum
    assert not any(one.failed for one in tried)
    for one in tried:
        if one.what.startswith("Calibrate"):
            exec(one.code, {"fq": fq, "model": copy.deepcopy(model), "batches": batches})
    same = {"mse", "max", "percentile", method} - named
    said = ["" if one == "mse" else f', method="{one}"' for one in same]
    assert tried[-1].code.endswith(tuple(f'fq.calibrate(model, batches{one}, weight_method="mse")' for one in said))


@pytest.mark.parametrize("preset", ["gguf_q4_k", "gguf_q8_0", "gguf_iq4_xs"])
@pytest.mark.parametrize("method", [None, "max", "mse"])
def test_the_method_of_weights_on_a_lattice_is_known(preset: str, method: str | None) -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(256, 4)), preset)
    fq.calibrate(model, weight_method=method)
    assert weight_methods_of(model) == ["max" if method == "max" else None]


@pytest.mark.parametrize("name", ["INT8", "FP8", "MXFP4", "INT4_GROUP32", "NVFP4", "INT8_WEIGHT_ONLY"])
def test_the_preset_of_a_model_is_found_by_its_quantizers(name: str) -> None:
    model = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 64), nn.Conv1d(3, 8, 3), nn.MaxPool1d(2), nn.Linear(31, 4))
    found = made_by(fq.prepare(model, name, skip=["4"]))
    assert found is not None
    assert (found.preset.name, found.skip) == (name, ("4",))


def test_own_rules_are_of_no_preset() -> None:
    rules = fq.Config("own", (fq.Rule("*", "int8"), fq.Rule("1.0", weight="int2 per_channel(0)")))
    model = fq.prepare(deep(4), rules)
    assert made_by(model) is None
    fq.calibrate(model, [rows(0)], progress=False)
    tried = next_step(model, given([rows(0), rows(1)]), AdviceContext(worst=["1.0"])).tried
    assert 'config, skip=["1.0"])' in tried[-1].code


@pytest.mark.parametrize("name", sorted(fq.known_engines()))
def test_its_presets_are_there_once_and_its_page_is_there(name: str) -> None:
    engine = fq.known_engines()[name]
    presets = [preset for kind in engine.kinds for preset in kind]
    assert len(set(presets)) == len(presets)
    assert [find_preset(preset).name for preset in presets] == presets
    assert not engine.page or (Path(__file__).parents[2] / "docs" / "engines" / f"{engine.page}.md").is_file()


def test_a_call_that_hurts_most_is_tried_in_float() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        parts = {"one": nn.Linear(8, 16), "two": nn.Linear(8, 16), "head": nn.Linear(16, 4)}
        return Calls(lambda m, x: m.head(torch.log(m.one(x) ** 2 + m.two(x) ** 2 + 1e-6)), **parts).eval()

    def batch(seed: int) -> Tensor:
        return drawn(seed, 32, 8) * 10 ** torch.linspace(-2, 1, 32)[:, None]

    model = fq.prepare(net(), "int8_affine", batch(0), target="onnxruntime")
    fq.calibrate(model, [batch(seed) for seed in range(4)])
    (call,) = (one.layer for one in fq.sensitivity(model, [batch(0)])[:1])
    assert "_sites.add" in call
    context = AdviceContext(worst=[call])
    found = next_step(model, given([batch(seed) for seed in range(8)]), context)
    assert found is not None
    (tried,) = (one for one in found.tried if one.what == f"Leave {call} in float")
    assert tried.helps
    assert f'skip=["{call}"]' in tried.code
    model = fq.prepare(net(), "int8_affine", batch(0), target="onnxruntime", skip=[call])  # as the code says
    fq.calibrate(model, [batch(seed) for seed in range(4)])
    assert call not in [one.layer for one in fq.sensitivity(model, [batch(0)])]
