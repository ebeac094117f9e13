"""Blocks of GGUF: codes, scales and minima become bytes and back, for every type with a code for each weight.

Source: ggml-common.h and ggml-quants.c of llama.cpp, which name the types. The value of a code q is
d * q; d * q + m (Q4_1, Q5_1); d * sc * q - dmin * m (Q2_K, Q4_K, Q5_K); d * sc * q (Q3_K, Q6_K, IQ4_XS, whose codes
index the values of a table); 2**(e - 127) * q (MXFP4). Products are exact in float32.

Source: docs/gguf.md of ggml, tools/gguf-split of llama.cpp. Only little-endian files of versions 2 and 3 are read.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fakequant.errors import CheckpointError, ShapeError, nearest
from fakequant.model.state.weight_codes import WeightCodes
from fakequant.numerics.scales import StoredScales
from fakequant.numerics.spec import QuantSpec

_CHUNK = 1 << 18
"""How many codes are converted at once: the codes and their results fit a cache of 1 MB."""

Array = np.ndarray
Numbers = Mapping[str, Array]
"""Arrays of the numbers of blocks by name, see `BlockLayout`."""


@dataclass(frozen=True)
class Integers:
    """The integers of a block: their count, the lowest and the highest.

    Files store unsigned differences from the lowest integer, but integers of 8 bits in two's complement.
    """

    count: int
    lowest: int
    highest: int

    @property
    def dtype(self) -> type:
        """The numpy dtype of the integers in memory."""
        return np.int8 if self.lowest < 0 else np.uint8

    @property
    def offset(self) -> int:
        """The number that is added to the integers in the file."""
        return -self.lowest if self.highest - self.lowest < 255 else 0


class Halfs(NamedTuple):
    """A field of a block with one float16, called `name`.

    Like every field of a `BlockLayout` it has a size in bytes, writes numbers to bytes [blocks, size], and reads them.
    """

    name: str

    def size(self, layout: BlockLayout) -> int:
        return 2

    def write(self, raw: Array, numbers: Numbers) -> None:
        _put(numbers[self.name], raw)

    def read(self, raw: Array, numbers: Numbers) -> None:
        numbers[self.name].reshape(-1, 1).view(np.uint8)[:] = raw


@dataclass(frozen=True)
class Bits:
    """A field with `count` bits of each integer; a byte holds as many integers as fit, the first in its lowest bits.

    Runs of `run` integers lie in runs of as many bytes: byte j of a run holds integers j, run + j, 2 * run + j, ...

    Args:
        count: the number of bits of each integer: 1, 2, 4 or 8.
    """

    name: str
    low: int
    count: int
    run: int

    def size(self, layout: BlockLayout) -> int:
        return layout.integers[self.name].count * self.count // 8

    def write(self, raw: Array, numbers: Numbers) -> None:
        runs = numbers[self.name].reshape(-1).view(f"V{self.run}").reshape(-1, 8 // self.count)
        found = self._moved_runs(runs, 0)
        for place in range(1, runs.shape[1]):
            found |= self._moved_runs(runs, place)
        _put(found, raw)

    def read(self, raw: Array, numbers: Numbers) -> None:
        width, integers = min(self.run, 8), numbers[self.name].reshape(-1)
        # [runs of bytes, integers in a byte, lanes of a run]: 8 bytes at once, because short loops cost most.
        lanes = integers.view(f"u{width}").reshape(-1, 8 // self.count, self.run // width)
        found = np.ascontiguousarray(raw).view(lanes.dtype).reshape(-1, lanes.shape[2])
        for lane in range(lanes.shape[2]):
            for place in range(lanes.shape[1]):
                lanes[:, place, lane] |= _moved(found[:, lane], place * self.count, self.count, self.low)

    def _moved_runs(self, runs: Array, place: int) -> Array:
        """The bits of the runs at a place, taken from 8 bytes at once if the number of bytes allows it."""
        own = np.ascontiguousarray(runs[:, place]).view(np.uint8)
        return _moved(own if own.size % 8 else own.view("u8"), self.low, self.count, place * self.count)


class ScalesAndMinima(NamedTuple):
    """Eight scales and eight minima of 6 bits in 12 bytes, in Q4_K and Q5_K."""

    def size(self, layout: BlockLayout) -> int:
        return 12

    def write(self, raw: Array, numbers: Numbers) -> None:
        """Fill the bytes [blocks, size]; bytes of the first four scales and minima also hold high bits of the rest."""
        scales, minima = numbers["scales"], numbers["minima"]
        first, last = (np.concatenate([scales[:, four], minima[:, four]], 1) for four in (_FIRST, _LAST))
        raw[:, :8] = first | last >> 4 << 6
        raw[:, 8:] = last[:, :4] & 15 | last[:, 4:] << 4

    def read(self, raw: Array, numbers: Numbers) -> None:
        low = np.concatenate([raw[:, 8:] & 15, raw[:, 8:] >> 4], 1)
        first, last = raw[:, :8] & 63, low | raw[:, :8] >> 6 << 4
        for name, four in (("scales", _FIRST), ("minima", _LAST)):
            numbers[name][:, _FIRST], numbers[name][:, _LAST] = first[:, four], last[:, four]


class ScaleNibbles(NamedTuple):
    """A scale in the low and a minimum in the high 4 bits of a byte for each sub-block, in Q2_K."""

    def size(self, layout: BlockLayout) -> int:
        return layout.integers["scales"].count

    def write(self, raw: Array, numbers: Numbers) -> None:
        raw[:] = numbers["scales"] | numbers["minima"] << 4

    def read(self, raw: Array, numbers: Numbers) -> None:
        numbers["scales"][:], numbers["minima"][:] = raw & 15, raw >> 4


class Trits(NamedTuple):
    """Codes of three values, in TQ1_0: five in a byte, but the last sixteen four in a byte.

    A byte is the fraction 0.t0t1t2t3t4 of base 3 in units of 1/256, rounded up: times 3, the carry is the next digit.
    """

    def size(self, layout: BlockLayout) -> int:
        return 52

    def write(self, raw: Array, numbers: Numbers) -> None:
        place = 0
        for start, digits, run in _TRITS:
            codes = numbers["codes"][:, start : start + digits * run].reshape(-1, digits, run)
            whole = sum(codes[:, digit].astype(np.uint16) * 3 ** (4 - digit) for digit in range(digits))
            raw[:, place : place + run] = (whole * 256 + 242) // 243
            place += run

    def read(self, raw: Array, numbers: Numbers) -> None:
        place = 0
        for start, digits, run in _TRITS:
            codes = numbers["codes"][:, start : start + digits * run].reshape(-1, digits, run)
            for digit in range(digits):
                left = raw[:, place : place + run] * np.uint8(3**digit)
                codes[:, digit] = left.astype(np.uint16) * 3 >> 8
            place += run


_FIRST, _LAST = slice(0, 4), slice(4, 8)
_TRITS = (0, 5, 32), (160, 5, 16), (240, 4, 4)  # the first code, digits of a byte, bytes


@dataclass(frozen=True)
class BlockLayout:
    """The layout of a type's blocks.

    Attributes:
        integers: a block's integers by name: "codes"; "scales" and "minima" of its sub-blocks; "exponent" of MXFP4.
        fields: the fields in the order of their bytes; each `Halfs` has the name "d" or "m".
    """

    integers: Mapping[str, Integers]
    fields: tuple[Halfs | Bits | ScaleNibbles | ScalesAndMinima | Trits, ...]

    @property
    def weights(self) -> int:
        """The number of weights of a block."""
        return self.integers["codes"].count

    @property
    def size(self) -> int:
        """The number of bytes of a block."""
        return sum(field.size(self) for field in self.fields)


def _codes(count: int, lowest: int, highest: int, **others: Integers) -> dict[str, Integers]:
    return {"codes": Integers(count, lowest, highest), **others}


def _nibbles(run: int, *, name: str = "codes") -> Bits:
    return Bits(name, 0, 4, run)


_D, _M = Halfs("d"), Halfs("m")
_FIFTH_BITS = Bits("codes", 4, 1, 1)
_SIX_BITS = {"scales": Integers(8, 0, 63), "minima": Integers(8, 0, 63)}
_Q3_K_SCALES = _nibbles(8, name="scales"), Bits("scales", 4, 2, 4)
_IQ4_XS_SCALES = Bits("scales", 4, 2, 1), _nibbles(1, name="scales")

LAYOUTS = {
    "Q8_0": BlockLayout(_codes(32, -128, 127), (_D, Bits("codes", 0, 8, 32))),
    "Q4_0": BlockLayout(_codes(32, -8, 7), (_D, _nibbles(16))),
    "Q4_1": BlockLayout(_codes(32, 0, 15), (_D, _M, _nibbles(16))),
    "Q5_0": BlockLayout(_codes(32, -16, 15), (_D, _FIFTH_BITS, _nibbles(16))),
    "Q5_1": BlockLayout(_codes(32, 0, 31), (_D, _M, _FIFTH_BITS, _nibbles(16))),
    "Q2_K": BlockLayout(
        _codes(256, 0, 3, scales=Integers(16, 0, 15), minima=Integers(16, 0, 15)),
        (ScaleNibbles(), Bits("codes", 0, 2, 32), _D, _M),
    ),
    "Q3_K": BlockLayout(
        _codes(256, -4, 3, scales=Integers(16, -32, 31)),
        (Bits("codes", 2, 1, 32), Bits("codes", 0, 2, 32), *_Q3_K_SCALES, _D),
    ),
    "Q4_K": BlockLayout(_codes(256, 0, 15, **_SIX_BITS), (_D, _M, ScalesAndMinima(), _nibbles(32))),
    "Q5_K": BlockLayout(
        _codes(256, 0, 31, **_SIX_BITS), (_D, _M, ScalesAndMinima(), Bits("codes", 4, 1, 32), _nibbles(32))
    ),
    "Q6_K": BlockLayout(
        _codes(256, -32, 31, scales=Integers(16, -128, 127)),
        (_nibbles(64), Bits("codes", 4, 2, 32), Bits("scales", 0, 8, 16), _D),
    ),
    "IQ4_NL": BlockLayout(_codes(32, 0, 15), (_D, _nibbles(16))),
    "IQ4_XS": BlockLayout(_codes(256, 0, 15, scales=Integers(8, -32, 31)), (_D, *_IQ4_XS_SCALES, _nibbles(16))),
    "TQ1_0": BlockLayout(_codes(256, -1, 1), (Trits(), _D)),
    "TQ2_0": BlockLayout(_codes(256, -1, 1), (Bits("codes", 0, 2, 32), _D)),
    "MXFP4": BlockLayout(_codes(32, 0, 15, exponent=Integers(1, 0, 255)), (Bits("exponent", 0, 8, 1), _nibbles(16))),
}
"""The layout of the blocks of each type."""


def layout_of(kind: str) -> BlockLayout:
    """The layout of a type's blocks; raises CheckpointError if the type is unknown."""
    if kind not in LAYOUTS:
        raise CheckpointError(f"no layout is known for the GGUF type {kind!r:.80}{nearest(kind, list(LAYOUTS))}")
    return LAYOUTS[kind]


