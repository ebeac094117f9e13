"""Save and load a quantized model: safetensors and JSON, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fakequant.errors import CheckpointError
from fakequant.files import writable_folder, write_whole
from fakequant.model.config import TensorConfig
from fakequant.model.prepare import attach
from fakequant.nn.fast_paths import leave_fast_paths
from fakequant.nn.integer import Execution
from fakequant.nn.layers import QuantizedLayer, layers
from fakequant.nn.learned import make_learned_range
from fakequant.nn.quantizer import Mode, Quantizer, quantizers
from fakequant.nn.sequential import join_relus

Model = TypeVar("Model", bound=nn.Module)

MANIFEST = "fakequant.json"
"""The file that says which layers are quantized and where the tensors are."""

_VERSION = 1


def save(model: nn.Module, directory: str | os.PathLike[str]) -> Path:
    """Write a prepared model to a folder, so that `load` restores it into a fresh float model.

    The folder gets `fakequant.json` (which layers are quantized, how) and one `.safetensors` file (parameters and
    buffers) named by its content. The JSON is replaced last and in one step: a run that is interrupted leaves either
    the old model or the new one.

    Raises:
        CheckpointError: the model is not prepared, a quantized layer was parametrized since, or safetensors is missing.
        SpecError: a format that is not registered, so that the checkpoint could not be loaded.
        OutputError: the folder cannot be written.

    >>> from tempfile import TemporaryDirectory
    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8_WEIGHT_ONLY)
    >>> with TemporaryDirectory() as folder:
    ...     sorted(path.suffix for path in save(model, folder).iterdir())
    ['.json', '.safetensors']
    """
    safetensors = _safetensors()
    if not quantizers(model):
        raise CheckpointError("the model has no quantizers; prepare it first, or save a float model with torch.save")
    _check_not_parametrized(model)
    folder = writable_folder(directory)
    data = safetensors.torch.save(
        {name: tensor.detach().contiguous().clone() for name, tensor in _tensors(model).items()}
    )
    digest = hashlib.sha256(data).hexdigest()
    tensors = f"model-{digest[:16]}.safetensors"
    manifest = {
        "fakequant": _VERSION,
        "tensors": {"file": tensors, "sha256": digest, "bytes": len(data)},
        "shared": _shared(model),
        "layers": {
            name: _layer_entry(layer) for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)
        },
    }
    write_whole(folder / tensors, data)
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=2).encode())
    for old in folder.glob("model-*.safetensors"):
        if old.name != tensors:
            old.unlink()
    return folder


def load(model: Model, directory: str | os.PathLike[str]) -> Model:
    """Restore a saved model into a fresh float model of the same architecture, in place; the model is returned.

    Raises:
        CheckpointError: no checkpoint there, a damaged one, one of another architecture, a model without memory, or
            safetensors is missing; the model is unchanged unless it was of another architecture.

    >>> from tempfile import TemporaryDirectory
    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8_WEIGHT_ONLY)
    >>> with TemporaryDirectory() as folder:
    ...     restored = load(nn.Sequential(nn.Linear(4, 4)), save(model, folder))
    >>> torch.equal(restored(torch.ones(1, 4)), model(torch.ones(1, 4)))
    True
    """
    safetensors = _safetensors()
    folder = Path(directory)
    manifest = read_manifest(folder)
    data = _read_tensors(folder, manifest)
    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{folder / manifest['tensors']['file']} cannot be read: {error}") from error
    if quantizers(model):
        raise CheckpointError("load expects a fresh float model, but this one is already prepared; build it anew")
    _check_memory(model)
    entries = manifest["layers"]
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if missing := [name for name in entries if name not in modules]:
        raise CheckpointError(f"the checkpoint has layers that the model lacks: {', '.join(missing)}")
    _check_layers(modules, entries)
    for name, entry in entries.items():
        _restore_layer(modules[name], entry, name)
    join_relus(model)
    leave_fast_paths(model)
    for name, source in manifest["shared"].items():
        tensors[name] = tensors[source]
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint in {folder} does not fit the model: {error}") from error
    return model


def _safetensors() -> Any:
    """The package safetensors, or an error that says how to get it."""
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        message = "checkpoints need safetensors, not installed here; run pip install 'fakequant[checkpoint]'"
        raise CheckpointError(message) from error
    return safetensors


def _check_memory(model: nn.Module) -> None:
    """Raise where torch would take the tensors of a checkpoint without a word and keep nothing of them."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise CheckpointError(
                f"the model has parameters on the meta device, which hold no values, the first is {name}; build it on "
                'a device, or call model.to_empty(device="cpu") before load'
            )


