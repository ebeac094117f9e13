"""The command line: the commands, and what each says when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from fakequant import cli
from fakequant.cli.commands import app
from fakequant.cli.job import Job, run
from fakequant.cli.recipe import load_recipe
from fakequant.model.presets import find_preset, presets
from fakequant.report.terminal import print_table
from tests.support.processor import why_sums_saturate
from tests.support.recipes import EVALUATE, MARK, RECIPE, TRAIN


def invoke(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(a) for a in arguments])


def assert_one_red_line(result: Result, *parts: str) -> None:
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), "an exception passed through"
    assert "Traceback" not in result.output
    line = result.stderr.strip()
    assert line.startswith("error: ")
    assert "\n" not in line
    for part in parts:
        assert part in line


# Presets and examples


@pytest.mark.parametrize("name", sorted(presets()))
def test_presets_are_found_in_any_case(name: str) -> None:
    assert find_preset(name) is find_preset(name.lower()) is find_preset(name.lower().replace("_", "-"))


# Commands that need no model


def test_doctor_says_what_serves() -> None:
    result = invoke("doctor")
    assert result.exit_code == 0
    for word in ("torch", "backend cpu", "backend reference", "available", "C++ compiler", "GPU", "threads"):
        assert word in result.stdout
    row = next(line for line in result.stdout.splitlines() if line.startswith("integer convolutions"))
    assert ("not available" in row) == (why_sums_saturate() is not None)


def test_no_command_shows_the_commands() -> None:
    result = invoke()
    assert all(name in result.output for name in ("init", "quantize", "inspect", "verify", "doctor"))
    sections = ("Start", "Choose presets", "Quantize and write", "Check and show")
    assert all(f"─ {section} ─" in result.output for section in sections)
    assert "─ Commands ─" not in result.output


def test_python_m_fakequant_is_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "fakequant", "--help"], capture_output=True, text=True, check=True)
    assert "fakequant" in run.stdout
    assert "quantize" in run.stdout


def test_without_its_packages_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "typer" else object())
    with pytest.raises(SystemExit, match=r"^the command line needs typer: pip install fakequant\[cli\]$"):
        cli.main()


def test_tables_take_text_for_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(Console(width=80), "[title]", ("[bold]x[/bold]",), [("int[-100,37] [/red]",)])
    shown = capsys.readouterr().out
    assert "[title]" in shown
    assert "int[-100,37] [/red]" in shown
    assert "[bold]x[/bold]" in shown


HOSTILE = "a\x1b]0;title\x07\x1b[2J\u202e\x9b"


def test_no_command_reaches_the_terminal(tmp_path: Path) -> None:
    import fakequant as fq

    model = torch.nn.Sequential()
    model.add_module(HOSTILE, torch.nn.Linear(2, 2))
    fq.save(fq.prepare(model, "int8_weight_only"), tmp_path)
    (tmp_path / "graph.txt").write_text(f"IR Graph: {HOSTILE}\n  Outputs:\n")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    manifest = (tmp_path / "fakequant.json").read_text().replace('"quantize"', '"\\u001b[2J"')
    (damaged / "fakequant.json").write_text(manifest)
    for arguments in ((tmp_path,), (tmp_path, "--graph"), (damaged,)):
        shown = invoke("inspect", *arguments).output
        assert r"a\x1b]0;title\x07\x1b[2J\u202e\x9b" in shown or r"\x1b[2J" in shown
        assert not set(shown) & set("\x1b\x07\u202e\x9b")


# quantize: what is wrong is found before the work


@pytest.mark.parametrize(
    "options", [("--preset", "int9"), ("--method", "entropie"), ("--style", "standart"), ("--execution", "fast")]
)
def test_unknown_names_are_found_before_the_recipe_runs(recipe, tmp_path: Path, options) -> None:
    path = recipe(RECIPE + MARK)
    assert_one_red_line(invoke("quantize", path, "--out", tmp_path / "out", *options), f"'{options[1]}'")
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "out").exists()


def test_an_unwritable_folder_is_found_before_the_recipe_runs(recipe, tmp_path: Path) -> None:
    path = recipe(RECIPE + MARK)
    (tmp_path / "file").write_text("in the way")
    assert_one_red_line(invoke("quantize", path, "--out", tmp_path / "file"), "cannot write to", "file")
    assert not (tmp_path / "executed").exists()
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("relative", [False, True])
def test_what_a_recipe_raises_or_warns_of_has_its_place(recipe, tmp_path: Path, monkeypatch, relative: bool) -> None:
    own = "import warnings\ndef model():\n    warnings.warn('beware')\n    return {}['weights']\n"
    path = recipe(f"{RECIPE}\n{own}")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="beware") as found:
        result = invoke("quantize", path.name if relative else path, "--out", "out")
    assert (result.exit_code, found[0].filename) == (1, str(path))
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{path}", line ')  # no line of ours
    assert lines[-1] == "KeyError: 'weights'"


# quantize, inspect, verify: the whole way


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Result]:
    """A recipe, the folder that `quantize` filled from it, and what it printed."""
    folder = tmp_path_factory.mktemp("done")
    path = folder / "tiny.py"
    path.write_text(RECIPE + EVALUATE + TRAIN)
    out = folder / "out"
    return path, out, invoke("quantize", path, "--out", out, "--preset", "Int8", "--method", "max", "--compare")


def test_quantize_writes_checkpoint_model_and_report(done: tuple[Path, Path, Result]) -> None:
    _, out, result = done
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} == {
        "checkpoint",
        "model.onnx",
        "graph.txt",
        "report.html",
        "results.json",
    }
    page = (out / "report.html").read_text()
    for text in ("float32", "entropy", "mse", "percentile", "max, then fine-tuned", "Exact: 0 of", "<svg"):
        assert text in page
    assert "Missing:" not in page


def test_quantize_measures_by_codes(recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fakequant as fq
    from fakequant.ops import products

    multiplied, linear = [], products.linear
    monkeypatch.setattr(products, "linear", lambda *given: multiplied.append(1) or linear(*given))
    path, out = recipe(RECIPE + EVALUATE + TRAIN), tmp_path / "out"
    result = invoke("quantize", path, "--out", out, "--method", "max", "--execution", "auto")
    assert result.exit_code == 0, result.output
    assert len(multiplied) >= 4, "two layers, measured after calibration and after training"
    page = (out / "report.html").read_text()
    assert "Measured with integer execution in 2 of 2 layers." in page
    assert "Exact: 0 of" in page
    model = fq.load(load_recipe(path).model(), out / "checkpoint")
    assert [layer.execution.value for layer in (model[0], model[2])] == ["auto", "auto"]
    refused = invoke("quantize", path, "--out", out, "--preset", "fp8", "--execution", "integer")
    assert refused.exit_code == 1
    assert "0, 2 (its input: codes of float8_e4m3fn are not integers)" in refused.output


def test_quantize_saves_the_model_after_training(done: tuple[Path, Path, Result]) -> None:
    import fakequant as fq

    path, out, _ = done
    fresh = load_recipe(path).model()
    trained = fq.load(load_recipe(path).model(), out / "checkpoint")
    assert torch.equal(trained[0].weight, fresh[0].weight * 2.0)


@pytest.mark.parametrize("what", ["", "checkpoint", "model.onnx"], ids=["folder", "checkpoint", "onnx"])
def test_inspect_shows_every_quantizer(done: tuple[Path, Path, Result], what: str) -> None:
    _, out, _ = done
    result = invoke("inspect", out / what)
    assert result.exit_code == 0, result.output
    for layer in ("0", "2"):
        assert f"{layer}._input_quantizer" in result.stdout
        assert f"{layer}._weight_quantizer" in result.stdout
    assert "int8 per_channel(0)" in result.stdout


@pytest.mark.parametrize("what", ["", "checkpoint"])
def test_inspect_shows_the_graph(done: tuple[Path, Path, Result], what: str) -> None:
    _, out, _ = done
    result = invoke("inspect", out / what, "--graph")
    assert result.exit_code == 0, result.output
    assert result.stdout == (out / "graph.txt").read_text()
    assert '{spec="int8 per_channel(0)"} : Float32 [3, 5]  # 2._weight_quantizer' in result.stdout


@pytest.mark.parametrize("what", ["", "model.onnx"])
def test_without_a_graph_inspect_says_so(done: tuple[Path, Path, Result], tmp_path: Path, what: str) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    assert_one_red_line(invoke("inspect", tmp_path / what, "--graph"), "there is no graph.txt in")


@pytest.mark.parametrize(("data", "message"), [(b"IR Graph: \xff\n", "cannot read"), (b"IR Graph: g", "is truncated")])
def test_a_damaged_graph_is_one_line(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "graph.txt").write_bytes(data)
    assert_one_red_line(invoke("inspect", tmp_path, "--graph"), message)


def test_a_model_that_cannot_be_captured_is_reported(recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fakequant.errors import GraphError

    def refuse(*_: object, **__: object) -> None:
        raise GraphError("an <operation> that cannot be in a graph")

    run(Job(recipe(RECIPE), "int8", "max", tmp_path), Console(quiet=True))
    assert (tmp_path / "graph.txt").exists()
    monkeypatch.setattr("fakequant.cli.job.capture", refuse)
    run(Job(recipe(RECIPE), "int8", "max", tmp_path), Console(quiet=True))
    assert "an &lt;operation&gt; that cannot be in a graph" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "graph.txt").exists()


def test_verify_against_itself_and_against_the_recipe(done: tuple[Path, Path, Result]) -> None:
    path, out, _ = done
    assert invoke("verify", out / "model.onnx").exit_code == 0
    with_model = invoke("verify", out / "model.onnx", "--recipe", path)
    assert with_model.exit_code == 0, with_model.output


def test_verify_with_another_model_fails(done: tuple[Path, Path, Result], recipe, tmp_path: Path) -> None:
    _, out, _ = done
    other = recipe(RECIPE.replace("manual_seed(0)", "manual_seed(5)").replace("3)\n\ndef cal", "3)\n\n\ndef cal"))
    made = invoke("quantize", other, "--out", tmp_path / "other", "--method", "max", "--preset", "int8")
    assert made.exit_code == 0, made.output
    result = invoke("verify", out / "model.onnx", "--recipe", other, "--checkpoint", tmp_path / "other" / "checkpoint")
    assert result.exit_code == 1


@pytest.mark.parametrize("content", [b"not an onnx file", b"", None], ids=["garbage", "empty", "truncated"])
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_file_that_is_not_ours_is_one_line(
    done: tuple[Path, Path, Result], tmp_path: Path, command: str, content: bytes | None
) -> None:
    path = tmp_path / "damaged.onnx"
    whole = (done[1] / "model.onnx").read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    assert_one_red_line(invoke(command, path), "damaged.onnx")


def test_a_folder_without_a_checkpoint_is_one_line(tmp_path: Path) -> None:
    assert_one_red_line(invoke("inspect", tmp_path), "holds no checkpoint")


def test_without_evaluate_the_report_says_so(recipe, tmp_path: Path) -> None:
    data = run(Job(recipe(RECIPE), "int8", "max", tmp_path / "out"), Console(quiet=True))
    assert data.accuracy == []
    assert "tiny.py does not define evaluate(model): give a function" in (tmp_path / "out" / "report.html").read_text()


def test_style_of_the_file(recipe, tmp_path: Path) -> None:
    path, out = recipe(RECIPE), tmp_path / "out"
    result = invoke("quantize", path, "--out", out, "--preset", "mxfp4", "--method", "max", "--style", "standard")
    assert result.exit_code == 0, result.output
    assert "the ReferenceEvaluator of onnx" in result.output
    assert "Not run in ONNX Runtime: " in (out / "report.html").read_text()
    assert "style standard, opset 24" in invoke("inspect", out / "model.onnx").output
    verified = invoke("verify", out / "model.onnx", "--recipe", path)
    assert verified.exit_code == 0, verified.output
    assert "exact in the ReferenceEvaluator of onnx" in verified.output
    refused = invoke("quantize", path, "--out", out, "--preset", "mxfp4", "--method", "max", "--style", "trt")
    assert refused.exit_code == 1
    assert "0._weight_quantizer: float4_e2m1fn" in refused.stderr


def test_no_train_leaves_the_weights(recipe, tmp_path: Path) -> None:
    import fakequant as fq

    path = recipe(RECIPE + TRAIN)
    result = invoke("quantize", path, "--out", tmp_path / "out", "--method", "max", "--no-train")
    assert result.exit_code == 0, result.output
    loaded = fq.load(load_recipe(path).model(), tmp_path / "out" / "checkpoint")
    assert torch.equal(loaded[0].weight, load_recipe(path).model()[0].weight)


def test_a_refused_export_still_leaves_checkpoint_and_report(
    recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fakequant.errors import ExportError

    def refuse(*_: object, **__: object) -> None:
        raise ExportError("layer 0: <cannot> be said in ONNX")

    monkeypatch.setattr("fakequant.cli.job.export_onnx", refuse)
    out = tmp_path / "out"
    assert_one_red_line(invoke("quantize", recipe(RECIPE), "--out", out, "--method", "max"), "layer 0: <cannot>")
    assert json.loads((out / "checkpoint" / "fakequant.json").read_text())["layers"]
    assert "The model was not exported: layer 0: &lt;cannot&gt; be said" in (out / "report.html").read_text()
    assert not (out / "model.onnx").exists()


def test_an_inexact_export_ends_with_an_error_after_the_report(
    recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fakequant.export import VerifyReport

    monkeypatch.setattr(VerifyReport, "exact", property(lambda self: False))
    out = tmp_path / "out"
    result = invoke("quantize", recipe(RECIPE), "--out", out, "--method", "max")
    assert_one_red_line(result, "does not compute the same as the model")
    assert (out / "report.html").is_file()
