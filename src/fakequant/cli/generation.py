"""Replace all files of the previous run by those of a new run in one step.

No file system replaces several files at once. During the change every file is therefore a symbolic link that goes
through one other link, `.fakequant-current`. This link first points to the old files; one rename points it to the new
files. Before and after the change the files are plain, because a link breaks when it is moved or sent. The folder
itself is never renamed: it may hold other files, be a working folder, or lie in a folder that cannot be written.

A process that dies during the change leaves links to the files of one run. The next run turns them into plain files.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fakequant.files import (
    abandoned,
    lock_file,
    locked,
    output_errors,
    writable_file,
    writable_folder,
    write_whole,
)
from fakequant.model.manifest import MANIFEST
from fakequant.model.manifest_reading import named_files
from fakequant.report.saved import RESULTS

CHECKPOINT, ONNX, REPORT, GRAPH = "checkpoint", "model.onnx", "report.html", "graph.txt"
PARTS = (f"{CHECKPOINT}/{MANIFEST}", ONNX, GRAPH, REPORT, RESULTS)
"""Paths in the folder of the files of one run. The manifest names the tensor files, whose names hash their content."""

_CURRENT = ".fakequant-current"
_RUN = ".fakequant-run-"


@contextmanager
def results_folder(directory: Path) -> Iterator[Path]:
    """Create the folder of the results if it does not exist, and check before any work that it can be written.

    If the work fails, new folders that are still empty are removed.

    Raises:
        OutputError: the folder or one of its files cannot be written.
    """
    made = [folder for folder in (directory, *directory.parents) if not os.path.lexists(folder)]
    try:
        out = writable_folder(directory)
        for part in PARTS:
            if (out / part).parent.exists():
                writable_file(out / part)
        yield out
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Create a temporary folder for the files of a run inside the folder that `publish` writes.

    Raises:
        OutputError: the temporary folder cannot be created.
    """
    folder = out / f"{_RUN}{secrets.token_hex(8)}"
    with lock_file(_lock_of(folder)):
        with output_errors(folder, "to "):
            folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def publish(new: Path, out: Path) -> None:
    """Replace the files of the previous run in one step; other files stay.

    A file of an earlier run that the new run does not have is removed. A symbolic link to another folder is followed:
    its target is written after the step.

    Args:
        new: the folder from `staged` with the new files.
        out: the folder of the results.

    Raises:
        OutputError: a file cannot be written; the old files are unchanged.
    """
    checkpoint = out / CHECKPOINT
    is_new = not checkpoint.exists()
    with output_errors(out, "to "):
        checkpoint.mkdir(exist_ok=True)
        try:
            with locked(out), locked(checkpoint):
                _recover(out)
                with staged(out) as old:
                    try:
                        _exchange(old, new, out)
                    finally:
                        _remove_tensors(old, out)
                        _remove_tensors(new, out)
        finally:
            with suppress(OSError):
                if is_new:
                    checkpoint.rmdir()  # it is empty if nothing was published


def _exchange(old: Path, new: Path, out: Path) -> None:
    is_ours = (out / RESULTS).is_file() and named_files(out / CHECKPOINT)
    parts = [part for part in PARTS if is_ours or (new / part).is_file()]  # what no run wrote is not removed
    inside = [part for part in parts if os.path.realpath(out / part) == os.path.join(os.path.realpath(out), part)]
    for part in inside:
        if (out / part).is_file():
            _keep(out / part, old / part, new / part)
    for tensors in (new / CHECKPOINT).glob("*.safetensors"):
        _link(tensors, out / CHECKPOINT / tensors.name)
    try:
        _point(out / _CURRENT, old.name, old)
    except OSError:  # a file system without symbolic links: one file after the other, the manifest first
        for part in inside:
            _place(new / part, out / part)
    else:
        try:
            for part in inside:
                _point(out / part, os.path.join(*[".."] * part.count("/"), _CURRENT, part), old)
            _point(out / _CURRENT, new.name, old)  # the one step
        finally:
            _settle(out)
    for part in set(parts) - set(inside):
        if (new / part).is_file():
            write_whole(out / part, (new / part).read_bytes())
        else:
            (out / part).unlink(missing_ok=True)


def _keep(now: Path, old: Path, new: Path) -> None:
    """Keep an old file during the change, and copy its permissions to the new file."""
    old.parent.mkdir(exist_ok=True)
    _link(now, old)
    if new.is_file():
        shutil.copymode(now, new)


def _recover(out: Path) -> None:
    """Finish the changes of processes that died, and remove their temporary folders."""
    _settle(out)
    for lock in out.glob(f"{_RUN}{'[0-9a-f]' * 16}.lock"):
        with abandoned(lock) as free:
            if free:
                _remove_tensors(lock.with_suffix(""), out)
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink(missing_ok=True)


def _settle(out: Path) -> None:
    """Turn the links through `.fakequant-current` into plain files."""
    current = out / _CURRENT
    if not current.is_symlink():
        return
    for part in PARTS:
        if (out / part).is_symlink() and _CURRENT in Path(os.readlink(out / part)).parts:
            _place(current / part, out / part)
    current.unlink()


def _place(source: Path, path: Path) -> None:
    """Move a file of a run to a path; remove the path if the run has no such file."""
    if not source.is_file():
        path.unlink(missing_ok=True)
        return
    spare = source.with_name(f"{source.name}.placed")
    spare.unlink(missing_ok=True)
    _link(source, spare)
    os.replace(spare, path)


def _point(path: Path, target: str, run: Path) -> None:
    """Create or replace a symbolic link in one step."""
    spare = run / "link"
    os.symlink(target, spare)
    os.replace(spare, path)


def _link(source: Path, target: Path) -> None:
    """Create a hard link, or a copy on a file system without hard links."""
    with suppress(FileExistsError):
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:
            shutil.copy(source, target)


def _remove_tensors(run: Path, out: Path) -> None:
    """Remove the tensor files of a run from the checkpoint, except those that its manifest names now."""
    for name in set(named_files(run / CHECKPOINT)) - set(named_files(out / CHECKPOINT)):
        with suppress(OSError):
            (out / CHECKPOINT / name).unlink()


def _lock_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.lock")
