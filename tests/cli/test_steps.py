"""What the command line tells while it works: steps with times, counts, and the batch that failed."""

from __future__ import annotations

import io
import math
import re
import runpy
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner, Result

from fakequant.cli.commands import app
from fakequant.cli.console import Steps, failures_named
from fakequant.cli.inspection import preset_lines
from fakequant.data import batches as tracking
from fakequant.data.batches import Batches
from fakequant.errors import RecipeError
from fakequant.model.config import TensorConfig
from fakequant.model.presets import presets
from fakequant.model.weights import spec_bits
from fakequant.report import read_results
from fakequant.version import __version__
from tests.support.recipes import EVALUATE, RECIPE, TRAIN

WRONG = RECIPE.replace("torch.randn(4, 6, generator=generator)", "torch.randn(4, 6 + 3 * (_ == 1))")


def invoke(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(a) for a in arguments])


@pytest.fixture
def written() -> tuple[Steps, io.StringIO]:
    out = io.StringIO()
    return Steps(Console(file=out, width=80), 2), out


def test_notes_and_counts_have_lines_of_their_own(written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "COUNT_EVERY", 0.0)
    steps, out = written
    with steps.step("calibrating"):
        assert list(tracking.track([1, 2, 3], "observing", 3)) == [1, 2, 3]
        steps.note("value: 1\x1b")
    lines = out.getvalue().splitlines()
    assert lines[:4] == ["[1/2] calibrating ...", "observing: 1 of 3", "observing: 2 of 3", r"value: 1\x1b"]
    assert re.fullmatch(r"\[1/2\] calibrating \.\.\. [\d.]+ s", lines[4])
    assert list(tracking.track([1, 2], "observing", None)) == [1, 2]
    assert out.getvalue().splitlines() == lines, "nothing is counted outside a step"


def test_a_failing_step_has_no_time(written) -> None:
    steps, out = written
    with pytest.raises(ZeroDivisionError), steps.step("exporting"):
        _ = 1 / 0
    assert out.getvalue() == "[1/2] exporting ...\n"


def test_quantize_tells_every_step(recipe, tmp_path: Path) -> None:
    path = recipe(RECIPE + EVALUATE + TRAIN)
    result = invoke("quantize", path, "--out", tmp_path / "out", "--improve", "fast", "-v")
    assert result.exit_code == 0, result.output
    told = re.findall(r"^\[(\d)/9\] (.*) \.\.\. [\d.]+ s$", result.stdout, flags=re.MULTILINE)
    assert [int(number) for number, _ in told] == list(range(1, 10))
    assert [what for _, what in told][:4] == ["measuring float32", "calibrating", "choosing weights", "fine-tuning"]
    assert "nearest  " in result.stdout, "the table of layers"
    page = (tmp_path / "out" / "report.html").read_text()
    assert re.search(
        r"Weights chosen by fast steps: error of the model.{1,6}s output on \d+ batch(es)? that chose nothing: .+?% is "
        r"left; layers: \d+% of the error of rounding to nearest is left",
        page,
    )
    assert "mse, then improved" in page
    assert "Weights chosen by their error" in page, "layer by layer"
    assert "keep the chosen values" in page
    out = tmp_path / "out"
    assert {row.layer for row in read_results(out).improvement} == {"0", "2"}
    assert invoke("report", out, out, "--out", tmp_path / "both.html").exit_code == 0
    assert "B: tiny, quantized to INT8" in (tmp_path / "both.html").read_text()
    assert invoke("report", out, "--out", tmp_path / "one.html").exit_code == 0
    assert "worst layer" in (tmp_path / "one.html").read_text()
    refused = invoke("report", tmp_path, out, "--out", tmp_path / "none.html")
    assert refused.exit_code == 1
    assert "there is no" in refused.stderr
    assert not (tmp_path / "none.html").exists()


