"""Where a model wants the tensors of a state: each is read when it is put there, the part of this process alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from fakequant.distributed import is_sharded, parallel_parameters
from fakequant.errors import CheckpointError, ConfigError
from fakequant.model.state.plan import Plan
from fakequant.model.state.snapshots import LazyTensor
from fakequant.nn.paths import join
from fakequant.nn.ranges.fixed_codes import KEY
from fakequant.nn.ranges.sharded import check_parts
from fakequant.text import listed

_OUTLINE = frozenset(
    [
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "is_meta", "ndim", "requires_grad")
    ]
    + [Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__]
)
"""What needs no values."""
_READS = frozenset([Tensor.copy_, Tensor.clone, torch.clone, torch.empty_like])
"""What reads values, and gives nothing that has their memory."""


class Placed(Tensor):
    """A lazy tensor where a model wants it: its values are read when they are copied, and not kept.

    Every other operation, as a module's hook may call, works on a copy, which stays: it may be written into.

    Args:
        source: shape, dtype, and how the whole is read.
        device: where the values come.
        make: reads what the model holds of it, by default the whole.
    """

    source: LazyTensor
    error: Exception | None
    """What the last read raised."""
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
        """The values; of a tensor that processes share, a DTensor."""
        if self._own is not None:
            return self._own
        try:
            return self._make().to(self.device)
        except Exception as error:
            self.error = error
            raise

    def own(self) -> Tensor:
        """The values as a copy, which later operations get too."""
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
    """Give modules that kept a tensor of the state itself, as their own `set_extra_state` may, a copy of its values."""
    for module in model.modules():
        for held in (vars(module), module._parameters, module._buffers):
            held |= {key: value.own() for key, value in held.items() if isinstance(value, Placed)}


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    values = tensor.values() if isinstance(tensor, Placed) else tensor
    return cast("Any", values).to_local() if is_sharded(values) else values


class Places:
    """Where the tensors of a state belong in a float model.

    Args:
        model: in float, on any device, also the meta device.
        weights: where it holds the weights of quantizers, by the paths of these.
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
        """Raise where processes share layers out in a way in which these cannot be quantized.

        Raises:
            CheckpointError: they cut through blocks, or the layer has what works on the whole input alone.
        """
        for path, _, entry in plan.quantizers():
            name = self._weights.get(path, "")
            if (axes := self._parallel.get(name)) is not None:
                try:
                    check_parts(path, entry.tensor.spec, self._own[name], axes)
                except ConfigError as error:
                    raise CheckpointError(str(error)) from error
        for path, layer in plan.layers.items():
            what = "transforms its input" if layer.transform else "adds a product of low rank to its output"
            if (layer.transform or layer.low_rank) and any(
                self._parallel.get(self._weights.get(join(path, one), "")) is not None for one in layer.quantizers
            ):
                raise CheckpointError(
                    f"the checkpoint's layer {path} {what}, for which it needs the whole of it, and parallelize_module "
                    "shared it out; leave the layer out of its plan"
                )

    def placed(self, name: str, source: LazyTensor) -> Placed:
        """A tensor of the state as the model takes it."""
        path, _, key = name.rpartition(".")
        weight = self._weights.get(path, "") if key == KEY else ""
        own = self._own.get(weight if weight in self._parallel else name)
        device = self._device(path) if own is None else _home(own)
        if own is None or not is_sharded(own) or tuple(own.shape) != source.shape:
            return Placed(source, device)
        return Placed(source, device, partial(_part_of, source, own, device))

    def _device(self, path: str) -> torch.device:
        """That of the nearest module around a quantizer."""
        while path and path not in self._devices:
            path = path.rpartition(".")[0]
        return self._devices.get(path, torch.device("cpu"))


def _part_of(source: LazyTensor, own: Any, device: torch.device) -> Tensor:
    """A tensor as one that is shared out like another; this process reads its own part."""
    from torch.distributed.tensor import DTensor

    (chunk,) = own.__create_chunk_list__()
    region = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    part = source.part(region) if chunk.sizes.numel() else torch.empty(chunk.sizes, dtype=source.dtype)
    mesh, placements = own.device_mesh, own.placements
    local = part.to(device)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=own.shape, stride=own.stride())


def _home(tensor: Tensor) -> torch.device:
    """The device of a tensor; of one on the meta device, the one on which it gets memory."""
    if not tensor.is_meta:
        return tensor.device
    if is_sharded(tensor):
        return torch.device(cast("Any", tensor).device_mesh.device_type)
    return torch.get_default_device()


def check_values(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise where a model would have tensors on the meta device after it got those of a state.

    Raises:
        CheckpointError: it has others there.
    """
    empty = [(join(path, key), tensor) for path, _, key, tensor in _empty(model)]
    if any(_home(tensor).type == "meta" for _, tensor in empty):
        raise CheckpointError("load is called under the meta device, where tensors hold no values; call it outside")
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
            "build these on a device before load (buffers with persistent=False are in no checkpoint)"
            f"{'; ' if sizes else ''}{listed(sizes)}"
        )


def check_attributes(model: nn.Module) -> None:
    """Raise where modules hold tensors on the meta device that no load set, beside their parameters and buffers.

    Raises:
        CheckpointError: they do.
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
            "these on a device before load (tensors that are neither parameters nor buffers are in no checkpoint)"
        )


def give_memory(model: nn.Module) -> bool:
    """Replace the tensors of a model on the meta device by empty ones; those that share memory still do.

    Returns:
        whether there were any.
    """
    memory, made = dict[int, Any](), dict[int, Tensor]()
    empty = _empty(model)
    for _, held, key, tensor in empty:
        if id(tensor) not in made:
            made[id(tensor)] = _with_memory(tensor, memory)
        held[key] = made[id(tensor)]
    for module in model.modules():  # such as the list of weights that an LSTM keeps
        for key, value in _attributes(module).items():
            if any(id(one) in made for one in tree_leaves(value)):
                vars(module)[key] = tree_map_only(Tensor, lambda one: made.get(id(one), one), value)
    return bool(empty)


def _empty(model: nn.Module) -> list[tuple[str, dict[str, Any], str, Tensor]]:
    """The parameters and buffers on the meta device: the path of a module, what holds them there, and their key."""
    modules = model.named_modules(remove_duplicate=False)
    held = ((path, own) for path, module in modules for own in (module._parameters, module._buffers))
    return [(path, own, key, one) for path, own in held for key, one in own.items() if one is not None and one.is_meta]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module but its parameters, buffers and modules."""
    return {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """The memory that a tensor on the meta device would have, and where it begins and ends there in bytes."""
    if not _has_storage(tensor):
        return id(tensor), 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = int(tensor.storage_offset()), int(last) + 1 if tensor.numel() else 0
    return tensor.untyped_storage()._cdata, start * tensor.itemsize, (start + size) * tensor.itemsize


def _with_memory(tensor: Tensor, memory: dict[int, Any]) -> Tensor:
    """An empty tensor for one on the meta device.

    Args:
        tensor: on the meta device.
        memory: what was made for the memory of others; it gets that of this one.
    """
    kind, device = type(tensor), _home(tensor)
    if not _has_storage(tensor):
        made: Tensor = torch.empty_like(tensor, device=device)
        made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    else:
        key, size = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
        if key not in memory:
            memory[key] = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        plain = torch.empty(0, dtype=tensor.dtype, device=device)
        plain.set_(memory[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        made = Tensor._make_subclass(kind, plain, tensor.requires_grad)  # type: ignore[attr-defined]
    vars(made).update(vars(tensor))
    return made
