"""Weights that hooks of Accelerate keep elsewhere, and load into a module only for the time of its calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def offloaded(model: nn.Module) -> list[str]:
    """The paths of the parameters and buffers of a model whose values hooks keep elsewhere between calls."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, tensor in {**module._parameters, **module._buffers}.items()
        if tensor is not None and tensor.is_meta and _kept(module, name) is not None
    ]


def fetched(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """A tensor of a module, with the values that the module's next call uses, if a hook keeps these elsewhere.

    Args:
        name: of the attribute.
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
    """The state dict of a model with the values that hooks keep elsewhere; they are in memory all at once."""
    state = model.state_dict()
    for name in offloaded(model):
        path, _, own = name.rpartition(".")
        if name in state:
            state[name] = fetched(model.get_submodule(path), own, state[name])
    return state


def _kept(module: nn.Module, name: str) -> tuple[Any, Mapping[str, Tensor]] | None:
    """The hook that keeps a tensor of a module, and the tensors that it keeps; None if no hook does."""
    hook = vars(module).get("_hf_hook")
    for one in getattr(hook, "hooks", (hook,)):
        values = getattr(one, "weights_map", None)
        if values is not None and name in values:
            return one, values
    return None
