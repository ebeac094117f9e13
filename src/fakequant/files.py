"""Write files whole or not at all, and lock folders between processes."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any

from fakequant.errors import FakeQuantError, OutputError, shown

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

_TEMPORARY = (".fakequant-", ".tmp")
"""The prefix and suffix of temporary names, which omit the target's name: it may have the maximum length."""
_LOCK = ".fakequant.lock"
_WRITTEN = 1 << 18
"""Bytes that are written at once: with more, Linux looks for large pages, and 400 MB took up to 1.2 s, not 0.1 s."""


def read_whole(path: Path) -> bytes:
    """The content of a regular file, or of a link to one; other files, such as a pipe, may never end, and are refused.

    Raises:
        OSError: the path is not a regular file, or cannot be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return path.read_bytes()


def check_path(path: Any, example: str, error: type[FakeQuantError] = OutputError) -> None:
    """Raise an error if `path` is neither a text nor an `os.PathLike`, for example after swapped arguments.

    Args:
        example: a right call, for the message.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise error(f"a path is a text or a pathlib.Path, got {shown(path)}; write {example}")


def writable_folder(directory: str | os.PathLike[str]) -> Path:
    """Create a folder if it does not exist, and check that it can be written.

    Raises:
        OutputError: the folder cannot be created or written.
    """
    folder = Path(directory)
    with output_errors(folder, "to "):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    return folder


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A context with a writable folder; it creates the folder and its parents, and removes them if they stay empty.

    Raises:
        OutputError: the folder cannot be created or written.
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        yield writable_folder(folder)
    finally:
        with suppress(OSError):
            for one in made:
                one.rmdir()


def writable_file(path: str | os.PathLike[str]) -> Path:
    """Check that `write_whole` can write a file at a path, and create its folder.

    Raises:
        OutputError: the folder cannot be written, the name is not valid, or the path is not a regular file.
    """
    target = Path(path)
    writable_folder(target.parent)
    _mode(target)
    return target


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: after an interrupt the path has either the old or the new contents.

    An existing file keeps its permissions; a new file gets the permissions of the umask. A symbolic link is followed:
    its target is written. Temporary files that killed processes left in the folder are removed.

    Raises:
        OutputError: the file cannot be written; the old file is unchanged.
    """
    write_in_order({path: data})


@contextmanager
def temporary_file(folder: Path, parts: Iterable[bytes | memoryview], path: Path | None = None) -> Iterator[Path]:
    """A context with a file under a temporary name, which is removed on exit unless it was renamed.

    Args:
        folder: the folder of the file.
        parts: the parts of the content, which are made one after the other.
        path: the file that the temporary file will replace: messages have its name, and its permissions are kept.

    Raises:
        OutputError: the file cannot be written.
    """
    mode = None if path is None else _mode(path)
    where = (folder, "to ") if path is None else (path, "")
    with ExitStack() as stack:
        with output_errors(*where):
            temporary = stack.enter_context(_temporary(folder, mode))
            file = open(temporary, "r+b")  # noqa: SIM115
            stack.callback(_close, file)
        for part in parts:
            with output_errors(*where):
                for start in range(0, len(part), _WRITTEN):
                    file.write(part[start : start + _WRITTEN])
        with output_errors(*where):
            file.flush()
            if mode is not None:
                os.chmod(temporary, mode)
            os.fsync(file.fileno())
            file.close()
        yield temporary


def _close(file: IO[bytes]) -> None:
    with suppress(OSError):  # of a full disk, which was reported: closing writes the rest once more
        file.close()


def write_in_order(files: Mapping[Path, bytes | Path], *, without_old: bool = False) -> None:
    """Write several files whole: first all under temporary names, then rename them in the given order.

    The last file may therefore refer to the others: when it is new, they are complete.

    Args:
        files: for each path, the content of the file, or the path of a `temporary_file` with the content.
        without_old: whether all old files are removed, the last file first, before the first new file appears: old and
            new files are never together, even after a kill. An error restores the old files. The caller must lock the
            folder.

    Raises:
        OutputError: a file cannot be written; if this is noticed before the first rename, all old files are unchanged.
    """
    with ExitStack() as stack:
        ready = []
        for path, data in files.items():
            mode, target = _mode(path), Path(os.path.realpath(path))
            if isinstance(data, bytes):
                temporary = stack.enter_context(temporary_file(target.parent, [data], path))
            else:
                temporary = data
                if mode is not None:
                    with output_errors(path):
                        os.chmod(temporary, mode)
            ready.append((path, temporary, target))
        if without_old:
            stack.enter_context(_moved_aside({path: target for path, _, target in reversed(ready)}))
        for path, temporary, target in ready:
            with output_errors(path):
                os.replace(temporary, target)


@contextmanager
def _moved_aside(files: Mapping[Path, Path]) -> Iterator[None]:
    """A context in which files have temporary names. The files are removed on exit, or restored after an error."""
    moved: list[tuple[Path, Path]] = []
    begin, end = _TEMPORARY
    are_new = False
    with ExitStack() as stack:  # has the locks: others remove temporary files that have none
        try:
            for path, target in files.items():
                if target.exists():
                    stack.enter_context(abandoned(target))
                    moved.append((target, target.with_name(f"{begin}{secrets.token_hex(8)}{end}")))
                    with output_errors(path):
                        os.rename(*moved[-1])
            are_new = True
            yield
        except BaseException:
            for target in files.values() if are_new else ():
                with suppress(OSError):
                    target.unlink()
            for target, aside in reversed(moved):
                with suppress(OSError):  # the last one may not be moved yet
                    os.rename(aside, target)
            raise
        for _, aside in moved:
            with suppress(OSError):
                aside.unlink()


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder in which a file is a link to a file elsewhere, such as a folder of the cache of Hugging Face.

    Raises:
        OutputError: a file is a link; the message names the file and a cure.
    """
    whole = Path(os.path.realpath(folder))
    for name in names:
        found = Path(os.path.realpath(folder / name))
        if not found.is_relative_to(whole):
            raise OutputError(
                f"cannot write {_shown(folder / name)}: it is a link to {_shown(found)}, which other programs may "
                "read; give another folder, or remove the link"
            )


