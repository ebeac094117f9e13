"""The file of a checkpoint that says which layers are quantized, how, and where the tensors are."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fakequant.errors import CheckpointError
from fakequant.files import read_whole, remove_abandoned
from fakequant.model.state.json_values import ALWAYS, Natural, plain_of
from fakequant.model.state.plan import Plan, read_plan

MANIFEST = "fakequant.json"
"""The name of the file."""

VERSION = 1
"""The version of the file that is written and read."""

_ORDER = ("tensors", "previous", "shared", "versions", "layers", "sites", "packed", "stale")
_OWN_NAME = re.compile(r"model-[0-9a-f]{16}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_READ = 1 << 18
"""Bytes of a file that are read at once."""


@dataclass(frozen=True)
class TensorEntry:
    """The file of the tensors: its name in the folder, the SHA-256 of its content, its size in bytes."""

    file: str
    sha256: str
    bytes: Natural


@dataclass(frozen=True)
class PackedEntry:
    """A weight that is stored as codes: the path of its quantizer, its shape and dtype, whether scales are codes."""

    quantizer: str
    shape: list[Natural]
    dtype: str
    packed_scale: bool


@dataclass(frozen=True, kw_only=True)
class Manifest(Plan):
    """What a checkpoint says of itself.

    Attributes:
        tensors: the file of the tensors.
        previous: the tensor file of the manifest that this one replaced; it is kept until the next save.
        packed: the weights that are stored as codes, by name.
    """

    tensors: TensorEntry
    previous: str | None = field(default=None, metadata=ALWAYS)
    packed: dict[str, PackedEntry] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The content of the file."""
        values = plain_of(self)
        written = [name for name in _ORDER if name in values and (name != "sites" or self.sites.owners)]
        written = [name for name in written if name != "stale" or self.stale]
        return json.dumps({"fakequant": VERSION, **{name: values[name] for name in written}}, indent=2).encode()


def tensor_file_name(sha256: str) -> str:
    """The name of a file of tensors by its content.

    >>> tensor_file_name("0123456789abcdef" * 4)
    'model-0123456789abcdef.safetensors'
    """
    return f"model-{sha256[:16]}.safetensors"


def named_files(folder: Path) -> list[str]:
    """The tensor files that the manifest in a folder names, the current one first; none where it cannot be read."""
    try:
        values = json.loads(read_whole(folder / MANIFEST))
        names = [values["tensors"]["file"], values.get("previous")]
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return []
    return [name for name in names if isinstance(name, str) and _OWN_NAME.fullmatch(name)]


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, and its folder if nothing else is in it; also what a process that was killed left."""
    with suppress(OSError):
        remove_abandoned(folder)
        if held := named_files(folder):
            (folder / MANIFEST).unlink()
        remove_unnamed(folder, held)
        folder.rmdir()


def remove_unnamed(folder: Path, known: Iterable[str] = ()) -> None:
    """Remove the tensor files that the manifest of a checkpoint does not name, as of models that were there before.

    Args:
        known: the names of those that a manifest named; of others the content must have the digest in the name.
    """
    named, known = named_files(folder), {*known}
    for path in list(folder.iterdir()):
        if _OWN_NAME.fullmatch(path.name) and path.name not in named:
            with suppress(OSError):
                if path.name in known or (path.is_file() and tensor_file_name(_digest(path)) == path.name):
                    path.unlink()


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(_READ):
            found.update(part)
    return found.hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint says of itself, read whole.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of a later version.
    """
    path = folder / MANIFEST
    try:
        values = json.loads(read_whole(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no checkpoint: there is no {MANIFEST} in it") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged and cannot be read: {error}") from error
    version = values.pop("fakequant", None) if isinstance(values, dict) else None
    if type(version) is int and version > VERSION:
        raise CheckpointError(
            f"{path} is a checkpoint of version {version}, written by a later version of fakequant; this one reads "
            f"version {VERSION}: update fakequant"
        )
    if type(version) is not int or version != VERSION:
        raise CheckpointError(f"{path} is no checkpoint of version {VERSION}")
    if missing := [key for key in ("tensors", "shared", "layers") if key not in values]:
        raise CheckpointError(f"{path} is damaged: it lacks {', '.join(missing)}")
    manifest = read_plan(values, Manifest, path)
    tensors = manifest.tensors
    for place, name in (("tensors.file", tensors.file), ("previous", manifest.previous or tensors.file)):
        if not _OWN_NAME.fullmatch(name):
            expected = f"not a name such as {tensor_file_name('0123456789abcdef')}"
            raise CheckpointError(f"{path} is damaged: {place} is {name!r:.80}, {expected}")
    if not _SHA256.fullmatch(tensors.sha256):
        raise CheckpointError(f"{path} is damaged: tensors.sha256 is {tensors.sha256!r:.80}, not 64 hexadecimal digits")
    return manifest
