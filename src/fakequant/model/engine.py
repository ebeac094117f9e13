"""Engines as objects: where an engine wants quantizers, how it computes a preset, and which files it loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

from torch import nn

from fakequant.data.arguments import refuse_unprepared
from fakequant.errors import ConfigError, CoverageWarning, ExportError, nearest, shown, warn_user
from fakequant.model.config import NAMED, TABLES, Config, TensorConfig, find_preset
from fakequant.model.placement import Target
from fakequant.model.weights import group_ranges
from fakequant.nn.device import Device
from fakequant.nn.integer import Execution
from fakequant.nn.paths import matches
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Quantizer, quantizers
from fakequant.nn.ranges import has_tensor_scale
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.registry import import_waiting
from fakequant.restore import attributes_of, restore_after, restore_on_error
from fakequant.text import listed, module_name

GROUPS = "INT4_GROUP128", "INT4_GROUP64", "INT4_GROUP32"
WEIGHTS = "INT8_WEIGHT_ONLY", "INT4_WEIGHT_ONLY", *GROUPS
"""Presets of integer weights, whose inputs stay in float."""
STATIC = "INT8", "INT8_AFFINE"
"""Presets of integer weights and inputs with fixed ranges."""
_FIELDS = ("input", "weight", "output")


@dataclass(frozen=True, eq=False)
class Engine:
    """An engine: a program that runs quantized models, with what it loads and how it computes.

    Attributes:
        name: the name for `target=` and `fakequant.set_execution`.
        bound: a text with the measured difference between the engine's results and the simulation, or "not run".
        serves: the models and machines that the engine is for.
        kinds: groups of names of presets, faster groups first; the engine multiplies in the same way for all presets
            in a group, and `advise` compares presets within a group.
        files: the name of the files that the engine reads: a format of `fakequant.deliver`, or a style of
            `fakequant.export_onnx`.
        export: the name of the function of this package that writes the engine's files, if `fakequant.deliver` does
            not.
        packages: the Python packages that run the files.
        placement: a function that returns the engine's rules for quantizers; None if only layers get quantizers.
        variant: called with "input", "weight" or "output" and the `TensorConfig` of a preset for that tensor; it
            returns the `TensorConfig` that the engine computes.
        tables: whether the engine loads quantized embeddings.
        fixed_global: whether the engine needs a fixed per-tensor scale for NVFP4 inputs, which `calibrate` then sets.
        merges: whether the engine merges layers, such as gate and up, and the experts of a block. Merged layers have
            one per-tensor scale; `calibrate` gives them one range.
        check: called with a prepared model; it raises ExportError if the engine does not load this model, although the
            engine's files can hold the model.
        device: the engine's arithmetic on codes; None if this arithmetic is unknown, or equals the simulation's.
        aliases: other names, such as names of engines that load the same models.
        page: the page of the documentation, "" for none.
        known: a sentence on the engine's speed; "" if nothing is known.
        others: the engine also runs every preset whose name starts with this text; None if it runs only `kinds`.

    Raises:
        ConfigError: an attribute has a wrong type.

    >>> mine = Engine("mine", "not run", kinds=(("INT8",),), files="compressed-tensors", tables=False)
    >>> prepare(nn.Sequential(nn.Linear(4, 4)), "int8", target=mine)[0].weight_quantizer
    Quantizer(int8 per_channel(0), weight, follows the weight)
    """

    name: str
    bound: str
    serves: str = ""
    kinds: tuple[tuple[str, ...], ...] = ()
    files: str = ""
    export: str = ""
    packages: tuple[str, ...] = ()
    placement: Callable[[], Target] | None = None
    variant: Callable[[str, TensorConfig], TensorConfig] = lambda field, config: config
    tables: bool = True
    fixed_global: bool = False
    merges: bool = False
    check: Callable[[nn.Module], None] = lambda model: None
    device: Device | None = None
    aliases: tuple[str, ...] = ()
    page: str = ""
    known: str = ""
    others: str | None = None

    def __post_init__(self) -> None:
        wrong = [
            f"{name} takes {wanted}, got {shown(getattr(self, name))}"
            for name, fits, wanted in (
                ("name", isinstance(self.name, str), "a text"),
                ("kinds", _holds(self.kinds, tuple), "tuples of names of presets, as (('INT8',),)"),
                ("packages", _holds(self.packages, str), "names of distributions, as ('torchao',)"),
                ("aliases", _holds(self.aliases, str), "names, as ('sglang',)"),
                ("placement", self.placement is None or callable(self.placement), "a function that makes a Target"),
                ("variant", callable(self.variant), "a function of a field and a TensorConfig"),
                ("check", callable(self.check), "a function of a prepared model"),
                ("device", self.device is None or isinstance(self.device, Device), "a fakequant.nn.Device"),
            )
            if not fits
        ]
        if wrong:
            raise ConfigError(f"an engine's {'; '.join(wrong)}")

    def __repr__(self) -> str:
        return f"Engine({self.name!r}, {self.bound!r})"

    @property
    def presets(self) -> list[str]:
        """The names of all presets that the engine is known to run."""
        return [name for kind in self.kinds for name in kind]

    def takes(self, preset: str) -> bool:
        """Whether the engine is known to run a preset."""
        return preset in self.presets or bool(self.others and preset.startswith(self.others))

    def unknown_gain(self, presets: Iterable[str]) -> str:
        """A sentence on presets for which no gain in this engine is known; "" if all gain, or `kinds` is empty.

        >>> known_engines()["qnn"].unknown_gain(["INT8"])  # its inputs become those of INT8_AFFINE there
        ''
        >>> known_engines()["litert"].unknown_gain(["INT8_WEIGHT_ONLY"])
        'It is not known that litert gains by INT8_WEIGHT_ONLY. It takes INT8, INT8_AFFINE: docs/engines/litert.md.'
        """

        def computed(preset: str) -> list[tuple[TensorConfig | None, ...]]:
            tensors = ([(field, getattr(rule, field)) for field in _FIELDS] for rule in find_preset(preset).layer_rules)
            return [tuple(one and self.variant(field, one) for field, one in fields) for fields in tensors]

        known = [computed(preset) for preset in self.presets if preset in NAMED]
        unknown = [preset for preset in presets if not self.takes(preset) and computed(preset) not in known]
        if not unknown or not self.presets:
            return ""
        page = f": docs/engines/{self.page}.md" if self.page else ""
        return f"It is not known that {self.name} gains by {listed(unknown)}. It takes {listed(self.presets)}{page}."

    def placement_of(self, config: Config) -> Target | None:
        """The engine's rules for quantizers; None if there are none, or the configuration makes all inputs dynamic."""
        inputs = [rule.input for rule in config.rules if rule.input is not None]
        is_dynamic = bool(inputs) and all(one.dynamic for one in inputs)
        return None if self.placement is None or is_dynamic else self.placement()

    def computed(self, config: Config, model: nn.Module) -> tuple[Config, str]:
        """The configuration that the engine computes for `config`, and a sentence on the changes ("" for none)."""
        changes, rules = list[str](), []
        for rule in config.rules:
            asked = {field: one for field in _FIELDS if (one := getattr(rule, field)) is not None}
            computed = {field: self.variant(field, one) for field, one in asked.items()}
            changed = {field: one for field, one in computed.items() if one != asked[field]}
            changes += [f"{field}s are {one} in place of {asked[field]}" for field, one in changed.items()]
            rules.append(replace(rule, **changed) if changed else rule)
        result = Config(config.name, tuple(rules)) if changes else config
        if not self.tables:
            without, before = result.with_rule(TABLES), result.resolve(model, any_module=True)
            after = without.resolve(model, any_module=True)
            left = [name for name, rule in after.items() if rule.leaves_in_float and not before[name].leaves_in_float]
            if left:
                result = without
                ending = "s" if len(left) == 1 else ""
                changes.append(f"{listed(left)} stay{ending} in float, because it holds no quantized tables")
        return result, f"for {self.name}, {'; '.join(dict.fromkeys(changes))}" if changes else ""

    def mark(self, model: nn.Module) -> None:
        """Mark the quantizers of a prepared model whose scales `calibrate` must fix or share for this engine."""
        for quantizer in quantizers(model).values() if self.fixed_global else ():
            quantizer.fixes_global = quantizer.dynamic and has_tensor_scale(quantizer.spec)
        if self.merges:
            group_ranges(model)

    def refuse(self, model: nn.Module, preset: str) -> None:
        """Raise ConfigError if the engine does not load a prepared model, or its files cannot hold the model."""
        if not quantizers(model):
            return
        import_waiting()  # files say what they can hold
        try:
            self.check(model)
            for check in holders:
                check(self.files or self.export, model)
        except ExportError as error:
            raise ConfigError(f"{self.name} cannot load {preset}: {error}") from error


