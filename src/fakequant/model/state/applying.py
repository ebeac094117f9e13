"""Put a quantized state into a float model; most checks come before the model changes, and errors undo all changes."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fakequant.data.arguments import check_model
from fakequant.distributed import Ranks, first_sharded, is_sharded, parallel_group, processes_of, refuse_offloaded
from fakequant.errors import CheckpointError, ConfigError, QParamsError, ShapeError
from fakequant.functional import quantize
from fakequant.model.calibrate import follow_values
from fakequant.model.prepare import attach
from fakequant.model.state.placing import (
    Placed,
    Places,
    check_attributes,
    check_ranges,
    check_values,
    copy_kept,
    give_memory,
    is_wide,
    weight_places,
)
from fakequant.model.state.plan import LayerEntry, Plan, check_sites, restore_sites
from fakequant.model.state.snapshots import LazyTensor, QuantizedState, lazy, versions_of
from fakequant.model.state.weight_codes import WeightCodes, uncoded
from fakequant.model.summary import note_floats
from fakequant.model.weights import (
    mark_ranges_current,
    quantized_weights,
    share_after_loading,
    share_learned,
    warn_stale_scales,
)
from fakequant.nn.quantized.forms import bypasses_class, own_class, quantized_class
from fakequant.nn.quantized.layers import QuantizedLayer, leave_fast_paths
from fakequant.nn.quantizer import KEY, Quantizer, is_same, quantizers
from fakequant.nn.sharded import share_mesh
from fakequant.nn.transforms import InputTransform, make_transform
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.numerics.formats.floats import as_integers, integers_of
from fakequant.restore import in_order, state_of

Model = TypeVar("Model", bound=nn.Module)


@accepts_wrapped_model
def apply(model: Model, state: QuantizedState) -> Model:
    """Put a quantized state into a fresh float model of the same architecture, in place; the model is returned.

    Most checks come before the model changes. After a later error the changes are undone; for this, the call stores the
    model's values on the CPU. A model on the meta device has no values: it gets memory on torch's default device,
    without a second copy; tensors that share memory share it afterwards, too. If `fully_shard` or `parallelize_module`
    splits the model, each process sets its part: all processes must call `apply`, and an error of one process is raised
    in all.

    Raises:
        CheckpointError: the state has another architecture, or scales, zero points or codes that a quantizer refuses;
            blocks are split between processes; the model is prepared; or the state lacks a tensor that the model has on
            the meta device.
        Exception: a module's own `_load_from_state_dict` failed. After every error the model is unchanged.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), "int8_weight_only")
    >>> again = apply(nn.Sequential(nn.Linear(4, 4)), snapshot(model))
    >>> torch.equal(again(torch.ones(4)), model(torch.ones(4)))
    True
    """
    check_model(model, "apply", "apply(model, state)", CheckpointError)
    return apply_from(model, lambda _: (state, ""))


@accepts_wrapped_model
def apply_from(model: Model, read: Callable[[bool], tuple[QuantizedState, str]]) -> Model:
    """Call `apply` with the state that `read` returns; an error of `read` in one process is raised in all processes.

    Args:
        read: returns the state, and a digest of its values or "". Its argument is True in the first process, where
            `read` may check more.

    Raises:
        CheckpointError: the processes read different checkpoints; or for the reasons of `apply`.
    """
    undo = in_order()
    try:
        with Ranks(processes_of(model, None) if first_sharded(model) else None, CheckpointError) as processes:
            if quantizers(model):
                raise CheckpointError(
                    "load expects a fresh float model, but this model is already prepared; build a new float model"
                )
            refuse_offloaded(model, "load the checkpoint into")
            state, content = read(processes.group is None or processes.group.rank() == 0)
            check_plan(model, state)
            places = Places(model, weight_places(dict(model.named_modules()), state))
            places.check(state)
            learns = any(entry.learned for _, _, entry in state.quantizers())
            if learns and parallel_group(model) is None and (name := first_sharded(model)):
                raise CheckpointError(
                    f"the checkpoint has learned scales, which fully_shard must know as parameters, but the model is "
                    f"already sharded (the first weight is {name}); load before fully_shard, or fix the scales before "
                    "save by fakequant.qat.set_scales(model, fakequant.qat.Scales.FIXED)"
                )
            tensors = _tensors(model, state, places)
            _check_dtypes(model, tensors)
            check_values(model, tensors)
            processes.same(outline_of(tensors, [state.plan, content]), "read different checkpoints")
            undo = state_of([model], "cpu")  # the CPU, because a GPU may have no room for a second copy
            was_empty = give_memory(model)
            restore_plan(model, state)
            _check_dtypes(model, tensors)  # those of quantizers, too
            versions = versions_of(model) if state.versions is None else state.versions
            given = OrderedDict(tensors)
            paths = [name for name, _ in model.named_modules(remove_duplicate=False)]
            vars(given)["_metadata"] = OrderedDict((name, {"version": versions.get(name, 1)}) for name in paths)
            try:
                model.load_state_dict(given)
                copy_kept(model)
            except RuntimeError as error:
                for value in tensors.values():
                    if isinstance(value, Placed) and value.error is not None:  # which torch made a part of its message
                        raise value.error from None
                raise CheckpointError(f"the checkpoint does not fit the model: {error}") from error
            if was_empty:
                check_attributes(model)
            processes.all(None)
            for path, weight in quantized_weights(model).items():
                codes = weight.quantizer.fixed_codes
                if codes is None or (is_sharded(weight.tensor) and not is_sharded(codes)):
                    continue  # the first call compares the whole
                if is_sharded(codes):
                    spec, tensor = weight.quantizer.spec, weight.tensor
                    with torch.no_grad():
                        scale, zero_point = weight.quantizer.qparams(tensor)[:2]
                        again: Any = as_integers(quantize(tensor, spec, scale=scale, zero_point=zero_point)[0])
                    if not torch.equal(again.to_local(), cast("Any", codes).to_local()):  # the part of this process
                        raise CheckpointError(
                            f"the weight of {path}, quantized again, has other codes than the checkpoint, and a layer "
                            "that parallelize_module splits quantizes its weight again; leave this layer out of "
                            "parallelize_plan"
                        )
                elif not weight.has_fixed_codes:
                    raise CheckpointError(
                        f"the checkpoint is damaged: the codes of the quantizer {path} give other values than the "
                        "stored weight"
                    )
            _note(model, state)
        return model
    except BaseException:
        undo()
        raise


def outline_of(tensors: Mapping[str, Any], plan: Any) -> str:
    """A digest of a plan and of the names, dtypes and shapes of tensors, without their values."""
    held = {name: [str(one.dtype), list(one.shape)] for name, one in tensors.items() if isinstance(one, Tensor)}
    return hashlib.sha256(json.dumps([plan, held]).encode()).hexdigest()


def check_plan(model: nn.Module, plan: Plan) -> None:
    """Raise CheckpointError if the modules of a float model are not the modules of a plan."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if missing := [name for name in plan.layers if name not in modules]:
        raise CheckpointError(
            f"the checkpoint has layers that the model lacks: {', '.join(missing)}; make the model that was saved"
        )
    for name, entry in plan.layers.items():
        layer = modules[name]
        cls = own_class(layer)
        if cls.__name__ != entry.type:
            raise CheckpointError(
                f"the checkpoint's layer {name} is a {entry.type}, the model's is a {cls.__name__}; make the model "
                "that was saved"
            )
        quantized = quantized_class(layer)
        if quantized is None:
            raise CheckpointError(
                f"the model's layer {name} is a {cls.__module__}.{cls.__name__}, which has no quantized form; import "
                "the module that registers this form (fakequant.nn.quantizes) before load"
            )
        if entry.quantizers and bypasses_class(layer):
            raise CheckpointError(
                f"the forward of the model's layer {name} was replaced, for example by a hook, so that calls would "
                "bypass the quantizers; remove the hook before load"
            )
        names = quantized.operands(layer)
        if unknown := sorted(set(entry.quantizers) - set(names)):
            raise CheckpointError(
                f"the checkpoint's layer {name} has quantizers {', '.join(unknown)}, but a {cls.__name__} has "
                f"{', '.join(names)}; the checkpoint is damaged, or of a later version of fakequant"
            )
        try:
            quantized.check(layer)
            _make_transform(layer, entry)
        except ConfigError as error:
            raise CheckpointError(f"the model's layer {name} cannot be quantized: {error}") from error
    check_sites(modules, plan.sites)


