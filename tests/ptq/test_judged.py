"""What improve and reconstruct choose is judged on other batches, and goes back where it does not help; their runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError, ConfigError
from fakequant.model.run.outputs import OutputDistance
from tests.support.bits import assert_same_bits, assert_same_state
from tests.support.functional_models import Calls
from tests.support.kept import kept


def two() -> nn.Module:
    """Two outputs, one of which is 1,000 times as large."""
    one, other = nn.Linear(24, 24), nn.Linear(24, 3)
    return Calls(lambda m, x: (m.two(m.one(x).relu()), 1e3 * m.one(x)), one=one, two=other)


def recurrent() -> nn.Module:
    parts = {"lstm": nn.LSTM(24, 16, batch_first=True), "head": nn.Linear(16, 3)}
    return Calls(lambda m, x: m.head(m.lstm(x[:, None].expand(-1, 3, -1))[0][:, -1]), **parts)


NETS: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24), nn.LayerNorm(24), nn.Linear(24, 5)),
    "two outputs": two,
    "lstm": recurrent,
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 6)), nn.Conv1d(4, 16, 3), nn.ReLU(), nn.Conv1d(16, 4, 2), nn.Flatten(), nn.Linear(12, 3)
    ),
}


LEARNED = partial(fq.ptq.reconstruct, preset="brecq", iterations=300)


def run(model: nn.Module, batch: Tensor) -> Any:
    return model(batch)


def ready(
    kind: str, preset: str, seed: int, rows: int = 8, count: int = 3
) -> tuple[nn.Module, nn.Module, list[Tensor]]:
    """A float network of random weights, the same one calibrated, and batches."""
    torch.manual_seed(seed)
    net = NETS[kind]().eval()
    given, model = [torch.randn(rows, 24) for _ in range(count)], fq.prepare(copy.deepcopy(net), preset)
    fq.calibrate(model, given, progress=False)
    return net, model, given


@pytest.mark.parametrize("preset", ["INT8", "INT4"])
@pytest.mark.parametrize("kind", NETS)
def test_choices_that_do_not_help_on_other_rows_go_back(kind: str, preset: str) -> None:
    """With 24 rows, choices made the output of 14 of 24 random networks worse on new rows, by up to a third."""
    lost = 0
    for seed in range(6):
        net, model, given = ready(kind, preset, seed)
        new = OutputDistance(net, kept([torch.randn(512, 24)], run))
        held = OutputDistance(net, kept(given[1:2], run))
        before, state = new.of(model).mean, copy.deepcopy(model)
        found = fq.ptq.improve(model, given, "fast", progress=False)
        lost += new.of(model).mean > 1.05 * before
        assert found.before is not None
        assert found.after == held.of(model).mean <= found.before
        assert found.remaining_error == found.after / found.before
        assert str(found).startswith("error of the model's output on 1 batch that chose nothing: ")
        if all(row.note.startswith("nearest: its choice does not") for row in found.layers):
            assert_same_state(model, state)
            assert found.remaining_error == 1
    assert lost <= 1


@pytest.mark.parametrize("work", [fq.ptq.improve, LEARNED], ids=["improve", "reconstruct"])
def test_batches_that_judge_are_the_given_ones(work: Any) -> None:
    net, model, given = ready("tanh", "INT4", 0, rows=512)
    judge = [torch.randn(64, 24), torch.randn(1, 24)]
    error = OutputDistance(net, kept(judge, run))
    before = error.of(model).mean
    blocks = [["0", "2", "4"]] if work is LEARNED else []
    found = work(model, given, *blocks, judge=iter(judge), progress=False)
    assert (found.before, found.after) == (before, error.of(model).mean)
    assert "on 2 batches that chose nothing" in str(found)
    assert found.remaining_error < 0.9
    with pytest.raises(ConfigError, match="give a list"):
        work(model, given, *blocks, judge=judge[0])


def test_an_output_that_is_nan_judges_nothing() -> None:
    """The second of three batches judges."""
    _, model, given = ready("tanh", "INT8", 0, rows=128)
    for number, named in enumerate(("0, batch 1: an input holds NaN", None, "0, batch 3: an input holds NaN")):
        damaged = [x * torch.nan if place == number else x for place, x in enumerate(given)]
        if named is not None:
            with pytest.raises(CalibrationError, match=named):
                fq.ptq.improve(model, damaged, "fast", progress=False)
            continue
        found = fq.ptq.improve(copy.deepcopy(model), damaged, "fast", progress=False)
        assert found.before is None
        assert any("not measured: all values of the output are NaN or 0" in note for note in found.notes)
        assert found.remaining_error_of_layers < 1


def test_layers_that_help_stay_where_others_do_not() -> None:
    """The second layer gets the opposite inputs on the batches that judge, so that its new bias is wrong there."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(12, 8) for name in ("one", "two")}  # with an input and an output of their own
    net = Calls(lambda m, x: (m.one(x[:, :12]), m.two(x[:, 12:])), **layers)
    mean, mixed = 4 * torch.randn(12), torch.randn(4, 12)

    def batch(*, judges: bool) -> Tensor:
        first = torch.randn(512, 4) @ mixed + 0.6 * torch.randn(512, 12)
        return torch.cat([first, (-mean if judges else mean) + 0.1 * torch.randn(512, 12)], 1)

    given, judge = [batch(judges=False) for _ in range(4)], [batch(judges=True) for _ in range(2)]
    model = fq.prepare(copy.deepcopy(net), fq.Config("test", (fq.Rule(weight="int3 per_channel(0)"),)))
    nearest = copy.deepcopy(model)
    found = fq.ptq.improve(model, given, judge=judge, progress=False)
    notes = {row.layer: row.note for row in found.layers}
    assert notes["one"] == ""
    assert notes["two"].startswith("nearest: its choice does not lower")
    assert_same_bits(model(judge[0])[1], nearest(judge[0])[1])
    assert found.remaining_error < 1


