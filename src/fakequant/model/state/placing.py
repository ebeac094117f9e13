"""Put the tensors of a state into a model: each tensor is read when it is copied, and only this process's part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from fakequant.data.arguments import check_model
from fakequant.distributed import is_sharded, parallel_parameters
from fakequant.errors import CheckpointError, ConfigError, QParamsError, ShapeError
from fakequant.memory import fetched_state
from fakequant.model.sites import site_path
from fakequant.model.state.plan import Plan, QuantizerEntry, SiteQuantizerEntry
from fakequant.model.state.snapshots import LazyTensor
from fakequant.model.weights import give_values, in_eval_mode
from fakequant.nn.paths import join
from fakequant.nn.quantized.forms import quantized_class
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import KEY
from fakequant.nn.ranges import GLOBAL_SCALE, LearnedRange, QuantizerPart, check_global_scale
from fakequant.nn.sharded import check_parts
from fakequant.nn.stored import StoredWeight, with_stored
from fakequant.nn.transforms import first_weights
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.numerics.formats.floats import check_codes, integers_of, of_integers
from fakequant.numerics.qparams import check_scale
from fakequant.numerics.spec import QuantSpec
from fakequant.text import listed

_OUTLINE = frozenset(
    [
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "is_meta", "ndim", "requires_grad")
    ]
    + [Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__]
)
"""Functions that need no values of a tensor."""
_READS = frozenset([Tensor.copy_, Tensor.clone, torch.clone, torch.empty_like])
"""Functions that read values, and return nothing that shares their memory."""


class Placed(Tensor):
    """A lazy tensor on the device of its place in a model: its values are read anew whenever they are copied.

    Any other operation, for example in a module's hook, may write values: it works on a copy, which is then stored.

    Args:
        source: the shape, the dtype, and a function that reads the whole tensor.
        device: the device of the values.
        make: reads the part that the model holds, by default the whole tensor.
    """

    source: LazyTensor
    error: Exception | None
    """The exception of the last read."""
    _make: Callable[[], Tensor]
    _own: Tensor | None

    @staticmethod
    def __new__(cls: Any, source: LazyTensor, device: torch.device, make: Callable[[], Tensor] | None = None) -> Placed:
        made = Tensor._make_wrapper_subclass(cls, source.shape, dtype=source.dtype, device=device)  # type: ignore[attr-defined]
        made.source, made.error, made._make, made._own = source, None, make or source.make, None
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def values(self) -> Tensor:
        """The values on the device; a DTensor if the tensor of the model is sharded."""
        if self._own is not None:
            return self._own
        try:
            return self._make().to(self.device)
        except Exception as error:
            self.error = error
            raise

    def own(self) -> Tensor:
        """A copy of the values that is made at the first call; later calls return the same copy."""
        if self._own is None:
            self._own = self.values().clone()
        return self._own

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _OUTLINE:
            return super().__torch_function__(function, types, args, kwargs or {})
        is_read = function in _READS and not (function is Tensor.copy_ and isinstance(args[0], Placed))
        args, kwargs = tree_map_only(Placed, Placed.values if is_read else Placed.own, (args, kwargs or {}))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Placed, Placed.own, (args, kwargs or {}))
        return function(*args, **kwargs)


def copy_kept(model: nn.Module) -> None:
    """Replace each `Placed` that a module stored, for example by `set_extra_state`, by a copy of its values."""
    for module in model.modules():
        for held in (vars(module), module._parameters, module._buffers):
            held |= {key: value.own() for key, value in held.items() if isinstance(value, Placed)}


def local_shard(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds; the whole tensor if it is not sharded."""
    values = tensor.values() if isinstance(tensor, Placed) else tensor
    return cast("Any", values).to_local() if is_sharded(values) else values


