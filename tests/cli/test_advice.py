"""The commands `advise`, `compare` and `search`, and the commands that a page advises."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fakequant as fq
from fakequant.cli.commands import app
from tests.support.processor import LOST_BY_SUMS

RECIPE = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))

def calibration_batches():
    return [torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_compare_prints_the_best_first_and_goes_on(recipe: Path, tmp_path: Path) -> None:
    presets = ["--preset", "MXFP4", "--preset", "w8a8"]
    arguments = ["compare", recipe, *presets, "--improve", "none", "--out", tmp_path / "rows"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    first = result.stdout
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["MXFP4 mse", "INT8 mse"]  # as they come
    assert [line.split()[0] for line in first.splitlines()] == ["preset", "INT8", "MXFP4"]
    assert run(*arguments) == first  # with its seconds: nothing ran again


def test_search_prints_a_preset_for_each_layer(recipe: Path) -> None:
    lines = run("search", recipe, "--bits", 6).splitlines()
    chosen = dict(line.split() for line in lines[:2])
    assert set(chosen) == {"0", "2"}
    assert float(lines[2].split()[0]) <= 6
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    fq.prepare(model, fq.Config("mixed", ()), rules=chosen)
    assert model(torch.ones(1, 64)).shape == (1, 8)
    rules = [word for layer, preset in chosen.items() for word in ("--rule", f"{layer}={preset}")]
    given = ["fakequant", "quantize", str(recipe), "--out", "quantized", "--float", "*"]
    assert shlex.split(lines[-1]) == [*given, *rules]


def test_search_by_a_floor_needs_evaluate(recipe: Path) -> None:
    result = CliRunner().invoke(app, ["search", str(recipe), "--floor", "2"])
    assert result.exit_code == 1
    assert "defines no evaluate(model), which --floor needs" in result.stderr
    recipe.write_text(RECIPE + "\ndef evaluate(net):\n    return 5.0\n")
    lines = run("search", recipe, "--floor", 2).splitlines()
    assert "evaluate(model) gives 5; error of the output" in " ".join(lines)


def test_pictures_and_rows_get_their_folders(recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    given = ["--preset", "w8a8", "--improve", "none", "--out", tmp_path / "a" / "rows", "--over", "milliseconds"]
    words = "compare", recipe, *given, "--plot", tmp_path / "b" / "p.svg", "-q"
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert (tmp_path / "a" / "rows").is_file()
    assert (tmp_path / "b" / "p.svg").stat().st_size > 1000


def test_a_plot_says_before_the_work_that_matplotlib_is_missing(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fakequant.ptq.comparison.find_spec", lambda _: None)
    result = CliRunner().invoke(app, ["compare", str(recipe), "--plot", str(tmp_path / "p.png")])
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "error: a plot needs matplotlib, not installed here; run pip install 'fakequant[report]'"
    ]


@pytest.mark.parametrize("command", [["advise"], ["compare"], ["search", "--bits", "6"]])
def test_verbose_shows_the_traceback_of_a_failing_batch(recipe: Path, command: list[str]) -> None:
    recipe.write_text(RECIPE.replace("32, 64, gen", "32, 63, gen"))
    name, *options = command
    result = CliRunner().invoke(app, [name, str(recipe), *options])
    number = 1 if name == "search" else 2  # the first that judges
    assert f"batch {number} of calibration_batches(), tensors of shape [32, 63], failed in layer 0" in result.stderr
    result = CliRunner().invoke(app, [name, str(recipe), *options, "-v"])
    assert isinstance(result.exception, RuntimeError)
    assert str(result.exception).startswith("mat1 and mat2 shapes")


def test_advise_prints_a_command_that_makes_the_answer(recipe: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["advise", str(recipe), "--floor", "30", "--work", str(tmp_path / "work")])
    assert result.exit_code == 0, result.output
    assert "INT8_WEIGHT_ONLY is the smallest that meets the floor of 30.0 dB" in " ".join(result.stdout.split())
    assert result.stderr.startswith("trying INT4_WEIGHT_ONLY; then at most: ")
    command = result.stdout.splitlines()[-1]
    assert shlex.split(command) == [
        *("fakequant", "quantize", str(recipe), "--out", "quantized", "--preset", "int8_weight_only")
    ]
    again = CliRunner().invoke(app, ["advise", str(recipe), "--floor", "30", "--work", str(tmp_path / "work")])
    assert (again.stdout, again.stderr) == (result.stdout, "")  # with its seconds: nothing ran again


CONVOLUTION = RECIPE.replace("nn.Linear(64, 64)", "nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)")
CONVOLUTION = CONVOLUTION.replace("nn.Linear(64, 8)", "nn.Flatten(), nn.Linear(144, 8)")


def test_advise_prints_python_where_the_command_has_no_such_option(recipe: Path) -> None:
    recipe.write_text(CONVOLUTION)
    lines = run("advise", recipe, "--target", "onnxruntime", "--preset", "int8_affine", "-q").splitlines()
    code = lines[lines.index("To make it, in Python (fakequant quantize folds no batch normalisations):") + 1 :]
    scope: dict[str, Any] = {}
    exec("\n".join(code), scope)
    assert "fq.fuse_batch_norm(quantized, made[0])" in code
    assert scope["quantized"](scope["batches"][0]).shape == (32, 8)


RESIDUAL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.same = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = torch.relu(self.up(x))
        return self.same(x) + x

def model():
    torch.manual_seed(0)
    return Net()

def calibration_batches():
    return [torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
"""


