"""The sites of a model in training mode, where owners may call other functions than in eval mode.

A call is the same in both modes if it stands at the same place in the code and comes as often. Other calls stay in
float in training mode: they are no part of the model that runs later, and no scale of another call would fit them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fakequant.model.modes import training
from fakequant.model.run.recorded import FunctionCall, Recording
from fakequant.model.run.recording import record
from fakequant.model.sites.planned import SitePlan
from fakequant.model.sites.sites import shielded_modules, warn_orders
from fakequant.nn.sites.sites import site_keys
from fakequant.text import listed, module_name

_NAMED = 3


def with_training(
    model: nn.Module, plan: SitePlan, recording: Recording, run: Callable[[], object]
) -> tuple[SitePlan, list[str]]:
    """A plan with the sequences of training mode, and a line for the user where they differ.

    A model that cannot run in training mode with the example, because it wants labels there, has the plan of eval mode.

    Args:
        model: the float model.
        plan: of its sites in eval mode.
        recording: of the run in eval mode.
        run: calls the model.

    """
    if not plan.steps:
        return plan, []
    try:
        trained = record(model, run, training)
    except Exception:  # whatever a model raises that is called without its labels
        return plan, []
    found = {owner: _keys(plan, owner, recording, trained) for owner in plan.steps}
    if unclear := {owner for owner, own in found.items() if own is None}:
        steps = {owner: own for owner, own in plan.steps.items() if owner not in unclear}
        plan = replace(plan, sites=tuple(site for site in plan.sites if site.owner not in unclear), steps=steps)
    keys = {owner: own for owner, own in found.items() if own is not None}
    other = {owner: found for owner, found in keys.items() if found != site_keys(plan.steps[owner])}
    modules = dict(model.named_modules())
    shielded = {*plan.shielded, *shielded_modules(modules, trained.called, plan.steps)}
    in_order = tuple(path for path in modules if path in shielded)
    return replace(plan, shielded=in_order, training_keys=other), _note(plan, other)


def _keys(plan: SitePlan, owner: str, recording: Recording, trained: Recording) -> tuple[str, ...] | None:
    """The keys of an owner's calls in training mode; as in eval mode where training mode does not call the owner.

    None where it is called with different sequences, with a warning.
    """
    usual = site_keys(plan.steps[owner])
    counted = set(plan.steps[owner])
    visits = [[call for call in visit if call.function in counted] for visit in trained.of_owner(owner)]
    if not visits:
        return usual
    sequences = [tuple(call.function for call in visit) for visit in visits]
    if other := next((steps for steps in sequences if steps != sequences[0]), None):
        warn_orders(owner, sequences[0], other, len(visits), mode=" in training mode")
        return None
    before = _by_place([call for call in recording.of_owner(owner)[0] if call.function in counted], usual)
    calls = visits[0]
    now = _by_place(calls, range(len(calls)))
    keys = [f"{call.function}_" for call in calls]
    for place, numbers in now.items():
        same = before.get(place, [])
        if len(same) == len(numbers):  # of a loop with another length it is unknown which rounds are left out
            for number, key in zip(numbers, same, strict=True):
                keys[number] = key
    return tuple(keys)


def _by_place(calls: Sequence[FunctionCall], names: Sequence[Any]) -> dict[Any, list[Any]]:
    """Names of calls by function and place in the code."""
    places: dict[Any, list[Any]] = {}
    for call, name in zip(calls, names, strict=True):
        places.setdefault((call.function, call.where), []).append(name)
    return places


def _note(plan: SitePlan, other: dict[str, tuple[str, ...]]) -> list[str]:
    """One line that says which calls differ."""
    sites: dict[str, list[str]] = {owner: [] for owner in other}
    for site in plan.sites:
        sites.get(site.owner, []).append(site.key)
    parts = []
    for owner, keys in other.items():
        counts = Counter(key.removesuffix("_") for key in keys if key.endswith("_"))
        added = [f"{count} x {name}" if count > 1 else name for name, count in counts.items()]
        lost = [key for key in sites[owner] if key not in keys]
        said = [f"also calls {', '.join(added)}, which stay in float"] if added else []
        said += [f"does not call {', '.join(lost)}"] if lost else []
        if said:
            parts.append(f"{module_name(owner)} {' and '.join(said)}")
    if not parts:
        return []
    shown = listed(parts, _NAMED, "more modules differ", between="; ")
    return [
        f"in training mode other functions run than in eval mode: {shown}. If such a call "
        "computes the same in both modes, write it once, outside of the branch"
    ]
