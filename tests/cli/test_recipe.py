"""Recipes: what a user's file offers, and what is said of one that does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fakequant.cli.commands import app
from fakequant.cli.recipe import load_recipe
from fakequant.errors import RecipeError
from fakequant.report import read_results
from tests.support.pages import blocks
from tests.support.recipes import EVALUATE, RECIPE

ROOT = Path(__file__).parents[2]
PAGE, EXAMPLES = ROOT / "docs" / "recipe.md", ROOT / "examples"
PROJECT = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))

torch.manual_seed(0)
loader = held_out = [(torch.randn(4, 6), torch.tensor([0, 1, 2, 0])) for _ in range(3)]
torch.save(Net().state_dict(), "net.pt")
"""


def test_recipe_offers_what_it_has(recipe) -> None:
    found = load_recipe(recipe(RECIPE + EVALUATE))
    assert [found.offers(name) for name in ("model", "calibration_batches", "evaluate", "train")] == [1, 1, 1, 0]
    assert isinstance(found.model(), torch.nn.Module)
    assert len(list(found.calibration_batches())) == len(list(found.calibration_batches())) == 3
    with torch.no_grad():
        assert type(found.evaluate(found.model().eval())) is float


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("", "model() and calibration_batches()"),
        ("def model(): pass", "the function calibration_batches();"),
        ("def calibration_batches(): pass", "the function model();"),
    ],
    ids=["both", "batches", "model"],
)
def test_recipe_that_lacks_a_function_names_it_and_the_file(recipe, text: str, missing: str) -> None:
    path = recipe(text)
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert str(path) in str(error.value)
    assert missing in str(error.value)


@pytest.mark.parametrize("name", ["model", "calibration_batches", "evaluate", "train"])
def test_recipe_whose_function_is_none_names_it(recipe, name: str) -> None:
    with pytest.raises(RecipeError, match=rf"tiny\.py: {name} is a int; it must be a function"):
        load_recipe(recipe(f"{RECIPE}\n{name} = 3\n"))


def test_recipe_of_another_kind_of_file(recipe) -> None:
    with pytest.raises(RecipeError, match=r"tiny\.txt is not a Python file"):
        load_recipe(recipe(RECIPE, "tiny.txt"))


def test_recipe_keeps_the_exception_of_its_own_code(recipe) -> None:
    with pytest.raises(ZeroDivisionError):
        load_recipe(recipe("1 / 0"))


def test_recipe_imports_its_neighbours_even_later(recipe) -> None:
    recipe("VALUE = 3", "neighbour_of_the_recipe.py")
    body = "def model():\n    import neighbour_of_the_recipe as n\n    return torch.nn.Linear(n.VALUE, 1)\n"
    found = load_recipe(recipe(f"{RECIPE}\n{body}"))
    assert found.model().weight.shape == (1, 3)


@pytest.mark.parametrize(
    ("body", "call", "expected"),
    [
        ("def model(): return 5", lambda r: r.model(), "model() returned 5 of type int, not a torch.nn.Module"),
        ("def calibration_batches(): return None", lambda r: r.calibration_batches(), "of type NoneType, not a list"),
        ("def calibration_batches(): return []", lambda r: r.first_batch(), "returned no batch; return at least one"),
        ("def evaluate(net): return None", lambda r: r.evaluate(r.model()), "returned None of type NoneType"),
        ("def evaluate(net): return 'good'", lambda r: r.evaluate(r.model()), "returned 'good' of type str"),
        ("def evaluate(net): return float('nan')", lambda r: r.evaluate(r.model()), "not a finite number"),
    ],
    ids=["model", "batches", "no batch", "none", "text", "nan"],
)
def test_recipe_that_returns_something_else(recipe, body: str, call, expected: str) -> None:
    found = load_recipe(recipe(f"{RECIPE}\n{body}\n"))
    with pytest.raises(RecipeError) as error:
        call(found)
    assert expected in str(error.value)
    assert "tiny.py" in str(error.value)


def test_the_example_recipe_offers_all_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from demo import digits  # pyright: ignore[reportMissingImports]  by the name that the recipe has for it

    monkeypatch.setattr(digits, "train", lambda split, epochs: digits.Net().eval())
    with digits.one_thread():
        found = load_recipe(EXAMPLES / "digits_recipe.py")
        assert all(found.offers(name) for name in ("model", "calibration_batches", "evaluate", "train"))
        assert sum(len(batch) for batch in found.calibration_batches()) == 1198
        assert 0 <= found.evaluate(found.model()) <= 100


def test_the_recipe_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_project", raising=False)
    Path("my_project.py").write_text(PROJECT)
    (block,) = blocks(PAGE.read_text())
    Path("recipe.py").write_text(block.code)
    result = CliRunner().invoke(app, ["quantize", "recipe.py", "--out", "out"])
    assert result.exit_code == 0, result.output
    figures = read_results(Path("out")).accuracy
    assert [figure.method for figure in figures] == ["", "mse", "mse, then fine-tuned"]