def pack(kind: str, numbers: Numbers) -> Array:
    """The bytes of blocks.

    Args:
        numbers: integers [blocks, count of `BlockLayout.integers`] by name, and "d" and "m" [blocks], float16, where
            the type has them. Minima of K-quants are subtracted, "m" of Q4_1 and Q5_1 is added.

    Returns:
        [blocks, bytes of a block], uint8.

    >>> pack("Q4_0", {"d": np.ones(1, np.float16), "codes": np.zeros((1, 32), np.int8)})[0, :4].tolist()
    [0, 60, 136, 136]
    """
    layout = layout_of(kind)
    count = len(numbers["codes"])
    raw = np.empty((count, layout.size), np.uint8)
    step = _CHUNK // layout.weights
    for start in range(0, count, step):
        part = {name: values[start : start + step] for name, values in numbers.items()}
        for name, integers in layout.integers.items():
            part[name] = part[name].view(np.uint8)
            if integers.offset:
                part[name] = part[name] + np.uint8(integers.offset)
            _check(kind, name, part[name], integers)
        place = 0
        for field in layout.fields:
            field.write(raw[start : start + step, place : place + field.size(layout)], part)
            place += field.size(layout)
    return raw


def unpack(kind: str, raw: Array) -> dict[str, Array]:
    """The numbers of blocks [blocks, bytes of a block] of uint8: the inverse of `pack`."""
    layout = layout_of(kind)
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] != layout.size:
        raise CheckpointError(f"blocks of {kind} are uint8 [blocks, {layout.size}], got {raw.dtype} {list(raw.shape)}")
    count, step = len(raw), _CHUNK // layout.weights
    found = {name: np.zeros((count, one.count), np.uint8) for name, one in layout.integers.items()}
    halfs = [field.name for field in layout.fields if isinstance(field, Halfs)]
    found |= {name: np.empty(count, np.float16) for name in halfs}
    for start in range(0, count, step):
        part = {name: values[start : start + step] for name, values in found.items()}
        place = 0
        for field in layout.fields:
            field.read(raw[start : start + step, place : place + field.size(layout)], part)
            place += field.size(layout)
        for name, integers in layout.integers.items():
            _check(kind, name, part[name], integers)
            part[name] -= np.uint8(integers.offset)
    return {
        name: values.view(layout.integers[name].dtype) if name not in halfs else values
        for name, values in found.items()
    }


