"""Save and load a quantized model: safetensors and JSON, written whole or not at all."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from fakequant.data.arguments import check_model
from fakequant.distributed import is_sharded, refuse_sharded, whole
from fakequant.errors import CheckpointError, ConfigError
from fakequant.files import check_path, locked, writable_folder, write_in_order
from fakequant.model.prepare import attach
from fakequant.model.state.manifest import (
    MANIFEST,
    LayerEntry,
    Manifest,
    SitesEntry,
    TensorFile,
    TransformEntry,
    quantizer_entry,
    tensor_file_name,
)
from fakequant.model.state.manifest_reading import named_files, read_manifest
from fakequant.model.state.packing import pack, unpack
from fakequant.model.state.stored_ranges import check_ranges, is_wide
from fakequant.model.state.stored_sites import check_sites, restore_sites, site_quantizers, sites_entry
from fakequant.model.ties import share_learned
from fakequant.model.unregistered import warn_unregistered
from fakequant.model.weights import note_weights, warn_stale_scales, weights_of
from fakequant.nn.fast_paths import leave_fast_paths
from fakequant.nn.folded import FoldedLayer
from fakequant.nn.forms import bypasses_class, own_class, quantized_class
from fakequant.nn.layers import QuantizedLayer, QuantLinear
from fakequant.nn.low_rank import LowRank
from fakequant.nn.quantizer import Quantizer, quantizers
from fakequant.nn.transforms import InputTransform, make_transform
from fakequant.nn.wrappers import unwraps
from fakequant.offload import fetched_state
from fakequant.restore import state_of

Model = TypeVar("Model", bound=nn.Module)


@unwraps
def save(model: nn.Module, directory: str | os.PathLike[str], *, packed: bool = False) -> Path:
    """Write a prepared model to a folder, so that `load` restores it into a fresh float model.

    The folder gets `fakequant.json` (which layers are quantized, how) and one `.safetensors` file (parameters and
    buffers) named by its content. The JSON is replaced last and in one step: a run that is interrupted leaves either
    the old model or the new one. The tensors of the model that was there before are kept until the next save, for
    processes that read them now; other files in the folder are left alone. Several processes may save to one folder at
    once (the last one's model stays), but one is enough: of data-parallel ranks let one save. Weights that are sharded
    over processes are gathered: all of these must call `save`.

    Args:
        model: a prepared model.
        directory: the folder.
        packed: store quantized weights as codes, two 4-bit codes in a byte: the sizes that `summary` gives. `load` sets
            them to the values of the codes, so that the model computes the same bits; the float weights are lost, and
            with them a good start for training on. Weights without scales get those of their next call, in the file
            alone. One warning names the weights that stay in float.

    Raises:
        CheckpointError: the model is not prepared, or safetensors is missing.
        SpecError: a format that is not registered, so that the checkpoint could not be loaded.
        OutputError: the folder cannot be written.

    >>> from tempfile import TemporaryDirectory
    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8_WEIGHT_ONLY)
    >>> with TemporaryDirectory() as folder:
    ...     sorted(path.suffix for path in save(model, folder).iterdir())
    ['.json', '.safetensors']
    """
    safetensors = _safetensors()
    check_model(model, "save", "save(model, folder)", CheckpointError)
    check_path(directory, "save(model, folder)", CheckpointError)
    warn_unregistered(model)
    if not quantizers(model):
        raise CheckpointError("the model has no quantizers; prepare it first, or save a float model with torch.save")
    stale = warn_stale_scales(model)
    folder = writable_folder(directory)
    shared = _shared(model)
    tensors, codes = pack(model, _tensors(model), shared) if packed else (_tensors(model), {})
    data = safetensors.torch.save({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()})
    digest = hashlib.sha256(data).hexdigest()
    file = tensor_file_name(digest)
    with locked(folder) as alone:
        before = [name for name in named_files(folder) if name != file]
        manifest = Manifest(
            TensorFile(file, digest, len(data)),
            shared,
            {name: layer_entry(layer) for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)},
            _versions(model),
            next(iter(before), None),
            sites_entry(model),
            codes,
            stale,
        )
        write_in_order({folder / file: data, folder / MANIFEST: manifest.to_bytes()})
        for name in before[1:] if alone else []:
            with suppress(OSError):
                (folder / name).unlink()
    return folder


@unwraps
def load(model: Model, directory: str | os.PathLike[str]) -> Model:
    """Restore a saved model into a fresh float model of the same architecture, in place; the model is returned.

    Everything is checked before the model changes; what fails later is undone, for which the values of the model are
    kept on the CPU for the time of the call.

    Raises:
        CheckpointError: no checkpoint there, a damaged one, one of another architecture or of a later version, scales
            or zero points that no call would take, a model without memory, or safetensors is missing.
        Exception: what a module's own `_load_from_state_dict` raises. After every error the model is as before.

    >>> from tempfile import TemporaryDirectory
    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8_WEIGHT_ONLY)
    >>> with TemporaryDirectory() as folder:
    ...     restored = load(nn.Sequential(nn.Linear(4, 4)), save(model, folder))
    >>> torch.equal(restored(torch.ones(1, 4)), model(torch.ones(1, 4)))
    True
    """
    safetensors = _safetensors()
    check_model(model, "load", "load(model, folder)", CheckpointError)
    check_path(directory, "load(model, folder)", CheckpointError)
    folder = Path(directory)
    manifest, data = _read(folder)
    path = folder / manifest.tensors.file
    try:
        tensors = safetensors.torch.load(data)
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    del data
    if quantizers(model):
        raise CheckpointError("load expects a fresh float model, but this one is already prepared; build it anew")
    refuse_sharded(model, "load the checkpoint into")
    _check_memory(model)
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if missing := [name for name in manifest.layers if name not in modules]:
        raise CheckpointError(f"the checkpoint has layers that the model lacks: {', '.join(missing)}")
    check_layers(modules, manifest.layers)
    check_sites(modules, manifest.sites)
    if wrong := [name for name, source in manifest.shared.items() if name in tensors or source not in tensors]:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {wrong[0]} shares no tensor of {path.name}")
    unpacked = unpack(manifest.packed, tensors, manifest.layers, str(folder / MANIFEST))
    tensors = unpacked.tensors | {name: unpacked.tensors[source] for name, source in manifest.shared.items()}
    check_ranges(modules, manifest.layers, tensors, is_wide(model), site_quantizers(manifest.sites))
    tensors = unpacked.values()
    tensors |= {name: tensors[source] for name, source in manifest.shared.items()}
    restore = state_of([model], "cpu")  # the CPU, because a GPU may have no room for a second copy
    try:
        restore_layers(model, manifest.layers, manifest.sites)
        _load_state(model, _state(model, manifest, tensors), folder)
        note_weights(model, manifest.stale)
        warn_stale_scales(model)
        return model
    except BaseException:  # as in `prepare`
        restore()
        raise


def _load_state(model: nn.Module, state: dict[str, Tensor], folder: Path) -> None:
    # A function of its own: CPython 3.11 does not protect the line of a `try` inside another one from interrupts.
    own = {name: value.dtype for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name, value in state.items():
        dtype = own.get(name, value.dtype)
        if dtype != value.dtype and not (dtype.is_floating_point and value.dtype.is_floating_point):
            raise CheckpointError(
                f"the checkpoint in {folder} does not fit the model: {name} is stored as {value.dtype}, and the model "
                f"has {dtype}"
            )
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint in {folder} does not fit the model: {error}") from error


def _state(model: nn.Module, manifest: Manifest, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as a state dict with the versions that the modules had when they were saved."""
    versions = _versions(model) if manifest.versions is None else manifest.versions
    state = OrderedDict(tensors)
    paths = [name for name, _ in model.named_modules(remove_duplicate=False)]
    vars(state)["_metadata"] = OrderedDict((name, {"version": versions.get(name, 1)}) for name in paths)
    return state


