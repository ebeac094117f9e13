"""What people do wrong: each gets one clear message, of one of this package's errors, before or without work."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fakequant as fq
from fakequant.cli.commands import app
from fakequant.errors import FakeQuantError

MODEL = "import torch\nfrom torch import nn\ndef model():\n    return nn.Linear(8, 2)\n"
BATCHES = "def calibration_batches():\n    return [torch.ones(4, 8), torch.randn(4, 8)]\n"
GOOD = MODEL + BATCHES


def batches(text: str) -> str:
    return f"{MODEL}def calibration_batches():\n    return {text}\n"


def evaluate(text: str) -> str:
    return f"{GOOD}def evaluate(net):\n    return {text}\n"


# Name: the arguments after `quantize RECIPE --out OUT`, and what the one line says.
ARGUMENTS: dict[str, tuple[list[str], str]] = {
    "preset mistyped": (["--preset", "int9"], r"unknown preset 'int9'; did you mean .*INT8"),
    "preset of two": (["--preset", "int8,fp8"], r"unknown preset 'int8,fp8'; did you mean"),
    "method mistyped": (["--method", "percentil"], r"unknown calibrator 'percentil'; did you mean percentile\?"),
    "method of a peer": (["--method", "awq"], r"unknown calibrator 'awq'; (did you mean|known names are)"),
    "rule without a preset": (["--rule", "2"], r"--rule takes PATTERN=PRESET, such as --rule head=int8, got '2'"),
    "rule with a wrong preset": (["--rule", "*=int88"], r"unknown preset 'int88'; did you mean"),
    "rule for no layer": (["--rule", "head=fp8"], r"the rule 'head' matches no layer"),
    "float for no layer": (["--float", "head"], r"the rule 'head' matches no layer"),
    "style of an engine": (["--style", "tensorrt"], r"unknown style 'tensorrt'; did you mean trt\?$"),
    "execution mistyped": (["--execution", "int"], r"execution must be one of 'simulate', 'auto', 'integer'"),
    "unseen mistyped": (["--unseen", "flaot"], r"flaot.*float"),
    "improve mistyped": (["--improve", "fats"], r"unknown steps 'fats' of --improve; did you mean fast\?"),
    "integers for floats": (["--preset", "fp8", "--execution", "integer"], r"codes of float8_e4m3fn are not int"),
    "text without a folder": (["--text", "lines.txt"], r"--text is for a folder of Hugging Face"),
}

# Name: the recipe, and what the one line says.
RECIPES: dict[str, tuple[str, str]] = {
    "nothing defined": ("", r"lacks the functions model\(\) and calibration_batches\(\); a recipe defines"),
    "no batches defined": (MODEL, r"lacks the function calibration_batches\(\); a recipe defines"),
    "model a module": ("from torch import nn\nmodel = nn.Linear(8, 2)\n", r"model is a Module.* write `def model\("),
    "batches a list": (f"{MODEL}calibration_batches = [1]\n", r"calibration_batches is a list; it must be a func"),
    "model returns a class": (GOOD.replace("nn.Linear(8, 2)", "nn.Linear"), r"of type type, not a torch\.nn\.Mod"),
    "model returns nothing": (GOOD.replace("return nn.Linear(8, 2)", "pass"), r"model\(\) returned None of type No"),
    "batches nothing": (batches("None"), r"calibration_batches\(\) returned None of type NoneType, not a list"),
    "batches empty": (batches("[]"), r"no (batch|data)"),
    "batches one tensor": (batches("torch.ones(4, 8)"), r"returned a Tensor, .* return a list of batches: \[tensor\]"),
    "batches one dict": (
        batches("{'input': torch.ones(4, 8)}"),
        r"returned a dict, .* return a list of batches: \[dict\]",
    ),
    "batch of text": (
        batches("['text']"),
        r"batch 1 of .*, a str, failed in Linear 8 -> 2: .* must be Tensor, not str",
    ),
    "batch of another width": (batches("[torch.ones(4, 9)]"), r"batch 1 of .*\(?Linear 8 -> 2\)? on float32 \[4, 9\]"),
    "batch of another dtype": (batches("[torch.ones(4, 8).double()]"), r"on float64 \[4, 8\]: RuntimeError"),
    "batch of integers": (batches("[torch.ones(4, 8).long()]"), r"batch 1 of .*int64"),
    "batch with NaN": (batches("[torch.full((4, 8), torch.nan)]"), r"contains 32 NaN and 0 inf values of 32"),
    "batch with inf": (batches("[torch.full((4, 8), torch.inf)]"), r"contains 0 NaN and 32 inf values"),
    "model in half": (GOOD.replace("nn.Linear(8, 2)", "nn.Linear(8, 2).half()"), r"batch 1 .* on float32 \[4, 8\]: "),
    "a model of one batch size": (
        GOOD.replace("nn.Linear(8, 2)", "nn.Sequential(nn.Linear(8, 2), nn.Unflatten(0, (2, 2)))"),
        r"torch cannot trace the model: .*; --static exports one batch size",
    ),
    "model on meta": (GOOD.replace("Linear(8, 2)", "Linear(8, 2, device='meta')"), r"meta"),
    "generator kept": (
        f"{MODEL}kept = (torch.ones(4, 8) for _ in range(2))\ndef calibration_batches():\n    return kept\n",
        r"returned the same generator twice, .*; make the generator inside the function",
    ),
    "evaluate nothing": (evaluate("None"), r"evaluate\(model\) returned None of type NoneType, not a number"),
    "evaluate text": (evaluate("'good'"), r"evaluate\(model\) returned 'good' of type str, not a number"),
    "evaluate NaN": (evaluate("float('nan')"), r"evaluate\(model\) returned nan of type float, not a finite number"),
    "already prepared": (
        GOOD.replace(
            "return nn.Linear(8, 2)", "import fakequant as fq\n    return fq.prepare(nn.Linear(8, 2), 'int8')"
        ),
        r"the model is already prepared: it has 2 quantizers",
    ),
    "nothing to quantize": (GOOD.replace("nn.Linear(8, 2)", "nn.ReLU()"), r"no layer that can be quantized"),
}
QUANTIZE = {name: (GOOD, *row) for name, row in ARGUMENTS.items()}
QUANTIZE |= {name: (text, [], message) for name, (text, message) in RECIPES.items()}

# Name: arguments, in which RECIPE, FOLDER and ABSENT stand for paths, and what the one line says.
OTHERS: dict[str, tuple[list[str], str]] = {
    "no recipe": (["quantize", "ABSENT", "--out", "FOLDER"], r"there is no recipe file .*absent"),
    "a folder for a recipe": (
        ["quantize", "FOLDER", "--out", "FOLDER"],
        r"is a folder without config\.json; give a Py",
    ),
    "a file for a folder": (["quantize", "RECIPE", "--out", "RECIPE"], r"cannot write to .*recipe\.py"),
    "inspect nothing": (["inspect", "ABSENT"], r"absent"),
    "inspect a recipe": (["inspect", "RECIPE"], r"recipe\.py"),
    "verify nothing": (["verify", "ABSENT"], r"absent"),
    "verify a recipe": (["verify", "RECIPE"], r"recipe\.py"),
    "report on nothing": (["report", "ABSENT"], r"there is no .*absent\.json; give the folder of `fakequant quantize`"),
    "search without a budget": (["search", "RECIPE"], r"one budget is needed: pass bits= per weight, size= in bytes"),
    "search with two": (["search", "RECIPE", "--bits", "4", "--size", "100"], r"exactly one budget is needed"),
    "search too small": (["search", "RECIPE", "--bits", "1"], r"no mix of these choices fits the budget: the smallest"),
    "compare mistyped": (["compare", "RECIPE", "--preset", "int88"], r"unknown preset 'int88'; did you mean"),
    "compare by no steps": (["compare", "RECIPE", "--improve", "bst"], r"unknown steps 'bst'; did you mean best"),
    "compare into a folder": (["compare", "RECIPE", "--out", "FOLDER"], r"cannot write .*folder: it is a folder"),
    "compare into a file's folder": (["compare", "RECIPE", "--out", "RECIPE/rows"], r"cannot write to .*recipe\.py"),
    "compare into no comparison": (["compare", "RECIPE", "--out", "RECIPE"], r"recipe\.py is no comparison, or was"),
    "plot of no kind": (["compare", "RECIPE", "--plot", "ABSENT.foo"], r"does not write \.foo: .*ends in .*\.png"),
    "plot of no ending": (["compare", "RECIPE", "--plot", "ABSENT"], r"does not write a file without an ending"),
    "plot into a file": (["compare", "RECIPE", "--plot", "RECIPE/z.png"], r"cannot write to .*recipe\.py"),
    "plot over nothing": (["compare", "RECIPE", "--over", "foo"], r"over must be one of 'bits', 'mill.*got 'foo'"),
    "compare on a wrong batch": (
        ["compare", "WIDE"],
        r"batch 2 of calibration_batches\(\), tensors of shape \[4, 9\], failed in Linear 8 -> 2 on float32 \[4, 9\]",
    ),
    "search on a wrong batch": (["search", "WIDE", "--bits", "8"], r"batch 2 of .*, tensors of shape \[4, 9\], failed"),
    "search with less than nothing": (["search", "RECIPE", "--bits", "-1"], r"bits=-1\.0: a budget is a number from 0"),
    "search with NaN": (["search", "RECIPE", "--size", "nan"], r"size=nan: a budget is a number from 0 on"),
    "start over a file": (["init", "RECIPE"], r"recipe\.py exists; give another name, or remove it first"),
}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def ready() -> nn.Sequential:
    model = fq.prepare(net(), "int8")
    fq.calibrate(model, [X])
    return model


X, X9 = torch.randn(4, 8), torch.ones(4, 9)
FAILS = r"^batch 2, tensors of shape \[4, 9\], failed in layer 0 \(Linear 8 -> 8\) on float32 \[4, 9\]: Run"
INTEGERS = (
    r"^batch 2, tensors of shape \[4, 8\], failed in layer 0 \(Linear 8 -> 8\) on int64 \[4, 8\]: DTypeError: cannot "
    r"quantize a tensor of dtype torch\.int64: .*; convert it first, .*; correct the batch or the model$"
)
FIRST_FAILS = FAILS.replace("batch 2", "batch 1")
EXAMPLE_FAILS = (
    r"^the example, tensors of shape \[4, 9\], failed in layer 0 \(Linear 8 -> 8\) on float32 \[4, 9\]: .*; give"
)
PYTHON: dict[str, tuple[Callable[[Path], Any], str]] = {
    "prepare by bits": (lambda _: fq.prepare(net(), 8), r"a preset's name is a text, such as 'int8', got 8"),
    "prepare by a dtype": (lambda _: fq.prepare(net(), torch.int8), r"such as 'int8', got torch\.int8"),
    "prepare turned round": (lambda _: fq.prepare("int8", net()), r"prepare takes a model first, got 'int8'"),
    "prepare twice": (lambda _: fq.prepare(ready(), "int8"), r"already prepared: it has 4 quantizers, the first is 0"),
    "prepare for no engine": (lambda _: fq.prepare(net(), "int8", X, target="tensort"), r"tensort.*tensorrt"),
    "skip by text": (lambda _: fq.prepare(net(), "int8", skip="2"), r"skip takes a list of patterns, got '2'"),
    "skip nothing": (
        lambda _: fq.prepare(net(), "int8", skip=["head"]),
        r"the rule 'head' matches no layer; layers th",
    ),
    "rules by a list": (
        lambda _: fq.prepare(net(), "int8", rules=["2"]),
        r"rules takes a dict from patterns to presets, got \['2'\]",
    ),
    "a comparison of a prepared model": (
        lambda _: fq.compare(ready(), [torch.ones(4, 8)]),
        r"compare takes a float model; call it before fakequant\.prepare, or on a copy made before",
    ),
    "a search on a prepared model": (
        lambda _: fq.search(ready(), [torch.ones(4, 8)], bits=6),
        r"search takes a float model; call it before",
    ),
    "a rule with a specification": (
        lambda _: fq.Rule("2", "int8 per_token"),
        r"takes a preset as second argument, got",
    ),
    "a rule with a number": (lambda _: fq.Rule("2", 4), r"a preset's name is a text, such as 'int8', got 4"),
    "a rule for a number": (lambda _: fq.Rule(0, "int8"), r"a rule's pattern is a text, such as 'head' or '\*', got 0"),
    "a config of names": (lambda _: fq.Config("mine", ["int8"]), r"made of rules, got 'int8'; write Rule\("),
    "calibrate unprepared": (lambda _: fq.calibrate(net(), [X]), r"has no quantizers; call fakequant\.prepare\(model"),
    "calibrate on a tensor": (lambda _: fq.calibrate(ready(), X), r"a tensor would be taken row by row; give a list"),
    "calibrate on nothing": (lambda _: fq.calibrate(fq.prepare(net(), "int8"), []), r"no (batch|data)"),
    "calibrate by a number": (lambda _: fq.calibrate(ready(), [X], 99.9), r"a method is given by its name, such as 'm"),
    "calibrate by no method": (
        lambda _: fq.calibrate(ready(), [X], "mes"),
        r"unknown calibrator 'mes'; did you mean m",
    ),
    "calibrate with an option": (
        lambda _: fq.calibrate(ready(), [X], "percentile", percent=99),
        r"no option 'percent'",
    ),
    "calibrate no layer": (
        lambda _: fq.calibrate(ready(), [X], pattern="head"),
        r"no layer .* matches 'head'; correct",
    ),
    "calibrate on a number": (lambda _: fq.calibrate(ready(), 3), r"takes batches, as a list or a data loader, got 3;"),
    "calibrate on None": (lambda _: fq.calibrate(ready(), None), r"takes batches, .* got None; give \[tensor\]"),
    "calibrate turned round": (
        lambda _: fq.calibrate([X], ready()),
        r"calibrate takes a model, got a list; write calibrate\(model, batches\)",
    ),
    "calibrate on another width": (lambda _: fq.calibrate(ready(), [X, X9]), FAILS),
    "histogram on another width": (lambda _: fq.plot.histogram(ready(), "0._input_quantizer", [X, X9]), FAILS),
    "report on another width": (lambda path: fq.report(ready(), [X, X9], path / "report.html"), FAILS),
    "calibrate on integers": (lambda _: fq.calibrate(fq.prepare(net(), "int8"), [X, X.long()]), INTEGERS),
    "improve on integers": (lambda _: fq.ptq.improve(ready(), [X, X.long()]), INTEGERS),
    "reconstruct on integers": (lambda _: fq.ptq.reconstruct(ready(), [X, X.long()]), INTEGERS),
    "search on integers": (
        lambda _: fq.search(net(), [X, X, X.long()], "INT8", bits=9),
        INTEGERS.replace("batch 2", "batch 3"),
    ),
    "sensitivity on another width": (lambda _: fq.sensitivity(ready(), [X, X9]), FAILS),
    "ratios on another width": (lambda _: fq.layer_sqnr(ready(), [X, X9]), FAILS),
    "improve on another width": (lambda _: fq.ptq.improve(ready(), [X, X9]), FAILS),
    "reconstruct on another width": (lambda _: fq.ptq.reconstruct(ready(), [X, X9]), FAILS),
    "scores on another width": (lambda _: fq.ptq.scores(net(), [X, X9]), FAILS),
    "equalize on another width": (lambda _: fq.ptq.equalize(net(), X9, fq.presets.INT8), FIRST_FAILS),
    "rotate on another width": (lambda _: fq.ptq.rotate(net(), X9), FIRST_FAILS),
    "batch norm on another width": (
        lambda _: fq.ptq.reestimate_batch_norm(nn.Sequential(nn.BatchNorm1d(8)), [X, X9]),
        r"^batch 2, tensors of shape \[4, 9\], failed in layer 0 \(BatchNorm1d\) on float32 \[4, 9\]: Run",
    ),
    "prepare on another width": (lambda _: fq.prepare(net(), "int8", X9), EXAMPLE_FAILS),
    "fuse on another width": (
        lambda _: fq.fuse_batch_norm(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval(), X9),
        EXAMPLE_FAILS,
    ),
    "fold on another width": (
        lambda _: fq.qat.fold_batch_norm(
            fq.prepare(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval(), "int8"), X9
        ),
        EXAMPLE_FAILS,
    ),
    "run uncalibrated": (lambda _: fq.prepare(net(), "int8")(X), r"has not been calibrated|not calibrated"),
    "quantize to no format": (lambda _: fq.fake_quantize(X, "int8x"), r"int8x.*; (did you mean|known)"),
    "quantize integers": (lambda _: fq.fake_quantize(X.long(), "int8"), r"int64"),
    "quantize an axis too many": (lambda _: fq.fake_quantize(X, "int8 per_channel(5)"), r"axis 5"),
    "export uncalibrated": (
        lambda path: fq.export_onnx(fq.prepare(net(), "int8"), X, path / "model.onnx"),
        r"calibrate\(model, batches\)",
    ),
    "export on another width": (lambda path: fq.export_onnx(ready(), X9, path / "model.onnx"), EXAMPLE_FAILS),
    "export a float model": (lambda path: fq.export_onnx(net(), X, path / "model.onnx"), r"prepare"),
    "verify nothing": (lambda path: fq.verify_onnx(path / "absent.onnx"), r"absent\.onnx"),
    "load nothing": (lambda path: fq.load(net(), path / "absent"), r"absent"),
    "load turned round": (
        lambda path: fq.load(path, net()),
        r"load takes a model, got a \w*Path; write load\(model, f",
    ),
    "load from a model": (lambda _: fq.load(net(), net()), r"a path is a text or a pathlib\.Path, got a Sequential"),
    "save turned round": (lambda path: fq.save(path, ready()), r"save takes a model, got a \w*Path; write save\(mod"),
    "export turned round": (
        lambda path: fq.export_onnx(X, ready(), path / "m.onnx"),
        r"export_onnx takes a model, got",
    ),
    "export to an example": (
        lambda path: fq.export_onnx(ready(), path / "m.onnx", X),
        r"a path is .* got a Tensor; wr",
    ),
    "export by a list": (
        lambda path: fq.export_onnx(ready(), [X, X], path / "model.onnx"),
        r"the example, tensors of shape \[4, 8\], \[4, 8\]: too many positional.*; give one batch, not a list of b",
    ),
    "export by a number": (
        lambda path: fq.export_onnx(ready(), 3, path / "m.onnx"),
        r"an example is a tensor, .*got 3",
    ),
    "verify turned round": (lambda path: fq.verify_onnx(ready(), path / "m.onnx"), r"a path is .*got a Sequential; wr"),
    "verify without the model": (
        lambda path: fq.verify_onnx(path / "m.onnx", [X]),
        r"verify_onnx takes a model, got a",
    ),
    "report turned round": (
        lambda path: fq.report(ready(), path / "r.html", [X]),
        r"a path is .*write report\(model, b",
    ),
    "report by a metric's name": (
        lambda path: fq.report(ready(), [X], path / "r.html", "acc"),
        r"report takes a function as metric, called as metric\(model\), got 'acc'",
    ),
    "report by nothing": (
        lambda path: fq.report(ready(), [X], path / "r.html", lambda _: None),
        r"metric\(model\) returned None, not a number; return a number, larger is better",
    ),
    "compare by a metric's name": (lambda _: fq.compare(net(), [X], metric="acc"), r"a function as metric.*got 'acc'"),
    "compare by nothing": (lambda _: fq.compare(net(), [X], metric=lambda _: None), r"metric\(model\) returned None"),
    "compare on another width": (lambda _: fq.compare(net(), [X, X9]), r"^batch 2, .* layer 0 \(Linear 8"),
    "search by a text": (
        lambda _: fq.search(net(), [X], bits="5"),
        r"bits='5': a budget is a number from 0 on, such as",
    ),
    "search by NaN": (lambda _: fq.search(net(), [X], size=float("nan")), r"size=nan: a budget is a number from 0 on"),
    "search by less than nothing": (
        lambda _: fq.search(net(), [X], bits=-1),
        r"bits=-1: a budget is a number from 0 on",
    ),
    "a schedule of text": (
        lambda _: fq.qat.Schedule("x", 3),
        r"original_lr='x'\): must be positive, a number such as 0.1",
    ),
    "a plot of numbers": (
        lambda _: fq.plot.errors([1, 2]),
        r"errors takes what sensitivity, .* got \[1, 2\]; write er",
    ),
    "a rule of three": (
        lambda _: fq.Rule("2", "int8", "int4"),
        r"a pattern and a preset, got 'int4' too; use keywords",
    ),
    "sensitivity unprepared": (
        lambda _: fq.sensitivity(net(), [X]),
        r"no quantizers; call fakequant\.prepare",
    ),
    "improve before calibrating": (
        lambda _: fq.ptq.improve(fq.prepare(net(), "int8"), [X]),
        r"input quantizers are not calibrated, the first is 0\._input_quantizer",
    ),
    "compare on a tensor": (lambda _: fq.compare(net(), X), r"compare takes batches, and a tensor .* give a list"),
    "search without a budget": (lambda _: fq.search(net(), [X]), r"one budget is needed: pass bits= per weight"),
    "execution mistyped": (lambda _: fq.set_execution(ready(), "fast"), r"execution must be one of 'simulate'"),
    "load another model": (
        lambda path: (fq.save(ready(), path / "saved"), fq.load(nn.Sequential(nn.Linear(3, 3)), path / "saved")),
        r"(layer|model|shape|tensor)",
    ),
}


def one_line(arguments: list[str]) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    *warned, line = result.stderr.strip().split("\n")
    assert all(one.startswith("warning: ") for one in warned), warned
    assert line.startswith("error: "), line
    assert "Traceback" not in line
    return line


@pytest.mark.parametrize("name", QUANTIZE)
def test_quantize(name: str, tmp_path: Path) -> None:
    text, arguments, message = QUANTIZE[name]
    recipe = tmp_path / "recipe.py"
    recipe.write_text(text)
    line = one_line(["quantize", str(recipe), "--out", str(tmp_path / "out"), *arguments])
    assert re.search(message, line), line
    assert not (tmp_path / "out" / "model.onnx").exists()


@pytest.mark.parametrize("name", OTHERS)
def test_other_commands(name: str, tmp_path: Path) -> None:
    arguments, message = OTHERS[name]
    (tmp_path / "folder").mkdir()
    (tmp_path / "recipe.py").write_text(GOOD)
    (tmp_path / "wide.py").write_text(batches("[torch.ones(4, 8), torch.ones(4, 9)]"))
    paths = {"RECIPE": "recipe.py", "FOLDER": "folder", "ABSENT": "absent", "WIDE": "wide.py"}
    line = one_line([re.sub("^[A-Z]+", lambda found: str(tmp_path / paths[found[0]]), word) for word in arguments])
    assert re.search(message, line), line


@pytest.mark.parametrize("name", PYTHON)
def test_python(name: str, tmp_path: Path) -> None:
    call, message = PYTHON[name]
    with pytest.raises(FakeQuantError) as error:
        call(tmp_path)
    assert re.search(message, str(error.value)), str(error.value)
    assert "\n" not in str(error.value), str(error.value)


def test_a_recipe_with_wrong_python_shows_its_line_alone(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("def model(:\n")
    result = CliRunner().invoke(app, ["quantize", str(recipe), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert lines[0] == f'  File "{recipe}", line 1'
    assert lines[-1].startswith("SyntaxError: ")


def test_there_are_all() -> None:
    assert len(QUANTIZE) + len(OTHERS) + len(PYTHON) + 1 >= 61
