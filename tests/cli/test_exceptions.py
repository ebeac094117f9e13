"""`fakequant quantize` with other presets for some layers, with codes in the checkpoint, and into folders in use."""

from __future__ import annotations

import shlex
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner, Result

import fakequant as fq
from fakequant.cli.commands import app
from fakequant.cli.recipe import load_recipe
from fakequant.nn.quantizer import quantizers
from tests.support.recipes import RECIPE


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def quantize(recipe: Path, out: Path, *options: str, columns: int = 200) -> Result:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(
        app, ["quantize", str(recipe), "--out", str(out), *options]
    )
    assert result.exit_code == 0, result.output
    return result


def specs(model: nn.Module) -> dict[str, str]:
    return {name: str(quantizer.spec) for name, quantizer in quantizers(model).items()}


def test_layers_get_other_presets_or_stay_in_float(recipe: Path, tmp_path: Path) -> None:
    quantize(recipe, tmp_path / "out", "--float", "*", "--rule", "2=w8a16")
    model = fq.load(load_recipe(recipe).model(), tmp_path / "out" / "checkpoint")
    wanted = fq.prepare(load_recipe(recipe).model(), "int8", skip=["*"], rules={"2": "w8a16"})
    assert specs(model) == specs(wanted)
    page = (tmp_path / "out" / "report.html").read_text()
    for text in ("INT8 with 2 exceptions", "In float: *.", "Other presets: 2=w8a16."):
        assert text in page


def test_what_search_prints_can_be_pasted(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = CliRunner().invoke(app, ["search", str(recipe), "--bits", "20"])
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    chosen, command = lines[:2], lines[-1]
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    model = fq.load(load_recipe(recipe).model(), tmp_path / "quantized" / "checkpoint")
    mixed = fq.prepare(
        load_recipe(recipe).model(), fq.Config("mixed", tuple(fq.Rule(*line.split()) for line in chosen))
    )
    assert specs(model) == specs(mixed)


def test_a_packed_checkpoint_holds_codes_and_gives_the_same(recipe: Path, tmp_path: Path) -> None:
    result = quantize(recipe, tmp_path / "plain")
    assert "checkpoint (float weights, for training on)" in result.stdout
    result = quantize(recipe, tmp_path / "packed", "--packed")
    assert "checkpoint (packed codes)" in result.stdout
    plain, packed = (
        fq.load(load_recipe(recipe).model(), tmp_path / name / "checkpoint") for name in ("plain", "packed")
    )
    x = torch.randn(4, 6)
    assert torch.equal(plain.eval()(x), packed.eval()(x))
    tensors = load_file(next((tmp_path / "packed" / "checkpoint").glob("*.safetensors")))
    assert torch.uint8 in {tensor.dtype for tensor in tensors.values()}


def test_a_folder_in_use_is_named(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "holds" not in quantize(recipe, out).stdout
    assert "holds" not in quantize(recipe, out).stdout

    def said(out: Path, *options: str) -> str:
        lines = quantize(recipe, out, *options, columns=60).stdout.splitlines()
        assert all(len(line) <= 60 or " " not in line for line in lines)
        return " ".join(takewhile(lambda line: not line.startswith("[1/"), lines))

    assert said(out, "--preset", "fp8") == f"{out} holds the INT8 run of {recipe}; this run replaces it"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        (foreign / name).touch()
    left = "this run keeps these and adds its files"
    assert said(foreign) == f"{foreign} holds a.txt, b.txt, c.txt and 1 more; {left}"
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.onnx").write_bytes(b"mine")
    assert said(other) == f"{other} holds model.onnx of another origin; this run replaces files of these names"
