"""The runner: compares all cases first, and times them only if nothing differs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cases import Entry
from benchmarks.cases import chosen as matching
from benchmarks.harness import COPY, Effort, Result, Timed, measure
from benchmarks.peers.measure import first_line
from benchmarks.record import Line, lines_of, machine, read_lines, updated, write_lines

from . import pages
from .cases import LARGEST, entries
from .limits import share, verdict
from .machine import ROOT, device_name, title

LINES = ROOT / "benchmarks" / "results" / "gpu.jsonl"
_TURN = 2e-3


def run(asked: argparse.Namespace, path: Path = LINES) -> int:
    """Do what the command is asked; 1 if a bit differs or a bar is missed."""
    if asked.pages:
        pages.write(read_lines(path))
        return 0
    print(title(asked.device), flush=True)
    start, chosen = time.monotonic(), _chosen(asked)
    if wrong := _differing(chosen):
        print(f"no times, because {len(wrong)} of {len(chosen)} cases differ from the reference:")
        print("\n".join(wrong))
        return 1
    lines = _measured(chosen, asked)
    print(pages.text(lines))
    if asked.add or not asked.only:
        write_lines(path, updated(read_lines(path), lines) if asked.only else lines)
        pages.write(read_lines(path))
    return _said(lines, time.monotonic() - start)


def _chosen(asked: argparse.Namespace) -> list[Entry]:
    every = entries(asked.device, asked.largest or LARGEST)
    found = [Entry(entry.case, matching(entry.case, entry.often, asked.only)) for entry in every]
    return [entry for entry in found if entry.often]


def _differing(entries: list[Entry]) -> list[str]:
    """Compare every case, a line for each; the lines of those that differ."""
    wrong = []
    for number, entry in enumerate(entries, 1):
        case = entry.case
        what = f"{case.name}, {case.direction}, {case.elements:,} {case.dtype_name}, {case.text}"
        reason = _difference(case)
        print(f"{number}/{len(entries)} {f'RED  {what}: {reason}' if reason else f'ok   {what}'}", flush=True)
        wrong += [f"RED  {what}: {reason}"] if reason else []
    return wrong


def _difference(case: Timed) -> str:
    """What is wrong with a case, or nothing."""
    try:
        count = case.differing()
    except Exception as error:  # Whatever a kernel raises is wrong, and the other cases are still compared.
        return f"raises {first_line(error)}"
    return f"{count:,} elements differ" if count else ""


def _measured(entries: list[Entry], asked: argparse.Namespace) -> list[Line]:
    """Time all cases, each printed when it is done."""
    where = {**machine(), "processor": device_name(asked.device)}
    where["commit"] = asked.commit or where["commit"]
    lines: list[Line] = []
    for number, entry in enumerate(entries, 1):
        for result in _results(entry, Effort(asked.seconds, turn=_TURN if asked.seconds else 0.0)):
            (line,) = lines_of([result], where)
            found = result.ratio
            line["share"] = share(entry.case, found.p50) if found and result.against == COPY else None
            lines.append(line)
            print(f"{number}/{len(entries)} {' | '.join(cell for cell in pages.row(line) if cell)}", flush=True)
    return lines


def _results(entry: Entry, effort: Effort) -> Iterator[Result]:
    """A case compared with each of the others; for one that raises, the error is the outcome."""
    case = entry.case
    for against in entry.often:
        try:
            yield from measure(case, (against,), effort, lambda case: 0)
        except Exception as error:  # A compiler or another library that fails on a GPU is a result, not the end of all.
            what = (case.name, case.direction, case.text, case.elements, case.dtype_name, against)
            yield Result(*what, outcome=f"raises {first_line(error)}")


def _said(lines: list[Line], seconds: float) -> int:
    """Print how many bars are missed; 1 if one is."""
    kept, missed = (sum(verdict(line) == word for line in lines) for word in ("ok", "MISSED"))
    timed = sum(line["p50"] is not None for line in lines)
    print(f"{timed} of {len(lines)} pairs timed in {seconds:.0f} seconds; {kept} bars kept, {missed} missed")
    return int(missed > 0)