def _holds(values: object, kind: type) -> bool:
    return isinstance(values, tuple) and all(isinstance(value, kind) for value in values)


_engines: dict[str, Engine] = {}

holders: list[Callable[[str, nn.Module], None]] = []
"""Checks of a prepared model, added by modules that write files. Each is called with the `files` or `export` of an
`Engine` and the model, and raises ExportError if the engine's files cannot hold the model."""


def register_engine(engine: Engine) -> Engine:
    """Add an engine for `target=` and `fakequant.set_execution`; it replaces an engine of the same name.

    Raises:
        ConfigError: the argument is not an `Engine`, or its name or alias belongs to an engine of another name.

    >>> register_engine(known_engines()["vllm"]).aliases
    ('sglang',)
    """
    if not isinstance(engine, Engine):
        raise ConfigError(f"register_engine takes a fakequant.Engine, got {shown(engine)}")
    names, others = (engine.name, *engine.aliases), known_engines()
    others = {name: known for name, known in others.items() if known.name != engine.name}
    if taken := [name for name in names if name in others]:
        raise ConfigError(f"{listed(taken)} already names another engine; choose other names")
    _engines.clear()
    _engines.update(others | dict.fromkeys(names, engine))
    return engine


def known_engines() -> dict[str, Engine]:
    """A dict of all engines, each under its name and under its aliases.

    >>> known_engines()["sglang"].name
    'vllm'
    """
    import_waiting()
    return dict(_engines)


