"""Every step of the package with other people's architectures: `make zoo`.

Writes benchmarks/results/zoo.json and, from it, docs/notes/zoo.md, after each architecture. What is in the record
for this commit is not run again, so that an interrupted run is continued. Exits with 1 if a step fails that works in
float.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.record import ROOT, commit, machine
from fakequant.files import write_whole

from .architectures import ARCHITECTURES
from .child import OURS
from .pages import page
from .preload import preload
from .runner import TOO_LONG, cell_of, left_to_run, read_record, run_all, run_architecture, write_record
from .steps import STEPS, USUAL

RESULTS = ROOT / "benchmarks" / "results" / "zoo.json"
PAGE = ROOT / "docs" / "notes" / "zoo.md"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="architectures whose name has one of these texts")
    parser.add_argument(
        "--steps", default=USUAL, metavar="LETTERS", help=f"of {''.join(STEPS)}; by default %(default)s"
    )
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a step (%(default)s)")
    parser.add_argument("--failed", action="store_true", help="only what fails in the record or is not in it")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the record (%(default)s)")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page (%(default)s)")
    options = parser.parse_args(given)
    if unknown := set(options.steps) - set(STEPS):
        parser.error(f"no step {', '.join(sorted(unknown))}; there are {''.join(STEPS)}")
    if unknown := [text for text in options.only or () if not any(text in name for name in ARCHITECTURES)]:
        parser.error(f"no architecture has {', '.join(unknown)} in its name")
    return options


def main(given: list[str] | None = None) -> int:
    """Run what the command line says; 1 if a step fails that works in float."""
    options = arguments(given)
    chosen = [name for name in ARCHITECTURES if not options.only or any(text in name for text in options.only)]
    measured, record = commit("src", "benchmarks/zoo"), read_record(options.results)
    record["machine"] = machine()
    left = {name: left_to_run(record, name, options.steps, measured, options.failed) for name in chosen}
    if any(left.values()):
        torch.set_num_threads(1)  # threads do not survive a fork
        preload()
    run, begin = partial(run_architecture, limit=options.limit), time.monotonic()
    for number, (name, cells) in enumerate(run_all(left, record, measured, run), 1):
        write_record(options.results, record)
        write_whole(options.page, page(record).encode())
        line = "".join(f"{letter}{cell['cell']} " for letter, cell in cells.items())
        print(f"{number:3} {name:40} {line} {time.monotonic() - begin:.0f} s", flush=True)
    if record.get("models"):
        write_whole(options.page, page(record).encode())
    return int(any(cell_of(record, name, letter) in (OURS, TOO_LONG) for name in chosen for letter in options.steps))


if __name__ == "__main__":
    sys.exit(main())
