"""`advise`: its answer is the model that its code makes, what it tries first, and that it can be cut and resumed."""

from __future__ import annotations

import copy
import io
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError, ConfigError, OutputError
from fakequant.files import locked
from fakequant.model.run.outputs import OutputDistance
from fakequant.ptq import Compared
from fakequant.ptq.advice import SearchOrder, SizeClass
from fakequant.ptq.trial import Trials, Variant
from tests.support.bits import assert_same_state, unchanged
from tests.support.functional_models import Calls
from tests.support.kept import kept

SOME = ["INT8", "INT8_PER_TOKEN", "INT4_WEIGHT_ONLY"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def rows(count: int = 4, seed: int = 0) -> list[Tensor]:
    return [torch.randn(16, 32, generator=torch.Generator().manual_seed(seed + one)) for one in range(count)]


def normed() -> nn.Module:
    """A convolution, a batch normalisation and a sum in its forward."""
    torch.manual_seed(0)
    conv, norm, head = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Linear(192, 4)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    parts = {"conv": conv, "norm": norm, "head": head}
    return Calls(lambda m, x: m.head(torch.relu(m.norm(m.conv(x)) + x).flatten(1)), **parts)


def images(count: int = 4) -> list[Tensor]:
    return [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(one)) for one in range(count)]


def made(call: str, **scope: Any) -> nn.Module:
    exec(call, scope)
    return scope["quantized"]