def find_engine(name: str | Engine) -> Engine:
    """The engine called `name`; an `Engine` is returned unchanged.

    Raises:
        ConfigError: no engine has this name; the message lists the nearest names.
    """
    if isinstance(name, Engine):
        return name
    if not isinstance(name, str):
        raise ConfigError(f"target takes the name of an engine, such as 'onnxruntime', got {shown(name)}")
    known = known_engines()
    if name not in known:
        raise ConfigError(f"unknown target {name!r}{nearest(name, sorted(known))}")
    return known[name]


Model = TypeVar("Model", bound=nn.Module)


def _chosen(execution: Execution | Device | Engine | str) -> tuple[Execution, Device | None]:
    """For `execution`: how layers compute, and the device whose codes quantizers store (None: the simulation's)."""
    if isinstance(execution, Engine) and execution.device is not None:
        execution = execution.device
    if isinstance(execution, Device):
        return Execution.SIMULATE, execution
    names = [known.value for known in Execution]
    if isinstance(execution, Execution) or (isinstance(execution, str) and execution in names):
        return Execution(execution), None
    known = {name: engine.device for name, engine in known_engines().items() if engine.device is not None}
    if not isinstance(execution, str) or execution not in known:
        is_known = isinstance(execution, Engine) or (isinstance(execution, str) and execution in known_engines())
        hint = "; this engine can only be simulated" if is_known else nearest(str(execution), [*names, *known])
        raise ConfigError(
            f"execution must be one of {', '.join(map(repr, [*names, *sorted(known)]))}, got {execution!r}{hint}"
        )
    return Execution.SIMULATE, known[execution]