def _check_not_parametrized(model: nn.Module) -> None:
    """Raise where `load` would find a layer of another class and other tensors."""
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLayer) and is_parametrized(layer):
            raise CheckpointError(
                f"{name or 'the model'} is parametrized, and could not be loaded; call "
                "torch.nn.utils.parametrize.remove_parametrizations on it before save"
            )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without names that share another's memory (tied weights)."""
    shared = _shared(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in shared}


def _shared(model: nn.Module) -> dict[str, str]:
    """Names of tied tensors, each with the first name of the same tensor."""
    first: dict[tuple[Any, ...], str] = {}
    shared = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            shared[name] = first[key]
        first.setdefault(key, name)
    return shared


def _layer_entry(layer: QuantizedLayer) -> dict[str, Any]:
    return {
        "type": type(layer).float_class.__name__,
        "execution": layer.execution.value,
        "quantizers": {
            attribute: {
                "tensor": TensorConfig(quantizer.spec, quantizer.dynamic).to_text(),
                "mode": quantizer.mode.value,
                "learned": _learned_entry(quantizer),
            }
            for attribute in type(layer).quantizer_names()
            if (quantizer := getattr(layer, attribute)) is not None
        },
    }


def _learned_entry(quantizer: Quantizer) -> dict[str, Any] | None:
    learned = quantizer.learned
    return None if learned is None else {"method": learned.method, "options": learned.options()}


def _check_layers(modules: dict[str, nn.Module], entries: dict[str, Any]) -> None:
    known = layers()
    for name, entry in entries.items():
        cls = type(modules[name])
        if cls.__name__ != entry["type"]:
            raise CheckpointError(
                f"the checkpoint's layer {name} is a {entry['type']}, the model's is a {cls.__name__}"
            )
        if cls not in known:
            raise CheckpointError(
                f"the model's layer {name} is a {cls.__module__}.{cls.__name__}, which has no quantized form; import "
                "what registers it (fakequant.nn.quantizes) before load"
            )
        if entry["quantizers"] and "forward" in vars(modules[name]):
            raise CheckpointError(
                f"the model's layer {name} has a forward of its own (a hook's, as of accelerate), which would bypass "
                "the quantizers; remove the hook before load"
            )


def _restore_layer(layer: nn.Module, entry: dict[str, Any], name: str) -> None:
    stored = entry["quantizers"]
    attach(layer, {attribute: TensorConfig.parse(values["tensor"]) for attribute, values in stored.items()}, name)
    if isinstance(layer, QuantizedLayer):
        layer.execution = Execution(entry.get("execution", "simulate"))
    for attribute, values in stored.items():
        quantizer: Quantizer = getattr(layer, attribute)
        quantizer.mode = Mode(values["mode"])
        if learned := values["learned"]:
            quantizer.attach_learned(make_learned_range(learned["method"], quantizer.spec, **learned["options"]))


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no checkpoint: there is no {MANIFEST} in it") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged and cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("fakequant") != _VERSION:
        raise CheckpointError(f"{path} is no checkpoint of version {_VERSION}")
    if missing := [key for key in ("tensors", "shared", "layers") if key not in manifest]:
        raise CheckpointError(f"{path} is damaged: it lacks {', '.join(missing)}")
    return manifest


def _read_tensors(folder: Path, manifest: dict[str, Any]) -> bytes:
    expected = manifest["tensors"]
    path = folder / expected["file"]
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    if len(data) != expected["bytes"]:
        raise CheckpointError(f"{path} is truncated or damaged: {len(data)} bytes instead of {expected['bytes']}")
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one that was recorded")
    return data
