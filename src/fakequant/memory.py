"""Where the values of tensors are: in memory that tensors or elements share, or in hooks of Accelerate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]  a room of torch without type stubs


def memory_of(x: Tensor) -> int | None:
    """A number that is equal for tensors with the same storage; None for a tensor without a storage."""
    with torch._C.DisableTorchFunction():  # a recording would take these for functions of the model
        if is_lazy(x) or x.layout is not torch.strided or _functorch.is_functorch_wrapped_tensor(x):
            return None
        return x.untyped_storage()._cdata if torch._C._has_storage(x) else None  # type: ignore[attr-defined]


def separate(tensors: Iterable[Tensor]) -> None:
    """Give each tensor whose elements share memory, as after `expand`, new memory with a place for each element.

    torch refuses to write a tensor with a stride of 0, and writes wrong values if elements overlap. Parameters stay
    the same objects, and equal views of the same memory stay tied. A buffer that is a view of another of the tensors
    stays a view, because a model may write the other tensor.

    >>> weight = nn.Parameter(torch.zeros(1, 3).expand(2, 3))
    >>> separate([weight])
    >>> weight.stride()
    (3, 1)
    """
    held = {id(tensor): tensor for tensor in tensors}.values()
    views: dict[Any, list[Tensor]] = {}
    for x in filter(_overlaps, held):
        views.setdefault((memory_of(x), x.storage_offset(), x.shape, x.stride(), x.dtype), []).append(x)
    for (memory, *_), equal in views.items():
        is_alone = len(equal) == sum(memory_of(x) == memory for x in held)
        if is_alone or all(isinstance(x, nn.Parameter) for x in equal):
            data = equal[0].detach().contiguous()
            for x in equal:
                x.data = data


def write_back(x: Tensor, value: Tensor) -> None:
    """Write `value`, which `x` had before, into `x` again, also if elements of `x` share memory.

    >>> mean = torch.zeros(1)
    >>> write_back(mean.expand(3), torch.ones(3))
    >>> mean
    tensor([1.])
    """
    if _overlaps(x):
        for axis in (axis for axis, stride in enumerate(x.stride()) if stride == 0):
            x, value = x.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
    x.copy_(value)


def _overlaps(x: Tensor) -> bool:
    """Whether elements of a tensor share memory."""
    if memory_of(x) is None or x.is_nested or x.numel() < 2:
        return False
    end, axes = 0, sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    for stride, size in axes:
        if stride == 0:
            return True
        if stride <= end:
            places = torch.arange(sum(stride * (size - 1) for stride, size in axes) + 1, device="cpu")
            return places.as_strided(x.shape, x.stride()).unique().numel() < x.numel()
        end += stride * (size - 1)
    return False


def offloaded(model: nn.Module) -> list[str]:
    """The paths of a model's parameters and buffers whose values are outside of the model between calls."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, tensor in {**module._parameters, **module._buffers}.items()
        if tensor is not None and tensor.is_meta and _kept(module, name) is not None
    ]


def fetched(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """A tensor of a module; if a hook holds its values outside of the model, a new tensor with these values.

    Args:
        name: the name of the attribute.
        tensor: the present value of the attribute.

    >>> layer = nn.Linear(2, 2)
    >>> fetched(layer, "weight", layer.weight) is layer.weight
    True
    """
    kept = _kept(module, name) if tensor.is_meta else None
    if kept is None:
        return tensor
    hook, values = kept
    with torch.no_grad():
        return values[name].to(hook.execution_device)


def fetched_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model with the values that hooks hold outside of it; all are in memory at once."""
    state = model.state_dict()
    for name in offloaded(model):
        path, _, own = name.rpartition(".")
        if name in state:
            state[name] = fetched(model.get_submodule(path), own, state[name])
    return state


def _kept(module: nn.Module, name: str) -> tuple[Any, Mapping[str, Tensor]] | None:
    """The hook that holds a tensor of a module, and all tensors that the hook holds; None without a hook."""
    hook = vars(module).get("_hf_hook")
    for one in getattr(hook, "hooks", (hook,)):
        values = getattr(one, "weights_map", None)
        if values is not None and name in values:
            return one, values
    return None