class Places:
    """The devices and shards of a float model for the tensors of a state.

    Args:
        weights: for the path of each weight's quantizer, the path of the weight.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, str]) -> None:
        self._own = {name: one for name, one in model.state_dict().items() if isinstance(one, Tensor)}
        self._weights = weights
        self._parallel = parallel_parameters(model)
        self._devices: dict[str, torch.device] = {}
        for name, tensor in chain(model.named_parameters(remove_duplicate=False), model.named_buffers()):
            for end in range(name.count(".") + 1):
                self._devices.setdefault(".".join(name.split(".")[:end]), _home(tensor))

    def check(self, plan: Plan) -> None:
        """Check that layers that are split over processes can be quantized.

        Raises:
            CheckpointError: the split cuts through blocks, or a split layer has a transform that needs the whole input.
        """
        for path, _, entry in plan.quantizers():
            name = self._weights.get(path, "")
            if (axes := self._parallel.get(name)) is not None:
                try:
                    check_parts(path, entry.tensor.spec, self._own[name], axes)
                except ConfigError as error:
                    raise CheckpointError(str(error)) from error
        for path, layer in plan.layers.items():
            if layer.transform and any(
                self._parallel.get(self._weights.get(join(path, one), "")) is not None for one in layer.quantizers
            ):
                raise CheckpointError(
                    f"the checkpoint's layer {path} transforms its input and needs the whole input, but "
                    "parallelize_module split the layer; leave the layer out of parallelize_plan"
                )

    def placed(self, name: str, source: LazyTensor) -> Placed:
        """A tensor of the state on the device of its place in the model, sharded like the model's tensor."""
        path, _, key = name.rpartition(".")
        weight = self._weights.get(path, "") if key == KEY else ""
        own = self._own.get(weight if weight in self._parallel else name)
        if own is None:
            while path and path not in self._devices:  # that of the nearest module around a quantizer
                path = path.rpartition(".")[0]
            return Placed(source, self._devices.get(path, torch.device("cpu")))
        device = _home(own)
        if not is_sharded(own) or tuple(own.shape) != source.shape:
            return Placed(source, device)
        return Placed(source, device, partial(_part_of, source, own, device))


def _part_of(source: LazyTensor, own: Any, device: torch.device) -> Tensor:
    """A DTensor of `source` with the shards of `own`; this process reads only its part."""
    from torch.distributed.tensor import DTensor

    (chunk,) = own.__create_chunk_list__()
    region = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    part = source.part(region) if chunk.sizes.numel() else torch.empty(chunk.sizes, dtype=source.dtype, device="cpu")
    mesh, placements = own.device_mesh, own.placements
    local = part.to(device)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=own.shape, stride=own.stride())


def _home(tensor: Tensor) -> torch.device:
    """The device of a tensor; for a meta tensor, the device on which the tensor will get memory."""
    if not tensor.is_meta:
        return tensor.device
    if is_sharded(tensor):
        return torch.device(cast("Any", tensor).device_mesh.device_type)
    return torch.get_default_device()


