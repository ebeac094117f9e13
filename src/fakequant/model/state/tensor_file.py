"""Safetensors files, written and read one tensor at a time; the bytes are those that the package safetensors writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fakequant.errors import CheckpointError
from fakequant.model.state.snapshots import LazyTensor, LazyTensors, Region

_MAPPED = 1 << 26
"""Bytes that are read before the file is mapped anew."""


def require_safetensors() -> Any:
    """The package safetensors, or an error that says how to get it."""
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        message = "checkpoints need safetensors, not installed here; run pip install 'fakequant[checkpoint]'"
        raise CheckpointError(message) from error
    return safetensors


def size_of(tensor: Tensor | LazyTensor) -> int:
    """The number of bytes that a tensor takes in a file."""
    return prod(tensor.shape) * tensor.dtype.itemsize


def file_content(
    tensors: Mapping[str, Tensor | LazyTensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a file of tensors, in parts; a lazy tensor is made when its part is asked for.

    Args:
        tensors: by name.
        metadata: texts for the header of the file.

    Raises:
        CheckpointError: a lazy tensor of another shape or dtype than was stated.

    >>> data = b"".join(file_content({"x": LazyTensor((2,), torch.uint8, lambda: torch.ones(2, dtype=torch.uint8))}))
    >>> len(data), data[-2:]
    (66, b'\\x01\\x01')
    """
    for name in tensors:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(
                f"a file cannot hold the name {name!r:.200}: {error.reason}; rename the module"
            ) from error
    # The names of dtypes and the order of tensors, which lies by dtype, are those of the same tensors without values.
    empty = {name: torch.empty(0, dtype=one.dtype) for name, one in tensors.items()}
    outline = require_safetensors().torch.save(empty, None if metadata is None else dict(metadata))
    header: dict[str, Any] = json.loads(outline[8 : 8 + int.from_bytes(outline[:8], "little")])
    if metadata:  # in the given order: the package's is another one each time
        header["__metadata__"] = dict(metadata)
    start = 0
    names = [name for name in header if name != "__metadata__"]
    for name in names:
        entry, end = header[name], start + size_of(tensors[name])
        entry |= {"shape": list(tensors[name].shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield _bytes_of(name, tensors[name])


def _bytes_of(name: str, stated: Tensor | LazyTensor) -> memoryview:
    tensor = stated.make() if isinstance(stated, LazyTensor) else stated
    if tensor.shape != tuple(stated.shape) or tensor.dtype is not stated.dtype:
        raise CheckpointError(
            f"{name} is a tensor of {tensor.dtype} and shape {list(tensor.shape)}, but {stated.dtype} and shape "
            f"{list(stated.shape)} were stated"
        )
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    return (torch.view_as_real(whole) if whole.is_complex() else whole).view(torch.uint8).numpy().data


class StoredTensors(LazyTensors):
    """The tensors of a safetensors file, read at each access, and the texts of its header.

    Raises:
        CheckpointError: a damaged file, or a dtype that torch does not have; an access may raise it, too.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._mapped = path, 0
        with self._errors():
            self._stamp, self._file = _stamp(path), _open(path)
            self.metadata: dict[str, str] = self._file.metadata() or {}
            names = list(self._file.keys())
            views = {name: self._file.get_tensor(name) for name in names}  # of the mapped file: nothing is read
        super().__init__({name: self._stored(name, view) for name, view in views.items()})

    def _stored(self, name: str, view: Tensor) -> LazyTensor:
        return LazyTensor(tuple(view.shape), view.dtype, partial(self._read, name), partial(self._read, name))

    def _read(self, name: str, region: Region | None = None) -> Tensor:
        with self._errors():
            if self._mapped > _MAPPED:
                self._map_anew()
            found = self._file.get_tensor(name)
            if region is not None:
                found = self._file.get_slice(name)[region] if found.numel() and found.dim() else found[region]
        self._mapped += size_of(found)
        return found

    def _map_anew(self) -> None:
        """Let go of the pages that were read; they count as memory of the process while the file is mapped."""
        with suppress(OSError):  # another process may have replaced or removed the file: keep the one that is open
            if _stamp(self._path) == self._stamp:
                file = _open(self._path)
                if _stamp(self._path) == self._stamp:
                    self._file, self._mapped = file, 0

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (require_safetensors().SafetensorError, KeyError) as error:  # KeyError: a dtype that torch lacks
            raise CheckpointError(f"{self._path} cannot be read: {error}") from error


def _open(path: Path) -> Any:
    return require_safetensors().safe_open(path, "pt")


def _stamp(path: Path) -> tuple[int, ...]:
    """A value that differs for another file of the same path."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
