"""Architectures in processes of their own: a time limit for each step, and a record that is continued."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT
from fakequant.files import write_whole

from .child import NOT_RUN, OURS

TOO_LONG = "T"
Cells = dict[str, dict[str, Any]]
"""By letter of the step: its cell, seconds of processor time, and its note or error."""
Record = dict[str, Any]
"""What is in the file: the machine, and by architecture the commit and the cells."""


def run_architecture(name: str, letters: str, limit: float, command: list[str] | None = None) -> Cells:
    """The cells of one architecture.

    Args:
        name: of the architecture.
        letters: of the steps, in their order.
        limit: seconds for each step; the process is killed after them, and another one does the rest.
        command: starts the process, to which name and letters are added; by default this package's own.
    """
    command = command or [sys.executable, "-m", "benchmarks.zoo.child"]
    found: Cells = {}
    while left := "".join(letter for letter in letters if letter not in found):
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen([*command, name, left], cwd=ROOT, stdout=subprocess.PIPE, stderr=errors)
            for cell in _lines(process, limit):
                found[cell.pop("step")] = cell
            ended = process.wait()
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
        missing = next((letter for letter in left if letter not in found), None)
        if missing is not None:
            found[missing] = _lost(ended, limit, said[-1] if said else "")
    return found


def _lines(process: subprocess.Popen[bytes], limit: float) -> Iterator[dict[str, Any]]:
    """The lines of a process as they come; it is killed when the next takes longer than the limit."""
    assert process.stdout is not None
    with process.stdout as lines:
        while select.select([lines], [], [], limit)[0]:
            line = lines.readline()
            if not line:
                return
            yield json.loads(line)
        process.kill()


def _lost(ended: int, limit: float, said: str) -> dict[str, Any]:
    """The cell of a step that took too long or that ended the process."""
    if ended == -9:
        return {"cell": TOO_LONG, "error": f"killed after {limit:g} s, or for want of memory", "seconds": limit}
    return {"cell": OURS, "error": f"the process ended with {ended}: {said}"[:300], "seconds": 0.0}


def run_all(
    wanted: dict[str, str], record: Record, commit: str, jobs: int, run: Callable[[str, str], Cells]
) -> Iterator[tuple[str, Cells]]:
    """Run the steps of architectures that the record lacks for a commit; yields each when it is done and recorded.

    Args:
        wanted: letters by architecture.
        record: changed in place; cells of another commit are dropped when an architecture is run again.
        commit: what is measured.
        jobs: how many processes at a time.
        run: gives the cells of an architecture's steps.
    """
    models = record.setdefault("models", {})
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {}
        for name, letters in wanted.items():
            old = models.get(name, {})
            done = old.get("cells", {}) if old.get("commit") == commit else {}
            if left := "".join(letter for letter in letters if letter not in done):
                waiting[pool.submit(run, name, left)] = name, done
        for future in as_completed(waiting):
            name, done = waiting[future]
            cells = future.result()
            models[name] = {"commit": commit, "cells": done | cells}
            yield name, cells


def read_record(path: Path) -> Record:
    """The record of earlier runs; empty if there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_record(path: Path, record: Record) -> None:
    """Write the record in one step, a line for each cell, so that changes are seen as lines."""
    rest = {name: value for name, value in record.items() if name != "models"}
    parts = [f'"{name}": {json.dumps(value)}' for name, value in rest.items()]
    models = []
    for name, model in sorted(record["models"].items()):
        cells = ",\n".join(f'  "{letter}": {json.dumps(cell)}' for letter, cell in sorted(model["cells"].items()))
        models.append(f'{json.dumps(name)}: {{"commit": {json.dumps(model["commit"])}, "cells": {{\n{cells}}}}}')
    parts.append('"models": {\n' + ",\n".join(models) + "}")
    write_whole(path, ("{" + ",\n".join(parts) + "}\n").encode())


def letters_of(skip: str, letters: str) -> str:
    """The letters that an architecture does not skip."""
    return "".join(letter for letter in letters if letter not in skip)


def cell_of(record: Record, name: str, letter: str) -> str:
    """The cell of a step, "." where it was not run."""
    return record["models"][name]["cells"].get(letter, {}).get("cell", NOT_RUN)
