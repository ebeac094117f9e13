"""Ratios of times that bars hold, each in several fresh processes; `python -m benchmarks.times` prints those of one.

Where the memory of a process lies decides how fast it is copied, for as long as the process lives: the same call took
1.6 to 3.5 times the copy from one process to the next. The median over processes is what counts; the least and the most
are shown beside it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

from . import formats, kernels
from .record import ROOT

PROCESSES = 5
OVER_ATEN, COPY_OVER_ATEN = "over ATen", "a copy over ATen"


class Spread(NamedTuple):
    """The median over processes of a ratio, and its least and its largest."""

    median: float
    low: float
    high: float


def measured() -> dict[str, float]:
    """The ratios in this process: the time of every case over a copy, by its name, and two of int8 over ATen.

    Raises:
        AssertionError: a case differs from the reference, so that its time means nothing.
    """
    found = {}
    for case in (kernels.INT8_CASE, *formats.GIVEN, *formats.DYNAMIC):
        assert case.differing() == 0, f"{case.name} differs from the reference; its time means nothing"
        found[case.name] = kernels.ratio(case.run(), case.copy(), case.inputs()).median
    case, aten = kernels.INT8_CASE, kernels.INT8_CASE.aten()
    assert aten is not None
    found[OVER_ATEN] = kernels.ratio(case.run(), aten, case.inputs()).median
    found[COPY_OVER_ATEN] = kernels.ratio(case.copy(), aten, case.inputs()).median
    return found


def over_processes(measure: Callable[[], dict[str, float]] | None = None) -> dict[str, Spread]:
    """The spread of every ratio over fresh processes, or over calls of `measure`."""
    runs = [(measure or _in_a_process)() for _ in range(PROCESSES)]
    columns = {name: [run[name] for run in runs] for name in runs[0]}
    return {name: Spread(statistics.median(found), min(found), max(found)) for name, found in columns.items()}


def _in_a_process() -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.times"]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)


if __name__ == "__main__":
    print(json.dumps(measured()))
