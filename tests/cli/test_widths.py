"""What commands print fits in 100 columns, in a pipe and where the terminal is as wide.

Errors and warnings are a line each in a pipe, for programs that read them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fakequant.cli.commands import app
from tests.support.recipes import EVALUATE, RECIPE

DEEP = RECIPE.replace(
    "nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)",
    "*(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU()) for _ in range(8)), nn.Linear(6, 3)",
)
WIDE = 100
TO_COPY = re.compile(r"fakequant \w+ ")
"""Commands to be copied, which stay whole."""


def invoke(*arguments: object, columns: int | None = WIDE) -> Result:
    return CliRunner(env={"COLUMNS": columns and str(columns)}).invoke(app, [str(a) for a in arguments])


def assert_fits(result: Result, columns: int = WIDE) -> None:
    messages = result.stderr.splitlines()
    assert [line for line in messages if len(line) > columns and not line.startswith(("error: ", "warning: "))] == []
    lines = [line for line in result.stdout.splitlines() if not TO_COPY.match(line)]
    assert [line for line in lines if len(line) > columns and " " in line.strip()] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, and two finished runs of it."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "recipe.py").write_text(DEEP + EVALUATE)
    for name, preset in (("one", "int8"), ("two", "int4_group32")):
        result = invoke("quantize", folder / "recipe.py", "--out", folder / name, "--preset", preset)
        assert result.exit_code == 0, result.output
    return folder


HELP = ["", "advise", "compare", "search", "quantize", "init", "presets", "inspect", "report", "verify", "deliver"]
COMMANDS: dict[str, tuple[str, ...]] = {
    **{f"{name} --help": (*filter(None, [name]), "--help") for name in (*HELP, "improve-folder", "doctor")},
    "init": ("init", "{folder}/new.py"),
    "presets": ("presets",),
    "a preset": ("presets", "int8"),
    "doctor": ("doctor",),
    "quantize": ("quantize", "{recipe}", "--out", "{folder}/a", "--verbose"),
    "quantize by target": ("quantize", "{recipe}", "--out", "{folder}/b", "--target", "onnxruntime"),
    "quantize, with steps": ("quantize", "{recipe}", "--out", "{folder}/c", "--improve", "fast", "--compare"),
    "inspect": ("inspect", "{folder}/one/checkpoint"),
    "inspect a file": ("inspect", "{folder}/one/model.onnx"),
    "report": ("report", "{folder}/one", "{folder}/two", "--out", "{folder}/page.html"),
    "verify": ("verify", "{folder}/one/model.onnx"),
    "verify with a recipe": ("verify", "{folder}/one/model.onnx", "--recipe", "{recipe}"),
    "deliver": ("deliver", "{recipe}", "--checkpoint", "{folder}/two/checkpoint", "--out", "{folder}/delivered"),
    "deliver, refused": ("deliver", "{recipe}", "--checkpoint", "{folder}/one/checkpoint", "--out", "{folder}/no"),
    "advise": ("advise", "{recipe}", "--preset", "int8", "--preset", "int4_group32"),
    "compare": ("compare", "{recipe}", "--preset", "int8", "--improve", "none"),
    "search": ("search", "{recipe}", "--bits", "20"),
    "search, refused": ("search", "{recipe}", "--bits", "1"),
    "an unknown preset": ("quantize", "{recipe}", "--preset", "int9", "--out", "{folder}/d"),
    "no file": ("verify", "{folder}/none.onnx"),
    "no folder": ("improve-folder", "{folder}/none", "--text", "{recipe}", "--out", "{folder}/e"),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("columns", [None, WIDE], ids=["pipe", "terminal"])
@pytest.mark.filterwarnings("ignore")
def test_what_is_printed_fits(name: str, columns: int | None, folder: Path) -> None:
    words = [word.format(folder=folder, recipe=folder / "recipe.py") for word in COMMANDS[name]]
    assert_fits(invoke(*words, columns=columns))


def test_paths_stay_whole_and_narrow_lines_end_at_spaces(folder: Path) -> None:
    long = folder / ("x" * 80) / "none.onnx"
    assert len(invoke("verify", long, columns=60).stderr.splitlines()) == 1
    on_terminal = {"COLUMNS": "60", "FORCE_COLOR": "1"}
    result = CliRunner(env=on_terminal).invoke(app, ["verify", str(long)])
    lines = re.sub(r"\x1b\[[\d;]*m", "", result.stderr).splitlines()
    assert any(str(long) in line for line in lines)
    assert len(lines) > 1
    assert [line for line in lines if len(line) > 60 and " " in line] == []


def test_a_warning_begins_a_line_of_its_own(folder: Path) -> None:
    result = invoke("quantize", folder / "recipe.py", "--out", folder / "f", "--preset", "int4_group32")
    assert "\nwarning: " in result.output
    assert not re.search(r"\.\.\.warning", result.output)
