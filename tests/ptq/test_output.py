"""What the results of algorithms say of the model's output, and of data that are too few."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.model.run.outputs import OutputDistance
from fakequant.ptq.comparison import Ways
from tests.support.bits import assert_same_state
from tests.support.functional_models import Calls
from tests.support.kept import error_left, kept
from tests.support.loops import Loop, batches


class Tagger(nn.Module):
    """Gives a row of values for each token; those of padding are large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner, self.head = nn.Embedding(9, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.table(tokens) * (1 + 50.0 * (tokens == 0)[..., None])).relu())


def padded(count: int = 6) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(1, 9, (8, 12), generator=generator) for _ in range(count)]
    keep = [torch.arange(12)[None] < torch.randint(3, 12, (8, 1), generator=generator) for _ in range(count)]
    return [{"tokens": one * kept, "mask": kept} for one, kept in zip(tokens, keep, strict=True)]


def test_padding_is_no_error_of_the_output() -> None:
    model = fq.prepare(Tagger(), "INT4_WEIGHT_ONLY")
    error = OutputDistance(Tagger(), kept(padded()[1:2], lambda model, batch: model(batch["tokens"])[batch["mask"]]))
    before = error.of(model).mean
    found = fq.ptq.improve(model, padded(), "fast", inputs=lambda batch: batch["tokens"], mask="mask", progress=False)
    assert (found.before, found.after) == (before, error.of(model).mean)


def decided() -> nn.Module:
    """Gives whole numbers."""
    return Calls(lambda m, x: m.layer(x).argmax(-1), layer=nn.Linear(16, 4))


def test_whole_numbers_have_no_error() -> None:
    model, said = fq.prepare(decided(), "INT4_WEIGHT_ONLY"), "model returns no floats"
    found = fq.ptq.improve(model, batches(), "fast", progress=False)
    assert (found.before, found.after) == (None, None)
    assert f"the error of the model's output was not measured: the {said}" in str(found)
    with pytest.raises(ConfigError, match=f"{said}.*metric="):
        fq.compare(decided(), batches(), ["INT8"])
    (row,) = fq.compare(decided(), batches(), Ways(["INT8"], steps=[None]), metric=lambda _: 1.0).rows
    assert not row.failed
    assert "nan" not in str(fq.compare(decided(), batches(), ["INT8"], metric=lambda _: 1.0))
    with pytest.raises(ConfigError, match=said):
        fq.ptq.equalize(nn.Sequential(nn.Linear(16, 16), decided()), batches()[0], "INT8")


def test_an_error_that_was_infinite_before_is_said() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y, exact = m.layer(x), nn.functional.linear(x, m.layer.weight, m.layer.bias)
        return torch.where((y == exact).all(), y, torch.inf)

    strict = Calls(forward, layer=nn.Linear(16, 4))
    found = fq.ptq.improve(fq.prepare(strict, "INT4_WEIGHT_ONLY"), batches(), ["ranges"], progress=False)
    assert found.before is None
    assert "the error of the model's output was not measured: it was NaN or infinite before" in found.notes


