"""An engine as a value: where it wants quantizers, what it computes of a preset, what it loads, and how it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from fakequant.errors import ConfigError, ExportError, nearest, shown
from fakequant.model.config import TABLES, Config, TensorConfig
from fakequant.model.sites.targets import Target
from fakequant.nn.device import Device
from fakequant.nn.quantizer import quantizers
from fakequant.registry import import_waiting
from fakequant.text import listed

GROUPS = "INT4_GROUP128", "INT4_GROUP64", "INT4_GROUP32"
WEIGHTS = "INT8_WEIGHT_ONLY", "INT4_WEIGHT_ONLY", *GROUPS
"""Presets of integer weights, whose inputs stay in float."""
STATIC = "INT8", "INT8_AFFINE"
"""Presets of integer weights and inputs with fixed ranges."""
_FIELDS = ("input", "weight", "output")


@dataclass(frozen=True, eq=False)
class Engine:
    """A program that runs quantized models. What this package knows of it stands here, in one value.

    Attributes:
        name: for `target=` and `fakequant.set_execution`.
        bound: how far its results are from the simulation, as measured, or that it was not run.
        serves: the models and machines that it is for.
        kinds: the names of presets by how the engine multiplies, those first that it runs faster: `advise` compares
            presets of one kind with each other.
        files: what it reads: the name of a format of `fakequant.deliver`, or of a style of `fakequant.export_onnx`.
        export: the function of this package that writes its files, where `fakequant.deliver` does not.
        packages: the distributions that run its files here.
        placement: makes the table of where it wants quantizers; None where layers alone have some.
        variant: called with "input", "weight" or "output" and how a preset quantizes that tensor; it returns how the
            engine computes it.
        tables: whether it holds quantized embeddings.
        fixed_global: whether it fixes the scale of the tensor of NVFP4 inputs; `calibrate` does it then.
        device: its arithmetic on codes; None where the simulation is what it computes, or where no other is known.
        aliases: other names of it, and engines that take the same.
        page: of the documentation, "" for none.
        known: what was seen of the speed, as a sentence; "" for nothing.
        others: what the names of other presets begin with that it also runs.

    Raises:
        ConfigError: an attribute is of another kind.

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
        """The names of all presets that it is known to run."""
        return [name for kind in self.kinds for name in kind]

    def takes(self, preset: str) -> bool:
        """Whether it is known to run a preset."""
        return preset in self.presets or bool(self.others and preset.startswith(self.others))

    def placement_of(self, config: Config) -> Target | None:
        """Where it wants the quantizers of a configuration: by its placement, if inputs have fixed ranges."""
        inputs = [rule.input for rule in config.rules if rule.input is not None]
        is_dynamic = bool(inputs) and all(one.dynamic for one in inputs)
        return None if self.placement is None or is_dynamic else self.placement()

    def computed(self, config: Config, model: nn.Module) -> tuple[Config, str]:
        """The configuration that it computes in place of another, and a sentence on the changes, "" for none."""
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

    def refuse(self, model: nn.Module, preset: str) -> None:
        """Raise a ConfigError if its files cannot hold a prepared model."""
        if not quantizers(model):
            return
        import_waiting()  # files say what they can hold
        for check in holders:
            try:
                check(self.files or self.export, model)
            except ExportError as error:
                raise ConfigError(f"{self.name} cannot load {preset}: {error}") from error


def _holds(values: object, kind: type) -> bool:
    return isinstance(values, tuple) and all(isinstance(value, kind) for value in values)


_engines: dict[str, Engine] = {}

holders: list[Callable[[str, nn.Module], None]] = []
"""Checks of a prepared model: each raises if files cannot hold it, by the `files` of an `Engine`, or its `export`.

Rooms that write files add them."""


def register_engine(engine: Engine) -> Engine:
    """Add an engine for `target=` and `fakequant.set_execution`; the engine that had its name is replaced.

    Raises:
        ConfigError: no `Engine`, or one with a name of another.

    >>> register_engine(known_engines()["vllm"]).aliases
    ('sglang',)
    """
    if not isinstance(engine, Engine):
        raise ConfigError(f"register_engine takes a fakequant.Engine, got {shown(engine)}")
    names, others = (engine.name, *engine.aliases), known_engines()
    others = {name: known for name, known in others.items() if known.name != engine.name}
    if taken := [name for name in names if name in others]:
        raise ConfigError(f"{listed(taken)} names another engine already; take other names")
    _engines.clear()
    _engines.update(others | dict.fromkeys(names, engine))
    return engine


def known_engines() -> dict[str, Engine]:
    """All engines by name, other names included.

    >>> known_engines()["sglang"].name
    'vllm'
    """
    import_waiting()
    return dict(_engines)


def find_engine(name: str | Engine) -> Engine:
    """The engine of a name; an engine is its own.

    Raises:
        ConfigError: there is none; the nearest are offered.
    """
    if isinstance(name, Engine):
        return name
    if not isinstance(name, str):
        raise ConfigError(f"target takes the name of an engine, such as 'onnxruntime', got {shown(name)}")
    known = known_engines()
    if name not in known:
        raise ConfigError(f"unknown target {name!r}{nearest(name, sorted(known))}")
    return known[name]
