"""Tables as text."""

from __future__ import annotations

import re
import sys
from collections import Counter

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.model.training.fuse import Fusions
from fakequant.text import table

NAME = "evil\x1b[31m\x1b[2J\n\x9b"
SHOWN = r"evil\x1b[31m\x1b[2J\n\x9b"


def calibrated() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module(NAME, nn.Linear(8, 8))
    model.add_module("norm", nn.LayerNorm(8))
    fq.prepare(model, "int8_weight_only")
    return model


def batches() -> list[torch.Tensor]:
    return [torch.randn(4, 8, generator=torch.Generator().manual_seed(1))]


class Adds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.relu()


def named(*modules: nn.Module) -> nn.Module:
    model = nn.Sequential()
    for number, module in enumerate(modules):
        model.add_module(f"{NAME}{number}", module)
    return model


SUMS = fq.Config("sums", (fq.Rule("*", input="int8", ops=("add",)),))
RESULTS = {
    "summary": lambda: fq.summary(calibrated()),
    "sensitivity": lambda: fq.sensitivity(calibrated(), batches()),
    "improve": lambda: fq.ptq.improve(calibrated(), batches(), "fast", progress=False),
    "equalize": lambda: fq.ptq.equalize(
        named(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), batches()[0], "int4_weight_only"
    ),
    "scores": lambda: fq.ptq.scores(named(nn.Linear(8, 8)), batches(), ["int8_weight_only"]),
    "site_plan": lambda: fq.site_plan(fq.prepare(named(Adds()), SUMS, example=torch.ones(2, 8))),
    "fusions": lambda: Fusions({NAME: "0"}, {"1": "it follows no layer of a kind that is known"}),
    "allocation": lambda: fq.ptq.Allocation({"0": "INT8"}, 0.1, 4500, 1000, why_float={NAME: "no batch reached it"}),
}


@pytest.mark.parametrize("name", RESULTS)
def test_control_characters_of_names_are_escaped(name: str) -> None:
    found = RESULTS[name]()
    for text in (str(found), repr(found)):
        assert all(c.isprintable() for c in text.replace("\n", ""))
        assert SHOWN in text


def test_lines_below_and_short_rows() -> None:
    text = table([["a", "b", ""], ["1", "22", "note"], ["longer than its column"]], ["below"], numbers=[1], line=True)
    assert text.splitlines() == ["a   b", "-  --", "1  22  note", "longer than its column", "below"]


NAMES = ["encoder_of_the_text_model.0.self_attention_query_projection", "h", "x" * 90, "a.b " * 30]


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("columns", [2, 3, 6, 9])
@pytest.mark.parametrize("line", [False, True])
def test_a_table_fits_the_terminal_and_loses_nothing(
    width: int, columns: int, line: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        [f"head{at}" for at in range(columns)],
        *([name, *["int8 per_channel(0)"] * (columns - 1)] for name in NAMES),
    ]
    below = ["The layers are " + ", ".join(NAMES)]
    monkeypatch.setenv("COLUMNS", f"{width}")
    whole = table(rows, below, numbers=[1], line=line)  # no terminal: what is exported counts for nothing
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = table(rows, below, numbers=[1], line=line)
    assert shown == table(rows, below, numbers=[1], line=line, width=width)
    assert max(map(len, shown.splitlines())) <= width
    letters = [Counter(re.sub(r"[\s-]", "", text)) for text in (shown, whole)]
    assert letters[0] == letters[1]
    assert max(map(len, table(rows, below, numbers=[1], line=line, width=width - 20).splitlines())) <= width - 20
    monkeypatch.setenv("COLUMNS", "1000")
    assert table(rows, below, numbers=[1], line=line) == whole


@pytest.mark.parametrize("name", RESULTS)
def test_results_fit_the_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = RESULTS[name]()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, f"{found!r}".splitlines())) <= 40


@pytest.mark.parametrize("stdout", [None, object()])
def test_tables_need_no_terminal(stdout: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stdout)
    assert table([["a", "b"]]) == "a  b"


def test_names_are_broken_at_dots() -> None:
    shown = table([["layer", "dB"], [NAMES[0], "31.5"]], width=50).splitlines()
    assert shown[1:] == [f"{'encoder_of_the_text_model.0.':44}  31.5", "self_attention_query_projection"]
