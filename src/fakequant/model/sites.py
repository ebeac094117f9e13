"""Plan, from a recorded run, which calls of functions in a model get quantizers, and put the plan into the model.

A site is a call of a function, such as + or @, that has quantizers. Its owner is the module whose `forward` makes the
call, and its operands are the float tensors that the function takes.

In training mode a module may call other functions than in eval mode. A call is the same in both modes if it is at the
same place in the code and comes as often. Other calls stay in float in training mode: they are no part of the model
that runs later, and no scale of another call would fit them.
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
from fakequant.model.weights import exceeds_float, training
from fakequant.nn.backward import GradientConfig
from fakequant.nn.functions import SITE_FUNCTIONS, SiteOperand, Trait, einsum_operand
from fakequant.nn.quantized.forms import bypasses_class, quantized_class
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Quantizer
from fakequant.nn.site_classes import add_sites, is_shielded, shield
from fakequant.nn.sites import SITES, Site, Sites, site_key, site_keys, sites_of
from fakequant.nn.wrappers import Kernel, Role, accepts_wrapped_model
from fakequant.numerics.granularity import PerChannel, PerTensor
from fakequant.numerics.qparams import QParams
from fakequant.text import listed, module_name, table


@dataclass(frozen=True)
class SiteQuantizer:
    """The plan of a quantizer of a site.

    Attributes:
        tensor: the specification, and whether the range is dynamic.
        kind: whether the operand is computed from the model's input, or from parameters only.
        group: the path of the quantizer that several operands share; None for a quantizer of a single operand.
        fixed: scale and zero point that neither calibration nor training changes; None if calibration finds them.
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
    """The plan of a site: a call of a function, and the quantizers of its operands.

    Attributes:
        owner: the path of the module whose `forward` calls the function.
        function: the canonical name of the function.
        index: how many calls of the same function come before this call in the same `forward`.
        operands: the names of the arguments that are float tensors.
        quantizers: for the name of each quantized operand, and for "output", the quantizer.
        weights: for each quantized operand that is a parameter read by no other call: the parameter's path in `owner`.
        gradient: how the products of the backward pass are quantized; None leaves them in float.
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
        sites: the sites in the order of the run.
        steps: for each owner, the functions that one `forward` calls, in order; only functions that have a site.
        shielded: the modules that owners call; calls of functions inside of these modules do not count as the owner's.
        training_keys: for each owner that calls other functions in training mode: the names of the calls, see `Sites`.
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


Placed = Mapping[FunctionCall, dict[str, SiteQuantizer]]
"""The quantizers by operand, by call of a recorded run; a site's first call stands for later visits of its owner."""


def path_of(call: FunctionCall) -> str:
    """The path of a call's site, or the path that the site would have."""
    return site_path(call.owner or "", site_key(call.function, call.index))


def plan_sites(model: nn.Module, config: Config, recording: Recording, placed: Placed | None = None) -> SitePlan:
    """Plan the sites of a model by the rules of a configuration; a target decides on calls that no rule matches.

    A module gets no sites, with a `CoverageWarning`, if two of its calls call the functions in different orders.

    Args:
        placed: the quantizers that a target places; None without a target.

    Raises:
        ConfigError: a rule matches no call, or the `forward` of a module with sites was replaced, for example by a
            hook.
    """
    modules, parameters = dict(model.named_modules()), list(model.parameters())  # a recording numbers these first
    found = candidates(model, recording)
    rules = rules_of_sites(model, config, found)
    sites: list[PlannedSite] = []
    for call in found:
        held, gradient = (placed or {}).get(call, {}), None
        if (rule := rules.get(call)) is not None:
            made = {name: operand_quantizer(recording, call, name, rule) for name in call.operands}
            held, gradient = {name: one for name, one in made.items() if one is not None}, rule.gradient
            if rule.output is not None:
                features = operand_of(call, next(iter(call.operands))).reduction
                held["output"] = SiteQuantizer(rule.output.placed({-1: features}))
        owner, weights = call.owner or "", dict[str, str]()
        factors = [name for name, one in held.items() if one.kind is Kind.WEIGHT]
        own = modules[owner].named_parameters(remove_duplicate=False) if factors else ()
        names = {id(parameter): name for name, parameter in own}
        for name in factors:
            value = call.operands[name]
            alone = all(c.site == call.site and c.inputs.count(value) == 1 for c in recording.consumers[value])
            if value < len(parameters) and alone and (path := names.get(id(parameters[value]))) is not None:
                weights[name] = path
        if held:
            sites.append(PlannedSite(owner, call.function, call.index, (*call.operands,), held, weights, gradient))
    counted, steps = dict[str, set[str]](), dict[str, tuple[str, ...]]()
    for site in sites:
        counted.setdefault(site.owner, set()).add(site.function)
    for owner, own in counted.items():
        visits = [tuple(c.function for c in visit if c.function in own) for visit in recording.of_owner(owner)]
        if other := next((visit for visit in visits if visit != visits[0]), None):
            _warn_orders(owner, visits[0], other, len(visits))
            continue
        if bypasses_class(modules[owner]):
            raise ConfigError(
                f"{module_name(owner)}: its forward was replaced, for example by a hook, so that calls would bypass "
                "the quantizers of its functions; remove the hook, or leave the functions in float by a rule"
            )
        steps[owner] = visits[0]
    sites = [site for site in sites if site.owner in steps]
    return SitePlan((*sites,), steps, _shielded_modules(modules, recording.called, steps))


