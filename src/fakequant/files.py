"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fakequant.errors import OutputError


def writable_folder(directory: str | os.PathLike[str]) -> Path:
    """The folder, made if need be, and proven writable before any work is done for it.

    Raises:
        OutputError: it cannot be made or written.
    """
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"cannot write to {folder}: {error.strerror or error}; choose another folder") from error
    return folder


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is either the old one or the new one whole, whatever interrupts."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
