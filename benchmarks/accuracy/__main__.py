"""Write docs/notes/accuracy-measured.md: what is left of the error of rounding to nearest, here and by other libraries.

python -m benchmarks.accuracy                      # everything, and the page
python -m benchmarks.accuracy "vision W4"          # cases with one of these texts; writes nothing
"""

from __future__ import annotations

import copy
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fakequant as fq
from benchmarks.accuracy.cases import CASES, CASES_OF_CNN, Case
from benchmarks.accuracy.language_peers import language_runs
from benchmarks.accuracy.models import Task, output_error, tasks
from benchmarks.accuracy.pages import write_page
from benchmarks.accuracy.peers import quiet, runs

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "accuracy.json"
_STEPS = {"nearest": None, "fast": "fast", "best": "best"}


def ours(case: Case, steps: str | None) -> Any:
    """A case by this package."""

    def run(model: nn.Module, batches: list[torch.Tensor]) -> nn.Module:
        prepared = fq.prepare(copy.deepcopy(model), case.config(model))
        fq.calibrate(prepared, batches, "max", progress=False)
        if steps is not None:
            fq.ptq.improve(prepared, batches, steps, progress=False)
        return prepared

    return run


def measure(task: Task, case: Case) -> list[dict[str, Any]]:
    """The rows of a model and a case."""
    rows = []
    named = {f"fakequant {name}": ours(case, steps) for name, steps in _STEPS.items()}
    if case.kernels is None:
        named |= runs(case) | language_runs(case, task.model)
    for name, run in named.items():
        row: dict[str, Any] = {"model": task.name, "case": case.name, "by": name}
        started = time.process_time()
        try:
            model = quiet(run, task.model, task.batches)
            seconds = round(time.process_time() - started, 1)
            error = output_error(model, task.model, task.held_out)
            row |= {"seconds": seconds, "error": error, "score": round(task.score(model), 2)}
        except Exception as error:  # a library that cannot do a case is a row of the table
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Measure the cases that the arguments name, or all."""
    warnings.simplefilter("ignore")
    words = " ".join(sys.argv[1:]).split()
    found = tasks(ROOT / "build" / "accuracy")
    rows = []
    for task in found.values():
        normed = any(isinstance(m, nn.LayerNorm) for m in task.model.modules())
        for case in CASES if normed else CASES_OF_CNN:
            if all(word in f"{task.name} {case.name}" for word in words):
                rows += measure(task, case)
    if not words:
        scores = {task.name: round(task.score(task.model), 2) for task in found.values()}
        RESULTS.write_text(json.dumps({"float": scores, "rows": rows}, indent=1) + "\n")
        write_page(ROOT / "docs" / "notes" / "accuracy-measured.md", scores, rows)


if __name__ == "__main__":
    main()
