"""What `fq.advise` is worth on trained models: `python -m benchmarks.real.advising [--folder FOLDER] [NAME ...]`.

For the presets of one size, the error on inputs that it has not seen: of its answer, of the usual preset, and of each
other preset. The models are those of packages, where these are installed, and those that `benchmarks.accuracy` trains.
Ends with 1 if an answer is more than 5 % worse than the best preset, or worse than the usual one.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fakequant as fq
from benchmarks.accuracy.models import classifiers, tasks
from benchmarks.real.__main__ import outputs
from benchmarks.real.models import MODELS, Task

SIZES = {
    "8 bits, inputs too": ("INT8", "INT8_AFFINE", "INT8_PER_TOKEN", "W8A8_DYNAMIC", "FP8"),
    "4 bits": ("INT4_GROUP32", "INT4_GROUP64", "INT4_GROUP128", "INT4_WEIGHT_ONLY", "NF4_WEIGHT_ONLY"),
}
"""Presets by size, the usual one first."""
USUAL, BEYOND = 20.0, 6.0
"""The usual floor, and how much more than its answer has the second one asks for."""
MOST = 1.05
"""The error of an answer over that of the best preset of its size."""


OWN = "digits CNN", "separable CNN", "gated CNN", "vision transformer", "byte transformer", "perceptron", "LSTM"
"""The models that `benchmarks.accuracy` trains."""


def trained(description: str | None, usual: Sequence[str] = ()) -> Iterator[tuple[str, Task]]:
    """Read the arguments of a benchmark, and load the models whose names have one of the given parts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*", metavar="NAME", default=usual, help="parts of the names of models")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fakequant-models")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wanted = [text.lower() for text in given.names] or [""]

    def own() -> Iterator[tuple[str, Callable[[], Task]]]:
        yield from MODELS.items()
        if any(text in " ".join(OWN).lower() for text in wanted):
            for name, task in {**tasks(given.folder), **classifiers(given.folder)}.items():
                held = [batch for part in task.held_out for batch in part.split(32)][:8]
                yield name, lambda task=task, held=held: Task(task.model, task.batches[:8], held)

    for name, load in own():
        if any(text in name.lower() for text in wanted):
            task = load()
            yield name, Task(copy.deepcopy(task.model).eval(), task.batches, task.held)


def error(model: nn.Module, task: Task, exact: torch.Tensor) -> float:
    """The squared error of the outputs on inputs that nothing was chosen by, as a share of their energy."""
    return float((outputs(model, task.held) - exact).square().sum() / exact.square().sum())


def made_by(call: str, task: Task) -> nn.Module:
    """The model that the code of an answer makes."""
    scope: dict[str, Any] = {"model": task.model, "batches": task.batches}
    exec(call, scope)
    return scope["quantized"]


def measured(task: Task, presets: tuple[str, ...], work: Path) -> list[dict[str, Any]]:
    """The rows of one model and size."""
    exact, rows = outputs(task.model, task.held), []
    answers = [fq.advise(task.model, task.batches, presets=presets, floor=USUAL, work=work)]
    more = max(USUAL, answers[0].best.score) + BEYOND
    answers.append(fq.advise(task.model, task.batches, presets=presets, floor=more, work=work))
    lines = answers[0].call.splitlines()
    plain: dict[str, float] = {}
    for preset in presets:
        start, part = next((i, line) for i, line in enumerate(lines) if line.startswith("fq.prepare"))
        name = part.split('"')[1]
        code = "\n".join([*lines[:start], part.replace(name, preset.lower()), lines[start + 1].split(', "')[0]])
        code += "" if code.endswith(")") else ', unseen="float")'
        plain[preset] = error(made_by(code, task), task, exact)
    for found in answers:
        own = found.best.measured
        same = [plain[name] for name in presets if abs(_bytes(found, name) / found.best.bytes - 1) <= 0.15]
        after = error(made_by(found.call, task), task, exact)
        seconds = sum(row.measured.seconds for row in found.rows)
        rows.append(
            {
                "floor": round(found.floor, 1),
                "answer": " ".join(filter(None, own.way)),
                "error": after,
                "over the best": after / min(same),
                "over the usual": after / plain[presets[0]] if plain[presets[0]] in same else None,
                "tried": len(found.rows),
                "seconds": round(seconds, 1),
            }
        )
    return rows


def _bytes(found: fq.ptq.Advice, preset: str) -> float:
    return next((row.bytes for row in found.rows if row.measured.preset == preset), math.inf)


def main() -> int:
    """Run and print; 1 if a bar is missed."""
    missed = 0
    for name, task in trained(__doc__):
        for size, presets in SIZES.items():
            with tempfile.TemporaryDirectory() as work:
                for row in measured(task, presets, Path(work)):
                    missed += row["over the best"] > MOST or (row["over the usual"] or 0) > 1
                    print(json.dumps({"model": name, "size": size, **row}), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
