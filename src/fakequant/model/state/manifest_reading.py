"""The manifest of a checkpoint, read from its file: every value is checked before any of them is used."""

from __future__ import annotations

import inspect
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from fakequant.errors import CheckpointError, ConfigError, SpecError
from fakequant.files import remove_abandoned
from fakequant.model.config import TensorConfig
from fakequant.model.state.json_values import UnexpectedValue, keys_of, mapping_of, member, number, text, texts
from fakequant.model.state.manifest import (
    MANIFEST,
    VERSION,
    LayerEntry,
    LearnedEntry,
    Manifest,
    OwnerEntry,
    PackedEntry,
    QuantizerEntry,
    SiteEntry,
    SiteQuantizerEntry,
    SitesEntry,
    TensorFile,
    TransformEntry,
    tensor_file_name,
)
from fakequant.nn.integer import Execution
from fakequant.nn.quantizer import Kind, Mode

_OWN_NAME = re.compile(r"model-[0-9a-f]{16}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UNUSABLE = (SpecError, ConfigError, UnexpectedValue, RecursionError)


def named_files(folder: Path) -> list[str]:
    """The tensor files that the manifest in a folder names, the current one first; none where it cannot be read."""
    try:
        values = json.loads((folder / MANIFEST).read_bytes())
        names = [values["tensors"]["file"], values.get("previous")]
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return []
    return [name for name in names if isinstance(name, str) and _OWN_NAME.fullmatch(name)]


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, and its folder if nothing else is in it; also what a process that was killed left."""
    with suppress(OSError):
        remove_abandoned(folder)
        for path in list(folder.iterdir()):
            if path.name == MANIFEST or _OWN_NAME.fullmatch(path.name):
                path.unlink()
        folder.rmdir()


def remove_unnamed(folder: Path) -> None:
    """Remove the tensor files that the manifest of a checkpoint does not name, as of models that were there before."""
    named = named_files(folder)
    for path in list(folder.iterdir()):
        if _OWN_NAME.fullmatch(path.name) and path.name not in named:
            with suppress(OSError):
                path.unlink()


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint says of itself, read whole.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of a later version.
    """
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no checkpoint: there is no {MANIFEST} in it") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged and cannot be read: {error}") from error
    try:
        return _manifest(values)
    except _UNUSABLE as error:
        raise _unusable(path, error) from error
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from error


def parse_layers(values: Any, source: str) -> dict[str, LayerEntry]:
    """Layers by path from what `layer_values` made for each.

    Raises:
        CheckpointError: it is damaged; the source is named.
    """
    try:
        return mapping_of(values, "layers", _layer)
    except _UNUSABLE as error:
        raise _unusable(source, error) from error


def parse_sites(values: Any, source: str) -> SitesEntry:
    """Sites from what `sites_values` made; none where there is nothing.

    Raises:
        CheckpointError: it is damaged; the source is named.
    """
    try:
        return _sites(values, "sites")
    except _UNUSABLE as error:
        raise _unusable(source, error) from error


def _unusable(source: object, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{source} cannot be used: {error}. It is damaged, of a later version of fakequant, or needs what your own "
        "code registers (formats, layers, learned ranges)"
    )


def _manifest(values: Any) -> Manifest:
    version = values.get("fakequant") if isinstance(values, dict) else None
    if type(version) is int and version > VERSION:
        raise CheckpointError(
            f"is a checkpoint of version {version}, written by a later version of fakequant; this one reads version "
            f"{VERSION}: update fakequant"
        )
    if type(version) is not int or version != VERSION:
        raise CheckpointError(f"is no checkpoint of version {VERSION}")
    if missing := [key for key in ("tensors", "shared", "layers") if key not in values]:
        raise CheckpointError(f"is damaged: it lacks {', '.join(missing)}")
    versions, previous = values.get("versions"), values.get("previous")
    return Manifest(
        _tensor_file(values["tensors"]),
        mapping_of(values["shared"], "shared", text),
        mapping_of(values["layers"], "layers", _layer),
        None if versions is None else mapping_of(versions, "versions", number),
        None if previous is None else _own_name(previous, "previous"),
        _sites(values.get("sites"), "sites"),
        {} if values.get("packed") is None else mapping_of(values["packed"], "packed", _packed),
        texts(values.get("stale", []), "stale"),
    )


