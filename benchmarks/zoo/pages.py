"""docs/notes/zoo.md: the matrix, what is quantized, and what fails, from the record."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from .child import FLOAT_TOO, OK, OURS
from .runner import TOO_LONG, Record, cell_of
from .steps import STEPS, USUAL

_INTRODUCTION = """\
# Zoo

{models} architectures of transformers, torchvision, timm and torch with random weights, in tiny configurations, on two
random batches, in INT8, prepared for ONNX Runtime. `make zoo` runs the steps {usual} with each of them, in
forks of one process, and writes this page. Commit {commit}, torch {torch}.

`{ok}` it works, `{ours}` it fails, `{too}` torch fails on the float model too, `{long}` it took too long, `.` not run.
"""
_COVERAGE = """\
## What is quantized

The share of multiply-accumulates of which all factors are fake-quantized; how many layers and functions have
quantizers; and how much noise the quantized outputs have, in dB of signal over noise. Random weights make the noise of
deep convolutional networks mean little.

| model | share | layers | functions | INT8 | NVFP4 | "auto" against simulated | bfloat16 autocast |
|---|---|---|---|---|---|---|---|"""
_LEFT = """\
## Products in float

The products of which a factor is not quantized, those with most multiply-accumulates first, and at most eight of a
model. Factors count in the order of the operator's arguments.

| model | module | operator | why | share |
|---|---|---|---|---|"""
_LONGEST = 160
_NOTHING_FAILS = "No step fails that does not fail in float too."


def page(record: Record) -> str:
    """The page as Markdown."""
    names = sorted(record["models"])
    commits = sorted({cell["commit"] for cells in record["models"].values() for cell in cells.values()})
    introduction = _INTRODUCTION.format(
        models=len(names),
        commit=", ".join(commits),
        usual=f"`{USUAL}`",
        torch=record["machine"]["torch"],
        ok=OK,
        ours=OURS,
        too=FLOAT_TOO,
        long=TOO_LONG,
    )
    coverage = [_COVERAGE, *(row for name in names if (row := _coverage(record, name)))]
    left = [row for name in names for row in _left(record, name)]
    coverage += ["", _LEFT, *left] if left else []
    parts = [introduction, *_failures(record, OURS, TOO_LONG), "## Steps\n", *_matrix(record, names), "", *coverage]
    return "\n".join([*parts, "", "## What fails in float too\n", *_causes(record, FLOAT_TOO)]) + "\n"


def _matrix(record: Record, names: list[str]) -> list[str]:
    letters = list(STEPS)
    return [
        *(f"* `{letter}`: {step.title}" for letter, step in STEPS.items()),
        "",
        f"| model | {' | '.join(letters)} |",
        "|" + "---|" * (len(letters) + 1),
        *(f"| {name} | {' | '.join(cell_of(record, name, letter) for letter in letters)} |" for name in names),
        f"| **fail** | {' | '.join(_failing(record, names, letter) for letter in letters)} |",
    ]


def _failing(record: Record, names: list[str], letter: str) -> str:
    """How many fail at a step, of how many that ran it."""
    cells = [cell_of(record, name, letter) for name in names]
    return f"{sum(cell in (OURS, TOO_LONG) for cell in cells)}/{sum(cell != '.' for cell in cells)}"


def _coverage(record: Record, name: str) -> str | None:
    cells = record["models"][name]
    counted = cells.get("c", {}).get("note")
    if counted is None:
        return None
    made = cells.get("a", {}).get("note") or {}
    parts = [name, _percent(counted["share"]), str(made.get("layers", "")), str(made.get("sites", ""))]
    return f"| {' | '.join([*parts, *(_db(cells, c) for c in 'dmnl')])} |"


def _left(record: Record, name: str) -> list[str]:
    """A row for each product in float."""
    counted = record["models"][name].get("c", {}).get("note") or {"in float": []}
    return [
        f"| {name} | `{path or '(model)'}` | {operator} | {why} | {_percent(share)} |"
        for path, operator, why, share in counted["in float"]
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _db(cells: dict[str, dict], letter: str) -> str:
    value = (cells.get(letter, {}).get("note") or {}).get("dB")
    return "" if value is None else f"{value:g}"


def _failures(record: Record, *kinds: str) -> list[str]:
    rows = _causes(record, *kinds)
    return ["## What fails\n", *rows, ""] if rows else [_NOTHING_FAILS, ""]


def _causes(record: Record, *kinds: str) -> list[str]:
    """A table of errors by step and cause: what differs from model to model is left out of the texts."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for name, model in sorted(record["models"].items()):
        for letter, cell in model.items():
            if cell["cell"] in kinds:
                found[letter, _cause(cell["error"])].append((name, _errors(cell)))
    if not found:
        return []
    ordered = sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[0]))
    rows = [
        f"| {letter} | {len(models)} | {models[0][1]} | {', '.join(name for name, _ in models)} |"
        for (letter, _), models in ordered
    ]
    return ["| step | models | error of the first | which |", "|---|---|---|---|", *rows]


def _errors(cell: dict[str, Any]) -> str:
    """The error of a cell, and that of the float model where its cause is another."""
    error, in_float = _cell(cell["error"]), cell.get("in float", cell["error"])
    return error if _cause(in_float) == _cause(cell["error"]) else f"{error}; in float: {_cell(in_float)}"


def _cause(error: str) -> str:
    """An error without numbers, names in code and paths of modules, and only its beginning."""
    return re.sub(r"\d+|[\w.]*[._][\w.]*|`[^`]*`|'[^']*'|\b\w*[A-Z]\w*[A-Z]\w*\b", "_", error)[:60]


def _cell(text: str) -> str:
    short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    return short.replace("|", "\\|").replace("<", "&lt;")