@accepts_wrapped_model
def set_execution(model: Model, execution: Execution | Device | Engine | str, pattern: str = "*") -> Model:
    """Set how a prepared model computes, in place; the model is returned.

    With an engine whose arithmetic is known, such as "qnn", quantizers store the codes of that engine: products of
    codes are summed exactly, and the engine's rule rounds the sums to codes. Gradients are those of the simulation.
    `torch.compile` and exports trace the simulation.

    Args:
        model: a prepared model.
        execution: "simulate", "auto" or "integer", see `fakequant.nn.Execution`; the name of an engine whose arithmetic
            is known, or a `fakequant.nn.Device`.
        pattern: a pattern of the paths of layers, and of modules that call functions with quantizers; `*` matches any
            characters (fnmatch).

    Raises:
        ConfigError: nothing matches; with "integer", some layers can never run in integers (all are named, with the
            reasons); or with a device, no quantizer has codes of the device. Nothing is then changed.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), presets.INT8)
    >>> print(summary(set_execution(model, "auto")))
    layer  type    input            weight               execution  state
    -----  ------  ---------------  -------------------  ---------  --------------
    0      Linear  int8 per_tensor  int8 per_channel(0)  integer    not calibrated
    weights: 80 bytes in float, 48 quantized (16 bits per weight)
    """
    refuse_unprepared(model)
    execution, device = _chosen(execution)
    modules = {name: module for name, module in model.named_modules() if matches(name, pattern)}
    layers = {name: module for name, module in modules.items() if isinstance(module, QuantizedLayer)}
    # A quantizer belongs to what matches if it does itself, or one of the modules around it.
    quantizers = dict[str, Quantizer]()
    for name, module in model.named_modules():
        paths = accumulate(name.split("."), "{}.{}".format)
        if isinstance(module, Quantizer) and not modules.keys().isdisjoint(paths):
            quantizers[name] = module
    if not layers and (device is None or not quantizers):
        raise ConfigError(f"no quantized layer matches {pattern!r}; correct the pattern")
    reasons = dict[str, list[str]]()
    if execution is Execution.INTEGER:
        for name, layer in layers.items():
            if (reason := layer.why_simulated(execution)) is not None:
                reasons.setdefault(reason, []).append(module_name(name))
    elif device is not None:
        for name, quantizer in quantizers.items():
            if (reason := quantizer.why_simulated(device)) is not None:
                reasons.setdefault(reason, []).append(name)
    told = "; ".join(f"{listed(names)} ({reason})" for reason, names in reasons.items())
    if execution is Execution.INTEGER and reasons:
        raise ConfigError(f'these layers cannot run in integers: {told}. Use "auto", which simulates them')
    if device is not None and reasons:
        message = f'under "{device.name}" these quantizers are simulated: {told}'
        if sum(map(len, reasons.values())) == len(quantizers):
            raise ConfigError(f'{message}; prepare with a preset such as "int8_affine" and target="{device.name}"')
        warn_user(message, CoverageWarning)
    of_layers = attributes_of(layers.values(), "execution")
    of_quantizers = attributes_of(quantizers.values(), "device")
    with restore_on_error(of_layers), restore_on_error(of_quantizers):
        for layer in layers.values():
            layer.execution = execution
        for quantizer in quantizers.values():
            quantizer.device = device
    return model


@contextmanager
def calling_quantizers(model: nn.Module) -> Iterator[None]:
    """A context without integer products: all layers call their quantizers, also those with an engine's codes."""
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLayer)]
    with restore_after(attributes_of(layers, "execution")):
        for layer in layers:
            layer.execution = Execution.SIMULATE
        yield


@contextmanager
def simulated(model: nn.Module) -> Iterator[None]:
    """A context in which a model computes the simulation, without integer products and codes of devices."""
    quantizers = [module for module in model.modules() if isinstance(module, Quantizer)]
    with calling_quantizers(model), restore_after(attributes_of(quantizers, "device")):
        for quantizer in quantizers:
            quantizer.device = None
        yield


@contextmanager
def executed_by(model: nn.Module, target: str | None) -> Iterator[Device | None]:
    """A context in which quantizers store an engine's codes; yields its device, or None if no quantizer can do so."""
    device = None if target is None else find_engine(target).device
    held = quantizers(model).values()
    if device is None or all(quantizer.why_simulated(device) is not None for quantizer in held):
        yield None
        return
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLayer)]
    with restore_after(attributes_of(layers, "execution")), restore_after(attributes_of(held, "device")):
        set_execution(model, device)
        yield device
