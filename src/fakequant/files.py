"""Files that are written whole or not at all, and locks between processes."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

from fakequant.errors import OutputError

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

_TEMPORARY = (".fakequant-", ".tmp")
"""How the name of a temporary file begins and ends; the name of its target may be as long as the system allows."""
_LOCK = ".fakequant.lock"


def writable_folder(directory: str | os.PathLike[str]) -> Path:
    """The folder, made if need be, and proven writable before any work is done for it.

    Raises:
        OutputError: it cannot be made or written.
    """
    folder = Path(directory)
    with output_errors(folder, "to "):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    return folder


def writable_file(path: str | os.PathLike[str]) -> Path:
    """The path of a file that `write_whole` could write, with its folder; found out before any work is done for it.

    Raises:
        OutputError: the folder cannot be written, the name is one that no file can have, or something else than a file
            is there.
    """
    target = Path(path)
    writable_folder(target.parent)
    _mode(target)
    return target


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is either the old one or the new one whole, whatever interrupts.

    A file that is replaced keeps its permissions; a new one has those that the umask leaves. Of a symbolic link the
    file is written that it points to. Temporary files that killed processes left in the folder are removed.

    Raises:
        OutputError: the file cannot be written; the old one is unchanged.
    """
    write_in_order({path: data})


def write_in_order(files: Mapping[Path, bytes]) -> None:
    """Write several files whole: all are written under other names first, then take their names one after the other.

    So the last one may name the others: where it is new, they are there.

    Raises:
        OutputError: one cannot be written; if it was found before the first took its name, all old ones are unchanged.
    """
    with ExitStack() as stack:
        ready = []
        for path, data in files.items():
            mode = _mode(path)
            target = Path(os.path.realpath(path))
            with output_errors(path):
                temporary = stack.enter_context(_temporary(target.parent, mode))
                with open(temporary, "r+b") as file:
                    file.write(data)
                    file.flush()
                    if mode is not None:
                        os.chmod(temporary, mode)
                    os.fsync(file.fileno())
            ready.append((path, temporary, target))
        for path, temporary, target in ready:
            with output_errors(path):
                os.replace(temporary, target)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """A context that one process at a time is in, for one folder; whether there is a lock.

    There is none on Windows and on file systems without `flock`: then the caller must delete nothing that another
    process may have written. A process that dies gives its lock back.

    Raises:
        OutputError: the folder cannot be written.
    """
    path = folder / _LOCK
    opened: list[FileIO] = []
    try:
        with output_errors(folder, "to "):
            _lock(path, opened)
        yield bool(opened)
    finally:
        _unlock(path, opened)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """A context in which a new file says that this process lives, see `abandoned`; the file is removed after it.

    Raises:
        OutputError: the file cannot be made.
    """
    opened: list[FileIO] = []
    try:
        with output_errors(path):
            _lock(path, opened)
        yield
    finally:
        _unlock(path, opened)


@contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """A context in which a file is locked; whether it was free, because the process that had it died.

    False where there are no locks.
    """
    handle, free = None, False
    try:
        if fcntl is not None:
            with suppress(OSError):
                handle = os.open(path, os.O_RDWR)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free = True
        yield free
    finally:
        if handle is not None:
            os.close(handle)


def _lock(path: Path, opened: list[FileIO]) -> None:
    """Make a file, lock it, and put it into a list, which stays empty where there are no locks.

    The list is the caller's: it closes the file wherever an interrupt comes. Else the next lock waits for ever.
    """
    while fcntl is not None:
        opened.append(FileIO(path, "a"))
        try:
            fcntl.flock(opened[-1], fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            opened.pop().close()
            with suppress(OSError):
                path.unlink()
            return
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(opened[-1].fileno()), os.stat(path)):
                return
        opened.pop().close()  # another process removed the file before it gave its lock back


def _unlock(path: Path, opened: list[FileIO]) -> None:
    try:
        if opened:
            with suppress(OSError):
                path.unlink()  # before the lock is given back: a process that waits for it sees that the file is gone
    finally:
        for file in opened:
            file.close()


@contextmanager
def _temporary(folder: Path, mode: int | None) -> Iterator[Path]:
    """A new empty file, locked while it is there; it is removed unless it was renamed."""
    _remove_abandoned(folder)
    begin, end = _TEMPORARY
    while True:
        path = folder / f"{begin}{secrets.token_hex(8)}{end}"
        # The system applies the umask. A file that others may not read is never readable by them.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
        try:
            if fcntl is not None:
                with suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:
                if fcntl is None:  # Windows, where open files can be neither renamed nor removed
                    os.close(handle)
                yield path
                return
            # Another process took the file for an abandoned one before it was locked: once more.
        finally:
            try:
                with suppress(FileNotFoundError):
                    os.unlink(path)
            finally:
                if fcntl is not None:
                    os.close(handle)


def _remove_abandoned(folder: Path) -> None:
    """Remove temporary files of processes that were killed."""
    begin, end = _TEMPORARY
    for path in folder.glob(f"{begin}{'[0-9a-f]' * 16}{end}"):
        with abandoned(path) as free:
            if free:
                path.unlink(missing_ok=True)


def _mode(path: Path) -> int | None:
    """The permissions of the file at a path; None where there is none yet.

    Raises:
        OutputError: something else than a file is there, or no file can have the name.
    """
    with output_errors(path):
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return None
    if stat.S_ISREG(found.st_mode):
        return stat.S_IMODE(found.st_mode)
    if stat.S_ISDIR(found.st_mode):
        raise OutputError(f"cannot write {path}: it is a folder; give the path of a file in it")
    raise OutputError(f"cannot write {path}: it is a device, a pipe or a socket; give the path of a file")


@contextmanager
def output_errors(path: Path, to: str = "") -> Iterator[None]:
    """A context in which errors of the system become one that says what cannot be written and what to do.

    Args:
        path: what is written.
        to: "to " if it is a folder.

    Raises:
        OutputError: in place of an OSError or ValueError.
    """
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way = "free space on the disk" if full else f"choose another {'folder' if to else 'path'}"
        raise OutputError(f"cannot write {to}{_shown(path)}: {error.strerror or error}; {way}") from error
    except ValueError as error:
        raise OutputError(f"cannot write {to}{_shown(path)}: {error}; choose another name") from error


def _shown(path: Path) -> str:
    """A path in one readable line, whatever its name is made of."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(path))
