"""Save and load a quantized model: a codec of its snapshot, written whole or not at all."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from fakequant.data.arguments import check_model, refuse_unprepared
from fakequant.distributed import Together, first_sharded, processes_of
from fakequant.errors import CheckpointError
from fakequant.files import check_path, locked, refuse_links, temporary_file, writable_folder, write_in_order
from fakequant.model.state.applying import apply_from, outline_of
from fakequant.model.state.codecs import codec, decoded, file_parts, write_folder
from fakequant.model.state.manifest import (
    MANIFEST,
    Manifest,
    TensorEntry,
    named_files,
    read_manifest,
    remove_unnamed,
    tensor_file_name,
)
from fakequant.model.state.packing import Encoded, decode, encode
from fakequant.model.state.snapshots import LazyTensor, LazyTensors, QuantizedState, lazy, snapshot
from fakequant.model.state.tensor_file import StoredTensors, file_content, require_safetensors
from fakequant.nn.quantizer import quantizers
from fakequant.nn.wrappers import unwraps

Model = TypeVar("Model", bound=nn.Module)
FORMAT = "fakequant"
"""The format of the files that `save` writes by default."""


@unwraps
def save(model: nn.Module, directory: str | os.PathLike[str], *, packed: bool = False, format: str = FORMAT) -> Path:
    """Write a prepared model to a folder, so that `load` restores it into a fresh float model.

    The folder gets `fakequant.json` (which layers are quantized, how) and one `.safetensors` file (parameters and
    buffers) named by its content. The JSON is replaced last and in one step: a run that is interrupted leaves either
    the old model or the new one. The tensors of the model that was there before are kept until the next save, for
    processes that read them now; other files in the folder are left alone. Several processes may save to one folder at
    once (the last one's model stays), but one is enough: of data-parallel ranks let one save. Weights that are sharded
    over processes are gathered: all of these must call `save`, and an error of one is raised in all. It writes one
    tensor after the other, and makes no second copy of the model.

    Args:
        model: a prepared model.
        directory: the folder.
        packed: store quantized weights as codes, two 4-bit codes in a byte: the sizes that `summary` gives. `load` sets
            them to the values of the codes, so that the model computes the same bits; the float weights are lost, and
            with them a good start for training on. Weights without scales get those of their next call, in the file
            alone. One warning names the weights that stay in float.
        format: of the files: "fakequant", or one of `register_codec`, which has other files.

    Raises:
        CheckpointError: the model is not prepared, an unknown format, or safetensors is missing.
        SpecError: a number format that is not registered, so that the checkpoint could not be loaded.
        OutputError: the folder cannot be written.

    >>> from tempfile import TemporaryDirectory
    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8_WEIGHT_ONLY)
    >>> with TemporaryDirectory() as folder:
    ...     sorted(path.suffix for path in save(model, folder).iterdir())
    ['.json', '.safetensors']
    """
    require_safetensors()
    check_model(model, "save", "save(model, folder)", CheckpointError)
    with Together(processes_of(model, None) if first_sharded(model) else None, CheckpointError) as processes:
        check_path(directory, "save(model, folder)", CheckpointError)
        other = None if format == FORMAT else codec(format)
        if other is not None and packed:
            raise CheckpointError(
                f'packed=True is of the format "{FORMAT}"; {format!r} says itself how it stores weights'
            )
        refuse_unprepared(model, CheckpointError, ", or save a float model with torch.save")
        folder = writable_folder(directory)
        specs = {path: str(one.spec) for path, one in quantizers(model).items()}
        processes.same(outline_of(model.state_dict(), [packed, format, specs]), "save different models")
        state = snapshot(model)
        if processes.group is not None:
            state = replace(state, tensors=_in_step(state.tensors, processes))
        if other is not None:
            write_folder(folder, other.encode(state))
        else:
            _write(folder, state, encode(state, packed=packed), processes)
    return folder


def _in_step(tensors: Mapping[str, Tensor], processes: Together) -> LazyTensors:
    """Tensors of which each that processes gather is asked for by all of them, or by none."""

    def asked(name: str, make: Callable[[], Tensor]) -> Tensor:
        processes.same(name, "write different tensors")
        return make()

    held = {name: lazy(tensors, name) for name in tensors}
    return LazyTensors(
        {name: LazyTensor(one.shape, one.dtype, partial(asked, name, one.make)) for name, one in held.items()}
    )


def _write(folder: Path, state: QuantizedState, encoded: Encoded, processes: Together) -> None:
    """Write the two files; a process that dies leaves the model that was there, or this one."""
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


@unwraps
def load(model: Model, directory: str | os.PathLike[str], *, format: str = FORMAT) -> Model:
    """Restore a saved model into a fresh float model of the same architecture, in place; the model is returned.

    A model on the meta device gets memory tensor by tensor, and needs no second copy; see `apply` for others. Of one
    that `fully_shard` or `parallelize_module` shares out each process reads its own part of the weights, and the first
    one alone reads the whole file, to compare its SHA-256.

    Args:
        model: in float.
        directory: the folder that `save` wrote.
        format: that of the files, as `save` got it.

    Raises:
        CheckpointError: no checkpoint there, a damaged one, one of another architecture or of a later version, scales
            or zero points that no call would take, blocks that a border of processes cuts, or safetensors is missing.
        Exception: what a module's own `_load_from_state_dict` raises. After every error the model is as before.

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
    """The state that `save` wrote, whose tensors are read at each access, and the SHA-256 that was recorded.

    Args:
        folder: of the checkpoint.
        checked: whether the content is compared with the SHA-256, for which all of it is read.

    Raises:
        CheckpointError: there is none, or a damaged one.
    """
    require_safetensors()
    manifest = read_manifest(folder)
    while True:  # a process that saves may remove the file in between: then read again
        path = folder / manifest.tensors.file
        try:
            _check_content(path, manifest.tensors, whole=checked)
            tensors = _read_tensors(folder, manifest.tensors)
            return decode(manifest, tensors, str(folder / MANIFEST)), manifest.tensors.sha256
        except FileNotFoundError as error:
            newer = read_manifest(folder)
            if newer.tensors == manifest.tensors:
                raise CheckpointError(f"cannot read {path}: {error.strerror}; save the model again") from error
            manifest = newer


def _check_content(path: Path, expected: TensorEntry, *, whole: bool) -> None:
    """Check the size of a file, and the SHA-256 of the whole of it."""
    digest = hashlib.sha256()
    with _read_errors(path):
        found = path.stat()
        # A file of another size is not read: it may be of any size, and a pipe never ends.
        if not stat.S_ISREG(found.st_mode) or found.st_size != expected.bytes:
            raise CheckpointError(f"{path} is truncated or damaged: {found.st_size} bytes instead of {expected.bytes}")
        for part in file_parts(path) if whole else ():
            digest.update(part)
    if whole and digest.hexdigest() != expected.sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one that was recorded")


def _read_tensors(folder: Path, expected: TensorEntry) -> StoredTensors:
    path = folder / expected.file
    with _read_errors(path):
        return StoredTensors(path)


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
