"""Save and load a quantized model as a folder, which is written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fakequant.data.arguments import check_model, refuse_unprepared
from fakequant.distributed import Ranks, first_sharded, processes_of
from fakequant.errors import CheckpointError, QParamsError, warn_user
from fakequant.files import (
    check_path,
    locked,
    read_whole,
    refuse_links,
    remove_abandoned,
    temporary_file,
    writable_folder,
    write_in_order,
)
from fakequant.model.state.applying import apply_from, outline_of
from fakequant.model.state.plan import ALWAYS, Natural, Plan, plain_of, read_plan
from fakequant.model.state.snapshots import (
    LazyTensor,
    LazyTensors,
    QuantizedState,
    StoredTensors,
    codec,
    decoded,
    file_content,
    file_parts,
    lazy,
    require_safetensors,
    snapshot,
    write_folder,
)
from fakequant.model.state.weight_codes import WeightCodes, uncoded
from fakequant.nn.quantizer import KEY, quantizers
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.numerics.formats.floats import Format, count_of, integers_of, lowest_of, of_integers, patterns_of
from fakequant.numerics.granularity import StoredScales
from fakequant.numerics.scales import ScaleSpec
from fakequant.numerics.spec import QuantSpec
from fakequant.text import listed

MANIFEST = "fakequant.json"
"""The name of the file with the manifest of a checkpoint."""

VERSION = 1
"""The version of the manifests that this package writes and reads."""

_ORDER = ("tensors", "previous", "shared", "versions", "layers", "sites", "packed", "stale")
_OWN_NAME = re.compile(r"model-[0-9a-f]{16}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class TensorEntry:
    """The file of the tensors: its name in the folder, the SHA-256 of its content, its size in bytes."""

    file: str
    sha256: str
    bytes: Natural


@dataclass(frozen=True)
class PackedEntry:
    """A weight stored as codes: the path of its quantizer, its shape and dtype, and whether its scales are codes."""

    quantizer: str
    shape: list[Natural]
    dtype: str
    packed_scale: bool


@dataclass(frozen=True, kw_only=True)
class Manifest(Plan):
    """The content of `fakequant.json`: a plan, the file of the tensors, and the weights that are stored as codes.

    Attributes:
        tensors: the file of the tensors.
        previous: the tensor file of the manifest that this manifest replaced; the file stays until the next save.
        packed: for the name of each weight that is stored as codes, its entry.
    """

    tensors: TensorEntry
    previous: str | None = field(default=None, metadata=ALWAYS)
    packed: dict[str, PackedEntry] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The manifest as JSON."""
        values = plain_of(self)
        written = [name for name in _ORDER if name in values and (name != "sites" or self.sites.owners)]
        written = [name for name in written if name != "stale" or self.stale]
        return json.dumps({"fakequant": VERSION, **{name: values[name] for name in written}}, indent=2).encode()


def tensor_file_name(sha256: str) -> str:
    """The name of a file of tensors, from the SHA-256 of its content.

    >>> tensor_file_name("0123456789abcdef" * 4)
    'model-0123456789abcdef.safetensors'
    """
    return f"model-{sha256[:16]}.safetensors"


def named_files(folder: Path) -> list[str]:
    """The tensor files that a folder's manifest names, the current file first; [] if the manifest cannot be read."""
    try:
        values = json.loads(read_whole(folder / MANIFEST))
        names = [values["tensors"]["file"], values.get("previous")]
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return []
    return [name for name in names if isinstance(name, str) and _OWN_NAME.fullmatch(name)]


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, files that a killed process left, and the folder if nothing else is in it."""
    with suppress(OSError):
        remove_abandoned(folder)
        if held := named_files(folder):
            (folder / MANIFEST).unlink()
        remove_unnamed(folder, held)
        folder.rmdir()


def remove_unnamed(folder: Path, known: Iterable[str] = ()) -> None:
    """Remove tensor files that the manifest of a checkpoint does not name, such as files of earlier models.

    Args:
        known: names in an earlier manifest; any other file is removed only if its name has the digest of its content.
    """
    named, known = named_files(folder), {*known}
    for path in list(folder.iterdir()):
        if _OWN_NAME.fullmatch(path.name) and path.name not in named:
            with suppress(OSError):
                if path.name in known or (path.is_file() and tensor_file_name(_digest(path)) == path.name):
                    path.unlink()


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    for part in file_parts(path):
        found.update(part)
    return found.hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        CheckpointError: the file is missing, damaged, or of another version.
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
            f"{path} is a checkpoint of version {version}, written by a later version of fakequant; this version "
            f"reads version {VERSION}: update fakequant"
        )
    if type(version) is not int or version != VERSION:
        raise CheckpointError(f"{path} is not a checkpoint of version {VERSION}")
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


_CHUNK = 1 << 18
"""How many codes are packed to bits at once: a multiple of 8, so that each chunk ends with a whole byte."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.float16)}
_DTYPES["bfloat16"] = torch.bfloat16
_NAMED = 4