def test_one_batch_judges_nothing_and_says_so() -> None:
    _, model, given = ready("tanh", "INT4", 0, rows=64, count=1)
    found = fq.ptq.improve(model, given, progress=False)
    assert str(found).startswith(
        "error of the model's output on 1 batch that also chose, so that new data may lose more: "
    )
    assert not any(row.note for row in found.layers)


def test_a_metric_judges_before_the_error_does() -> None:
    """The metric wants the first layer as it is, and is blind to the second, of which the error decides."""
    torch.manual_seed(0)
    net = Calls(lambda m, x: (m.one(x), m.two(x)), one=nn.Linear(12, 8), two=nn.Linear(12, 8))
    model = fq.prepare(net, "INT4_WEIGHT_ONLY")
    nearest, given = copy.deepcopy(model), [torch.randn(64, 12) @ torch.randn(12, 12) for _ in range(4)]

    def unchanged(model: nn.Module) -> float:
        assert not model.training
        return -float((model.one(given[0]) - nearest.one(given[0])).abs().sum())

    found = fq.ptq.improve(model, given, metric=unchanged, progress=False)
    notes = {row.layer: row.note for row in found.layers}
    assert notes["one"].startswith("nearest: its choice does not raise the metric")
    assert notes["two"] == ""
    assert_same_bits(model(given[0])[0], nearest(given[0])[0])
    assert (found.metric, found.metric_before, found.metric_after) == ("unchanged", 0, 0)
    assert str(found).startswith("unchanged: 0 -> 0\nerror of the model's output on 1 batch that chose nothing: ")
    assert found.remaining_error < 1


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("judge", [None, []])
def test_a_metric_decides_where_no_error_does(sign: int, judge: list[Any] | None) -> None:
    """Outputs without floats have no error, and batches that chose do not judge; the metric judges all the same."""
    torch.manual_seed(0)
    net = Calls(lambda m, x: m.one(x).argmax(-1), one=nn.Linear(12, 8))
    model = fq.prepare(net, "INT4_WEIGHT_ONLY")
    nearest, given = model.one.weight.detach().clone(), [torch.randn(64, 12) for _ in range(2)]
    found = fq.ptq.improve(
        model, given, "fast", judge=judge, metric=lambda m: sign * float(m.one.weight.ne(nearest).any()), progress=False
    )
    assert bool(model.one.weight.ne(nearest).any()) == (sign == 1)
    assert found.metric_after == max(sign, 0)
    assert found.before is None


