"""The sites of a model in a checkpoint: what the manifest says of them, and how they are made again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fakequant.errors import CheckpointError
from fakequant.model.sites.planned import PlannedSite, SitePlan, SiteQuantizer
from fakequant.model.sites.sites import apply_sites, site_plan
from fakequant.model.state.plan import OwnerEntry, Plan, SiteEntry, SiteQuantizerEntry, SitesEntry, quantizer_values
from fakequant.nn.paths import module_at
from fakequant.nn.quantized.forms import bypasses_class
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.sites.functions import SITE_FUNCTIONS
from fakequant.nn.sites.sites import functions_of, site_keys


def sites_entry(model: nn.Module) -> SitesEntry:
    """What a manifest says of the sites of a model."""
    plan = site_plan(model)
    owners = {
        path: OwnerEntry(type(module_at(model, path)).__name__, list(steps), {}, _listed(plan, path))
        for path, steps in plan.steps.items()
    }
    for site in plan.sites:
        held: dict[str, SiteQuantizerEntry] = {}
        for name, planned in site.quantizers.items():
            quantizer = module_at(model, f"{site.path}.{name}")
            assert isinstance(quantizer, Quantizer)
            held[name] = SiteQuantizerEntry(
                **quantizer_values(quantizer), kind=planned.kind, group=planned.group, pinned=quantizer.pinned
            )
        owners[site.owner].sites[site.key] = SiteEntry(
            list(site.operands), held, site.gradient, weights=dict(site.weights)
        )
    return SitesEntry(owners, list(plan.shielded))


def check_sites(modules: Mapping[str, nn.Module], entry: SitesEntry) -> None:
    """Raise a CheckpointError where a model's modules by path are not what a manifest says of its sites."""
    if missing := [path for path in (*entry.owners, *entry.shielded) if path not in modules]:
        raise CheckpointError(f"the checkpoint has modules that the model lacks: {', '.join(missing)}")
    for path, owner in entry.owners.items():
        shown, cls = path or "(the model)", type(modules[path])
        if cls.__name__ != owner.type:
            raise CheckpointError(f"the checkpoint's module {shown} is a {owner.type}, the model's is a {cls.__name__}")
        if bypasses_class(modules[path]):
            raise CheckpointError(
                f"the model's module {shown} has a forward of its own (a hook's), which would bypass the quantizers of "
                "its functions; remove the hook before load"
            )
        steps = (*owner.steps, *functions_of(owner.training_keys or ()))
        unknown = sorted({*steps} - {*SITE_FUNCTIONS}) or sorted({*owner.sites} - {*site_keys(tuple(owner.steps))})
        if unknown:
            raise CheckpointError(
                f"the checkpoint's module {shown} has quantizers of the calls {', '.join(unknown)}, which are not "
                "known here; it is damaged, or of a later version of fakequant"
            )


def restore_sites(model: nn.Module, plan: Plan) -> None:
    """Make the sites of a plan in a float model, without ranges."""
    owners = plan.sites.owners
    planned = [
        PlannedSite(
            path,
            *_function(key),
            tuple(site.operands),
            {name: SiteQuantizer(held.tensor, held.kind, held.group) for name, held in site.quantizers.items()},
            site.weights,
            site.gradient,
        )
        for path, owner in owners.items()
        for key, site in owner.sites.items()
    ]
    steps = {path: tuple(owner.steps) for path, owner in owners.items()}
    trained = {path: tuple(owner.training_keys) for path, owner in owners.items() if owner.training_keys is not None}
    apply_sites(model, SitePlan(tuple(planned), steps, tuple(plan.sites.shielded), trained))
    first: dict[nn.Module, SiteQuantizerEntry] = {}
    for path, _, held in plan.quantizers():
        if isinstance(held, SiteQuantizerEntry):
            first.setdefault(module_at(model, path), held)  # functions may share one
    for quantizer, held in first.items():
        assert isinstance(quantizer, Quantizer)
        quantizer.mode, quantizer.pinned, quantizer.by_value = held.mode, held.pinned, held.make_by_value()
        if (learned := held.make_learned()) is not None:
            quantizer.attach_learned(learned)


def _listed(plan: SitePlan, owner: str) -> list[str] | None:
    keys = plan.training_keys.get(owner)
    return None if keys is None else list(keys)


def _function(key: str) -> tuple[str, int]:
    name, _, index = key.rpartition("_")
    return name, int(index)
