"""A GGUF file: metadata and tensors by name, read without trust, and written tensor by tensor.

Source: docs/gguf.md of ggml, tools/gguf-split of llama.cpp. Only little-endian files of versions 2 and 3 are read.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fakequant.delivery.gguf.blocks import LAYOUTS, Array
from fakequant.errors import CheckpointError

_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata by their number, as `struct` names them; two more are texts and arrays."""
_TEXT, _ARRAY = 8, 9
_FLOATS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F64": np.dtype("<f8")}
"""Types without blocks, and what their bytes are read as."""
_MOST_AXES = 4
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def require_gguf() -> Any:
    """Import the package gguf; the error says how to install it."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        message = "GGUF files need the package gguf, not installed here; run pip install 'fakequant[delivery]'"
        raise CheckpointError(message) from error
    return gguf


def is_gguf(path: Path) -> bool:
    """Whether a path is a file with GGUF's magic number."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


class GgufTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        kind: its type, such as "Q4_K" or "F32".
        shape: as torch has it: rows lie along the last axis.
        make: gives its content, [rows..., bytes] of uint8 or numbers.
    """

    kind: str
    shape: tuple[int, ...]
    make: Callable[[], Array]

    @property
    def size(self) -> int:
        """Bytes of the content."""
        weights, size = sizes_of(self.kind)
        return prod(self.shape) // weights * size


def sizes_of(kind: str) -> tuple[int, int]:
    """The numbers of weights and of bytes in a block."""
    if kind in _FLOATS:
        return 1, _FLOATS[kind].itemsize
    gguf = require_gguf()
    if kind in LAYOUTS:
        return LAYOUTS[kind].weights, LAYOUTS[kind].size
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def content(architecture: str, describe: Callable[[Any], None], tensors: Mapping[str, GgufTensor]) -> Iterator[Any]:
    """The bytes of a file, in parts; a tensor is made when its part is asked for.

    Args:
        architecture: as llama.cpp names it.
        describe: adds the metadata to a `gguf.GGUFWriter`.
        tensors: by name, in the order of the file.
    """
    gguf, buffer = require_gguf(), BytesIO()
    writer = gguf.GGUFWriter(None, architecture)
    describe(writer)
    for name, one in tensors.items():
        kind = gguf.GGMLQuantizationType[one.kind]
        writer.add_tensor_info(name, one.shape, np.dtype("f4"), one.size, raw_dtype=kind)
    writer.fout, writer.state = [buffer], gguf.gguf_writer.WriterState.EMPTY  # in place of a file that it opens
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    header = buffer.getvalue()
    yield header + bytes(-len(header) % _ALIGNMENT)
    for name, one in tensors.items():
        raw = np.ascontiguousarray(one.make()).reshape(-1).view(np.uint8)
        if len(raw) != one.size:
            raise CheckpointError(f"{name} has {len(raw)} bytes, but {one.size} were stated")
        yield raw.data
        yield bytes(-len(raw) % _ALIGNMENT)


class GgufFile:
    """The metadata and tensors of a file, or of all files of a model, which are mapped into memory and not read whole.

    Attributes:
        path: of the file; of several, the first one, `...-00001-of-00003.gguf`, which has the metadata.
        count: the number of files; 0 or 1 if there is one.
        metadata: values by key; arrays of numbers are arrays of numpy, those of texts lists.
        tensors: by name, in the order of the file; their content is made at each access.

    Raises:
        CheckpointError: a damaged file, or content that this reader does not know.
    """

    def __init__(self, path: Path, number: int = 0) -> None:
        """Open a file.

        Args:
            path: of the file.
            number: that it has among the files of a model, from 0 on.
        """
        self.path = path
        try:
            self._raw = np.asarray(np.memmap(path, np.uint8, "r")) if path.stat().st_size else np.zeros(0, np.uint8)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        reader = _ValueReader(self._raw, str(path))
        tensors = reader.counts()
        self.metadata = dict(reader.pairs())
        self.count = count = self.metadata.get("split.count", 0)
        if not isinstance(count, int) or self.metadata.get("split.no", 0) != number:
            raise reader.damage(f"is not file {number + 1} of a model; give the first one, with -00001-of- in its name")
        entries = [reader.entry() for _ in range(tensors)]
        align = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(align, int) or align <= 0 or align & (align - 1):
            raise reader.damage(f"has an alignment of {align!r:.80}, which is no power of two")
        self._starts = {name: offset + reader.place + -reader.place % align for name, *_, offset in entries}
        self.tensors = {name: self._stored(reader, name, shape, kind) for name, shape, kind, _ in entries}
        if len(self.tensors) != tensors:
            raise reader.damage("has several tensors of one name")
        if count > 1 and number == 0:
            self._join(reader, count)

    def _join(self, reader: _ValueReader, count: int) -> None:
        """Add the tensors of the other files."""
        named = _PART.fullmatch(self.path.name)
        if named is None or int(named[2]) != 1 or int(named[3]) != count:
            raise reader.damage(f"is the first of {count} files, and is not named ...-00001-of-{count:05}.gguf")
        for number in range(1, count):
            other = GgufFile(self.path.with_name(f"{named[1]}-{number + 1:05}-of-{count:05}.gguf"), number)
            if both := self.tensors.keys() & other.tensors.keys():
                raise CheckpointError(f"{other.path} has {min(both)}, which an earlier file has")
            self.tensors |= other.tensors
        if (total := self.metadata.get("split.tensors.count", len(self.tensors))) != len(self.tensors):
            raise reader.damage(f"is the first of files with {total} tensors, and they have {len(self.tensors)}")

    def _stored(self, reader: _ValueReader, name: str, shape: tuple[int, ...], kind: int) -> GgufTensor:
        gguf = require_gguf()
        if kind not in list(gguf.GGMLQuantizationType):
            raise reader.damage(f"says that {name} is of type {kind}, which is unknown")
        text = gguf.GGMLQuantizationType(kind).name
        weights, _ = sizes_of(text)
        if not shape or min(shape) <= 0 or len(shape) > _MOST_AXES or shape[-1] % weights:
            raise reader.damage(f"says that {name} is of shape {list(shape)}, which {text} cannot have")
        stored, start = GgufTensor(text, shape, partial(self._content, name)), self._starts[name]
        if start + stored.size > len(self._raw):
            raise reader.damage(f"ends within {name}: {stored.size} bytes of {text} from {start} on")
        return stored

    def _content(self, name: str) -> Array:
        one, start = self.tensors[name], self._starts[name]
        raw = self._raw[start : start + one.size]
        if one.kind in _FLOATS:
            return raw.view(_FLOATS[one.kind]).reshape(one.shape)
        return raw.reshape(*one.shape[:-1], -1)


class _ValueReader:
    """Reads values one after the other, none beyond the end of the file."""

    def __init__(self, raw: Array, path: str) -> None:
        self.place, self._raw, self._path = 0, raw, path

    def damage(self, text: str) -> CheckpointError:
        """The error for a file that says something wrong."""
        return CheckpointError(f"{self._path} {text}")

    def counts(self) -> int:
        """Return the number of tensors, and keep the number of pairs."""
        if self._take(4).tobytes() != _MAGIC:
            raise self.damage("is no GGUF file: it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = " (or its bytes are in the other order)" if version & 0xFFFF == 0 else ""
            raise self.damage(f"is of version {version}{swapped}; versions 2 and 3 in little-endian order are read")
        tensors, self._pairs = self._number("Q"), self._number("Q")
        if tensors * 24 + self._pairs * 13 > len(self._raw):  # bytes that each takes at least
            raise self.damage(f"is too short for {tensors} tensors and {self._pairs} pairs of metadata")
        return tensors

    def pairs(self) -> Iterator[tuple[str, Any]]:
        """The metadata."""
        for _ in range(self._pairs):
            yield self._text(), self._value(self._number("I"))

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of the next tensor."""
        name, axes = self._text(), self._number("I")
        shape = tuple(int(one) for one in self._take(8 * axes).view("<u8"))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        if kind not in _NUMBERS:
            raise self.damage(f"has metadata of type {kind}, which is unknown")
        return self._number(_NUMBERS[kind])

    def _array(self, kind: int, count: int) -> Any:
        if kind == _TEXT:
            if count * 8 > len(self._raw):
                raise self.damage(f"is too short for {count} texts")
            return [self._text() for _ in range(count)]
        if kind not in _NUMBERS:
            raise self.damage(f"has an array of type {kind}, which is not read")
        dtype = np.dtype(f"<{_NUMBERS[kind]}")
        return self._take(count * dtype.itemsize).view(dtype)

    def _text(self) -> str:
        raw = self._take(self._number("Q")).tobytes()
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.damage(f"has a text that is no UTF-8: {raw[:40]!r}") from error

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")).tobytes())[0]

    def _take(self, count: int) -> Array:
        if count > len(self._raw) - self.place:
            raise self.damage(f"ends early: {count} bytes were expected from {self.place} on")
        self.place += count
        return self._raw[self.place - count : self.place]