def _packed(values: Any, place: str) -> PackedEntry:
    quantizer, shape, dtype, scale = keys_of(values, place, "quantizer", "shape", "dtype", "packed_scale")
    if not isinstance(shape, list):
        raise UnexpectedValue(f"{place}.shape is {shape!r:.80}, not a list")
    if not isinstance(scale, bool):
        raise UnexpectedValue(f"{place}.packed_scale is {scale!r:.80}, not true or false")
    sizes = [number(size, f"{place}.shape") for size in shape]
    return PackedEntry(text(quantizer, f"{place}.quantizer"), sizes, text(dtype, f"{place}.dtype"), scale)


def _tensor_file(values: Any) -> TensorFile:
    file, sha256, size = keys_of(values, "tensors", "file", "sha256", "bytes")
    sha256 = text(sha256, "tensors.sha256")
    if not _SHA256.fullmatch(sha256):
        raise UnexpectedValue(f"tensors.sha256 is {sha256!r:.80}, not 64 hexadecimal digits")
    return TensorFile(_own_name(file, "tensors.file"), sha256, number(size, "tensors.bytes"))


def _own_name(value: Any, place: str) -> str:
    if not _OWN_NAME.fullmatch(text(value, place)):
        raise UnexpectedValue(f"{place} is {value!r:.80}, not a name such as {tensor_file_name('0123456789abcdef')}")
    return value


def _layer(values: Any, place: str) -> LayerEntry:
    kind, held = keys_of(values, place, "type", "quantizers")
    return LayerEntry(
        text(kind, f"{place}.type"),
        member(values.get("execution", Execution.SIMULATE.value), f"{place}.execution", Execution),
        mapping_of(held, f"{place}.quantizers", _quantizer),
        None if values.get("transform") is None else _transform(values["transform"], f"{place}.transform"),
        number(values.get("low_rank", 0), f"{place}.low_rank"),
    )


def _transform(values: Any, place: str) -> TransformEntry:
    kind, options = keys_of(values, place, "kind", "options")
    return TransformEntry(text(kind, f"{place}.kind"), mapping_of(options, f"{place}.options", number))


def _sites(values: Any, place: str) -> SitesEntry:
    if values is None:
        return SitesEntry()
    owners, shielded = keys_of(values, place, "owners", "shielded")
    return SitesEntry(mapping_of(owners, f"{place}.owners", _owner), texts(shielded, f"{place}.shielded"))


def _owner(values: Any, place: str) -> OwnerEntry:
    kind, steps, sites = keys_of(values, place, "type", "steps", "sites")
    trained = values.get("training_keys")
    return OwnerEntry(
        text(kind, f"{place}.type"),
        texts(steps, f"{place}.steps"),
        mapping_of(sites, f"{place}.sites", _site),
        None if trained is None else texts(trained, f"{place}.training_keys"),
    )


def _site(values: Any, place: str) -> SiteEntry:
    operands, held = keys_of(values, place, "operands", "quantizers")
    return SiteEntry(
        texts(operands, f"{place}.operands"),
        mapping_of(held, f"{place}.quantizers", _site_quantizer),
        mapping_of(values.get("weights", {}), f"{place}.weights", text),
    )


def _site_quantizer(values: Any, place: str) -> SiteQuantizerEntry:
    kind, group, pinned = keys_of(values, place, "kind", "group", "pinned")
    if not isinstance(pinned, bool):
        raise UnexpectedValue(f"{place}.pinned is {pinned!r:.80}, not true or false")
    return SiteQuantizerEntry(
        _quantizer(values, place),
        member(kind, f"{place}.kind", Kind),
        None if group is None else text(group, f"{place}.group"),
        pinned,
    )


def _quantizer(values: Any, place: str) -> QuantizerEntry:
    tensor, mode, learned = keys_of(values, place, "tensor", "mode", "learned")
    entry = QuantizerEntry(
        TensorConfig.parse(text(tensor, f"{place}.tensor")),
        member(mode, f"{place}.mode", Mode),
        None if learned is None else _learned(learned, f"{place}.learned"),
    )
    made = entry.make_learned()
    for name, value in {} if entry.learned is None else entry.learned.options.items():
        default = inspect.signature(type(made)).parameters[name].default
        if default is not inspect.Parameter.empty and type(value) is not type(default):
            raise UnexpectedValue(f"{place}.learned.options.{name} is {value!r:.80}, not a {type(default).__name__}")
    return entry


def _learned(values: Any, place: str) -> LearnedEntry:
    method, options = keys_of(values, place, "method", "options")
    read = mapping_of(options, f"{place}.options", lambda value, _: value)
    if reserved := read.keys() & {"method", "spec"}:
        raise UnexpectedValue(f"{place}.options has {', '.join(sorted(reserved))}, which is no option")
    return LearnedEntry(text(method, f"{place}.method"), read)
