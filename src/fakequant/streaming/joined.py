"""The state of a model from those of its finished blocks and of what is outside of them, read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from fakequant.model.state.plan import OwnerEntry, Plan, SiteEntry, SiteQuantizerEntry, SitesEntry
from fakequant.model.state.snapshots import LazyTensor, LazyTensors, Made, QuantizedState, lazy, snapshot
from fakequant.model.state.weight_codes import WeightCodes
from fakequant.nn.paths import join
from fakequant.streaming.source import ModelSource
from fakequant.streaming.work import Work


def joined_state(
    source: ModelSource, blocks: Mapping[str, nn.Module], work: Work, quantized: Sequence[bool]
) -> QuantizedState:
    """The state of a prepared model whose modules outside of the blocks have their weights.

    Args:
        source: the model.
        blocks: by path.
        work: with the finished blocks.
        quantized: which blocks it has; the others come from the source.
    """
    state = snapshot(source.model)
    inside = tuple(f"{path}." for path in blocks)
    tensors = {name: lazy(state.tensors, name) for name in state.tensors if not name.startswith(inside)}
    weights: dict[str, Callable[[], WeightCodes]] = {
        name: lambda name=name: state.weights[name] for name in state.weights if not name.startswith(inside)
    }
    plans = [_without(state, inside)]
    for number, (path, block) in enumerate(blocks.items()):
        own = block.state_dict()
        if not quantized[number]:
            tensors |= {
                join(path, key): LazyTensor.of(x, lambda path=path, key=key, x=x: source.tensor(path, key).to(x.dtype))
                for key, x in own.items()
            }
            continue
        held = work.state(number)
        plans.append(_placed(held, path))
        for key, x in held.tensors.items():
            tensors[join(path, key)] = LazyTensor.of(x, lambda number=number, key=key: work.state(number).tensors[key])
        for name in held.weights:
            tensors[join(path, name)] = LazyTensor.of(
                own[name], lambda number=number, name=name: work.state(number).weights[name].values()
            )
            weights[join(path, name)] = lambda number=number, name=name, path=path: _renamed(
                work.state(number).weights[name], path
            )
    plan = Plan(
        shared=state.shared,
        versions=state.versions,
        layers={name: entry for one in plans for name, entry in one.layers.items()},
        sites=SitesEntry(
            {name: entry for one in plans for name, entry in one.sites.owners.items()},
            [name for one in plans for name in one.sites.shielded],
        ),
        stale=[name for one in plans for name in one.stale],
    )
    names = {name: name for name in [*source.model.state_dict()] if name in tensors}  # in the order of the model
    ordered = {name: tensors[name] for name in (*names, *(name for name in tensors if name not in names))}
    return QuantizedState.of(plan, LazyTensors(ordered), Made(weights))


def _renamed(weight: WeightCodes, path: str) -> WeightCodes:
    return replace(weight, quantizers=tuple(join(path, name) for name in weight.quantizers))


def _without(plan: Plan, inside: tuple[str, ...]) -> Plan:
    """The part of a plan that is outside of some modules."""
    sites = plan.sites
    return Plan(
        layers={path: entry for path, entry in plan.layers.items() if not f"{path}.".startswith(inside)},
        sites=SitesEntry(
            {path: entry for path, entry in sites.owners.items() if not f"{path}.".startswith(inside)},
            [path for path in sites.shielded if not f"{path}.".startswith(inside)],
        ),
        stale=[path for path in plan.stale if not path.startswith(inside)],
    )


def _placed(plan: Plan, path: str) -> Plan:
    """The plan of a module as a part of the plan of the model that has it at a path."""
    sites = plan.sites
    return Plan(
        layers={join(path, name): entry for name, entry in plan.layers.items()},
        sites=SitesEntry(
            {join(path, name): _placed_owner(entry, path) for name, entry in sites.owners.items()},
            [join(path, name) for name in sites.shielded],
        ),
        stale=[join(path, name) for name in plan.stale],
    )


def _placed_owner(owner: OwnerEntry, path: str) -> OwnerEntry:
    return replace(owner, sites={key: _placed_site(site, path) for key, site in owner.sites.items()})


def _placed_site(site: SiteEntry, path: str) -> SiteEntry:
    def placed(entry: SiteQuantizerEntry) -> SiteQuantizerEntry:
        return entry if entry.group is None else replace(entry, group=join(path, entry.group))

    return replace(site, quantizers={key: placed(entry) for key, entry in site.quantizers.items()})
