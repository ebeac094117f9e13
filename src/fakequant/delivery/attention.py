"""Quantizers of keys and values, which files name by the module that calls the attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fakequant.delivery.format import Part
from fakequant.delivery.schemes import attention_args
from fakequant.errors import CheckpointError, ConfigError
from fakequant.model.config import Config, Rule
from fakequant.model.run.recording import record
from fakequant.model.sites.planned import SitePlan
from fakequant.model.sites.sites import plan_sites
from fakequant.model.state.plan import OwnerEntry, SiteEntry, SiteQuantizerEntry, SitesEntry
from fakequant.model.state.stored_sites import sites_entry
from fakequant.model.tensor_config import TensorConfig
from fakequant.nn.quantized.forms import own_class
from fakequant.nn.quantizer import quantizers
from fakequant.text import listed

_CACHE = {"past_key_values", "past_key_value"}
"""The arguments by which compressed-tensors 0.20 puts its quantized keys and values into an attention."""


def missed_cache(modules: Iterable[nn.Module]) -> str:
    """Why keys and values of some attentions stay in float in transformers, as a sentence; "" if they do not."""
    classes = {own_class(module) for module in modules}
    names = [cls.__name__ for cls in classes if not _CACHE & {*inspect.signature(cls.forward).parameters}]
    if not names:
        return ""
    return (
        f"Keys and values stay in float in transformers: {listed(sorted(names))} takes its cache by another name than "
        f"{' or '.join(sorted(_CACHE))}, which compressed-tensors gives; transformers 5.23 has these names."
    )


def attention_sites(model: nn.Module, config: TensorConfig, operands: Iterable[str]) -> SitesEntry:
    """The calls of attention of a language model, with quantizers of some operands.

    A float model runs once with two tokens, by which its calls are found; a prepared one has them.

    Raises:
        CheckpointError: no call of attention is found.
    """
    if quantizers(model):
        return sites_entry(model)
    device = next(model.parameters()).device
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
    try:
        recording = record(model, lambda: model(input_ids=tokens, use_cache=False))
        plan = plan_sites(model, Config("attention", (Rule("*", ops=("attention",), input=config),)), recording)
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"keys and values are quantized, and the model calls no attention: {error}") from error
    return _entry(model, plan, {*operands})


def _entry(model: nn.Module, plan: SitePlan, operands: set[str]) -> SitesEntry:
    keys = {path: list(own) for path, own in plan.training_keys.items()}
    owners = {
        path: OwnerEntry(type(model.get_submodule(path)).__name__, list(steps), {}, keys.get(path))
        for path, steps in plan.steps.items()
    }
    for site in plan.sites:
        held = {
            name: SiteQuantizerEntry(one.tensor, kind=one.kind, group=one.group)
            for name, one in site.quantizers.items()
            if name in operands
        }
        owners[site.owner].sites[site.key] = SiteEntry(list(site.operands), held, weights=dict(site.weights))
    return SitesEntry(owners, list(plan.shielded))


def conflicts_of_calls(model: nn.Module, parts: Sequence[Part]) -> dict[str, str]:
    """Why files of compressed-tensors cannot hold some keys and values beside others, by the name of the part."""
    calls = {part.path: part for part in parts if part.call}
    classes = {type(part.module) for part in calls.values()} | {own_class(part.module) for part in calls.values()}
    others = [path for path, one in model.named_modules() if type(one) in classes and path not in calls]
    schemes = {part.name: attention_args(part) for part in calls.values()}
    first = next(iter(schemes.values()), None)
    found = {
        name: "files have one scheme of keys and values for all layers" for name, one in schemes.items() if one != first
    }
    return found | dict.fromkeys(others, "files have keys and values of all layers quantized, or of none")