@contextmanager
def locked(folder: Path, name: str = _LOCK, *, wait: bool = True) -> Iterator[bool]:
    """A context that locks a folder for one process at a time; yields whether this system has locks.

    Args:
        folder: the folder, which must exist.
        name: the name of the lock's file.
        wait: whether to wait for the process that has the lock.

    Windows and file systems without `flock` have no lock: there the caller must not delete files that another process
    may have written. The system releases the lock of a process that dies.

    Raises:
        OutputError: the folder cannot be written, or another process has the lock and `wait` is false.
    """
    path = folder / name
    opened: list[FileIO] = []
    try:
        with output_errors(folder, "to "):
            _lock(path, opened, wait)
        yield bool(opened)
    finally:
        try:
            if opened:
                with suppress(OSError):
                    path.unlink()  # before the lock is released: a waiting process then sees that the file is gone
        finally:
            for file in opened:
                file.close()


@contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """A context that locks a file; it yields True if the process that had the lock has died.

    It yields False on systems that have no locks.
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


def _lock(path: Path, opened: list[FileIO], wait: bool) -> None:
    """Create a file, lock it and append it to `opened`, which stays empty on systems without locks.

    The caller closes the files in `opened` after any interrupt; an open file would block the next lock for ever.
    """
    while fcntl is not None:
        opened.append(FileIO(path, "a"))
        try:
            fcntl.flock(opened[-1], fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            opened.pop().close()
            raise OutputError(
                f"another process writes to {_shown(path.parent)}; wait until it has ended, or give another folder"
            ) from None
        except OSError:  # a file system without locks
            opened.pop().close()
            with suppress(OSError):
                path.unlink()
            return
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(opened[-1].fileno()), os.stat(path)):
                return
        opened.pop().close()  # another process removed the file before it released the lock


@contextmanager
def _temporary(folder: Path, mode: int | None) -> Iterator[Path]:
    """A context with a new, empty and locked file, which is removed on exit unless it was renamed."""
    remove_abandoned(folder)
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
            # Another process removed the file as abandoned before it was locked: try again.
        finally:
            try:
                with suppress(FileNotFoundError):
                    os.unlink(path)
            finally:
                if fcntl is not None:
                    os.close(handle)


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files of processes that were killed."""
    begin, end = _TEMPORARY
    for path in folder.glob(f"{begin}{'[0-9a-f]' * 16}{end}"):
        with abandoned(path) as free:
            if free:
                path.unlink(missing_ok=True)


def _mode(path: Path) -> int | None:
    """Return the permissions of the file at a path, or None if it does not exist.

    Raises:
        OutputError: the path is not a regular file, or its name is not valid.
    """
    with output_errors(path):
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return None
    if stat.S_ISREG(status.st_mode):
        return stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode):
        raise OutputError(f"cannot write {path}: it is a folder; give the path of a file in it")
    raise OutputError(f"cannot write {path}: it is a device, a pipe or a socket; give the path of a file")


@contextmanager
def output_errors(path: Path, preposition: str = "") -> Iterator[None]:
    """A context that turns errors of the operating system into an OutputError with the path and the remedy.

    Args:
        path: the file or folder that is written.
        preposition: the word before the path in the message, "to " for a folder, "" for a file.

    Raises:
        OutputError: instead of an OSError or ValueError.
    """
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way = "free space on the disk" if full else f"choose another {'folder' if preposition else 'path'}"
        raise OutputError(f"cannot write {preposition}{_shown(path)}: {error.strerror or error}; {way}") from error
    except ValueError as error:
        raise OutputError(f"cannot write {preposition}{_shown(path)}: {error}; choose another name") from error


def _shown(path: Path) -> str:
    """Return a path as one line: characters that cannot be printed are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(path))
