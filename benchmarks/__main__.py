"""Time everything: `python -m benchmarks [TEXT ...]`. What is timed: `benchmarks/cases.py`.

Every case is compared with the reference first, and has no time if a bit differs. Results are written to
benchmarks/results/bench.jsonl, whole or not at all. From that file come the tables of performance.md and peers.md in
docs/notes/, and the plot. With a TEXT only the cases that have it in "name, direction, dtype, elements, other" are
timed, and nothing is written unless `--add` puts these results among the others. `--pages` times nothing and writes
the pages from the file. Exits with 1 if a bit differs or a limit of `benchmarks/limits.py` is missed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.harness import Effort, Result

from . import pages
from .limits import missed
from .processes import Plan, as_text, run
from .record import LINES, lines_of, machine, read_lines, updated, write_lines


def arguments() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser("python -m benchmarks")
    parser.add_argument("only", nargs="*", metavar="TEXT", help="time only the cases with one of these texts")
    parser.add_argument("--add", action="store_true", help="put the results of some cases among the others")
    parser.add_argument("--pages", action="store_true", help="time nothing, write tables and plot from the file")
    parser.add_argument("--processes", type=int, default=Plan.processes, help="fresh processes, one after the other")
    parser.add_argument("--seconds", type=float, default=Plan.effort.seconds, help="for each pair in each process")
    return parser


def main(given: list[str] | None = None, path: Path = LINES) -> int:
    """Measure, print and write; 1 if a bit differs or a limit is missed."""
    asked = arguments().parse_args(given)
    if asked.pages:
        pages.write(read_lines(path))
        return 0
    machine()  # before anything is timed: the load is then that of other programs
    started = time.monotonic()
    results = run(Plan("everything", tuple(asked.only), asked.processes, Effort(asked.seconds)))
    if asked.add or not asked.only:
        lines = lines_of(results)
        write_lines(path, updated(read_lines(path), lines) if asked.only else lines)
        pages.write(read_lines(path))
    return verdict(results, time.monotonic() - started)


def verdict(results: list[Result], seconds: float) -> int:
    """Print what is wrong; 1 if anything is."""
    wrong = [as_text(result) for result in results if result.differing]
    too_slow = [as_text(result) for result in results if missed(result)]
    timed = sum(result.ratio is not None for result in results)
    counts = f"{len(wrong)} differ, {len(too_slow)} missed"
    print(f"{timed} of {len(results)} pairs timed in {seconds:.0f} seconds; {counts}")
    print("\n".join([*wrong, *too_slow]))
    return int(bool(wrong or too_slow))


if __name__ == "__main__":
    raise SystemExit(main())