def rules_of_sites(model: nn.Module, config: Config, found: Iterable[FunctionCall]) -> dict[FunctionCall, Rule]:
    """For each call that rules with `ops` match: the last of these rules.

    Raises:
        ConfigError: a rule matches no call.
    """
    names, modules = all_names(model), dict(model.named_modules())
    found = list(found)
    rules: dict[FunctionCall, Rule] = {}
    for rule in config.site_rules:
        owners = {call: modules[call.owner or ""] for call in found if call.function in rule.functions}
        matched = [call for call, owner in owners.items() if rule.matches_any((*names[owner], path_of(call)), owner)]
        if not matched and not rule.optional:
            calls = listed(dict.fromkeys(f"{module_name(call.owner or '')}: {call.function}" for call in found), 8)
            what = f"calls that can be quantized are {calls}" if found else "the model calls no function to quantize"
            raise ConfigError(
                f"the rule {rule.pattern!r} with ops {', '.join(rule.ops)} matches no call of the example's run; "
                f"{what}. Correct the pattern, or set optional=True if the rule may match nothing"
            )
        rules.update(dict.fromkeys(matched, rule))
    return rules


def candidates(model: nn.Module, recording: Recording) -> list[FunctionCall]:
    """The calls that could be sites.

    If a module's `forward` runs several times, a call that repeats is listed once, by its first occurrence. Each call
    has enough float tensors, in the same arguments every time, and is outside of layers that have a quantized form.
    """
    owners = {
        path
        for path, module in model.named_modules()
        if quantized_class(module) is None and not isinstance(module, QuantizedLayer)
    }
    firsts = (
        same[0]
        for same in recording.same.values()
        if same[0].owner in owners and all([*call.operands] == [*same[0].operands] for call in same)
    )
    known = (call for call in firsts if call.function in SITE_FUNCTIONS)
    return [call for call in known if len(call.operands) >= SITE_FUNCTIONS[call.function].fewest]


def operand_of(call: FunctionCall, name: str) -> SiteOperand:
    """The description of an operand, from the call's equation or the table of functions; list items get a default."""
    known = {operand.name: operand for operand in SITE_FUNCTIONS[call.function].operands}
    if call.equation:
        return einsum_operand(call.equation, name, [*known].index(name) if name in known else None)
    return known.get(name, SiteOperand(name, 0))


def operand_quantizer(recording: Recording, call: FunctionCall, name: str, rule: Rule) -> SiteQuantizer | None:
    """The quantizer that a rule gives an operand of a call; None if the operand stays in float."""
    operand = operand_of(call, name)
    # A constant that is no weight may be cut to the length of the input, so that its range is not always one.
    weight = Trait.PRODUCT in SITE_FUNCTIONS[call.function].traits and name in recording.constants(call)
    axes = {0: operand.channels, -1: operand.reduction} if weight else {-1: operand.reduction}
    shapes = {key: recording.values[value].shape for key, value in call.operands.items()}
    own, whole = shapes[name], shapes.get("weight", ())
    sizes = whole[len(whole) - operand.positions :]
    kernel = Kernel.of(sizes, own[operand.reduction] if weight and sizes else None)
    config = rule.tensor(Role.WEIGHT if weight else Role.INPUT, axes, kernel)
    if weight and config is not None and len(own) == 1 and isinstance(config.spec.granularity, PerChannel):
        config = TensorConfig(config.spec.replace(granularity=PerTensor()), config.dynamic)  # a vector has no channels
    if weight and config is not None and rule.input is None and exceeds_float(config.spec, own):
        return None
    return None if config is None else SiteQuantizer(config, Kind.WEIGHT if weight else Kind.INPUT)


def _warn_orders(owner: str, steps: tuple[str, ...], other: tuple[str, ...], visits: int, mode: str = "") -> None:
    """Warn that an owner calls the functions of its sites in another order when it is called again."""
    ops = ", ".join(repr(name) for name in sorted({*steps, *other}))
    warn_user(
        f"{module_name(owner)} is called {visits} times{mode} and calls functions in different orders, so that "
        f"their quantizers could not be told apart: {', '.join(steps) or 'none'}; {', '.join(other) or 'none'}. These "
        "functions are left in float. Move the branch or the loop into another module; "
        f"Rule({owner!r}, ops=({ops},)) ends this warning",
        CoverageWarning,
    )


def _shielded_modules(
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
        ConfigError: a module of the plan is missing, lacks the planned calls, or cannot have sites.
    """
    modules = dict(model.named_modules())
    shared: dict[str, Quantizer] = {}
    if missing := [path for path in (*plan.steps, *plan.shielded) if path not in modules]:
        raise ConfigError(f"the plan of sites has modules that the model lacks: {', '.join(missing)}")
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
            raise ConfigError(f"the plan's steps for {module_name(owner)} lack the calls {', '.join(unknown)}")
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
    """The functions of a prepared model that have quantizers, as a plan that prints as a table.

    >>> class Residual(nn.Module):
    ...     def forward(self, x):
    ...         return x + torch.relu(x)
    >>> rules = Config("sums", (Rule("*", input="int8", ops=("add",)),))
    >>> print(site_plan(prepare(Residual(), rules, example=torch.ones(2, 4))))
    _sites.add_0: input int8 per_tensor, other int8 per_tensor
    """
    check_model(model, "site_plan", "site_plan(model)")
    owners = {path: sites for path, module in model.named_modules() if (sites := sites_of(module)) is not None}
    sites = (site for own in owners.values() for site in own.children())  # one quantizer may serve several operands
    uses = Counter(id(q) for site in sites for q in site._modules.values() if isinstance(q, Quantizer))
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
                    tensor, fixed = TensorConfig(quantizer.spec, quantizer.dynamic), None
                    if quantizer.pinned and quantizer.scale is not None and quantizer.zero_point is not None:
                        fixed = float(quantizer.scale), int(quantizer.zero_point)
                    held[name] = SiteQuantizer(tensor, quantizer.kind, group, fixed)
                one = PlannedSite(owner, site.function, index, site.operands, held, site.weights, site.gradient)
                planned.append(one)
    shielded = tuple(path for path, module in model.named_modules() if is_shielded(module))
    trained = {owner: own.training_keys for owner, own in owners.items() if own.training_keys is not None}
    return SitePlan(tuple(planned), {owner: own.steps for owner, own in owners.items()}, shielded, trained)


_NAMED = 3


def with_training(
    model: nn.Module, plan: SitePlan, recording: Recording, run: Callable[[], object]
) -> tuple[SitePlan, list[str]]:
    """The plan with the calls of training mode added, and a list: empty, or with a line on calls of one mode only.

    A model that cannot run in training mode with the example, for lack of labels, keeps the plan of eval mode.
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
    shielded = {*plan.shielded, *_shielded_modules(modules, trained.called, plan.steps)}
    in_order = tuple(path for path in modules if path in shielded)
    sites: dict[str, list[str]] = {owner: [] for owner in other}
    for site in plan.sites:
        sites.get(site.owner, []).append(site.key)
    parts = []
    for owner, own in other.items():
        counts = Counter(key.removesuffix("_") for key in own if key.endswith("_"))
        added = [f"{count} x {name}" if count > 1 else name for name, count in counts.items()]
        lost = [key for key in sites[owner] if key not in own]
        said = [f"also calls {', '.join(added)}, which stay in float"] if added else []
        said += [f"does not call {', '.join(lost)}"] if lost else []
        if said:
            parts.append(f"{module_name(owner)} {' and '.join(said)}")
    note = []
    if parts:
        shown = listed(parts, _NAMED, "more modules differ", between="; ")
        note.append(
            f"in training mode other functions run than in eval mode: {shown}. If such a call "
            "computes the same in both modes, write it once, outside of the branch"
        )
    return replace(plan, shielded=in_order, training_keys=other), note


def _keys(plan: SitePlan, owner: str, recording: Recording, trained: Recording) -> tuple[str, ...] | None:
    """The keys of an owner's calls in training mode; the keys of eval mode if training mode does not call the owner.

    The result is None, with a warning, if two calls of the owner call functions in different orders.
    """
    usual = site_keys(plan.steps[owner])
    counted = set(plan.steps[owner])
    visits = [[call for call in visit if call.function in counted] for visit in trained.of_owner(owner)]
    if not visits:
        return usual
    sequences = [tuple(call.function for call in visit) for visit in visits]
    if other := next((steps for steps in sequences if steps != sequences[0]), None):
        _warn_orders(owner, sequences[0], other, len(visits), mode=" in training mode")
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
    """For each function and place in the code: the names of the calls of this function at this place."""
    places: dict[Any, list[Any]] = {}
    for call, name in zip(calls, names, strict=True):
        places.setdefault((call.function, call.where), []).append(name)
    return places