def test_a_metric_that_is_no_number_changes_nothing() -> None:
    _, model, given = ready("tanh", "INT4", 0)
    state = copy.deepcopy(model)
    for metric, error in ((lambda m: float("nan"), "NaN"), (lambda m: None, "not a number"), (0.5, "as metric")):
        with pytest.raises(ConfigError, match=error):
            fq.ptq.improve(model, given, metric=metric, progress=False)  # pyright: ignore[reportArgumentType]
        assert_same_state(model, state)


def attend(m: Any, x: Tensor) -> Tensor:
    x = m.words(x)
    q, k, v = (layer(m.norm(x)).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (m.q, m.k, m.v))
    return x + m.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def attending() -> nn.Module:
    layers = {name: nn.Linear(16, 16) for name in ("q", "k", "v", "out")}
    return Calls(attend, words=nn.Embedding(20, 16), norm=nn.LayerNorm(16), **layers)


COUNTED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)),
        lambda: torch.randn(64, 16),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(288, 4)
        ),
        lambda: torch.randn(32, 3, 8, 8),
    ),
    "attention": (attending, lambda: torch.randint(0, 20, (16, 12))),
}


def counted(net: str, number: int) -> tuple[nn.Module, list[Tensor], list[int]]:
    """A prepared net, batches, and what counts the calls of its forward."""
    torch.manual_seed(0)
    make, batch = COUNTED[net]
    model, runs = fq.prepare(make().eval(), "INT4_GROUP32"), [0]
    batches, own = [batch() for _ in range(number)], model.forward

    def forward(*args: Any) -> Any:
        runs[0] += 1
        return own(*args)

    model.forward = forward  # type: ignore[method-assign]
    return model, batches, runs


@pytest.mark.parametrize("number", [2, 4, 8])
@pytest.mark.parametrize("steps", ["fast", "best"])
@pytest.mark.parametrize("net", COUNTED)
def test_improve_runs_a_model_three_times_and_two_batches_once_more(net: str, steps: str, number: int) -> None:
    model, batches, runs = counted(net, number)
    found = fq.ptq.improve(model, batches, steps, progress=False)
    parts = sum(not row.note.startswith("no batch") for row in found.layers)  # run where all together do not help
    usual = 3 * number + 2 + 1 + 1  # the one that judges runs before the choices, too, and once more
    assert runs[0] in (usual, usual + parts)
    assert found.is_judged


@pytest.mark.parametrize(
    ("number", "options", "runs"),
    [
        (8, {"steps": "fast"}, 3 * 8 + 2 + 1 + 1),  # what all changes lower is measured once
        (8, {"steps": "fast", "checkpoint": True}, 3 * 8 + 2 + 1 + 2),  # the first batch again
        (4, {"steps": "fast", "judge": []}, 3 * 4 + 2 + 3 * 4 + 1),  # all four measure
        (8, {"steps": ["gptq"]}, 8 + 2 + 7 + 3 + 1),  # without drift, the float model on what judges alone
        (1, {"steps": "fast"}, 3 + 1 + 3 + 1),
    ],
    ids=str,
)
def test_other_ways_run_it(number: int, options: dict[str, Any], runs: int, tmp_path: Path) -> None:
    model, batches, counts = counted("mlp", number)
    how = {**options, "checkpoint": tmp_path if "checkpoint" in options else None}
    found = fq.ptq.improve(model, batches, progress=False, **how)
    assert counts[0] == runs
    assert number < 8 or (found.remaining_error < 1 and not any(row.note for row in found.layers))