class Encoded(NamedTuple):
    """The tensors of a file, and the manifest's entries for weights that are stored as codes."""

    tensors: dict[str, Tensor | LazyTensor]
    packed: dict[str, PackedEntry]


def encode(state: QuantizedState, *, packed: bool) -> Encoded:
    """The tensors of the file that `save` writes for a state, and the manifest's entries for weights stored as codes.

    Args:
        packed: whether to write weights as codes; a warning names the weights without codes, which stay in float.
    """
    weights = dict.fromkeys(state.weights) if packed else {}
    tensors: dict[str, Tensor | LazyTensor] = {
        name: lazy(state.tensors, name) for name in state.tensors if name not in weights
    }
    entries: dict[str, PackedEntry] = {}
    for name in weights:
        weight = uncoded(state.weights, name)
        held = {"scale": weight.scale, "zero_point": weight.zero_point}
        # The codes of the weight are stored once: those of its quantizers are left out.
        for path, (key, value) in product(weight.quantizers, held.items()):
            if value is not None:
                tensors.setdefault(f"{path}.{key}", value)
            tensors.pop(f"{path}.{KEY}", None)
        codes: dict[str, Tensor] = {}
        if weight.scale.dtype is torch.float32 and weight.spec.scale.format is not None:
            with suppress(QParamsError):  # a scale is no value of the format
                codes = {key: _bytes_of(rule, getattr(weight, key)) for key, rule in _rules(weight.spec).items()}
        path = weight.quantizers[0]
        tensors |= {f"{path}.{key}": value for key, value in codes.items()}
        size = -(-prod(weight.shape) * weight.spec.format.bits // 8)
        tensors[name] = LazyTensor((size,), torch.uint8, partial(_codes_as_bytes, state.weights, name))
        dtype = str(weight.dtype).removeprefix("torch.")
        entries[name] = PackedEntry(path, list(weight.shape), dtype, bool(codes))
    if packed and (left := state.in_float):
        shown = listed((f"{name}: {reason}" for name, reason in left.items()), _NAMED, between="; ")
        total = len(left) + len(entries)
        warn_user(f"packed=True stores {len(left)} of {total} quantized weights in float: {shown}")
    return Encoded(tensors, entries)


def _codes_as_bytes(weights: Mapping[str, WeightCodes], name: str) -> Tensor:
    weight = weights[name]
    return _to_bytes(weight.codes.cpu(), weight.spec.format)


def _rules(spec: QuantSpec) -> dict[str, ScaleSpec]:
    return {"scale": spec.scale} if spec.offset is None else {"scale": spec.scale, "zero_point": spec.offset}


def _bytes_of(rule: ScaleSpec, values: Tensor) -> Tensor:
    """The codes of scales as bytes; with second-level scales, the codes packed to bits, and then these scales."""
    codes, shared = rule.split(values.cpu())
    if rule.format is None or shared is None:
        return codes.contiguous().view(torch.uint8)
    last = shared if rule.shared is None else rule.shared.to_storage(shared)
    return torch.cat([_to_bytes(codes, rule.format), last.contiguous().view(torch.uint8).flatten()])


def _of_bytes(rule: ScaleSpec, stored: Tensor | None, groups: tuple[int, ...], spec: QuantSpec) -> Tensor:
    """The scales or offsets that `_bytes_of` stored, float32 in the shape `groups`."""
    if stored is None or stored.dtype is not torch.uint8 or not stored.dim() or not str(rule):
        kind = "no scales" if stored is None else f"scales of {stored.dtype}"
        raise _BadCodes(f"have {kind}, which do not fit {spec}")
    fmt, granularity = rule.format, rule.granularity
    if fmt is None or granularity is None:
        return rule.join(StoredScales(_viewed(stored, torch.float32 if fmt is None else fmt.storage)))
    size = -(-prod(groups) * fmt.bits // 8)
    codes, of_groups = _from_bytes(stored[:size], fmt, list(groups)), granularity.group_shape(groups)
    shared = _viewed(stored[size:].clone(), torch.float32 if rule.shared is None else rule.shared.storage)
    if shared.numel() != prod(of_groups):
        raise _BadCodes(f"have {shared.numel()} second-level scales, but {rule} needs {prod(of_groups)}")
    last = shared if rule.shared is None else rule.shared.from_storage(shared, torch.float32)
    return rule.join(StoredScales(codes, last.reshape(of_groups)))


def _viewed(stored: Tensor, kind: torch.dtype) -> Tensor:
    if stored.shape[-1] % kind.itemsize:
        raise _BadCodes(f"have {stored.shape[-1]} bytes of scales, which is no whole number of {kind} values")
    return stored.view(kind)


def decode(manifest: Manifest, tensors: LazyTensors, source: str) -> QuantizedState:
    """The state of a checkpoint; its tensors are read at each access.

    Args:
        source: the path of the manifest, for messages.

    Raises:
        CheckpointError: the entry of a weight does not fit the weight's tensor, or names no static quantizer.
    """
    found: dict[str, Tensor | LazyTensor] = {key: tensors.lazy[key] for key in tensors if key not in manifest.packed}
    entries: dict[str, tuple[PackedEntry, QuantSpec]] = {}
    specs = {path: held.tensor.spec for path, _, held in manifest.quantizers() if held.is_static}
    for name, entry in manifest.packed.items():
        spec = specs.get(entry.quantizer)
        damage = f"{source} is damaged: {name} has"
        if spec is None:
            raise CheckpointError(f"{damage} codes, but {entry.quantizer} has no static range")
        scale = found.get(f"{entry.quantizer}.scale")
        if scale is None:
            raise CheckpointError(f"{damage} codes, but {entry.quantizer} has no scale")
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{damage} the dtype {entry.dtype!r:.80}, which no weight can have")
        try:
            _check_bytes(tensors.lazy.get(name), spec.format, entry.shape)
            if entry.packed_scale and isinstance(scale, LazyTensor):  # else of a weight before
                groups = spec.granularity.group_shape(entry.shape)
                for key, rule in _rules(spec).items():
                    path = f"{entry.quantizer}.{key}"
                    found[path] = _of_bytes(rule, tensors.get(path), groups, spec)
        except _BadCodes as error:
            raise CheckpointError(f"{source} is damaged: the codes of {name} {error}") from error
        entries[name] = entry, spec
    return QuantizedState.of(manifest, LazyTensors(found), PackedWeights(entries, tensors, LazyTensors(found), source))


class PackedWeights(Mapping[str, WeightCodes]):
    """The weights that a file holds as codes; each weight is read anew at each access.

    Args:
        entries: for the name of each weight, its entry in the manifest and its specification.
    """

    def __init__(
        self,
        entries: Mapping[str, tuple[PackedEntry, QuantSpec]],
        packed: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        source: str,
    ) -> None:
        self._entries, self._packed, self._tensors, self._source = entries, packed, tensors, source

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> WeightCodes:
        entry, spec = self._entries[name]
        try:
            return self._with(name, _from_bytes(self._packed[name], spec.format, entry.shape))
        except _BadCodes as error:
            raise CheckpointError(f"{self._source} is damaged: the codes of {name} {error}") from error

    def uncoded(self, name: str) -> WeightCodes:
        """A weight with its shape and scales, but a meta tensor in place of the codes, which are not read."""
        entry, spec = self._entries[name]
        return self._with(name, torch.empty(entry.shape, dtype=spec.format.storage, device="meta"))

    def _with(self, name: str, codes: Tensor) -> WeightCodes:
        entry, spec = self._entries[name]
        params = self._tensors[f"{entry.quantizer}.scale"], self._tensors.get(f"{entry.quantizer}.zero_point")
        return WeightCodes(codes, *params, spec, tuple(entry.shape), _DTYPES[entry.dtype], (entry.quantizer,))


class _BadCodes(Exception):
    """Stored codes that do not fit the manifest."""


def _to_bytes(codes: Tensor, format: Format) -> Tensor:
    """Codes as bytes [ceil(codes * bits / 8)]; the first code is in the lowest bits."""
    patterns, places = patterns_of(codes.flatten(), format).numpy(), np.arange(format.bits, dtype=np.int32)
    parts = [np.zeros(0, np.uint8)]
    for start in range(0, len(patterns), _CHUNK):
        part = (patterns[start : start + _CHUNK, None] >> places) & 1
        parts.append(np.packbits(part.astype(np.uint8).reshape(-1), bitorder="little"))
    return torch.from_numpy(np.concatenate(parts))


def _check_bytes(stored: Tensor | LazyTensor | None, format: Format, shape: Sequence[int]) -> None:
    expected = -(-prod(shape) * format.bits // 8)
    if stored is None or stored.dtype is not torch.uint8 or tuple(stored.shape) != (expected,):
        got = "are missing" if stored is None else f"are {stored.dtype} of shape {list(stored.shape)}"
        raise _BadCodes(f"{got}, but {format} of shape {list(shape)} takes {expected} bytes")


def _from_bytes(stored: Tensor, format: Format, shape: Sequence[int]) -> Tensor:
    """Unpack the codes that `_to_bytes` packed: to a tensor of `shape` in the storage dtype of `format`."""
    _check_bytes(stored, format, shape)
    elements, bits = prod(shape), format.bits
    patterns = np.empty(elements, np.int32)
    raw, step = stored.numpy(), _CHUNK * bits // 8
    places = np.arange(bits, dtype=np.int32)
    for number, start in enumerate(range(0, len(raw), step)):
        here = patterns[number * _CHUNK : (number + 1) * _CHUNK]
        part = np.unpackbits(raw[start : start + step], bitorder="little", count=len(here) * bits)
        here[:] = (part.reshape(-1, bits).astype(np.int32) << places).sum(1)
    if elements and int(patterns.max()) >= count_of(format):
        raise _BadCodes(f"hold the number {int(patterns.max())}, but {format} has {count_of(format)} codes, from 0 on")
    codes = torch.from_numpy(patterns + lowest_of(format)).to(integers_of(format))
    return of_integers(codes, format).reshape(shape)


Model = TypeVar("Model", bound=nn.Module)
FORMAT = "fakequant"
"""The format of the files that `save` writes by default."""


@accepts_wrapped_model
def save(model: nn.Module, directory: str | os.PathLike[str], *, packed: bool = False, format: str = FORMAT) -> Path:
    """Write a prepared model to a folder, so that `load` restores it into a fresh float model.

    The folder gets `fakequant.json` (which layers are quantized, and how) and a `.safetensors` file (parameters and
    buffers) named by its content. The JSON is replaced last and in one step: an interrupted run leaves either the old
    model or the new model. The tensors of the old model stay until the next save, for processes that read them now;
    other files in the folder are not changed. Several processes may save to one folder at once (the last model stays),
    but one is enough: with data-parallel ranks, let only one save. If weights are sharded over processes, all these
    processes must call `save`, which gathers the weights; an error of one process is raised in all. Tensors are written
    one after the other, without a second copy of the model.

    Args:
        model: a prepared model.
        directory: the folder.
        packed: whether to store quantized weights as codes, such as two 4-bit codes in a byte, in the sizes that
            `summary` gives. `load` sets the weights to the values of the codes, so that the model computes the same
            bits; the float weights are lost, and with them a good start for more training. A weight without scales is
            stored with those that its next call would compute. A warning names the weights that stay in float.
        format: the format of the files: "fakequant", or a format of `register_codec`.

    Raises:
        CheckpointError: the model is not prepared, the format is unknown, or safetensors is missing.
        SpecError: a number format is not registered, so that the checkpoint could not be loaded.
        OutputError: the folder cannot be written.

    >>> from tempfile import TemporaryDirectory
    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8_WEIGHT_ONLY)
    >>> with TemporaryDirectory() as folder:
    ...     sorted(path.suffix for path in save(model, folder).iterdir())
    ['.json', '.safetensors']
    """
    require_safetensors()
    check_model(model, "save", "save(model, folder)", CheckpointError)
    with Ranks(processes_of(model, None) if first_sharded(model) else None, CheckpointError) as processes:
        check_path(directory, "save(model, folder)", CheckpointError)
        other = None if format == FORMAT else codec(format)
        if other is not None and packed:
            raise CheckpointError(
                f'packed=True is only for the format "{FORMAT}", got format={format!r}; leave packed out'
            )
        refuse_unprepared(model, CheckpointError, ", or save a float model with torch.save")
        if devices := {one.device.name for one in quantizers(model).values() if one.device is not None}:
            warn_user(f"files do not keep the execution {listed(devices)!r}: call fakequant.set_execution after load")
        folder = writable_folder(directory)
        specs = {path: str(one.spec) for path, one in quantizers(model).items()}
        processes.same(outline_of(model.state_dict(), [packed, format, specs]), "save different models")
        state = snapshot(model)
        if processes.group is not None:
            # All processes ask for a tensor that they gather, or none.
            def asked(name: str, make: Callable[[], Tensor]) -> Tensor:
                processes.same(name, "write different tensors")
                return make()

            held = {name: lazy(state.tensors, name) for name in state.tensors}
            made = {n: LazyTensor(one.shape, one.dtype, partial(asked, n, one.make)) for n, one in held.items()}
            state = replace(state, tensors=LazyTensors(made))
        if other is not None:
            write_folder(folder, other.encode(state))
        else:
            _write(folder, state, encode(state, packed=packed), processes)
    return folder


def _write(folder: Path, state: QuantizedState, encoded: Encoded, processes: Ranks) -> None:
    """Write the two files; a process that dies leaves the old model or the new model."""
    nothing = TensorEntry(tensor_file_name("0" * 64), "0" * 64, 0)
    Manifest(tensors=nothing, packed=encoded.packed, **state.fields()).to_bytes()  # raises before anything is written
    digest, size = hashlib.sha256(), 0

    def hashed() -> Iterator[bytes | memoryview]:
        nonlocal size
        for part in file_content(encoded.tensors):
            digest.update(part)
            size += len(part)
            yield part

    with temporary_file(folder, hashed()) as written:
        processes.all(None)  # none of them failed
        file = TensorEntry(tensor_file_name(digest.hexdigest()), digest.hexdigest(), size)
        with locked(folder) as alone:
            refuse_links(folder, [file.file, MANIFEST])
            before = [name for name in named_files(folder) if name != file.file]
            manifest = Manifest(
                tensors=file, previous=next(iter(before), None), packed=encoded.packed, **state.fields()
            )
            write_in_order({folder / file.file: written, folder / MANIFEST: manifest.to_bytes()})
            if alone:
                remove_unnamed(folder, before)


@accepts_wrapped_model
def load(model: Model, directory: str | os.PathLike[str], *, format: str = FORMAT) -> Model:
    """Restore a saved model into a fresh float model of the same architecture, in place; the model is returned.

    A model on the meta device gets memory tensor by tensor, and needs no second copy; for other models see `apply`. If
    `fully_shard` or `parallelize_module` splits the model, each process reads its part of the weights, and the first
    process also reads the whole file, to compare its SHA-256.

    Args:
        model: a float model.
        directory: the folder that `save` wrote.
        format: the format of the files, as for `save`.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or of another architecture or a later version; a quantizer
            does not accept its scales or zero points; blocks are split between processes; or safetensors is missing.
        Exception: a module's own `_load_from_state_dict` failed. After every error the model is unchanged.

    >>> from tempfile import TemporaryDirectory
    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8_WEIGHT_ONLY)
    >>> with TemporaryDirectory() as folder:
    ...     restored = load(nn.Sequential(nn.Linear(4, 4)), save(model, folder))
    >>> torch.equal(restored(torch.ones(1, 4)), model(torch.ones(1, 4)))
    True
    """
    require_safetensors()
    check_model(model, "load", "load(model, folder)", CheckpointError)
    check_path(directory, "load(model, folder)", CheckpointError)
    folder = Path(directory)
    return apply_from(
        model, lambda first: read(folder, checked=first) if format == FORMAT else (decoded(format, folder), "")
    )


def read(folder: Path, *, checked: bool = True) -> tuple[QuantizedState, str]:
    """The state that `save` wrote, and the recorded SHA-256; the state reads its tensors at each access.

    Args:
        folder: the folder of the checkpoint.
        checked: whether to read the whole content and compare its SHA-256.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    require_safetensors()
    manifest = read_manifest(folder)
    while True:  # a process that saves may remove the file in between: then read again
        path = folder / manifest.tensors.file
        try:
            found = path.stat()
            # A file of another size is not read: it may be of any size, and a pipe never ends.
            if not stat.S_ISREG(found.st_mode) or found.st_size != manifest.tensors.bytes:
                raise CheckpointError(
                    f"{path} is truncated or damaged: {found.st_size} bytes instead of {manifest.tensors.bytes}"
                )
            if checked and _digest(path) != manifest.tensors.sha256:
                raise CheckpointError(f"{path} is damaged: its SHA-256 is not the recorded SHA-256")
            tensors = StoredTensors(path)
        except FileNotFoundError as error:
            newer = read_manifest(folder)
            if newer.tensors == manifest.tensors:
                raise CheckpointError(f"cannot read {path}: {error.strerror}; save the model again") from error
            manifest = newer
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        else:
            return decode(manifest, tensors, str(folder / MANIFEST)), manifest.tensors.sha256