def _put(numbers: Array, raw: Array) -> None:
    """Copy `numbers` into `raw`, bytes [blocks, size]; a block is a single element, which is 2 to 8 times as fast."""
    whole = f"V{raw.shape[1]}"
    raw.view(whole)[:] = numbers.view(np.uint8).reshape(raw.shape).view(whole)


def _moved(lanes: Array, low: int, count: int, place: int) -> Array:
    """The `count` bits from bit `low` on of every byte, moved to bit `place`."""
    if count == 8:
        return lanes
    mask = lanes.dtype.type(int.from_bytes(bytes([(1 << count) - 1 << low]) * lanes.itemsize, "little"))
    shift = lanes.dtype.type(abs(place - low))
    return (lanes & mask) << shift if place >= low else (lanes & mask) >> shift


def _check(kind: str, name: str, stored: Array, integers: Integers) -> None:
    count = integers.highest - integers.lowest + 1
    if count < 256 and stored.size and int(stored.max()) >= count:
        raise CheckpointError(
            f"{name} of {kind} are {integers.lowest} to {integers.highest}, got {int(stored.max()) - integers.offset}"
        )


_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""By number, the types of metadata in the notation of `struct`; texts and arrays are two more types."""
_TEXT, _ARRAY = 8, 9
_FLOATS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F64": np.dtype("<f8")}
"""Types without blocks, and the numpy dtypes of their bytes."""
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
        shape: the shape in torch: a row lies along the last axis.
        make: a function that returns the content: the bytes of blocks, uint8 [rows..., bytes], or numbers [shape].
    """

    kind: str
    shape: tuple[int, ...]
    make: Callable[[], Array]

    @property
    def size(self) -> int:
        """The number of bytes of the content."""
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


