"""Put a quantized state into a float model; everything is checked before the model changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain, product
from typing import TypeVar

from torch import Tensor, nn

from fakequant.data.arguments import check_model
from fakequant.distributed import (
    Together,
    first_sharded,
    is_sharded,
    parallel_group,
    part_like,
    processes_of,
    refuse_offloaded,
)
from fakequant.errors import CheckpointError, ConfigError, QParamsError, ShapeError
from fakequant.model.prepare import attach
from fakequant.model.state.plan import LayerEntry, Plan, QuantizerEntry
from fakequant.model.state.snapshots import QuantizedState, versions_of
from fakequant.model.state.stored_ranges import check_ranges, is_wide, weight_places
from fakequant.model.state.stored_sites import check_sites, restore_sites
from fakequant.model.state.weight_codes import WeightCodes
from fakequant.model.ties import share_learned
from fakequant.model.weights import note_weights, quantized_weights, warn_stale_scales, weights_of
from fakequant.nn.low_rank import LowRank
from fakequant.nn.quantized.fast_paths import leave_fast_paths
from fakequant.nn.quantized.forms import bypasses_class, own_class, quantized_class
from fakequant.nn.quantized.layers import QuantizedLayer, QuantLinear
from fakequant.nn.quantizer import Quantizer, quantizers
from fakequant.nn.ranges.fixed_codes import KEY, is_same
from fakequant.nn.ranges.sharded import share_mesh
from fakequant.nn.transforms import InputTransform, make_transform
from fakequant.nn.wrappers import unwraps
from fakequant.numerics.formats.codes import as_integers
from fakequant.restore import state_of

Model = TypeVar("Model", bound=nn.Module)


@unwraps
def apply(model: Model, state: QuantizedState) -> Model:
    """Put a quantized state into a fresh float model of the same architecture, in place; the model is returned.

    Everything is checked before the model changes; what fails later is undone, for which the values of the model are
    kept on the CPU for the time of the call. Each process of a model that `fully_shard` shares out keeps its part: all
    of them call this, and an error of one is raised in all.

    Raises:
        CheckpointError: a state of another architecture, scales, zero points or codes that no call would take, a
            prepared model, or one without memory.
        Exception: what a module's own `_load_from_state_dict` raises. After every error the model is as before.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), "int8_weight_only")
    >>> again = apply(nn.Sequential(nn.Linear(4, 4)), snapshot(model))
    >>> torch.equal(again(torch.ones(4)), model(torch.ones(4)))
    True
    """
    check_model(model, "apply", "apply(model, state)", CheckpointError)
    if quantizers(model):
        raise CheckpointError("load expects a fresh float model, but this one is already prepared; build it anew")
    if parallel_group(model) is not None:  # a model that is prepared, as a loaded one is, is not shared out by rows
        raise ConfigError(
            "parallelize_module shared out the layers; prepare this model as that of the checkpoint was, load the "
            "checkpoint into another float model, and give the values of its state_dict() to model.load_state_dict: "
            "distribute_tensor(value, own.device_mesh, own.placements) of torch.distributed.tensor where own, that of "
            "this model, is a DTensor"
        )
    refuse_offloaded(model, "load the checkpoint into")
    with Together(processes_of(model, None) if first_sharded(model) else None) as processes:
        _check_memory(model)
        check_plan(model, state)
        tensors = _tensors(model, state)
        processes.all(None)  # none of them failed
        restore = state_of([model], "cpu")  # the CPU, because a GPU may have no room for a second copy
        try:
            restore_plan(model, state)
            _load_state(model, state, tensors)
            processes.all(None)
            _check_fixed_codes(model)
            _note(model, state)
        except BaseException:  # as in `prepare`
            restore()
            raise
    return model


def check_plan(model: nn.Module, plan: Plan) -> None:
    """Raise a CheckpointError where the modules of a float model are not those of a plan."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if missing := [name for name in plan.layers if name not in modules]:
        raise CheckpointError(f"the checkpoint has layers that the model lacks: {', '.join(missing)}")
    for name, entry in plan.layers.items():
        _check_layer(modules[name], name, entry)
    check_sites(modules, plan.sites)