def _versions(model: nn.Module) -> dict[str, int]:
    """The versions of the state of modules by path, where they are not torch's default of 1."""
    found = {name: module._version for name, module in model.named_modules(remove_duplicate=False)}
    return {name: version for name, version in found.items() if isinstance(version, int) and version != 1}


def _safetensors() -> Any:
    """The package safetensors, or an error that says how to get it."""
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        message = "checkpoints need safetensors, not installed here; run pip install 'fakequant[checkpoint]'"
        raise CheckpointError(message) from error
    return safetensors


def _check_memory(model: nn.Module) -> None:
    """Raise where torch would silently ignore the tensors of a checkpoint."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise CheckpointError(
                f"the model has parameters on the meta device, which hold no values, the first is {name}; build it on "
                'a device, or call model.to_empty(device="cpu") before load'
            )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without names that share another's memory (tied weights)."""
    shared = _shared(model)
    return {name: whole(tensor) for name, tensor in fetched_state(model).items() if name not in shared}


def _shared(model: nn.Module) -> dict[str, str]:
    """Names of tied tensors, each with the first name of the same tensor."""
    first: dict[tuple[Any, ...], str] = {}
    shared = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in model.state_dict().items():
        if is_sharded(tensor) or tensor.is_meta:  # by the parameter: its memory may be elsewhere, or shared out
            key: tuple[Any, ...] = (id(parameters.get(name, tensor)),)
        else:
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            shared[name] = first[key]
        first.setdefault(key, name)
    return shared