@dataclass(frozen=True)
class GgufContent:
    """The bytes of a file: metadata, then a part for each of its tensors, which is made when the part is read.

    Args:
        describe: a function that adds the metadata to a `gguf.GGUFWriter`.
    """

    architecture: str
    describe: Callable[[Any], None]
    tensors: Mapping[str, GgufTensor]

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[bytes | memoryview]:
        gguf, buffer = require_gguf(), BytesIO()
        writer = gguf.GGUFWriter(None, self.architecture)
        self.describe(writer)
        for name, one in self.tensors.items():
            kind = gguf.GGMLQuantizationType[one.kind]
            writer.add_tensor_info(name, one.shape, np.dtype("f4"), one.size, raw_dtype=kind)
        writer.fout, writer.state = [buffer], gguf.gguf_writer.WriterState.EMPTY  # in place of a file that it opens
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        header = buffer.getvalue()
        yield header + bytes(-len(header) % _ALIGNMENT)
        for name, one in self.tensors.items():
            raw = np.ascontiguousarray(one.make()).reshape(-1).view(np.uint8)
            if len(raw) != one.size:
                raise CheckpointError(f"{name} has {len(raw)} bytes, but {one.size} were stated")
            yield np.pad(raw, (0, gap)).data if (gap := -len(raw) % _ALIGNMENT) else raw.data