def restore_plan(model: nn.Module, plan: Plan) -> None:
    """Turn layers of a float model into their quantized forms, and add quantizers to functions, by a checked plan."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for name, entry in plan.layers.items():
        layer = modules[name]
        attach(layer, {attribute: quantizer.tensor for attribute, quantizer in entry.quantizers.items()}, name)
        if isinstance(layer, QuantizedLayer):
            layer.execution, layer.gradient = entry.execution, entry.gradient
            if (transform := _make_transform(layer, entry)) is not None:
                layer.add_module("_input_transform", transform)
        for attribute, stored in entry.quantizers.items():
            quantizer: Quantizer = getattr(layer, attribute)
            quantizer.mode, quantizer.by_value = stored.mode, stored.make_by_value()
            if (learned := stored.make_learned()) is not None:
                quantizer.attach_learned(learned)
    restore_sites(model, plan)
    share_after_loading(model)
    leave_fast_paths(model)
    share_mesh(model)
    follow_values(model)


def finish_loading(model: nn.Module, plan: Plan) -> None:
    """Finish a model of `restore_plan` after another loader set its tensors: check ranges, and share learned ranges.

    Raises:
        CheckpointError: a quantizer does not accept its scales or zero points.
    """
    share_learned(model)
    check_ranges(dict(model.named_modules()), plan, model.state_dict(), is_wide(model))
    _note(model, plan)


def _note(model: nn.Module, plan: Plan) -> None:
    mark_ranges_current(model, plan.stale)
    note_floats(model)
    warn_stale_scales(model)


def _tensors(model: nn.Module, state: QuantizedState, places: Places) -> dict[str, Placed]:
    """The checked state dict for `load_state_dict`; each tensor is read from the state when it is copied."""
    modules = dict(model.named_modules())
    tensors = {name: lazy(state.tensors, name) for name in state.tensors}
    coded = {name: uncoded(state.weights, name) for name in state.weights if name not in tensors}
    codes, scales = _Codes(state.weights), dict[str, tuple[list[str], Tensor]]()
    for name, source in state.shared.items():
        if source not in tensors and source not in coded:
            raise CheckpointError(
                f"the checkpoint is damaged: {name} should share the tensor {source}, which the checkpoint lacks; "
                "save the model again"
            )
        if name in tensors:
            raise CheckpointError(
                f"the checkpoint is damaged: it lists {name} as shared with {source}, and also stores it as a "
                "separate tensor; save the model again"
            )
    readers: dict[str, list[str]] = {}
    for path, name in weight_places(modules, state).items():
        readers.setdefault(state.shared.get(name, name), []).append(path)
    entries = {path: entry for path, _, entry in state.quantizers()}
    for name, weight in coded.items():
        if unknown := set(weight.quantizers) - set(entries):
            raise CheckpointError(
                f"the checkpoint is damaged: {name} names the quantizer {min(unknown)}, which the checkpoint lacks; "
                "save the model again"
            )
        held = {path: entries[path] for path in readers.get(name, [])}
        own = [path for path, entry in held.items() if entry.is_static and entry.tensor.spec == weight.spec]
        if not own:
            shown = ", ".join(f"{path} is {entry.tensor}" for path, entry in held.items())
            raise CheckpointError(
                f"the checkpoint has codes of {name} as {weight.spec} with fixed scales, but no quantizer of this "
                f"weight has this specification: {shown or 'no layer and no function of the plan reads it'}"
            )
        if not weight.codes.is_meta:  # else they are checked when they are made
            _check_codes(name, weight)
        stored = {"scale": weight.scale, "zero_point": weight.zero_point}
        made = {key: LazyTensor.of(value) for key, value in stored.items() if value is not None}
        for path, (key, one) in product(own, (made | {KEY: codes.integers(name, weight)}).items()):
            tensors.setdefault(f"{path}.{key}", one)
        scales[name] = own, weight.scale
        coded[name] = replace(weight, codes=weight.codes.to("meta"))
    tensors |= {name: codes.values(name, weight) for name, weight in coded.items()}
    found = {name: places.placed(name, tensor) for name, tensor in tensors.items()}
    found |= {name: found[source] for name, source in state.shared.items()}
    checked = {f"{path}.{KEY}" for own, _ in scales.values() for path in own} - {*state.tensors}  # with `_check_codes`
    check_ranges(modules, state, {name: one for name, one in found.items() if name not in checked}, is_wide(model))
    for name, (own, scale) in scales.items():
        if not any(is_same(scale, tensors[f"{path}.scale"].make()) for path in own):
            raise CheckpointError(
                f"the checkpoint is damaged: {own[0]} has other scales than the codes of {name}; save the model again"
            )
    return found


class _Codes:
    """Makes lazy tensors of weights. The codes of the last weight are kept, so that a weight is read only once."""

    def __init__(self, weights: Mapping[str, WeightCodes]) -> None:
        self._weights, self._last = weights, ("", cast("WeightCodes", None))

    def _of(self, name: str) -> WeightCodes:
        if self._last[0] != name:
            self._last = "", cast("WeightCodes", None)  # frees it
            self._last = name, self._weights[name]
            _check_codes(name, self._last[1])
        return self._last[1]

    def values(self, name: str, weight: WeightCodes) -> LazyTensor:
        """The values of a weight."""
        return LazyTensor(tuple(weight.shape), weight.dtype, lambda: self._of(name).values())

    def integers(self, name: str, weight: WeightCodes) -> LazyTensor:
        """The codes of a weight in the form that a quantizer stores."""
        kind = integers_of(weight.spec.format)
        return LazyTensor(tuple(weight.shape), kind, lambda: as_integers(self._of(name).codes))


def _check_codes(name: str, weight: WeightCodes) -> None:
    try:
        weight.check()
    except (ShapeError, QParamsError) as error:
        raise CheckpointError(f"the checkpoint is damaged: the codes of {name} {error}") from error


def _check_dtypes(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    own = {name: value.dtype for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        dtype = own.get(name, value.dtype)
        if dtype != value.dtype and not (dtype.is_floating_point and value.dtype.is_floating_point):
            raise CheckpointError(
                f"the checkpoint does not fit the model: {name} is stored as {value.dtype}, but the model has {dtype}; "
                "build the model with the dtypes that were saved"
            )


def _make_transform(layer: nn.Module, entry: LayerEntry) -> InputTransform | None:
    """The transform of a layer's input, or None; tensors of the checkpoint later set its buffers."""
    return None if entry.transform is None else make_transform(entry.transform.kind, layer, **entry.transform.options)
