"""The files of a run: written in a temporary folder, then moved to their places, the figures last.

Before the first file is moved, figures and report say that the run is not whole. So files of two runs, which a killed
process leaves, are never taken for files of one run.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fakequant.files import locked, output_errors, writable_file, writable_folder, write_in_order, write_whole
from fakequant.model.state.checkpoint import MANIFEST, named_files, remove_unnamed
from fakequant.report.data import RESULTS

CHECKPOINT, ONNX, REPORT, GRAPH = "checkpoint", "model.onnx", "report.html", "graph.txt"
PARTS = (f"{CHECKPOINT}/{MANIFEST}", ONNX, GRAPH, REPORT, RESULTS)
"""The paths of the files of a run in the folder, in the order in which they are moved there."""

_LOCK, _RUN = ".fakequant-run.lock", ".fakequant-run-"
NOT_WHOLE = b"This run ended while its files were moved here, and some are of the run before: give the command again.\n"


@contextmanager
def results_folder(directory: Path) -> Iterator[Path]:
    """Create the folder of the results if it does not exist, and check before any work that it can be written.

    One process at a time has the folder; temporary folders of processes that were killed are removed. If the work
    fails, new folders that are still empty are removed.
    """
    made = [folder for folder in (directory, *directory.parents) if not os.path.lexists(folder)]
    try:
        out = writable_folder(directory)
        with locked(out, _LOCK, wait=False) as alone:
            for part in PARTS:
                if (out / part).parent.exists():
                    writable_file(out / part)
            for left in out.glob(f"{_RUN}{'[0-9a-f]' * 16}") if alone else ():
                shutil.rmtree(left, ignore_errors=True)
            yield out
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A context with a temporary folder for the files of a run, inside the folder that `publish` writes."""
    folder = out / f"{_RUN}{secrets.token_hex(8)}"
    try:
        with output_errors(folder, "to "):
            folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(new: Path, out: Path) -> None:
    """Replace the files of the previous run by new files; other files stay. If the disk is full, all old files stay.

    A file of an earlier run that the new run does not have is removed. A symbolic link is followed: its target is
    written. An existing file keeps its permissions.
    """
    checkpoint = out / CHECKPOINT
    with output_errors(out, "to "):
        checkpoint.mkdir(exist_ok=True)
        with locked(checkpoint) as alone:
            before = named_files(checkpoint)
            is_ours = (out / RESULTS).is_file() and before
            for name in set(named_files(new / CHECKPOINT)) - set(before):
                _move(new / CHECKPOINT / name, checkpoint / name)
            write_in_order({out / RESULTS: NOT_WHOLE, out / REPORT: NOT_WHOLE})
            for part in PARTS:
                if (new / part).is_file():
                    _move(new / part, out / part)
                elif is_ours:  # files that no run wrote stay
                    (out / part).unlink(missing_ok=True)
            if alone:
                remove_unnamed(checkpoint, before)


def _move(source: Path, path: Path) -> None:
    """Move a file to a path, or to the target of a symbolic link; the permissions of an existing file stay."""
    target = os.path.realpath(path)
    with suppress(FileNotFoundError):
        shutil.copymode(target, source)
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:  # the target of a link is on another file system
            raise
        write_whole(path, source.read_bytes())
