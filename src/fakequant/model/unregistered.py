"""Modules that are easily lost: those in plain containers, which torch does not know, and those that come later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from fakequant.errors import CoverageWarning, warn_user
from fakequant.nn.merged_adapters import adapter_layers
from fakequant.nn.paths import join
from fakequant.nn.quantized.forms import quantized_class
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.text import listed, module_name

_NAMED = 4


_SEEN = "_seen_by_prepare"
"""The attribute of a prepared model, and of its layers that were left in float on purpose."""


def note_floats(model: nn.Module) -> None:
    """Mark the layers in float that have a quantized form: those that come later are not meant to be in float."""
    for module in (model, *filter(_is_float, model.modules())):
        if not isinstance(module, torch.jit.ScriptModule):
            vars(module)[_SEEN] = True


def warn_of_new_layers(model: nn.Module) -> None:
    """Warn in one line of layers in float that came into a model after it was prepared; those of adapters are meant."""
    skip = [*adapter_layers(model), "*.modules_to_save.*"]
    new = {
        join(path, name): module
        for path, owner in model.named_modules()
        if vars(owner).get(_SEEN)
        for name, module in owner.named_modules()
        if _is_float(module) and _SEEN not in vars(module) and not any(fnmatchcase(f".{name}.", own) for own in skip)
    }
    if new:
        named = listed([f"{module_name(path)} ({type(module).__name__})" for path, module in new.items()], _NAMED)
        first = next(iter(new))
        warn_user(
            f"layers that came after fakequant.prepare are in float: {named}. To quantize them, call "
            f"fakequant.prepare(model.get_submodule({first!r}), preset) and calibrate the model",
            CoverageWarning,
        )


def _is_float(module: nn.Module) -> bool:
    own = not isinstance(module, QuantizedLayer) and quantized_class(module) is not None
    return own and next(module.parameters(), None) is not None


def warn_unregistered(model: nn.Module) -> None:
    """Warn in one line of modules with parameters that a model holds in plain lists, tuples, dicts or dataclasses.

    >>> class Held(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.blocks = [nn.Linear(2, 2)]
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn_unregistered(Held())
    >>> str(caught[0].message)[:52]
    'modules in plain containers are not part of a model:'
    """
    known, found = {id(module) for module in model.modules()}, dict[str, nn.Module]()
    for path, module in model.named_modules():
        registered = {id(module._parameters), id(module._buffers), id(module._modules)}
        for name, value in vars(module).items():
            if id(value) not in registered:
                found |= _held(value, f"{path}.{name}".lstrip("."), known)
    # A module that holds the model, as an adapter its parent, is no part of it.
    lost = {path: held for path, held in found.items() if [*held.parameters()] and model not in set(held.modules())}
    if lost:
        named = listed([f"{path} ({type(held).__name__})" for path, held in lost.items()], _NAMED)
        warn_user(
            f"modules in plain containers are not part of a model: {named}. prepare, save, load and state_dict "
            "leave them out; hold them in torch.nn.ModuleList or torch.nn.ModuleDict, or as attributes",
            CoverageWarning,
        )


def _held(value: Any, path: str, known: set[int]) -> dict[str, nn.Module]:
    """The modules in a value that are not known yet, by path; what was looked at becomes known."""
    if isinstance(value, nn.Module):
        new = {} if id(value) in known else {path: value}
        known |= {id(part) for part in value.modules()}
        return new
    is_container = isinstance(value, (Mapping, list, tuple, set, frozenset, deque)) or is_dataclass(value)
    if not is_container or isinstance(value, type) or id(value) in known:
        return {}
    known.add(id(value))
    if isinstance(value, Mapping):
        items = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, Iterable):
        items = [(f"[{place}]", item) for place, item in enumerate(value)]
    else:
        items = [(f".{field.name}", getattr(value, field.name, None)) for field in fields(value)]
    return {name: module for key, item in items for name, module in _held(item, f"{path}{key}", known).items()}
