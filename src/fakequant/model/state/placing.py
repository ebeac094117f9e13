"""Where a model wants the tensors of a state: each is read when it is put there, the part of this process alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fakequant.distributed import is_sharded, parallel_parameters
from fakequant.errors import CheckpointError, ConfigError
from fakequant.model.run.memory import version_of
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


class Later(Tensor):
    """A tensor that every operation reads anew; its shape and dtype are known before, and its values are not kept.

    Args:
        source: shape, dtype, and how the whole is read.
        device: where the values come.
        make: reads what the model holds of it, by default the whole.
    """

    source: LazyTensor
    error: Exception | None
    """What the last read raised."""
    _make: Callable[[], Tensor]
    _written: Tensor | None

    @staticmethod
    def __new__(cls: Any, source: LazyTensor, device: torch.device, make: Callable[[], Tensor] | None = None) -> Later:
        made = Tensor._make_wrapper_subclass(cls, source.shape, dtype=source.dtype, device=device)  # type: ignore[attr-defined]
        made.source, made.error, made._make, made._written = source, None, make or source.make, None
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def values(self) -> Tensor:
        """The values; of a tensor that processes share, a DTensor."""
        if self._written is not None:
            return self._written
        try:
            return self._make().to(self.device)
        except Exception as error:
            self.error = error
            raise

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _OUTLINE:
            return super().__torch_function__(function, types, args, kwargs or {})
        read = list[tuple[Later, Tensor, int | None]]()

        def values(later: Later) -> Tensor:
            found = later.values()
            read.append((later, found, version_of(found)))
            return found

        args, kwargs = tree_map_only(Later, values, (args, kwargs or {}))
        result = function(*args, **kwargs)
        for later, found, version in read:
            if version_of(found) != version:  # a hook of a module wrote into it
                later._written = found
        return result

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Later, Later.values, (args, kwargs or {}))
        return function(*args, **kwargs)


def copy_kept(model: nn.Module) -> None:
    """Give modules that kept a tensor of the state itself, as their own `set_extra_state` may, a copy of its values."""
    for module in model.modules():
        for held in (vars(module), module._parameters, module._buffers):
            held |= {key: value.values().clone() for key, value in held.items() if isinstance(value, Later)}


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, which may come later."""
    values = tensor.values() if isinstance(tensor, Later) else tensor
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

    def later(self, name: str, source: LazyTensor) -> Later:
        """A tensor of the state as the model takes it."""
        path, _, key = name.rpartition(".")
        weight = self._weights.get(path, "") if key == KEY else ""
        own = self._own.get(weight if weight in self._parallel else name)
        device = self._device(path) if own is None else _home(own)
        if own is None or not is_sharded(own) or tuple(own.shape) != source.shape:
            return Later(source, device)
        return Later(source, device, partial(_part_of, source, own, device))

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


def check_values(model: nn.Module, names: Iterable[str]) -> None:
    """Raise where a model would have tensors on the meta device after it got those of some names.

    Raises:
        CheckpointError: it has others there.
    """
    held = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    given, empty = {*names}, [(name, tensor) for name, tensor in held if tensor.is_meta]
    filled = {id(tensor) for name, tensor in empty if name in given}
    if left := [name for name, tensor in empty if id(tensor) not in filled]:
        raise CheckpointError(
            f"the model has tensors on the meta device, which hold no values, and the checkpoint lacks {listed(left)}; "
            "build these on a device before load (buffers with persistent=False are in no checkpoint)"
        )
    if any(_home(tensor).type == "meta" for _, tensor in empty):
        raise CheckpointError("load is called under the meta device, where tensors hold no values; call it outside")


def give_memory(model: nn.Module) -> None:
    """Replace the tensors of a model on the meta device by empty ones; those that are tied stay tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in cast("Mapping[str, Tensor | None]", held).items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        made[id(tensor)] = _with_memory(tensor)
                    cast("dict[str, Tensor]", held)[name] = made[id(tensor)]


def _with_memory(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device=_home(tensor))
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter
