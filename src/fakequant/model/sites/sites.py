"""Which calls of functions in a model get quantizers: the plan, made from a recorded run, and carried out in place.

The sites of a model in training mode, where owners may call other functions than in eval mode.

A call is the same in both modes if it stands at the same place in the code and comes as often. Other calls stay in
float in training mode: they are no part of the model that runs later, and no scale of another call would fit them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from fakequant.data.arguments import check_model
from fakequant.errors import ConfigError, CoverageWarning, warn_user
from fakequant.model.config import Config, Rule, TensorConfig, all_names
from fakequant.model.run.outputs import record
from fakequant.model.run.recorded import FunctionCall, Recording
from fakequant.model.sizes import exceeds_float
from fakequant.model.weights import training
from fakequant.nn.backward import GradientConfig
from fakequant.nn.paths import module_at
from fakequant.nn.quantized.forms import bypasses_class, quantized_class
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Quantizer
from fakequant.nn.sites.classes import add_sites, is_shielded, shield
from fakequant.nn.sites.functions import SITE_FUNCTIONS, SiteOperand, Trait, einsum_operand
from fakequant.nn.sites.sites import SITES, Site, Sites, site_key, site_keys, sites_of
from fakequant.nn.wrappers import Kernel, Role, accepts_wrapped_model
from fakequant.numerics.granularity import PerChannel, PerTensor
from fakequant.numerics.qparams import QParams
from fakequant.text import listed, module_name, table


@dataclass(frozen=True)
class SiteQuantizer:
    """One quantizer of a site.

    Attributes:
        tensor: how it quantizes.
        kind: whether the operand is computed from the model's input, or from parameters alone.
        group: the path of the quantizer that it is, where several share one; None for one of its own.
        fixed: scale and zero point that nothing moves; None where calibration finds them.
    """

    tensor: TensorConfig
    kind: Kind = Kind.INPUT
    group: str | None = None
    fixed: tuple[float, int] | None = None

    def __str__(self) -> str:
        text = str(self.tensor)
        if self.fixed is not None:
            text += f" with scale {self.fixed[0]:.6g} and zero point {self.fixed[1]}"
        return text if self.group is None else f"{text} shared as {self.group}"


@dataclass(frozen=True)
class PlannedSite:
    """One call of a function and the quantizers of its operands.

    Attributes:
        owner: the path of the module whose `forward` calls the function.
        function: its canonical name.
        index: how many calls of it come before in the same `forward`.
        operands: the arguments that are float tensors.
        quantizers: by operand.
        weights: the operands that are parameters which this call alone reads, with their paths in the owner.
        gradient: how the products of its backward pass are quantized; None leaves them in float.
    """

    owner: str
    function: str
    index: int
    operands: tuple[str, ...]
    quantizers: dict[str, SiteQuantizer]
    weights: dict[str, str] = field(default_factory=dict)
    gradient: GradientConfig | None = None

    @property
    def key(self) -> str:
        """The name of the site in its owner."""
        return site_key(self.function, self.index)

    @property
    def path(self) -> str:
        """The path of the site in the model."""
        return site_path(self.owner, self.key)


@dataclass(frozen=True)
class SitePlan:
    """The sites of a model; prints as a table.

    Attributes:
        sites: in the order of the run.
        steps: for every owner the functions that have sites in it, in the order of all their calls in one `forward`.
        shielded: the modules that owners call, whose own calls are not theirs.
        training_keys: the calls in training mode, of the owners in which they are others: see `Sites`.
    """

    sites: tuple[PlannedSite, ...] = ()
    steps: dict[str, tuple[str, ...]] = field(default_factory=dict)
    shielded: tuple[str, ...] = ()
    training_keys: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for site in self.sites:
            held = ", ".join(f"{name} {quantizer}" for name, quantizer in site.quantizers.items())
            lines.append(f"{site.path}: {held}")
        return table([[line] for line in lines]) or "no functions have quantizers"

    __repr__ = __str__  # what notebooks and consoles show


def site_path(owner: str, key: str) -> str:
    """The path of a site in a model.

    >>> site_path("blocks.0", "add_1")
    'blocks.0._sites.add_1'
    """
    return f"{owner}.{SITES}.{key}" if owner else f"{SITES}.{key}"


@dataclass(frozen=True)
class Candidate:
    """A call that could be a site, from all visits of its owner."""

    owner: str
    function: str
    index: int
    operands: tuple[str, ...]
    constants: frozenset[str]
    """The operands that are parameters, or computed from parameters alone."""
    equation: str = ""
    """The equation of the `Call`."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Those of the operands in the first call."""

    @property
    def path(self) -> str:
        """The path that its site would have."""
        return site_path(self.owner, site_key(self.function, self.index))

    def shape(self, operand: str) -> tuple[int, ...]:
        """The shape of an operand; () of one that the call does not have."""
        return dict(zip(self.operands, self.shapes, strict=True)).get(operand, ())


Placed = Mapping[Candidate, dict[str, SiteQuantizer]]


def plan_sites(model: nn.Module, config: Config, recording: Recording, placed: Placed | None = None) -> SitePlan:
    """The sites that the rules of a configuration say, and, where no rule speaks of a call, those of a target.

    Args:
        model: the float model.
        config: its rules.
        recording: of a run of the model.
        placed: the quantizers that a target places; none without a target.

    Raises:
        ConfigError: a rule matches no call.
    """
    found = candidates(model, recording)
    rules = rules_of_sites(model, config, found)
    planned = [(one, _quantizers(one, rules[one]) if one in rules else (placed or {}).get(one, {})) for one in found]
    return complete_plan(model, recording, [(one, held) for one, held in planned if held], rules)


def rules_of_sites(model: nn.Module, config: Config, found: Iterable[Candidate]) -> dict[Candidate, Rule]:
    """The rules that speak of calls, by call; the last that matches holds.

    Raises:
        ConfigError: a rule matches no call.
    """
    names = all_names(model)
    modules = dict(model.named_modules())
    found = list(found)
    rules: dict[Candidate, Rule] = {}
    for rule in config.site_rules:
        matched = [
            one
            for one in found
            if one.function in rule.functions
            and rule.matches_any((*names[modules[one.owner]], one.path), modules[one.owner])
        ]
        if not matched and not rule.optional:
            raise ConfigError(_nothing_matched(rule, found))
        rules.update(dict.fromkeys(matched, rule))
    return rules


def complete_plan(
    model: nn.Module,
    recording: Recording,
    planned: Iterable[tuple[Candidate, dict[str, SiteQuantizer]]],
    rules: Mapping[Candidate, Rule],
) -> SitePlan:
    """The plan for chosen calls: with the sequences of their owners, and the modules that owners call.

    Owners that are called with different sequences have no sites, and a `CoverageWarning` says so.

    Raises:
        ConfigError: an owner cannot be one.
    """
    parameters = list(model.parameters())  # a recording numbers them first
    sites = tuple(_planned_site(model, recording, one, held, parameters, rules.get(one)) for one, held in planned)
    counted: dict[str, set[str]] = {}
    for site in sites:
        counted.setdefault(site.owner, set()).add(site.function)
    steps = {owner: _steps(recording, owner, functions) for owner, functions in counted.items()}
    if unclear := [owner for owner, own in steps.items() if own is None]:
        sites = tuple(site for site in sites if site.owner not in unclear)
    steps = {owner: own for owner, own in steps.items() if own is not None}
    modules = dict(model.named_modules())
    for owner in steps:
        if bypasses_class(modules[owner]):
            raise ConfigError(
                f"{module_name(owner)}: a forward of its own (a hook's) would bypass the quantizers of its "
                "functions; remove the hook, or leave the functions in float by a rule"
            )
    return SitePlan(sites, steps, shielded_modules(modules, recording.called, steps))


def _planned_site(
    model: nn.Module,
    recording: Recording,
    one: Candidate,
    held: dict[str, SiteQuantizer],
    parameters: list[nn.Parameter],
    rule: Rule | None,
) -> PlannedSite:
    weights = [name for name, quantizer in held.items() if quantizer.kind is Kind.WEIGHT]
    owner = module_at(model, one.owner)
    found = _parameters_of(owner, parameters, recording, (one.owner, one.function, one.index), weights)
    gradient = None if rule is None else rule.gradient
    return PlannedSite(one.owner, one.function, one.index, one.operands, held, found, gradient)


def _parameters_of(
    owner: nn.Module,
    parameters: Sequence[nn.Parameter],
    recording: Recording,
    call: tuple[str, str, int],
    operands: Iterable[str],
) -> dict[str, str]:
    """The operands of a call that are parameters of its owner which nothing else reads, with their paths in the owner.

    Args:
        owner: the module whose `forward` calls it.
        parameters: those of the float model, as it lists them.
        recording: of its run.
        call: owner, function and index.
        operands: the names to look at.
    """
    names = {id(parameter): name for name, parameter in owner.named_parameters(remove_duplicate=False)}
    found: dict[str, str] = {}
    for operand in operands:
        value = next(one.operands[operand] for one in recording.calls_of[call[0]] if one.site == call)
        readers = recording.consumers[value]
        alone = all(one.site == call and one.inputs.count(value) == 1 for one in readers)
        if value < len(parameters) and alone and (name := names.get(id(parameters[value]))) is not None:
            found[operand] = name
    return found


def candidates(model: nn.Module, recording: Recording) -> list[Candidate]:
    """The calls that could be sites: with enough float tensors, outside of layers that have a quantized form."""
    found: list[Candidate] = []
    for owner, module in model.named_modules():
        if quantized_class(module) is not None or isinstance(module, QuantizedLayer):
            continue
        calls: dict[tuple[str, int], list[FunctionCall]] = {}
        for visit in recording.of_owner(owner):
            for call in visit:
                calls.setdefault((call.function, call.index), []).append(call)
        for (function, index), same in calls.items():
            operands = tuple(same[0].operands)
            if len(operands) >= SITE_FUNCTIONS[function].fewest and all(tuple(c.operands) == operands for c in same):
                constants = frozenset(
                    name for name in operands if all(recording.values[call.operands[name]].constant for call in same)
                )
                shapes = tuple(recording.values[value].shape for value in same[0].operands.values())
                found.append(Candidate(owner, function, index, operands, constants, same[0].equation, shapes))
    order = {call.site: call.number for call in reversed(recording.calls)}
    return sorted(found, key=lambda one: order[one.owner, one.function, one.index])


def operand_of(one: Candidate, name: str) -> SiteOperand:
    """What the table or an equation says of an operand; one of a list without an equation is nothing special."""
    known = {operand.name: operand for operand in SITE_FUNCTIONS[one.function].operands}
    if one.equation:
        return einsum_operand(one.equation, name, [*known].index(name) if name in known else None)
    return known.get(name, SiteOperand(name, 0))


def operand_quantizer(one: Candidate, name: str, rule: Rule) -> SiteQuantizer | None:
    """The quantizer that a rule gives an operand of a call; None if it gives none."""
    operand = operand_of(one, name)
    # A constant that is no weight may be cut to the length of the input, so that its range is not always one.
    weight = name in one.constants and Trait.PRODUCT in SITE_FUNCTIONS[one.function].traits
    axes = {0: operand.channels, -1: operand.reduction} if weight else {-1: operand.reduction}
    own, whole = one.shape(name), one.shape("weight")
    sizes = whole[len(whole) - operand.positions :]
    kernel = Kernel.of(sizes, own[operand.reduction] if weight and sizes else None)
    config = rule.tensor(Role.WEIGHT if weight else Role.INPUT, axes, kernel)
    if weight and config is not None and len(own) == 1 and isinstance(config.spec.granularity, PerChannel):
        config = TensorConfig(config.spec.replace(granularity=PerTensor()), config.dynamic)  # a vector has no channels
    if weight and config is not None and rule.input is None and exceeds_float(config.spec, own):
        return None
    return None if config is None else SiteQuantizer(config, Kind.WEIGHT if weight else Kind.INPUT)


def _quantizers(one: Candidate, rule: Rule) -> dict[str, SiteQuantizer]:
    made = {name: operand_quantizer(one, name, rule) for name in one.operands}
    held = {name: quantizer for name, quantizer in made.items() if quantizer is not None}
    if rule.output is not None:
        features = operand_of(one, one.operands[0]).reduction
        held["output"] = SiteQuantizer(rule.output.placed({-1: features}))
    return held


def _steps(recording: Recording, owner: str, functions: set[str]) -> tuple[str, ...] | None:
    """The one sequence of the functions of an owner's sites; None where there are several, with a warning."""
    visits = [
        tuple(call.function for call in visit if call.function in functions) for visit in recording.of_owner(owner)
    ]
    other = next((steps for steps in visits if steps != visits[0]), None)
    if other is not None:
        warn_orders(owner, visits[0], other, len(visits))
        return None
    return visits[0]


def warn_orders(owner: str, steps: tuple[str, ...], other: tuple[str, ...], visits: int, mode: str = "") -> None:
    """Say that an owner calls the functions of its sites in another order when it is called again."""
    ops = ", ".join(repr(name) for name in sorted({*steps, *other}))
    warn_user(
        f"{module_name(owner)} is called {visits} times{mode} and calls functions in different orders, so that "
        f"their quantizers could not be told apart: {', '.join(steps) or 'none'}; {', '.join(other) or 'none'}. They "
        "are left in float. Move the branch or the loop into a module of its own; "
        f"Rule({owner!r}, ops=({ops},)) says that it is meant",
        CoverageWarning,
    )


def shielded_modules(
    modules: Mapping[str, nn.Module], called: Mapping[str, list[str]], owners: Iterable[str]
) -> tuple[str, ...]:
    """The modules that owners call, or may call in training mode."""
    shielded: dict[str, None] = {}
    owners = set(owners)

    def add(path: str) -> None:
        module = modules.get(path)
        if module is None or path in owners or isinstance(module, torch.jit.ScriptModule):
            return
        if type(module).forward is nn.Module.forward:  # a list of modules, which is never called itself
            for name, child in module.named_children():
                if modules.get(f"{path}.{name}") is child:
                    add(f"{path}.{name}")
        else:
            shielded[path] = None

    for owner in owners:
        for path in called.get(owner, []):
            add(path)
        for name, _ in modules[owner].named_children():
            add(f"{owner}.{name}" if owner else name)
    return tuple(path for path in modules if path in shielded)


def apply_sites(model: nn.Module, plan: SitePlan) -> None:
    """Give a model the quantizers of a plan, in place.

    Raises:
        ConfigError: the model lacks an owner, or its owner cannot have sites.
    """
    modules = dict(model.named_modules())
    shared: dict[str, Quantizer] = {}
    if missing := [path for path in (*plan.steps, *plan.shielded) if path not in modules]:
        raise ConfigError(f"the plan has modules that the model lacks: {', '.join(missing)}")
    planned: dict[str, list[PlannedSite]] = {}
    for site in plan.sites:
        planned.setdefault(site.owner, []).append(site)
    for owner, steps in plan.steps.items():
        sites: dict[str, Site] = {}
        for site in planned.get(owner, []):
            first = next(chain(modules[owner].parameters(), modules[owner].buffers(), model.parameters()), None)
            device = None if first is None or first.is_meta else first.device
            held = {name: _made(q, f"{site.path}.{name}", shared, device) for name, q in site.quantizers.items()}
            sites[site.key] = made = Site(site.function, site.operands, held, site.weights)
            made.gradient = site.gradient
        if unknown := sorted(set(sites) - set(site_keys(steps))):
            raise ConfigError(f"{module_name(owner)} has no calls {', '.join(unknown)}")
        own = Sites(owner, steps, sites, plan.training_keys.get(owner))
        add_sites(modules[owner], own.train(modules[owner].training))
    for path in plan.shielded:
        shield(modules[path])


def _made(planned: SiteQuantizer, path: str, shared: dict[str, Quantizer], device: torch.device | None) -> Quantizer:
    if planned.group is not None and planned.group in shared:
        return shared[planned.group]
    quantizer = Quantizer(planned.tensor.spec, kind=planned.kind, dynamic=planned.tensor.dynamic)
    quantizer.name = path
    if planned.fixed is not None:
        scale, zero_point = planned.fixed
        zero = torch.tensor([zero_point], dtype=torch.int32, device=device)
        quantizer.set_qparams(QParams(torch.tensor([scale], device=device), zero))
        quantizer.pinned = True
    return shared.setdefault(planned.group or path, quantizer)


@accepts_wrapped_model
def site_plan(model: nn.Module) -> SitePlan:
    """The functions of a prepared model that have quantizers, as a plan that prints.

    >>> class Residual(nn.Module):
    ...     def forward(self, x):
    ...         return x + torch.relu(x)
    >>> rules = Config("sums", (Rule("*", input="int8", ops=("add",)),))
    >>> print(site_plan(prepare(Residual(), rules, example=torch.ones(2, 4))))
    _sites.add_0: input int8 per_tensor, other int8 per_tensor
    """
    check_model(model, "site_plan", "site_plan(model)")
    owners = {path: sites for path, module in model.named_modules() if (sites := sites_of(module)) is not None}
    uses = Counter(id(quantizer) for own in owners.values() for site in own.children() for quantizer in held_by(site))
    first: dict[int, str] = {}
    planned: list[PlannedSite] = []
    for owner, own in owners.items():
        for place, key in enumerate(own.keys):
            site = own._modules.get(key)
            if isinstance(site, Site):
                index = own.steps[:place].count(site.function)
                held: dict[str, SiteQuantizer] = {}
                for name, quantizer in ((n, q) for n, q in site._modules.items() if isinstance(q, Quantizer)):
                    path = f"{site_path(owner, key)}.{name}"
                    group = first.setdefault(id(quantizer), path) if uses[id(quantizer)] > 1 else None
                    tensor = TensorConfig(quantizer.spec, quantizer.dynamic)
                    held[name] = SiteQuantizer(tensor, quantizer.kind, group, _fixed_of(quantizer))
                one = PlannedSite(owner, site.function, index, site.operands, held, site.weights, site.gradient)
                planned.append(one)
    shielded = tuple(path for path, module in model.named_modules() if is_shielded(module))
    trained = {owner: own.training_keys for owner, own in owners.items() if own.training_keys is not None}
    return SitePlan(tuple(planned), {owner: own.steps for owner, own in owners.items()}, shielded, trained)


def _fixed_of(quantizer: Quantizer) -> tuple[float, int] | None:
    if not quantizer.pinned or quantizer.scale is None or quantizer.zero_point is None:
        return None
    return float(quantizer.scale), int(quantizer.zero_point)


def held_by(site: nn.Module) -> list[Quantizer]:
    """The quantizers of a site, of which one may serve several operands."""
    return [quantizer for quantizer in site._modules.values() if isinstance(quantizer, Quantizer)]


def _nothing_matched(rule: Rule, found: list[Candidate]) -> str:
    calls = listed(dict.fromkeys(f"{module_name(one.owner)}: {one.function}" for one in found), 8)
    what = f"calls that can be quantized are {calls}" if found else "the model calls no function to quantize"
    return (
        f"the rule {rule.pattern!r} with ops {', '.join(rule.ops)} matches no call of the example's run; {what}. "
        "Correct the pattern, or set optional=True if the rule may match nothing"
    )


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