def check_values(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Check that a state replaces all tensors of a model that are on the meta device.

    Raises:
        CheckpointError: the state lacks such tensors, which are named.
    """
    empty = [(join(path, key), tensor) for path, _, key, tensor in _empty(model)]
    if any(_home(tensor).type == "meta" for _, tensor in empty):
        raise CheckpointError(
            "load is called in a context of the meta device, where tensors hold no values; call load outside of it"
        )
    given = [_extent(tensor) for name, tensor in empty if name in tensors]
    others = ((name, _extent(tensor)) for name, tensor in empty if name not in tensors)
    left = [
        name for name, (own, start, end) in others if not any(a <= start and end <= b and c == own for c, a, b in given)
    ]
    if left:
        sizes = [
            f"{name} has shape {list(tensors[name].shape)} there and {list(tensor.shape)} in the model"
            for name, tensor in empty
            if name in tensors and tensors[name].shape != tensor.shape
        ]
        raise CheckpointError(
            f"the model has tensors on the meta device, which hold no values, and the checkpoint lacks {listed(left)}; "
            "build these tensors on a device before load (buffers with persistent=False are in no checkpoint)"
            f"{'; ' if sizes else ''}{listed(sizes)}"
        )


def check_attributes(model: nn.Module) -> None:
    """Check that no attribute of a module, except parameters and buffers, holds a tensor on the meta device.

    Raises:
        CheckpointError: some attributes, which are named, hold such tensors.
    """
    held = ((path, name, value) for path, one in model.named_modules() for name, value in _attributes(one).items())
    left = [
        join(path, name)
        for path, name, value in held
        if any(isinstance(one, Tensor) and one.is_meta for one in tree_leaves(value))
    ]
    if left:
        raise CheckpointError(
            f"the model has tensors on the meta device, which hold no values, in the attributes {listed(left)}; build "
            "them on a device before load (tensors that are neither parameters nor buffers are in no checkpoint)"
        )


def give_memory(model: nn.Module) -> bool:
    """Replace the meta tensors of a model by empty tensors with memory; tensors that share memory still do.

    Returns:
        Whether the model had meta tensors.
    """
    memory, made = dict[int, Any](), dict[int, Tensor]()
    empty = _empty(model)
    for _, held, key, tensor in empty:
        if id(tensor) not in made:
            kind, device = type(tensor), _home(tensor)
            if not _has_storage(tensor):
                new: Tensor = torch.empty_like(tensor, device=device)
                new = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            else:
                storage = tensor.untyped_storage()
                if storage._cdata not in memory:
                    whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
                    memory[storage._cdata] = whole.untyped_storage()
                plain = torch.empty(0, dtype=tensor.dtype, device=device)
                plain.set_(memory[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
                new = Tensor._make_subclass(kind, plain, tensor.requires_grad)  # type: ignore[attr-defined]
            vars(new).update(vars(tensor))
            made[id(tensor)] = new
        held[key] = made[id(tensor)]
    for module in model.modules():  # such as the list of weights that an LSTM keeps
        for key, value in _attributes(module).items():
            if any(id(one) in made for one in tree_leaves(value)):
                vars(module)[key] = tree_map_only(Tensor, lambda one: made.get(id(one), one), value)
    return bool(empty)


def _empty(model: nn.Module) -> list[tuple[str, dict[str, Any], str, Tensor]]:
    """For each parameter and buffer on the meta device: the module's path, the dict with the tensor, and its key."""
    modules = model.named_modules(remove_duplicate=False)
    held = ((path, own) for path, module in modules for own in (module._parameters, module._buffers))
    return [(path, own, key, one) for path, own in held for key, one in own.items() if one is not None and one.is_meta]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module except its parameters, buffers and submodules."""
    return {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """The id of a meta tensor's storage, and the bytes at which the tensor begins and ends in it."""
    if not _has_storage(tensor):
        return id(tensor), 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = int(tensor.storage_offset()), int(last) + 1 if tensor.numel() else 0
    return tensor.untyped_storage()._cdata, start * tensor.itemsize, (start + size) * tensor.itemsize


@accepts_wrapped_model
def float_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a prepared model without its quantizers: the float model loads it with `strict=True`.

    Transforms of inputs (`improve`'s "smooth" and "rotate") are undone in the weights, up to rounding.

    A prepared model also loads a state dict of the float model by `load_state_dict` with `strict=True`: its quantizers
    keep their ranges.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> used = calibrate(model, [torch.ones(1, 4)])
    >>> nn.Sequential(nn.Linear(4, 4)).load_state_dict(float_state_dict(model))
    <All keys matched successfully>
    """
    check_model(model, "float_state_dict", "float_state_dict(model)")
    give_values(model)
    state = with_stored(model, fetched_state(model))
    state.update({name: own.values() for name, own in state.items() if type(own) is StoredWeight})
    added = {name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, QuantizerPart)}
    for name, module in model.named_modules(remove_duplicate=False):
        transform = module.input_transform if isinstance(module, QuantizedLayer) else None
        if transform is not None:
            for path in (join(name, own) for own in first_weights(module)):
                state[path] = transform.out_of_weight(module, state[path].detach())
            added.add(join(name, "_input_transform"))
    for names in (state, getattr(state, "_metadata", {})):
        for name in [*names]:
            parts = name.split(".")
            if any(".".join(parts[:count]) in added for count in range(len(parts) + 1)):
                del names[name]
    return state


def weight_places(modules: Mapping[str, nn.Module], plan: Plan) -> dict[str, str]:
    """For the path of each weight's quantizer in a plan: the path of the weight."""
    found: dict[str, str] = {}
    for path, layer in plan.layers.items():
        module = modules[path]
        form = type(module) if isinstance(module, QuantizedLayer) else quantized_class(module)
        operands = {} if form is None else form.operands(module)
        found |= {join(path, name): join(path, operands[name].weight) for name in layer.quantizers if name in operands}
    for path, owner in plan.sites.owners.items():
        for key, site in owner.sites.items():
            found |= {f"{site_path(path, key)}.{name}": join(path, place) for name, place in site.weights.items()}
    return {quantizer: place for quantizer, place in found.items() if not place.endswith(".") and place}


def check_ranges(modules: Mapping[str, nn.Module], plan: Plan, tensors: Mapping[str, Tensor], wide: bool) -> None:
    """Check that the quantizers of a plan accept the scales, zero points, learned ranges and codes in `tensors`.

    Args:
        tensors: the tensors of the state; for a weight stored as codes, any tensor of its shape.
        wide: whether the model computes in float64.

    Raises:
        CheckpointError: a quantizer refuses or lacks a tensor, or a tensor does not fit the layer's weight.
    """
    by_quantizer: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        words = key.split(".")
        for end in range(1, len(words)):
            by_quantizer.setdefault(".".join(words[:end]), {})[".".join(words[end:])] = tensor
    places = weight_places(modules, plan)
    for path, _, entry in plan.quantizers():
        # Its own weight, because a model of other shapes is another architecture, which torch says better.
        weight: object = tensors.get(places.get(path, ""))
        above, _, name = places.get(path, "").rpartition(".")
        if weight is None and path in places and (owner := modules.get(above)) is not None:
            with in_eval_mode(owner):  # a parametrization computes it; a spectral norm makes a step in training
                weight = getattr(owner, name, None)
        held = {key: one if key == KEY else local_shard(one) for key, one in by_quantizer.get(path, {}).items()}
        try:
            # A function may compute in float64 whatever the parameters are.
            _check_quantizer(entry, held, weight, wide or isinstance(entry, SiteQuantizerEntry))
        except (QParamsError, ShapeError) as error:
            raise CheckpointError(
                f"the checkpoint's quantizer {path} cannot be used: {error}. The state is damaged, or it is no "
                "snapshot of a model"
            ) from error


def is_wide(model: nn.Module) -> bool:
    """Whether a model has a float64 parameter or buffer, or no float tensor at all."""
    dtypes = {t.dtype for t in chain(model.parameters(), model.buffers()) if t.is_floating_point()}
    return not dtypes or torch.float64 in dtypes


def _check_quantizer(entry: QuantizerEntry, held: dict[str, Tensor], weight: object, wide: bool) -> None:
    spec, learned = entry.tensor.spec, entry.make_learned()
    if (codes := held.pop(KEY, None)) is not None:
        expected = integers_of(spec.format)
        if codes.dtype is not expected:
            raise QParamsError(f"{KEY} are {codes.dtype}, but codes of {spec.format} are stored as {expected}")
        try:
            if isinstance(weight, Tensor) and weight.shape != codes.shape:
                raise ShapeError(f"are of shape {list(codes.shape)}, but the weight of shape {list(weight.shape)}")
            part = local_shard(codes)
            check_codes(of_integers(part, spec.format), tuple(part.shape), spec.format)
        except (QParamsError, ShapeError) as error:
            raise type(error)(f"{KEY} {error}") from error
    if learned is not None:
        _check_learned(spec, learned, held, weight, wide)
        return
    if entry.tensor.dynamic and (global_scale := held.pop(GLOBAL_SCALE, None)) is not None:
        check_global_scale(global_scale, spec)
    if unknown := sorted(set(held) - {"scale", "zero_point"}):
        raise QParamsError(f"it holds {', '.join(unknown)}, but learns no range")
    scale, zero_point = held.get("scale"), held.get("zero_point")
    if scale is None:
        if zero_point is not None:
            raise QParamsError("it has a zero point, but no scale")
        return
    _check_dtype("scale", scale, wide)
    check_scale(scale, spec.arithmetic, exact=spec.scale.is_exact, signed=spec.has_signed_scales)
    if zero_point is not None:
        if zero_point.shape != scale.shape:
            raise ShapeError(f"zero_point has shape {list(zero_point.shape)}, but scale has {list(scale.shape)}")
        _check_zero_point(spec, zero_point)
    elif not spec.symmetric:
        raise QParamsError(f"it lacks zero_point, which {spec} needs")
    if entry.by_value is not None:
        count = len(entry.by_value.boundaries) + 1
        if scale.dim() < 2 or len(scale) != count:
            raise ShapeError(f"scale has shape {list(scale.shape)}, not a scale for each of {count} bins of values")
        scale = scale[0]
    _check_shape(spec, "scale", scale, weight)


def _check_learned(
    spec: QuantSpec, learned: LearnedRange, held: Mapping[str, Tensor], weight: object, wide: bool
) -> None:
    prefix = f"{learned.method}."
    if unknown := sorted(key for key in held if not key.startswith(prefix)):
        raise QParamsError(f"it holds {', '.join(unknown)}, but learns its range by {learned.method!r}")
    # A symmetric specification has no offset: the first name alone is needed.
    for key in learned.names[:1] if spec.symmetric else learned.names:
        if prefix + key not in held:
            raise QParamsError(f"it lacks {key}, which the method {learned.method!r} needs")
    for key in learned.names:
        if (parameter := held.get(prefix + key)) is not None:
            _check_dtype(key, parameter, wide)
            if not bool(parameter.isfinite().all()):
                raise QParamsError(f"{key} must be finite in every group")
            if learned.by_group:
                _check_shape(spec, key, parameter, weight)
    if (zero_point := held.get(prefix + "zero_point")) is not None:
        _check_zero_point(spec, zero_point)


def _check_dtype(name: str, value: Tensor, wide: bool) -> None:
    if value.dtype is torch.float64 and not wide:
        raise QParamsError(
            f"{name} is float64, but the model does not compute in float64; call model.double() before load"
        )
    if value.dtype not in (torch.float32, torch.float64):
        raise QParamsError(f"{name} must be float32, got a tensor of {value.dtype}")


def _check_zero_point(spec: QuantSpec, zero_point: Tensor) -> None:
    if spec.symmetric:
        raise QParamsError(f"it has a zero point, but {spec} is symmetric")
    if zero_point.dtype is torch.bool or zero_point.is_complex():
        raise QParamsError(f"zero_point must be int32, got a tensor of {zero_point.dtype}")
    exact, fmt = zero_point.double(), spec.format
    if spec.offset is not None:
        if not bool(exact.isfinite().all()):
            raise QParamsError(f"zero_point, the offset of {spec}, must be finite in every group")
        return
    good = (exact >= fmt.quant_min) & (exact <= fmt.quant_max) & (exact == exact.round())
    if not bool(good.all()):
        raise QParamsError(
            f"zero_point must be a code of {fmt}, {fmt.quant_min:g} to {fmt.quant_max:g}, in every group, "
            f"got {exact[~good][0].item()}"
        )


def _check_shape(spec: QuantSpec, name: str, value: Tensor, weight: object) -> None:
    """Raise ShapeError if `value` [groups] does not fit the weight; without a weight, if `value` fits no tensor."""
    if isinstance(weight, Tensor):
        expected = spec.granularity.group_shape(weight.shape)
        if tuple(value.shape) != expected and not value.numel() == 1 == math.prod(expected):
            raise ShapeError(
                f"{name} has shape {list(value.shape)}, but {spec.granularity} on the weight of shape "
                f"{list(weight.shape)} needs {list(expected)}"
            )
    elif spec.granularity.keeps_whole_axes and spec.granularity.group_shape(value.shape) != tuple(value.shape):
        raise ShapeError(
            f"{name} has shape {list(value.shape)}, which {spec.granularity} gives for no tensor; the checkpoint is "
            "damaged"
        )
