"""Weights that hooks of Accelerate hold outside of the model, and load into a module only for its calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


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