def test_quiet_prints_errors_only(recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke("quantize", recipe(WRONG), "--out", tmp_path / "out", "--method", "max", "-q")
    assert result.exit_code == 1
    assert result.output.startswith("error: batch 2 of calibration_batches(), tensors of shape [4, 9], [4], failed in")
    assert result.output.strip().endswith("correct the batch or the model (-v shows the traceback)")
    consoles = []
    monkeypatch.setattr("fakequant.cli.job.run", lambda job, console: consoles.append(console))
    invoke("quantize", "recipe.py", "--out", tmp_path / "out", "-q")
    invoke("quantize", "recipe.py", "--out", tmp_path / "out")
    assert [console.quiet for console in consoles] == [True, False]


def test_unknown_steps_are_found_before_the_recipe_runs(tmp_path: Path) -> None:
    result = invoke("quantize", tmp_path / "absent.py", "--out", tmp_path / "out", "--improve", "bset")
    assert "error: unknown steps 'bset' of --improve; did you mean best?" in result.output


def test_verbose_shows_the_traceback_of_a_failing_batch(recipe, tmp_path: Path) -> None:
    verbose = invoke("quantize", recipe(WRONG), "--out", tmp_path / "out", "--method", "max", "-v")
    assert isinstance(verbose.exception, RuntimeError)


def test_an_error_while_a_batch_is_made_stays_as_it_is() -> None:
    def batches():
        yield torch.ones(1)
        raise KeyError("missing file")

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            raise KeyError("in the batch")

    def leave_early() -> None:
        for batch in given:
            assert batch == 1
            break
        raise KeyError("after the batches")

    def fail_inside() -> None:
        for batch in given:
            given.run(model, batch)

    given, model = Batches([1, 2], "calibrate"), Failing()
    with pytest.raises(KeyError), failures_named(model):
        list(Batches(batches(), "calibrate"))
    with pytest.raises(KeyError), failures_named(model):
        leave_early()
    with pytest.raises(RecipeError, match=r"^batch 1 of .*, a int, failed in Failing: KeyError"):  # noqa: SIM117
        with failures_named(model):
            fail_inside()


def test_version() -> None:
    assert invoke("--version").output == f"fakequant {__version__}\n"


def test_presets_are_listed_with_bits_in_100_columns() -> None:
    result = invoke("presets")
    assert result.exit_code == 0
    lines = preset_lines()
    assert result.stdout.startswith("\n".join(lines))
    assert max(map(len, result.stdout.split("\n"))) <= 100
    assert set(presets()) <= {line.split()[0] for line in lines}
    assert any(line.startswith("  INT4_GROUP128        4.25  int4 block 128, float") for line in lines)
    assert "W4A16_G128 is INT4_GROUP128" in " ".join(result.stdout.split())


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_shown_in_full(name: str) -> None:
    result = invoke("presets", name)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.split("\n"))) <= 100
    weights = [str(rule.weight) for rule in presets()[name].rules if rule.weight is not None]
    assert all(weight in " ".join(result.stdout.split()) for weight in weights)


def test_an_unknown_preset_names_the_nearest() -> None:
    result = invoke("presets", "int9")
    assert result.exit_code == 1
    assert "INT8" in result.output


@pytest.mark.parametrize(
    ("spec", "shape", "bits"),
    [
        ("int8", (4, 6), 24 * 8 + 32),
        ("int8 per_channel(0)", (4, 6), 24 * 8 + 4 * 32),
        ("uint4 per_channel(0)", (4, 6), 24 * 4 + 4 * 32 + 4 * 4),
        ("int4 per_block(-1:4,pad)", (4, 6), 24 * 4 + 8 * 32),
        ("float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor", (2, 32), 64 * 4 + 4 * 8 + 32),
        ("float4_e2m1fn per_block(-1:32,pad) scale=float8_e8m0fnu:floor", (2, 32), 64 * 4 + 2 * 8),
    ],
)
def test_stored_bits_count_scales_and_zero_points(spec: str, shape: tuple[int, ...], bits: int) -> None:
    found = spec_bits(TensorConfig.parse(spec).spec, shape)
    assert found.codes + found.scales == bits
    assert found.per_weight == bits / math.prod(shape)


def test_init_writes_a_recipe_that_runs(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    result = invoke("init", path)
    assert f"fakequant quantize {path} --out quantized" in result.stdout
    functions = runpy.run_path(str(path))
    for batch in functions["calibration_batches"]():
        functions["model"]()(batch)
