"""Rows of docs/notes/bars.md from the records of other commands in benchmarks/results/; none without a record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakequant.calibration import DEFAULT_METHOD
from tests.support import jobs

from . import misuses, report
from .accuracy import compare, methods
from .bar import Bar
from .record import ROOT

WHEEL = ROOT / "benchmarks" / "results" / "wheel.json"
"""Written by tests/native/wheel.py, as `make wheel` calls it."""
LONGEST_INSTALL, LARGEST_WHEEL = 30.0, 4_000_000
MOST_OVER_SINGLE = 1.5
CLOSE_TO_BEST = 0.02


def wheel_bars(found: list[dict[str, Any]]) -> list[Bar]:
    """The sizes of wheels, and the seconds until a first tensor."""
    bars = []
    for wheel in found:
        what = f"wheel served by the {wheel['served']} (`make wheel`)"
        size, seconds = wheel["bytes"], wheel["installed"] + wheel["first"]
        bars.append(Bar(f"{what}: bytes", f"< {LARGEST_WHEEL:,}", f"{size:,}", size < LARGEST_WHEEL))
        what += ": seconds from its installation without a compiler to the first tensor, beyond torch's import"
        bars.append(Bar(what, f"< {LONGEST_INSTALL:g}", f"{seconds:.1f}", seconds < LONGEST_INSTALL))
    return bars


def report_bars(found: dict[str, Any]) -> list[Bar]:
    """The size of a report, and the seconds to write it."""
    what = f"report of a BERT with {found['parameters']:,} parameters (`python -m benchmarks.report`)"
    size, seconds = found["bytes"], found["seconds"]
    return [
        Bar(f"{what}: bytes", f"<= {report.BYTES:,}", f"{size:,}", size <= report.BYTES),
        Bar(f"{what}: seconds", f"<= {report.SECONDS:g}", f"{seconds:.1f}", seconds <= report.SECONDS),
    ]


def compare_bars(found: dict[str, Any]) -> list[Bar]:
    """The time of `compare` over that of single evaluations."""
    ratio = found["together"] / found["apart"]
    what = f"`fq.compare` of {found['presets']} presets on the {found['model']}, with a metric: time over that of"
    what += " single evaluations (`python -m benchmarks.accuracy.compare`)"
    return [Bar(what, f"<= {MOST_OVER_SINGLE:g}", f"{ratio:.2f}", ratio <= MOST_OVER_SINGLE)]


def calibration_bars(rows: list[dict[str, Any]]) -> list[Bar]:
    """The error by the default method over that by the best single one, on average over models and presets."""
    by_case: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        by_case.setdefault((row["preset"], row["model"]), {})[row["method"]] = row["error"]
    shares: dict[str, list[float]] = {}
    for (preset, _), errors in by_case.items():
        best = min(errors.values())
        shares.setdefault(preset, []).append(errors[DEFAULT_METHOD] / best)
    means = {preset: sum(some) / len(some) for preset, some in shares.items()}
    mean = sum(map(sum, shares.values())) / len(by_case)
    models = len({model for _, model in by_case})
    what = f"default calibration (`{DEFAULT_METHOD}`) over the best single method, {models} trained models"
    what += ": squared error of the output (`python -m benchmarks.accuracy.methods`)"
    measured = f"{mean:.3f} ({', '.join(f'{preset} {found:.3f}' for preset, found in means.items())})"
    return [Bar(what, f"<= {1 + CLOSE_TO_BEST:g} on average", measured, mean <= 1 + CLOSE_TO_BEST)]


def misuse_bars(found: dict[str, Any]) -> list[Bar]:
    """The mistakes that get one clear message."""
    what = "mistakes of users that get one clear message, without a traceback of ours (`python -m benchmarks.misuses`)"
    return [Bar(what, "all", f"{found['clear']} of {found['tried']}", found["clear"] == found["tried"] > 0)]


def job_bars() -> list[Bar]:
    """The lines of the commonest jobs, as their page has them."""
    found = [jobs.lines(job) for job in jobs.JOBS]
    what = f"the {len(found)} commonest jobs (docs/jobs.md): lines, the best other library's in brackets"
    measured = ", ".join(f"{ours} ({theirs})" for ours, theirs in found)
    return [Bar(what, "<= the other's", measured, all(0 < ours <= theirs for ours, theirs in found))]


RECORDS: dict[Path, tuple[str, Callable[[Any], list[Bar]]]] = {
    WHEEL: ("make wheel", wheel_bars),
    report.RESULTS: ("python -m benchmarks.report", report_bars),
    methods.RESULTS: ("python -m benchmarks.accuracy.methods", calibration_bars),
    compare.RESULTS: ("python -m benchmarks.accuracy.compare", compare_bars),
    misuses.RESULTS: ("python -m benchmarks.misuses", misuse_bars),
}


def record_bars() -> list[Bar]:
    """The rows of all records; a line says which record is missing and what writes it."""
    bars = []
    for path, (command, rows) in RECORDS.items():
        if path.exists():
            bars += rows(json.loads(path.read_text()))
        else:
            print(f"{path} is missing: run `{command}` for its rows")
    return [*bars, *job_bars()]