class Half(nn.Module):
    """Takes the first of two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.net(x) * scale


PAIRS = [(x, torch.ones(1), "label") for x in rows()]
WORDS = [{"x": x, "scale": torch.ones(1)} for x in rows()]


CASES: dict[str, tuple[Callable[[], nn.Module], list[Any], dict[str, Any]]] = {
    "weights alone": (net, rows(), {"floor": 25}),
    "improved": (net, rows(8), {"floor": 22, "presets": ["INT4_GROUP32", "INT4_WEIGHT_ONLY"]}),
    "calibrated by another method": (net, rows(9), {"floor": 60, "presets": ["INT8"]}),
    "one batch": (net, rows(1), {"floor": 30}),
    "many batches": (net, rows(19), {"floor": 30, "presets": ["INT8"]}),
    "placed by an engine": (normed, images(), {"floor": 20, "target": "onnxruntime", "presets": ["INT8_AFFINE"]}),
    "an index": (net, [(x, 0) for x in rows()], {"inputs": 0, "presets": ["INT8"]}),
    "labels that are left out": (Half, PAIRS, {"presets": ["INT8"]}),
    "a dict": (Half, WORDS, {"presets": ["INT8"]}),
    "a forward": (Half, PAIRS, {"forward": lambda model, pair: model(*pair[:2]), "presets": ["INT8"]}),
    "no gain": (net, rows(), {"floor": 90, "presets": ["INT8_WEIGHT_ONLY"]}),
}


@pytest.mark.parametrize("name", CASES)
def test_its_code_makes_the_measured_model_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, batches, how = CASES[name]
    model, kept_models = make().train(), dict[Any, nn.Module]()
    quantized = Trials.quantized

    def keeping(self: Trials, *way: str, **options: Any) -> nn.Module:
        kept_models[way] = quantized(self, *way, **options)
        return kept_models[way]

    monkeypatch.setattr(Trials, "quantized", keeping)
    before, shown = copy.deepcopy(model), str(model)
    found = fq.advise(model, batches, **how)
    wanted = kept_models[found.best.measured.way]
    again = made(found.call, model=model, batches=batches, **how)
    assert_same_state(again, wanted)
    assert str(again) == str(wanted)
    assert all(module.training for module in model.modules())
    assert str(model) == shown
    assert_same_state(model, before)


def test_the_judges_are_those_that_the_code_leaves_out() -> None:
    model, batches = net(), rows(19)
    found = fq.advise(model, batches, presets=["INT8"], floor=30)
    line = next(line for line in found.call.splitlines() if line.startswith("made = "))
    scope: dict[str, Any] = {"batches": [*range(19)]}
    exec(line, scope)
    judges = sorted(set(range(19)) - set(scope["made"]))
    assert judges == [*range(1, 16, 2)]
    quantized = made(found.call, model=model, batches=batches)
    error = OutputDistance(model, kept([batches[one] for one in judges], lambda net, x: net(x))).of(quantized).mean
    assert error == found.best.measured.error
    assert "Judged on 8 batches held back, with 11 batches to make it." in str(found)


@pytest.mark.parametrize("floor", [10, 21, 35, 80])
def test_it_is_the_smallest_that_meets_the_floor(floor: float) -> None:
    found = fq.advise(net(), rows(8), floor=floor, presets=["INT8_WEIGHT_ONLY", "INT4_WEIGHT_ONLY", "INT8"])
    good = [row for row in found.rows if row.score >= floor]
    assert found.meets is bool(good)
    if good:
        assert found.best.bytes == min(row.bytes for row in good)
        assert "is the smallest that meets the floor" in found.reason
    else:
        assert found.best.score == max(row.score for row in found.rows)
        assert re.search(r"None meets the floor of 80.0 dB: .* and misses it by \d", found.reason)


UNHELD: dict[str, tuple[Callable[[], nn.Module], list[Any], str, list[str] | None, str]] = {
    "a model": (net, rows(), "llama.cpp", None, "gguf cannot hold this model, however it is quantized: GGUF files are"),
    "layers": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 32)), nn.Conv1d(1, 4, 3)),
        rows(),
        "vllm",
        None,
        "it quantizes linear layers, embeddings and experts, and this is a Conv1d; leave it in float by Rule",
    ),
    "formats": (net, rows(), "onnxruntime", ["GGUF_Q4_K"], "but no offsets in units of x"),
    "ranges": (net, rows(), "tensorrt", ["INT8_AFFINE"], "TensorRT has no zero points"),
}


@pytest.mark.parametrize(("make", "batches", "target", "presets", "said"), UNHELD.values(), ids=UNHELD)
def test_what_no_file_holds_is_said_before_the_first_trial(
    make: Callable[[], nn.Module],
    batches: list[Any],
    target: str,
    presets: list[str] | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Trials, "quantized", lambda *_: pytest.fail("a trial"))
    with pytest.raises(ConfigError, match=r"the model can be prepared with none of .*") as error:
        fq.advise(make(), batches, target=target, presets=presets)
    assert said in str(error.value)


def test_a_preset_that_the_files_cannot_hold_is_a_row_with_the_reason() -> None:
    found = fq.advise(net(), rows(), target="onnxruntime", presets=["GGUF_Q4_K", "INT8_AFFINE"], floor=10)
    assert found.best.measured.preset == "INT8_AFFINE"
    (refused,) = [row for row in found.rows if row.measured.failed]
    assert "no offsets in units of x" in refused.measured.failed


def test_one_of_several_of_one_size_is_not_called_the_smallest() -> None:
    presets = ["INT4_GROUP128", "INT4_GROUP64", "INT4_GROUP32", "NVFP4_WEIGHT_ONLY"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    found = fq.advise(model, [torch.randn(16, 256) for _ in range(4)], presets=presets, floor=10)
    smallest = min(row.bytes for row in found.rows)
    assert found.best.bytes > smallest
    assert "is the smallest" not in found.reason
    assert f"{found.best.measured.preset} meets the floor of 10.0 dB: it has {found.best.score:.1f} dB" in found.reason
    assert "the best of the sizes within 15% of the smallest, INT4_GROUP128." in found.reason


@pytest.mark.parametrize("target", [None, "onnxruntime", "vllm", "transformers"])
def test_it_prints_in_80_columns(target: str | None) -> None:
    text = str(fq.advise(net(), rows(), target=target))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("\n*  ") == 1
    assert "not measured" in text
    assert "<table" in fq.advise(net(), rows(), target=target)._repr_html_()


def test_a_metric_decides() -> None:
    def metric(model: nn.Module) -> float:
        return float(any("int8" in repr(one) for one in model.modules()))

    found = fq.advise(net(), rows(), metric=metric, floor=0.5, presets=[*SOME, "INT4_GROUP32"])
    assert (found.best.measured.preset, found.unit, found.best.score) == ("INT8_PER_TOKEN", "metric", 1.0)
    with pytest.raises(ConfigError, match=r"metric\(model\) gives nan for the float model"):
        fq.advise(net(), rows(), metric=lambda _: float("nan"))


@pytest.mark.parametrize("fails", [lambda: 1 / 0, lambda: float("nan"), lambda: "much"])
def test_a_metric_that_fails_for_a_model_is_a_row(fails: Callable[[], Any]) -> None:
    def metric(model: nn.Module) -> Any:
        return fails() if any("int4" in repr(one) for one in model.modules()) else 1.0

    found = fq.advise(net(), rows(), metric=metric, presets=["INT4_WEIGHT_ONLY", "INT8"])
    assert found.best.measured.preset == "INT8"
    assert [row.measured.preset for row in found.rows if row.measured.failed] == ["INT4_WEIGHT_ONLY"]
    assert "failed" in str(found)


def test_a_metric_that_fails_for_the_float_model_or_for_all_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        fq.advise(net(), rows(), metric=lambda _: 1 / 0)
    calls = iter([1.0])
    with pytest.raises(ConfigError, match="all trials failed; the first, INT8: StopIteration"):
        fq.advise(net(), rows(), metric=lambda _: next(calls), presets=["INT8"])


def endless(error: BaseException) -> Iterator[float]:
    yield from (1.0, 0.1)
    raise error


def test_an_interrupt_gives_what_was_found_and_leaves_the_model(tmp_path: Path) -> None:
    model, calls = net(), endless(KeyboardInterrupt())
    with unchanged(model):
        found = fq.advise(model, rows(), metric=lambda _: next(calls), presets=SOME, floor=0.9, work=tmp_path)
    assert (found.interrupted, len(found.rows), found.meets) == (True, 1, False)
    assert "Interrupted" in str(found)
    assert made(found.call, model=model, batches=rows())(rows()[0]).shape == (16, 8)


def test_an_interrupt_before_the_first_result_is_one() -> None:
    calls = iter([1.0])

    def metric(_: nn.Module) -> float:
        if (value := next(calls, None)) is None:
            raise KeyboardInterrupt
        return value

    with pytest.raises(KeyboardInterrupt):
        fq.advise(net(), rows(), metric=metric, presets=SOME)


def test_a_folder_goes_on_to_the_same_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"presets": ["INT4_GROUP32", "INT4_WEIGHT_ONLY", "INT8"], "floor": 45}
    whole = fq.advise(net(), rows(8), **how)
    measured, left = Trials.of, iter(range(3))

    def cut(self: Trials, way: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return measured(self, way, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Trials, "of", cut)
        assert fq.advise(net(), rows(8), work=tmp_path, **how).interrupted
    ran = []
    monkeypatch.setattr(Trials, "of", lambda self, way, **o: ran.append(way) or measured(self, way, **o))
    again = fq.advise(net(), rows(8), work=tmp_path, **how)
    assert (again.best.measured.way, again.call, again.reason) == (whole.best.measured.way, whole.call, whole.reason)
    assert len(ran) == len(whole.rows) - 3
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]  # what improve kept is gone
    with pytest.raises(ConfigError, match="another path, or remove the file"):
        fq.advise(net(), rows(8, seed=1), work=tmp_path, **how)


Metric = Callable[[nn.Module], float]
METRICS: dict[str, tuple[Metric, Metric]] = {
    "code": (lambda model: 2.0 - float(model is None), lambda model: 1.0 + float(model is None)),
    "number": (
        lambda model, whole=2.0: 1.0 if model is None else whole / 2,
        lambda model, whole=4.0: 1.0 if model is None else whole / 4,
    ),
    "function inside": (
        lambda model: min(1.0, (lambda: 3.0 - float(model is None))()),
        lambda model: min(1.0, (lambda: 1.0 + float(model is None))()),
    ),
}


@pytest.mark.parametrize("name", METRICS)
def test_a_folder_of_another_metric_with_the_same_float_value_is_refused(name: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"presets": SOME[:1], "floor": 0.5, "work": tmp_path}
    first, other = METRICS[name]
    for _ in range(2):
        fq.advise(net(), rows(), metric=lambda model, own=first: min(1.0, own(model)), **how)
    with pytest.raises(ConfigError, match="is no comparison, or was made with another model"):
        fq.advise(net(), rows(), metric=lambda model, own=other: min(1.0, own(model)), **how)


def test_a_folder_is_of_one_process_and_what_the_user_has_in_it_stays(tmp_path: Path) -> None:
    how: dict[str, Any] = {"presets": ["INT4_WEIGHT_ONLY"], "floor": 200, "work": tmp_path}
    names = ("improve-INT4_WEIGHT_ONLY-auto-fast/thesis.txt", "improve-notes/a.txt", "00000.layer")
    fq.advise(net(), rows(), **how)
    (row,) = {path.name for path in tmp_path.iterdir()}
    kept = [json.loads(line) for line in (tmp_path / row).read_text().splitlines()[1:]]
    steps = next(one for one in kept if one["steps"])
    names = (*names, f"improve-{'-'.join([steps['preset'], steps['method'], steps['steps']])}/mine.txt")
    (tmp_path / row).unlink()
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    with locked(tmp_path), pytest.raises(OutputError, match="another process writes to"):
        fq.advise(net(), rows(), **how)
    fq.advise(net(), rows(), **how)
    assert {str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*") if one.is_file()} == {row, *names}
    assert all((tmp_path / name).read_text() == "mine" for name in names)


def test_it_says_what_is_tried_and_what_follows() -> None:
    with redirect_stderr(io.StringIO()) as said:
        fq.advise(net(), rows(), presets=SOME, floor=40, progress=True)
        fq.advise(net(), rows(), presets=SOME)
    lines = said.getvalue().splitlines()
    assert lines[0].startswith("trying INT4_WEIGHT_ONLY; then at most: ")
    assert re.search(r"best so far: INT4_WEIGHT_ONLY, \d+\.\d dB;", lines[1])
    assert sum(line.startswith("trying INT4_WEIGHT_ONLY;") for line in lines) == 1  # the second call has no terminal


def test_presets_that_the_model_cannot_have_are_said() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8))
    model[0].forward = lambda x: nn.functional.linear(x, model[0].weight)  # as a hook of another library does
    with pytest.raises(
        ConfigError,
        match="prepared with none of INT8, INT8_PER_TOKEN, INT4_WEIGHT_ONLY; with INT8: ConfigError: 0: its forward",
    ):
        fq.advise(model, rows(), presets=SOME)


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "no batches": (lambda: fq.advise(net(), []), "advise needs batches, and got none"),
    "one tensor": (lambda: fq.advise(net(), rows()[0]), "advise takes batches, and a tensor would be taken row by row"),
    "a prepared model": (lambda: fq.advise(fq.prepare(net(), "int8"), rows()), "advise takes a float model"),
    "no model": (lambda: fq.advise(rows(), net()), r"advise takes a model, got .*; write advise\(model, batches\)"),
    "no layers": (lambda: fq.advise(nn.ReLU(), rows()), "the model can be prepared with none of INT8_WEIGHT_ONLY"),
    "a target": (
        lambda: fq.advise(net(), rows(), target="onnxrt"),
        "unknown target 'onnxrt'; did you mean onnxruntime",
    ),
    "a target of another kind": (lambda: fq.advise(net(), rows(), target=3), "target takes the name of an engine"),
    "a preset": (lambda: fq.advise(net(), rows(), presets=["int9"]), "unknown preset 'int9'"),
    "one preset": (lambda: fq.advise(net(), rows(), presets="int8"), "presets takes a list of names, got 'int8'"),
    "no presets": (lambda: fq.advise(net(), rows(), presets=[]), r"presets takes a list of names, got \[\]"),
    "a floor": (lambda: fq.advise(net(), rows(), floor="much"), "floor='much': a budget is a number"),
    "no floor": (lambda: fq.advise(net(), rows(), floor=float("nan")), "floor=nan: a budget is a number"),
    "a metric": (lambda: fq.advise(net(), rows(), metric=3), "advise takes a function as metric"),
    "a folder": (lambda: fq.advise(net(), rows(), work=3), "a path is a text or a pathlib.Path, got 3"),
    "NaN": (
        lambda: fq.advise(net(), [x * float("nan") for x in rows()]),
        "batch .*: an output of the float model is NaN",
    ),
    "another shape": (lambda: fq.advise(net(), [torch.ones(2, 3)] * 2), "of shape .*2, 3.* failed in layer 0"),
    "forward and a target": (
        lambda: fq.advise(net(), rows(), forward=lambda model, x: model(x), target="openvino"),
        "the target openvino places quantizers by a run that calls the model itself",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_clear_message(name: str) -> None:
    work, message = CALLS[name]
    with pytest.raises(OutputError if name == "a folder" else (ConfigError, CalibrationError), match=message) as caught:
        work()
    assert "\n" not in str(caught.value)


CLASSES = [SizeClass(400, ("A4", "B4")), SizeClass(800, ("A8", "B8")), SizeClass(801, ("W8",))]


def climbed(
    score: Callable[[Variant], float], floor: float, has_metric: bool = False, static: tuple[str, ...] = ("A8",)
) -> tuple[SearchOrder, list[Variant]]:
    """The ladder after all that it asks for; scores are in dB, or of a metric."""
    ladder, tried = SearchOrder(CLASSES, static, floor, has_metric), []
    for way, follows in ladder.ways():
        tried.append(way)
        assert follows
        value = score(way)
        error = 0.1 if has_metric else 10 ** (-value / 10)
        ladder.rows[way] = Compared(*way, error=error, metric=value if has_metric else None, bytes=len(tried))
    return ladder, tried


def by_preset(**scores: float) -> Callable[[Variant], float]:
    return lambda way: scores[way.preset]


def test_presets_end_with_the_first_size_that_meets_the_floor() -> None:
    ladder, tried = climbed(by_preset(A4=21, B4=22, A8=30, B8=30, W8=40), 20)
    assert tried == [Variant("A4"), Variant("B4")]
    assert ladder.answer is not None
    assert ladder.answer.preset == "B4"  # the best of its size, not the first that is enough


def test_what_costs_more_is_tried_below_that_size_alone() -> None:
    gains = {"": 0, "fast": 3, "best": 4}
    scores = by_preset(A4=16, B4=15, A8=25, B8=22, W8=40)
    ladder, tried = climbed(lambda way: scores(way) + gains[way.steps], 20)
    assert tried == [
        *(Variant(name) for name in ("A4", "B4", "A8", "B8")),
        Variant("A4", steps="fast"),
        Variant("B4", steps="fast"),
        Variant("A4", steps="best"),
    ]
    assert ladder.answer is not None
    assert ladder.answer.way == ("A4", "mse", "best")


def test_methods_are_tried_for_static_inputs() -> None:
    ladder, tried = climbed(lambda way: 25.0 if way.method == "percentile" else 19.0 if "8" in way.preset else 5.0, 24)
    assert tried[:5] == [Variant(name) for name in ("A4", "B4", "A8", "B8", "W8")]
    assert tried[5:7] == [Variant("A8", method) for method in ("max", "percentile")]
    assert ladder.answer is not None
    assert ladder.answer.way == ("A8", "percentile", "")


def test_where_none_meets_the_floor_the_best_of_all_is_the_answer() -> None:
    ladder, tried = climbed(by_preset(A4=10, B4=11, A8=30, B8=31, W8=40), 100)
    assert [way for way in tried if way.steps] == [Variant("W8", steps="fast")]  # the others are out of reach
    assert ladder.answer is not None
    assert (ladder.answer.preset, ladder.meets(ladder.answer)) == ("W8", False)


def test_what_costs_more_must_be_clearly_better() -> None:
    def score(way: Variant) -> float:
        return 30.0 + 0.3 * (way.steps == "fast") if way.preset == "W8" else 1.0

    ladder, tried = climbed(score, 32)
    assert Variant("W8", steps="fast") in tried
    assert ladder.answer is not None
    assert ladder.answer.way == ("W8", "mse", "")


def test_by_a_metric_everything_is_tried_until_it_is_met() -> None:
    ladder, tried = climbed(by_preset(A4=1, B4=2, A8=3, B8=4, W8=5), 6, has_metric=True)
    assert sum(way.steps == "best" for way in tried) == len(CLASSES)
    assert ladder.answer is not None
    assert ladder.answer.preset == "W8"


def test_of_equal_models_one_is_improved() -> None:
    ladder = SearchOrder([SizeClass(1, ("A", "B", "C"))], (), 20)
    for way, _ in ladder.ways():
        error = 0.05 if way.preset == "C" else 0.02
        ladder.rows[way] = Compared(*way, error=error, bytes=1.0)
    assert [way.preset for way in ladder.rows if way.steps == "fast"] == ["A", "C"]


def test_what_fails_is_no_answer() -> None:
    ladder = SearchOrder([SizeClass(1, ("A", "B"))], (), 20)
    for way, _ in ladder.ways():
        failed = "why" if way.preset == "A" else ""
        ladder.rows[way] = Compared(*way, failed=failed) if failed else Compared(*way, error=1.0)
    assert ladder.answer is not None
    assert ladder.answer.preset == "B"


@pytest.mark.parametrize("error", [math.inf, math.nan])
def test_outputs_without_a_number_are_the_worst(error: float) -> None:
    ladder = SearchOrder([SizeClass(1, ("A", "B"))], (), 20)
    for way, _ in ladder.ways():
        ladder.rows[way] = Compared(*way, error=error if way.preset == "A" else 0.5)
    assert ladder.answer is not None
    assert ladder.answer.preset == "B"
