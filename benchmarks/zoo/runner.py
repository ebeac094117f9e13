"""Architectures in forks of one process: imports are paid once, each step has a time limit, a record is continued."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fakequant.files import write_whole

from .child import NOT_RUN, OURS, run_steps

TOO_LONG = "T"
Cells = dict[str, dict[str, Any]]
"""By letter of the step: its cell, commit, seconds of processor time, and its note or error."""
Record = dict[str, Any]
"""What is in the file: the machine, and by architecture the cells."""


def run_architecture(
    name: str, letters: str, limit: float, work: Callable[[str, str, Connection], None] = run_steps
) -> Cells:
    """The cells of one architecture.

    Args:
        name: of the architecture.
        letters: of the steps, in their order.
        limit: seconds for each step; the process is killed after them, and another one does the rest.
        work: runs in a fork and sends the cell of each step, in their order.
    """
    forks = multiprocessing.get_context("fork")
    found: Cells = {}
    while left := "".join(letter for letter in letters if letter not in found):
        ours, theirs = forks.Pipe(duplex=False)
        gc.freeze()  # so that a collection in the fork copies no pages of the parent
        process = forks.Process(target=work, args=(name, left, theirs))
        process.start()
        theirs.close()
        for cell in _cells(process.pid, ours, limit):
            found[cell.pop("step")] = cell
        process.join()
        missing = next((letter for letter in left if letter not in found), None)
        if missing is not None:
            found[missing] = _lost(process.exitcode, limit)
    return found


def _cells(pid: int | None, cells: Connection, limit: float) -> Iterator[dict[str, Any]]:
    """The cells of a process as they come; it is killed when the next takes longer than the limit."""
    with cells:
        while cells.poll(limit):
            try:
                yield cells.recv()
            except EOFError:
                return
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def _lost(ended: int | None, limit: float) -> dict[str, Any]:
    """The cell of a step that took too long or that ended the process."""
    if ended == -signal.SIGKILL:
        return {"cell": TOO_LONG, "error": f"killed after {limit:g} s, or for want of memory", "seconds": limit}
    return {"cell": OURS, "error": f"the process ended with {ended}", "seconds": 0.0}


def run_all(
    wanted: dict[str, str], record: Record, commit: str, run: Callable[[str, str], Cells]
) -> Iterator[tuple[str, Cells]]:
    """Run steps of architectures; yields each architecture when it is done and recorded.

    Args:
        wanted: letters by architecture.
        record: changed in place.
        commit: what is measured.
        run: gives the cells of an architecture's steps.
    """
    models = record.setdefault("models", {})
    for name, letters in wanted.items():
        if not letters:
            continue
        cells = {letter: {**cell, "commit": commit} for letter, cell in run(name, letters).items()}
        models.setdefault(name, {}).update(cells)
        yield name, cells


def left_to_run(record: Record, name: str, letters: str, commit: str, failed: bool) -> str:
    """The letters that the record lacks.

    Args:
        record: of earlier runs.
        name: of the architecture.
        letters: of the steps wanted.
        commit: what is measured: cells of another commit count as lacking, if `failed` is False.
        failed: whether cells that fail count as lacking, and all others do not.
    """
    cells = record.get("models", {}).get(name, {})
    if failed:
        return "".join(letter for letter in letters if cell_of(record, name, letter) in (OURS, TOO_LONG, NOT_RUN))
    return "".join(letter for letter in letters if cells.get(letter, {}).get("commit") != commit)


def read_record(path: Path) -> Record:
    """The record of earlier runs; empty if there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_record(path: Path, record: Record) -> None:
    """Write the record in one step, a line for each cell, so that changes are seen as lines."""
    rest = {name: value for name, value in record.items() if name != "models"}
    parts = [f'"{name}": {json.dumps(value)}' for name, value in rest.items()]
    models = []
    for name, model in sorted(record["models"].items()):
        cells = ",\n".join(f'  "{letter}": {json.dumps(cell)}' for letter, cell in sorted(model.items()))
        models.append(f"{json.dumps(name)}: {{\n{cells}}}")
    parts.append('"models": {\n' + ",\n".join(models) + "}")
    write_whole(path, ("{" + ",\n".join(parts) + "}\n").encode())


def cell_of(record: Record, name: str, letter: str) -> str:
    """The cell of a step, "." where it was not run."""
    return record.get("models", {}).get(name, {}).get(letter, {}).get("cell", NOT_RUN)