def restore_plan(model: nn.Module, plan: Plan) -> None:
    """Turn layers of a float model into their quantized forms, and make its sites, as a checked plan says."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for name, entry in plan.layers.items():
        _restore_layer(modules[name], entry, name)
    restore_sites(model, plan)
    share_learned(model)
    leave_fast_paths(model)
    share_mesh(model)


def settle(model: nn.Module, plan: Plan) -> None:
    """Finish a model that has a plan, and whose tensors something else has loaded.

    Raises:
        CheckpointError: scales or zero points that no call would take.
    """
    share_learned(model)
    check_ranges(dict(model.named_modules()), plan, model.state_dict(), is_wide(model))
    _note(model, plan)


def _check_fixed_codes(model: nn.Module) -> None:
    for path, weight in quantized_weights(model).items():
        if weight.quantizer.fixed_codes is None or is_sharded(weight.tensor):  # the first call compares the whole one
            continue
        if not weight.has_fixed_codes:
            raise CheckpointError(
                f"the checkpoint is damaged: the codes that {path} holds have other values than the weight in it"
            )


def _note(model: nn.Module, plan: Plan) -> None:
    note_weights(model, plan.stale)
    warn_stale_scales(model)


def _tensors(model: nn.Module, state: QuantizedState) -> dict[str, Tensor]:
    """The state dict of a state, checked."""
    modules, tensors = dict(model.named_modules()), dict(state.tensors)
    coded = {name: state.weights[name] for name in state.weights if name not in tensors}
    for name, source in state.shared.items():
        if name in tensors or (source not in tensors and source not in coded):
            raise CheckpointError(f"the checkpoint is damaged: {name} shares no tensor of it")
    readers: dict[str, list[str]] = {}
    for path, name in weight_places(modules, state).items():
        readers.setdefault(state.shared.get(name, name), []).append(path)
    entries = {path: entry for path, _, entry in state.quantizers()}
    for name, weight in coded.items():
        held = {path: entries[path] for path in readers.get(name, [])}
        if unknown := set(weight.quantizers) - set(entries):
            raise CheckpointError(
                f"the checkpoint is damaged: {name} names the quantizer {min(unknown)}, which it lacks"
            )
        own = [path for path, entry in held.items() if entry.is_static and entry.tensor.spec == weight.spec]
        if not own:
            raise CheckpointError(_no_reader(name, weight, held))
        _check_codes(name, weight)
        stored = ("scale", weight.scale), ("zero_point", weight.zero_point), (KEY, as_integers(weight.codes))
        for path, (key, value) in product(own, stored):
            if value is not None:
                tensors.setdefault(f"{path}.{key}", value)
        if not any(is_same(weight.scale, tensors[f"{path}.scale"]) for path in own):
            raise CheckpointError(f"the checkpoint is damaged: {own[0]} has other scales than the codes of {name}")
    codes = {name: weight.codes for name, weight in coded.items()}
    check_ranges(modules, state, _with_shared(state, {**tensors, **codes}), is_wide(model))
    shards: dict[str, Tensor] = model.state_dict() if first_sharded(model) else {}
    parts = {name: part_like(shards.get(name), value) for name, value in tensors.items()}
    # One weight at a time is whole in floats.
    parts |= {name: part_like(shards.get(name), weight.values()) for name, weight in coded.items()}
    return _with_shared(state, parts)


def _no_reader(name: str, weight: WeightCodes, held: Mapping[str, QuantizerEntry]) -> str:
    shown = ", ".join(f"{path} is {entry.tensor}" for path, entry in held.items())
    return (
        f"the checkpoint has codes of {name} as {weight.spec} with fixed scales, but no quantizer of it is that: "
        f"{shown or 'no layer and no function of its plan reads it'}"
    )


def _check_codes(name: str, weight: WeightCodes) -> None:
    try:
        weight.check()
    except (ShapeError, QParamsError) as error:
        raise CheckpointError(f"the checkpoint is damaged: the codes of {name} {error}") from error


def _with_shared(state: QuantizedState, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {name: tensors[source] for name, source in state.shared.items()}


def _load_state(model: nn.Module, state: QuantizedState, tensors: dict[str, Tensor]) -> None:
    # A function of its own: CPython 3.11 does not protect the line of a `try` inside another one from interrupts.
    own = {name: value.dtype for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        dtype = own.get(name, value.dtype)
        if dtype != value.dtype and not (dtype.is_floating_point and value.dtype.is_floating_point):
            raise CheckpointError(
                f"the checkpoint does not fit the model: {name} is stored as {value.dtype}, and the model has {dtype}"
            )
    versions = versions_of(model) if state.versions is None else state.versions
    given = OrderedDict(tensors)
    paths = [name for name, _ in model.named_modules(remove_duplicate=False)]
    vars(given)["_metadata"] = OrderedDict((name, {"version": versions.get(name, 1)}) for name in paths)
    try:
        model.load_state_dict(given)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint does not fit the model: {error}") from error


def _check_memory(model: nn.Module) -> None:
    """Raise where torch would silently ignore the tensors of a checkpoint."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise CheckpointError(
                f"the model has parameters on the meta device, which hold no values, the first is {name}; build it on "
                'a device, or call model.to_empty(device="cpu") before load'
            )


def _check_layer(layer: nn.Module, name: str, entry: LayerEntry) -> None:
    """Raise where a layer is not what its entry says."""
    cls = own_class(layer)
    if cls.__name__ != entry.type:
        raise CheckpointError(f"the checkpoint's layer {name} is a {entry.type}, the model's is a {cls.__name__}")
    quantized = quantized_class(layer)
    if quantized is None:
        raise CheckpointError(
            f"the model's layer {name} is a {cls.__module__}.{cls.__name__}, which has no quantized form; import "
            "what registers it (fakequant.nn.quantizes) before load"
        )
    if entry.quantizers and bypasses_class(layer):
        raise CheckpointError(
            f"the model's layer {name} has a forward of its own (a hook's), which would bypass "
            "the quantizers; remove the hook before load"
        )
    names = quantized.operands(layer)
    if unknown := sorted(set(entry.quantizers) - set(names)):
        raise CheckpointError(
            f"the checkpoint's layer {name} has quantizers {', '.join(unknown)}, but a {cls.__name__} has "
            f"{', '.join(names)}; it is damaged, or of a later version of fakequant"
        )
    try:
        quantized.check(layer)
        _make_transform(layer, entry)
        _check_low_rank(layer, quantized, entry.low_rank)
    except ConfigError as error:
        raise CheckpointError(f"the model's layer {name} cannot be quantized: {error}") from error


def _check_low_rank(layer: nn.Module, quantized: type[QuantizedLayer], rank: int) -> None:
    weights = weights_of(layer)
    if rank and not (issubclass(quantized, QuantLinear) and weights and rank <= min(weights[0].shape)):
        raise ConfigError(f"a product of rank {rank} beside its weight does not fit it")


def _restore_layer(layer: nn.Module, entry: LayerEntry, name: str) -> None:
    """Turn a float layer into its quantized form as its entry in a plan says."""
    attach(layer, {attribute: quantizer.tensor for attribute, quantizer in entry.quantizers.items()}, name)
    if isinstance(layer, QuantizedLayer):
        layer.execution, layer.gradient = entry.execution, entry.gradient
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
