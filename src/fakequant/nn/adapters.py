"""Quantizers in models with adapters of peft: their ranges train and are saved with the adapter.

peft freezes all parameters but the adapter's, and saves nothing else. It exempts modules of one class of its own,
`AuxiliaryTrainingWrapper`, which say themselves what they save. A quantizer becomes one where peft is imported, so that
`save_pretrained`, the Trainer's checkpoints, `from_pretrained` and `load_adapter` need no call of the user.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fakequant.errors import StaleScaleWarning, warn_user
from fakequant.nn.ranges.fixed_codes import KEY

MERGED = "trained_merged"
"""The attribute of a weight's quantizer, and its key beside an adapter, by which the adapter was trained as merged."""


def take_flag(quantizer: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Say where an adapter that is loaded was trained as merged, and its layer adds it to the quantized weight."""
    if state_dict.pop(prefix + MERGED, None) is not None and not vars(quantizer).get(MERGED):
        warn_user(
            "the adapter was trained as it will be merged (QATCallback, Training or train_merged), and computes "
            "something else beside quantized layers; call fakequant.integrations.peft.train_merged(model)",
            StaleScaleWarning,
        )


def join_adapters(quantizer: nn.Module) -> None:
    """Make a quantizer one of the modules that peft saves and does not freeze, in place; nothing without peft."""
    quantizer.__class__ = joined_class(type(quantizer))


def joined_class(cls: type[Any]) -> type[Any]:
    """The class of quantizers that `join_adapters` makes of another; the same class where peft is not imported."""
    wrapper = getattr(sys.modules.get("peft.utils.other"), "AuxiliaryTrainingWrapper", None)
    if wrapper is None or issubclass(cls, wrapper):
        return cls
    if cls not in _made:
        named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _made[cls] = type(cls.__name__, (_Joined, cls, wrapper), {**named, "joined_from": cls})
    return _made[cls]


def copies_called(model: nn.Module, path: str) -> list[str]:
    """The paths of the copies that peft calls in place of a part that `modules_to_save` names; none for other parts.

    `head.original_module.dense` has the copy `head.modules_to_save.default.dense`, and one for each other adapter.
    """
    wrapper = getattr(sys.modules.get("peft.utils.other"), "ModulesToSaveWrapper", None)
    parts = path.split(".")
    for place, part in enumerate(parts):
        owner = model.get_submodule(".".join(parts[:place])) if part == "original_module" else None
        if wrapper is not None and isinstance(owner, wrapper):
            start = ".".join([*parts[:place], "modules_to_save"])
            return [".".join([start, name, *parts[place + 1 :]]) for name in model.get_submodule(start)._modules]
    return []


_made: dict[type[Any], type[Any]] = {}


class _Joined:
    """The methods of peft's wrappers for a quantizer, which wraps nothing and serves all adapters alike."""

    _adapters: frozenset[str] = frozenset()
    _active_adapter: tuple[()] | list[str] | str = ()
    _disable_adapters = False

    def enable_adapters(self, enabled: bool) -> None:
        """Nothing is switched off: the layer without adapters has the same ranges."""

    def check_set_adapter(self, adapter_name: str | list[str]) -> None:
        self._active_adapter = adapter_name

    def set_adapter(self: Any, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        for parameter in self.parameters():
            parameter.requires_grad_(not inference_mode)

    def delete_adapter(self, adapter_name: str, new_active_adapters: list[str] | None) -> None:
        """The ranges stay, because the model needs them."""
        self._active_adapter = new_active_adapters or ()

    def _get_available_adapters(self) -> set[str]:
        return set()

    def adapter_state_dict(self, adapter_name: str, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state of an adapter without the codes of weights, which are as large as the model and saved with it."""
        flag = {MERGED: torch.ones((), dtype=torch.uint8)} if vars(self).get(MERGED) else {}
        return {key: value for key, value in state_dict.items() if key != KEY and not key.endswith(f".{KEY}")} | flag

    def adapter_state_dict_load_map(self, adapter_name: str) -> dict[str, str]:
        """No key is renamed: `load_state_dict` finds those that were saved."""
        return {}

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: Any) -> Any:
        return self

    def register_forward_pre_hook(self: Any, hook: Any, **options: Any) -> RemovableHandle:
        """Register a hook, but leave out peft's, which gives its layers the adapter of each example."""
        if "adapter_names" in getattr(hook, "keywords", {}):
            return RemovableHandle(OrderedDict())
        return nn.Module.register_forward_pre_hook(self, hook, **options)

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        _, _, *state = object.__reduce_ex__(self, max(int(protocol), 2))
        return (_new, (self.joined_from,), *state)


def _new(cls: type[Any]) -> Any:
    made: Any = joined_class(cls)
    return made.__new__(made)