def layer_entry(layer: QuantizedLayer) -> LayerEntry:
    """What a manifest says of a layer."""
    if isinstance(layer, FoldedLayer):
        raise ConfigError(
            "batch normalisations are folded while the model trains (fakequant.qat.fold_batch_norm); call "
            "fakequant.qat.merge_batch_norm(model) first, or keep model.state_dict() to go on training"
        )
    held = {attribute: getattr(layer, attribute) for attribute in layer.operands(layer)}
    transform = layer.input_transform
    return LayerEntry(
        type(layer).float_class.__name__,
        layer.execution,
        {attribute: quantizer_entry(quantizer) for attribute, quantizer in held.items() if quantizer is not None},
        None if transform is None else TransformEntry(transform.kind, transform.options()),
        0 if layer.low_rank is None else layer.low_rank.rank,
    )


def check_layers(modules: dict[str, nn.Module], entries: dict[str, LayerEntry]) -> None:
    """Raise where a model's modules by path are not what a manifest's entries for layers say."""
    for name, entry in entries.items():
        cls = own_class(modules[name])
        if cls.__name__ != entry.type:
            raise CheckpointError(f"the checkpoint's layer {name} is a {entry.type}, the model's is a {cls.__name__}")
        quantized = quantized_class(modules[name])
        if quantized is None:
            raise CheckpointError(
                f"the model's layer {name} is a {cls.__module__}.{cls.__name__}, which has no quantized form; import "
                "what registers it (fakequant.nn.quantizes) before load"
            )
        if entry.quantizers and bypasses_class(modules[name]):
            raise CheckpointError(
                f"the model's layer {name} has a forward of its own (a hook's), which would bypass "
                "the quantizers; remove the hook before load"
            )
        names = quantized.operands(modules[name])
        if unknown := sorted(set(entry.quantizers) - set(names)):
            raise CheckpointError(
                f"the checkpoint's layer {name} has quantizers {', '.join(unknown)}, but a {cls.__name__} has "
                f"{', '.join(names)}; it is damaged, or of a later version of fakequant"
            )
        try:
            quantized.check(modules[name])
            _make_transform(modules[name], entry)
            _check_low_rank(modules[name], quantized, entry.low_rank)
        except ConfigError as error:
            raise CheckpointError(f"the model's layer {name} cannot be quantized: {error}") from error


def _check_low_rank(layer: nn.Module, quantized: type[QuantizedLayer], rank: int) -> None:
    weights = weights_of(layer)
    if rank and not (issubclass(quantized, QuantLinear) and weights and rank <= min(weights[0].shape)):
        raise ConfigError(f"a product of rank {rank} beside its weight does not fit it")


def restore_layers(model: nn.Module, entries: Mapping[str, LayerEntry], sites: SitesEntry) -> None:
    """Turn layers of a float model into their quantized forms, and make its sites, as checked entries say."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for name, entry in entries.items():
        _restore_layer(modules[name], entry, name)
    restore_sites(model, sites)
    share_learned(model)
    leave_fast_paths(model)


def _restore_layer(layer: nn.Module, entry: LayerEntry, name: str) -> None:
    """Turn a float layer into its quantized form as its entry in a manifest says."""
    attach(layer, {attribute: quantizer.tensor for attribute, quantizer in entry.quantizers.items()}, name)
    if isinstance(layer, QuantizedLayer):
        layer.execution = entry.execution
        if (transform := _make_transform(layer, entry)) is not None:
            layer.add_module("_input_transform", transform)
        if entry.low_rank:
            layer.add_module("_low_rank", LowRank.of(layer, entry.low_rank))
    for attribute, stored in entry.quantizers.items():
        quantizer: Quantizer = getattr(layer, attribute)
        quantizer.mode = stored.mode
        if (learned := stored.make_learned()) is not None:
            quantizer.attach_learned(learned)


def _make_transform(layer: nn.Module, entry: LayerEntry) -> InputTransform | None:
    """The transform of a layer's input, whose buffers the tensors of the checkpoint set."""
    return None if entry.transform is None else make_transform(entry.transform.kind, layer, **entry.transform.options)


def _read(folder: Path) -> tuple[Manifest, bytes]:
    """The manifest and the file that it names. A process that saves may remove the file in between: then read again."""
    manifest = read_manifest(folder)
    while True:
        try:
            return manifest, _read_tensors(folder, manifest.tensors)
        except FileNotFoundError as error:
            newer = read_manifest(folder)
            if newer.tensors == manifest.tensors:
                path = folder / manifest.tensors.file
                raise CheckpointError(f"cannot read {path}: {error.strerror}; save the model again") from error
            manifest = newer


def _read_tensors(folder: Path, expected: TensorFile) -> bytes:
    """The content of the file of tensors.

    Raises:
        FileNotFoundError: it is not there.
        CheckpointError: it is damaged.
    """
    path = folder / expected.file
    try:
        found = path.stat()
        # A file of another size is not read: it may be of any size, and a pipe never ends.
        if not stat.S_ISREG(found.st_mode) or found.st_size != expected.bytes:
            raise CheckpointError(f"{path} is truncated or damaged: {found.st_size} bytes instead of {expected.bytes}")
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    if hashlib.sha256(data).hexdigest() != expected.sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one that was recorded")
    return data
