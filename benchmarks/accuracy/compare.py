"""The time of `fq.compare` over that of as many single evaluations.

python -m benchmarks.accuracy.compare

Writes it to benchmarks/results/compare.json.
"""

from __future__ import annotations

import copy
import time
import warnings

import torch

import fakequant as fq
from benchmarks.accuracy.models import Task, output_error, tasks
from benchmarks.record import ROOT, machine, write_results

RESULTS = ROOT / "benchmarks" / "results" / "compare.json"

PRESETS = (
    *("INT8", "INT8_AFFINE", "INT8_PER_TOKEN", "INT8_WEIGHT_ONLY", "FP8", "MXFP8"),
    *("MXFP6", "MXFP4", "NVFP4", "INT4_GROUP32", "INT4_GROUP128", "NF4_WEIGHT_ONLY"),
)
_TIMES = 3


def single(task: Task, preset: str) -> None:
    """What a user without `compare` runs for one preset: quantize, the error of the output, the metric."""
    model = fq.prepare(copy.deepcopy(task.model), preset)
    fq.calibrate(model, task.batches, progress=False)
    with torch.no_grad():
        output_error(model.eval(), task.model, task.batches)
        task.score(model)


def seconds(task: Task) -> tuple[float, float]:
    """Seconds of `compare`, and of the single evaluations; the shorter of several times."""
    together, apart = [], []
    for _ in range(_TIMES):
        started = time.perf_counter()
        for preset in PRESETS:
            single(task, preset)
        apart.append(time.perf_counter() - started)
        started = time.perf_counter()
        fq.compare(task.model, task.batches, fq.ptq.Ways(PRESETS, steps=[None]), metric=task.score)
        together.append(time.perf_counter() - started)
    return min(together), min(apart)


def main() -> None:
    """Print and record the ratio for the encoder of images."""
    where = machine()  # before the work: the load is then that of other programs
    warnings.simplefilter("ignore")
    task = tasks(ROOT / "build" / "accuracy")["vision transformer"]
    together, apart = seconds(task)
    print(f"{len(PRESETS)} presets: compare {together:.1f} s, single evaluations {apart:.1f} s: {together / apart:.2f}")
    figures = {"model": task.name, "presets": len(PRESETS), "together": together, "apart": apart}
    write_results(RESULTS, {"machine": where, **figures})


if __name__ == "__main__":
    main()
