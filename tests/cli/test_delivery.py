"""`fakequant deliver`, and `fakequant verify` for what it wrote; the report shows it beside exported files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner, Result

import fakequant as fq
from fakequant.cli.commands import app

RECIPE = """
import torch
from torch import nn


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))


def calibration_batches():
    return [torch.linspace(-3, 3, 128).reshape(2, 64)]
"""


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.py").write_text(RECIPE)
    model = fq.prepare(net(), "INT4_GROUP32")
    fq.save(model, tmp_path / "checkpoint")
    return tmp_path / "recipe.py"


def delivered(recipe: Path) -> Path:
    folder = recipe.parent / "file"
    done = invoke("deliver", recipe, "--out", folder, "--checkpoint", recipe.parent / "checkpoint")
    assert done.exit_code == 0, done.output
    hint = f"fakequant verify {folder} --recipe {recipe} --checkpoint {recipe.parent / 'checkpoint'}"
    said, command = done.output.rsplit("\n", 2)[:2]
    assert " ".join(said.split()) == f"Written: {folder}. Compare it:"  # a long line breaks at spaces
    assert command == hint
    assert invoke(*hint.split()[1:]).exit_code == 0
    return folder


def test_a_delivered_model_is_verified(recipe: Path) -> None:
    folder = delivered(recipe)
    assert torch.equal(
        fq.read(folder, net())[0].weight, fq.load(net(), recipe.parent / "checkpoint")[0].quantized_weight()
    )
    done = invoke("verify", folder, "--recipe", recipe)
    assert done.exit_code == 0, done.output
    said = "".join(done.output.split())  # lines under a table break where they must, also in a path
    assert f"{folder}:exactinthispackage'sreader" in said


def test_changed_codes_are_shown_and_give_the_status_1(recipe: Path) -> None:
    folder = delivered(recipe)
    tensors = load_file(folder / "model.safetensors")
    tensors["2.weight_packed"][3, 0] ^= 1
    save_file(tensors, folder / "model.safetensors")
    done = invoke("verify", folder, "--recipe", recipe)
    assert done.exit_code == 1
    assert re.search(r"NOT\s+exact: [12] elements differ", done.output)  # the line breaks where it must
    assert "2.weight" in done.output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["verify", "FILE"], "give the recipe of the model by --recipe"),
        (["deliver", "NO_RECIPE", "--out", "OUT", "--format", "safetensor"], "unknown format"),
        (["deliver", "RECIPE", "--out", "OUT", "--checkpoint", "OUT"], "holds no checkpoint"),
    ],
)
def test_mistakes_are_one_line(recipe: Path, words: list[str], text: str) -> None:
    folder = recipe.parent
    places = {"FILE": folder, "RECIPE": recipe, "OUT": folder / "out", "CHECKPOINT": folder / "checkpoint"}
    done = invoke(*(places.get(word, word) for word in words))
    assert done.exit_code == 1
    assert done.output.startswith("error: ")
    assert text in done.output


def test_the_report_shows_it_beside_exported_files(recipe: Path) -> None:
    model = fq.prepare(net(), "INT4_GROUP32")
    folder = fq.deliver(model, recipe.parent / "file", "compressed-tensors")
    found = fq.verify_delivery(folder, model, [torch.ones(2, 64)])
    page = fq.report(model, [torch.ones(2, 64)], recipe.parent / "report.html", results=[found]).read_text()
    assert "int4 per_block(-1:32,pad)" in page
    assert "Exact: 0 of" in page