class GgufFile:
    """The metadata and tensors of a file, or of all files of a model; files are mapped into memory and not read whole.

    Attributes:
        path: the path of the file, or of the first of several, `...-00001-of-00003.gguf`, which has the metadata.
        count: the number of files; 0 or 1 for a single file.
        metadata: the values by key; arrays of numbers are arrays of numpy, arrays of texts are lists.
        tensors: the tensors by name, in the order of the file; their content is read at each access.
    """

    def __init__(self, path: Path, number: int = 0) -> None:
        """Open a file; `number` is its index among the files of a model, from 0 on."""
        self.path = path
        try:
            self._raw = np.asarray(np.memmap(path, np.uint8, "r")) if path.stat().st_size else np.zeros(0, np.uint8)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        reader = _ValueReader(self._raw, str(path))
        tensors, self.metadata = reader.begin()
        self.count = count = self.metadata.get("split.count", 0)
        if not isinstance(count, int) or self.metadata.get("split.no", 0) != number:
            raise reader.damage(f"is not file {number + 1} of a model; give the first file, named ...-00001-of-...")
        entries = [reader.entry() for _ in range(tensors)]
        align = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(align, int) or align <= 0 or align & (align - 1):
            raise reader.damage(f"has an alignment of {align!r:.80}, which is not a power of two")
        self._starts = {name: offset + reader.place + -reader.place % align for name, *_, offset in entries}
        self.tensors = {name: self._stored(reader, name, shape, kind) for name, shape, kind, _ in entries}
        if len(self.tensors) != tensors:
            raise reader.damage("has several tensors of one name")
        if count <= 1 or number:
            return
        named = _PART.fullmatch(path.name)
        if named is None or int(named[2]) != 1 or int(named[3]) != count:
            raise reader.damage(f"is the first of {count} files, and is not named ...-00001-of-{count:05}.gguf")
        for one in range(1, count):
            other = GgufFile(path.with_name(f"{named[1]}-{one + 1:05}-of-{count:05}.gguf"), one)
            if both := self.tensors.keys() & other.tensors.keys():
                raise CheckpointError(f"{other.path} is damaged: it has {min(both)}, which an earlier file has, too")
            self.tensors |= other.tensors
        if (total := self.metadata.get("split.tensors.count", len(self.tensors))) != len(self.tensors):
            raise reader.damage(f"says that its files have {total} tensors in all, but they have {len(self.tensors)}")

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
    """Reads values one after the other; a value beyond the end of the file raises an error."""

    def __init__(self, raw: Array, path: str) -> None:
        self.place, self._raw, self._path = 0, raw, path

    def damage(self, text: str) -> CheckpointError:
        """A CheckpointError with the path of the file and a text."""
        return CheckpointError(f"{self._path} {text}")

    def begin(self) -> tuple[int, dict[str, Any]]:
        """The number of tensors, and the metadata."""
        if self._take(4).tobytes() != _MAGIC:
            raise self.damage("is not a GGUF file: it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = " (or its bytes are in the other order)" if version & 0xFFFF == 0 else ""
            raise self.damage(f"is of version {version}{swapped}; versions 2 and 3 in little-endian order are read")
        tensors, pairs = self._number("Q"), self._number("Q")
        if tensors * 24 + pairs * 13 > len(self._raw):  # bytes that each takes at least
            raise self.damage(f"is too short for {tensors} tensors and {pairs} pairs of metadata")
        return tensors, {self._text(): self._value(self._number("I")) for _ in range(pairs)}

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """The name, shape, type and offset of the next tensor."""
        name, axes = self._text(), self._number("I")
        shape = tuple(int(one) for one in self._take(8 * axes).view("<u8"))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise self.damage(f"has metadata of type {kind}, which is unknown")
        kind, count = self._number("I"), self._number("Q")
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
            raise self.damage(f"has a text that is not UTF-8: {raw[:40]!r}") from error

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")).tobytes())[0]

    def _take(self, count: int) -> Array:
        if count > len(self._raw) - self.place:
            raise self.damage(f"ends early: {count} bytes were expected from {self.place} on")
        self.place += count
        return self._raw[self.place - count : self.place]


_SPECS = {
    "TQ1_0": "int2_narrow per_block(-1:256) scale=float16",
    "TQ2_0": "int2_narrow per_block(-1:256) scale=float16",
    "Q2_K": "uint2 per_block(-1:16) scale=uint4@per_block(-1:16)/float16 offset=uint4@per_block(-1:16)/float16",
    "Q3_K": "int3 per_block(-1:16) scale=int6@per_block(-1:16)/float16",
    "IQ4_XS": "iq4_nl per_block(-1:32) scale=int6@per_block(-1:8)/float16",
    "MXFP4": "float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor",
    "Q4_K": "uint4 per_block(-1:32) scale=uint6@per_block(-1:8)/float16 offset=uint6@per_block(-1:8)/float16",
    "IQ4_NL": "iq4_nl per_block(-1:32) scale=float16:signed",
    "Q4_0": "int4 per_block(-1:32) scale=float16:signed",
    "Q4_1": "uint4 per_block(-1:32) scale=float16 offset=float16",
    "Q5_K": "uint5 per_block(-1:32) scale=uint6@per_block(-1:8)/float16 offset=uint6@per_block(-1:8)/float16",
    "Q5_0": "int5 per_block(-1:32) scale=float16:signed",
    "Q5_1": "uint5 per_block(-1:32) scale=float16 offset=float16",
    "Q6_K": "int6 per_block(-1:16) scale=int8@per_block(-1:16)/float16",
    "Q8_0": "int8 per_block(-1:32) scale=float16",
}
"""The types, the smallest first; the first type that can hold a weight is used."""
_INSTEAD = {"IQ4_XS": "IQ4_NL", **dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0")}
_INSTEAD |= {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""By type, the type that llama.cpp stores if rows are not whole blocks of 256."""


@cache
def spec_of(kind: str) -> QuantSpec:
    """The specification of the weights in a type."""
    return QuantSpec.parse(_SPECS[kind])


def for_rows(kind: str, columns: int) -> str:
    """The type, if its block size divides `columns`; else the type that llama.cpp stores instead."""
    return kind if columns % LAYOUTS[kind].weights == 0 else _INSTEAD.get(kind, kind)


def kind_of(spec: QuantSpec, shape: tuple[int, ...]) -> str:
    """The smallest type that holds weights of a specification and a shape; raises ShapeError if there is none."""
    found = [kind for kind in _SPECS if _holds(spec_of(kind), spec)]
    if not found:
        raise ShapeError(f"GGUF has no type for {spec}")
    for kind in found:
        if shape[-1] % LAYOUTS[kind].weights == 0:
            return kind
    instead = _INSTEAD.get(found[0], "F16")
    raise ShapeError(
        f"its rows of {shape[-1]} do not divide into blocks of {LAYOUTS[found[0]].weights}, as {found[0]} needs; "
        f"llama.cpp stores them as {instead}{f', the preset GGUF_{instead}' if instead in _SPECS else ', in float'}"
    )


def _holds(own: QuantSpec, spec: QuantSpec) -> bool:
    """Whether a type, with specification `own`, holds all codes and scales of `spec` with the same values."""
    if not spec.arithmetic.is_linear or _form(spec) != _form(own):
        return False
    format, all_of_own = spec.format, own.format
    if not (format.has_zero_point and all_of_own.has_zero_point):
        return format == all_of_own
    within = all_of_own.quant_min <= format.quant_min and format.quant_max <= all_of_own.quant_max
    return within and format.signed == all_of_own.signed


@cache
def _form(spec: QuantSpec) -> tuple[Any, ...]:
    """The part of a specification that `_holds` compares: symmetry, shapes of blocks, formats of scales and offsets."""
    try:
        groups = spec.granularity.group_shape(_ROWS)
        stored = [
            None if one is None else (one.format, one.shared, one.granularity and one.granularity.block_shape(groups))
            for one in (spec.scale, spec.offset)
        ]
        return spec.symmetric, tuple(spec.granularity.block_shape(_ROWS)), *stored
    except ShapeError:
        return (spec,)


_ROWS = 2, 512


def to_blocks(kind: str, weight: WeightCodes) -> Array:
    """The bytes [..., bytes of a row] of a weight."""
    layout = LAYOUTS[kind]
    numbers = {"codes": _numbers(weight.codes, layout.weights)}
    scales = weight.spec.scale.split(weight.scale)
    if "exponent" in layout.integers:
        numbers["exponent"] = _numbers(scales.codes.view(torch.uint8), 1)
    elif scales.shared is None:
        numbers["d"] = _numbers(scales.codes, 1)
    else:
        numbers |= {"scales": _numbers(scales.codes, layout.integers["scales"].count), "d": _halfs(scales.shared)}
    if weight.spec.offset is not None:
        assert weight.zero_point is not None, "a specification with offsets has some"
        offsets = weight.spec.offset.split(weight.zero_point)
        if offsets.shared is None:  # a file's minimum is added, an offset subtracted
            numbers["m"] = -_numbers(offsets.codes, 1)
        else:
            numbers |= {"minima": _numbers(offsets.codes, layout.integers["minima"].count), "m": _halfs(offsets.shared)}
    return pack(kind, numbers).reshape(*weight.shape[:-1], -1)


def from_blocks(kind: str, raw: Array, dtype: torch.dtype) -> WeightCodes:
    """The weight in bytes [..., bytes of a row]; raises CheckpointError if scales or integers are out of range."""
    layout, spec = LAYOUTS[kind], spec_of(kind)
    rows = raw.shape[:-1]
    numbers = {name: torch.from_numpy(one) for name, one in unpack(kind, raw.reshape(-1, layout.size)).items()}
    for name in ("d", "m"):
        if name in numbers and not bool(numbers[name].isfinite().all()):
            raise CheckpointError("has scales that are inf or NaN")
    if "exponent" in numbers:
        stored = StoredScales(numbers["exponent"].view(torch.float8_e8m0fnu).reshape(*rows, -1), None)
    else:
        stored = _stored(numbers.get("scales"), numbers["d"], rows)
    offset = None
    if spec.offset is not None:
        m = numbers["m"] if "minima" in numbers else -numbers["m"]
        offset = spec.offset.join(_stored(numbers.get("minima"), m, rows))
    codes = numbers["codes"].reshape(*rows, -1)
    if codes.dtype is not spec.format.storage:
        codes = codes.view(spec.format.storage)
    return WeightCodes(codes, spec.scale.join(stored), offset, spec, tuple(codes.shape), dtype)


def _stored(codes: Tensor | None, halfs: Tensor, rows: tuple[int, ...]) -> StoredScales:
    if codes is None:
        return StoredScales(halfs.reshape(*rows, -1), None)
    return StoredScales(codes.reshape(*rows, -1), halfs.float().reshape(*rows, -1))


def _numbers(values: Tensor, count: int) -> Array:
    """A tensor as an array [blocks, count], or [blocks] if `count` is 1."""
    values = values.detach().cpu().contiguous()
    raw = values.view(torch.uint8) if values.is_floating_point() and values.itemsize == 1 else values
    return raw.numpy().reshape(-1, count) if count > 1 else raw.numpy().reshape(-1)


def _halfs(values: Tensor) -> Array:
    return values.detach().cpu().to(torch.float16).numpy().reshape(-1)