class Few(nn.Module):
    """A block whose output is the mean of a few rows, or one row, of each example."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.head, self.kind = nn.Linear(32, 16), kind

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return self.head(x if self.kind == "row" else x[:, 0] if self.kind == "first" else x.mean(1))


@pytest.mark.parametrize(("kind", "shape"), [("row", (2, 32)), ("first", (2, 4, 32)), ("mean", (2, 4, 32))])
def test_few_rows_choose_nothing_that_loses_on_others(kind: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    given, new, notes = [torch.randn(shape) for _ in range(2)], torch.randn(64, *shape[1:]), list[str]()

    def work(model: nn.Module) -> None:
        notes.extend(fq.ptq.improve(model, given, "fast", judge=[], progress=False).notes)

    assert error_left(Few(kind).eval(), "INT4_GROUP32", given, work, [new]) < 1.07
    assert any("as many examples" in note for note in notes)


def test_a_single_row_chooses_nothing_and_many_rows_win() -> None:
    torch.manual_seed(1)
    left, new = [], torch.randn(256, 32)
    for given in ([torch.randn(1, 32)], [torch.randn(1024, 32)]):
        how = partial(fq.ptq.improve, batches=given, steps="fast", judge=[], progress=False)
        left.append(error_left(Few("row").eval(), "INT4_GROUP32", given, how, [new]))
    assert left[0] == 1
    assert left[1] < 0.8


@pytest.mark.parametrize("preset", ["int8", "fp8", "int8_per_token", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_few_rows_smooth_nothing(preset: str, rows: int) -> None:
    """A channel that is small in one row by chance got a factor that new rows could not stand: errors of 31 times."""
    torch.manual_seed(1)
    new, given = torch.randn(256, 32), [torch.randn(rows, 32)]

    def work(model: Any) -> None:
        notes = fq.ptq.improve(model, given, "fast", progress=False).notes
        assert any('"smooth" needs 2 rows' in note for note in notes)
        assert model.up.input_transform is None

    assert error_left(Few("row").eval(), preset, given, work, [new]) < 1.07


@pytest.mark.parametrize("preset", ["int8", "int4_weight_only"])
def test_batches_that_repeat_count_once(preset: str) -> None:
    """They judged what they had chosen themselves: an error of 57 times that of nearest values on new rows."""
    torch.manual_seed(1)
    batches = [torch.randn(24, 32) for _ in range(2)]
    found = []
    for given in (batches, [*batches, batches[0].clone(), batches[1], batches[0]]):
        model = fq.prepare(Few("row").eval(), preset)
        fq.calibrate(model, batches, progress=False)
        result = fq.ptq.improve(model, given, "fast", progress=False)
        assert ("3 of 5 batches repeat earlier ones, and count once" in result.notes) == (given is not batches)
        found.append(model)
    assert_same_state(*found)


@pytest.mark.parametrize("rows", [8, 64])
def test_layers_with_fewer_rows_than_columns_are_named(rows: int) -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), "INT4_WEIGHT_ONLY")
    found = fq.ptq.improve(model, [torch.randn(rows, 16)], "fast", progress=False)
    assert any(note.startswith("0: its input has 8 rows for 16 columns") for note in found.notes) == (rows == 8)


@pytest.mark.parametrize("steps", ["fast", "best"])
@pytest.mark.parametrize("rows", [8, 64])
def test_few_rows_do_not_cost_what_new_rows_would_have(rows: int, steps: str) -> None:
    left = []
    for seed in range(3):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        given, new = [torch.randn(rows, 64)], [torch.randn(512, 64)]
        how = partial(fq.ptq.improve, batches=given, steps=steps, progress=False)
        left.append(error_left(net, "INT8_WEIGHT_ONLY", given, how, new))
    assert sum(left) / 3 <= 1  # few rows may choose nothing
    assert rows == 8 or sum(left) / 3 < 1


def in_bfloat16(model: nn.Module, batch: Any, *, keeps_casts: bool = True) -> Any:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=keeps_casts):
        return model(batch)


@pytest.mark.parametrize("preset", ["INT8", "INT4_WEIGHT_ONLY"])
@pytest.mark.parametrize("work", [fq.ptq.improve, fq.ptq.reconstruct, fq.ptq.scores])
def test_autocast_in_forward(preset: str, work: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Linear(16, 4))
    if work is fq.ptq.scores:
        assert len(work(net, batches(), [preset], forward=in_bfloat16, progress=False).layers) == 3
        return
    model = fq.prepare(copy.deepcopy(net), preset)
    fq.calibrate(model, batches(), forward=in_bfloat16, progress=False)
    found = work(model, batches(), forward=in_bfloat16, progress=False, judge=[])
    assert found.remaining_error_of_layers < 1


def test_casts_of_weights_that_have_changed_are_made_anew() -> None:
    """Autocast keeps casts of parameters for all threads, also of a bias that `improve` has changed since."""
    models = []
    for keeps_casts in (True, False):
        models.append(fq.prepare(Loop(1), "INT4_WEIGHT_ONLY"))
        forward = partial(in_bfloat16, keeps_casts=keeps_casts)
        fq.ptq.improve(models[-1], batches(), "fast", forward=forward, progress=False)
    assert_same_state(*models)


@pytest.mark.parametrize("steps", [["smooth"], ["rotate"], ["input", "smooth"]])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_transform_does_not_lose_what_calibration_won(steps: list[str], seed: int) -> None:
    """Calibration cuts off the largest values here, which a range of all values would not."""
    torch.manual_seed(seed)
    net, values = nn.Sequential(nn.Linear(32, 32)), torch.distributions.StudentT(3.0)
    given = [values.sample((64, 32)) for _ in range(8)]
    assert error_left(net, "INT4", given, partial(fq.ptq.improve, batches=given, steps=steps, progress=False)) <= 1