def test_quantize_puts_quantizers_where_the_target_wants_them(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(RESIDUAL)
    given = ("advise", recipe, "--target", "onnxruntime", "--preset", "int8_affine", "-q")
    words = shlex.split(run(*given).splitlines()[-1])
    assert words[-4:] == ["--preset", "int8_affine", "--target", "onnxruntime"]
    result = CliRunner().invoke(app, [*words[1:4], str(tmp_path / "out"), *words[5:], "-q"])
    assert result.exit_code == 0 or LOST_BY_SUMS.search(result.stderr), result.output
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert "_sites.add_0" in [layer["name"] for layer in found["layers"]]


def test_quantize_takes_what_the_target_computes_of_a_preset(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("quantize", recipe, "--out", out, "--target", "vllm", "--preset", "int8_per_token", "-q")
    assert "int8 per_token reciprocal" in (out / "checkpoint" / "fakequant.json").read_text()


def test_quantize_says_that_a_target_is_not_known_to_gain_by_a_preset(recipe: Path, tmp_path: Path) -> None:
    given = ("quantize", recipe, "--out", tmp_path / "out", "--target", "vllm")
    said = "It is not known that vllm gains by INT4_GROUP32. It takes W8A8_DYNAMIC, FP8_DYNAMIC, INT4_GROUP128"
    assert " ".join(run(*given, "--preset", "int4_group32").split()).count(said) == 1
    assert said in json.loads((tmp_path / "out" / "results.json").read_text())["summary"][1]
    assert "not known" not in run(*given, "--preset", "w8a8_dynamic")
    result = CliRunner().invoke(app, [*map(str, given[:-1]), "vlm"])
    assert result.stderr == "error: unknown target 'vlm'; did you mean vllm?\n"


def test_advise_is_ended_by_an_interrupt_with_what_it_found(recipe: Path) -> None:
    calls = "\ncalls = iter([1.0, 0.5])\ndef evaluate(net):\n    value = next(calls, None)\n"
    recipe.write_text(RECIPE + calls + "    if value is None:\n        raise KeyboardInterrupt\n    return value\n")
    result = CliRunner().invoke(app, ["advise", str(recipe)])
    assert result.exit_code == 130, result.stderr
    assert "Interrupted: the answer is chosen from the rows above." in result.stdout
    assert "None meets the floor of 0.99 evaluate: INT4_WEIGHT_ONLY is nearest" in result.stdout


LOUD = """
import torch
from torch import nn

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(nn.functional.layer_norm(x + self.down(torch.relu(self.up(x))), (16,)))

def model():
    torch.manual_seed(0)
    return Encoder()

def calibration_batches():
    for seed in range(4):
        x = torch.randn(8, 12, 16, generator=torch.Generator().manual_seed(seed))
        yield x * torch.where(torch.arange(12) == 0, 200.0, 1.0).view(1, 12, 1)
"""


def test_a_page_of_a_command_advises_a_command(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(LOUD)
    run("quantize", recipe, "--out", tmp_path / "out", "--float", "he?d", "--packed", "-q")
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["next"].startswith("Take the preset int8_per_token")
    words = shlex.split(found["code"])
    assert words == [
        *("fakequant", "quantize", str(recipe), "--out", str(tmp_path / "out"), "--preset", "int8_per_token"),
        *("--packed", "--float", "he?d"),
    ]
    tried = found["advice"]["tried"]
    assert all(one["code"].startswith("fakequant quantize ") for one in tried)
    run(*words[1:], "-q")
    better = json.loads((tmp_path / "out" / "results.json").read_text())
    assert better["advice"]["error"] < 0.5 * found["advice"]["error"]
