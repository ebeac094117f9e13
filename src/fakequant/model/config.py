"""Configurations: which layers of a model are quantized, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from fakequant.errors import ConfigError, FakeQuantError, check_keys, nearest, shown
from fakequant.model.weights import weights_of
from fakequant.nn.backward import GradientConfig
from fakequant.nn.functions import canonical_ops
from fakequant.nn.integer import Execution, as_execution
from fakequant.nn.paths import matches
from fakequant.nn.quantized.forms import computed_class, quantized_class
from fakequant.nn.quantized.layers import layers
from fakequant.nn.wrappers import NO_KERNEL, Kernel, Role
from fakequant.numerics.granularity import PerBlock
from fakequant.numerics.spec import QuantSpec, as_spec
from fakequant.registry import import_waiting
from fakequant.text import listed, module_name

NAMED: dict[str, Any] = {}
"""The presets by name, see `register_preset`; `fakequant.model.presets` has the presets for all models."""

ALIASES = {
    "W8A8": "INT8",
    "W8A16": "INT8_WEIGHT_ONLY",
    "INT8WO": "INT8_WEIGHT_ONLY",
    "W4A4": "INT4",
    "W4A16": "INT4_GROUP128",
    "W4A16_G32": "INT4_GROUP32",
    "W4A16_G64": "INT4_GROUP64",
    "W4A16_G128": "INT4_GROUP128",
    "FP8_E4M3": "FP8",
    "NVFP4A16": "NVFP4_WEIGHT_ONLY",
    "NF4": "NF4_WEIGHT_ONLY",
}
"""By the name of a preset in another library, the name of the same preset here."""


def find_preset(name: str) -> Any:
    """The preset with a name of this package or of another library; case does not count, and `-` equals `_`.

    Raises:
        ConfigError: no preset has this name; the message lists the nearest names.

    >>> find_preset("int8-weight-only").name
    'INT8_WEIGHT_ONLY'
    >>> find_preset("w4a16").name
    'INT4_GROUP128'
    """
    if not isinstance(name, str):
        raise ConfigError(
            f"a preset's name is a text, such as 'int8', got {name!r:.80}; for your own rules pass a fakequant.Config"
        )
    upper = name.upper().replace("-", "_")
    upper = ALIASES.get(upper, upper)
    if upper not in NAMED and upper.isidentifier():
        import_waiting()
    if upper not in NAMED:
        raise ConfigError(f"unknown preset {name!r}{nearest(upper, sorted([*NAMED, *ALIASES]))}")
    return NAMED[upper]


def register_preset(config: Config) -> Config:
    """Let `prepare`, rules and the command line find a configuration by its name, in upper or lower case.

    Raises:
        ConfigError: another preset has the name, or the name has other characters than letters, digits and `_`.

    >>> mine = register_preset(Config("MINE", (Rule(weight="int4 per_channel(0)"), Rule("head"))))
    >>> find_preset("mine") is mine
    True
    >>> del NAMED["MINE"]  # of the example only
    """
    if not isinstance(config, Config):
        raise ConfigError(f"register_preset takes a fakequant.Config, got {shown(config)}")
    name = config.name.upper()
    if not name.isidentifier():
        raise ConfigError(f"a preset has a name of letters, digits and _, such as 'MINE', got {config.name!r:.80}")
    if name in ALIASES or NAMED.get(name, config) != config:
        raise ConfigError(f"another preset has the name {name}; choose another name")
    NAMED[name] = config
    return config


_NO_AXIS = 1 << 30  # of no tensor


@dataclass(frozen=True)
class TensorConfig:
    """How a tensor of a layer is quantized: a specification, and whether the range is dynamic (computed in each call).

    >>> print(TensorConfig("int8 per_token", dynamic=True))
    int8 per_token dynamic
    """

    spec: QuantSpec
    dynamic: bool = False

    def __init__(self, spec: QuantSpec | str, dynamic: bool = False) -> None:
        object.__setattr__(self, "spec", as_spec(spec))
        object.__setattr__(self, "dynamic", dynamic)

    def __str__(self) -> str:
        return f"{self.spec}{' dynamic' if self.dynamic else ''}"

    def __repr__(self) -> str:
        return f"TensorConfig({str(self.spec)!r}{', dynamic=True' if self.dynamic else ''})"

    def placed(self, axes: dict[int, int], kernel: Kernel = NO_KERNEL) -> TensorConfig:
        """The configuration for a layer's tensor, in which axis `axes[i]` has the role that axis i has here."""
        given = self.spec.granularity
        granularity = given.remap_axes(axes)
        if kernel.window and given.remap_axes({-1: _NO_AXIS}) != given:  # other axes than -1 are meant literally
            granularity = granularity.over_window(axes[-1], kernel.window, kernel.length)
        spec = self.spec.regrouped(lambda one: one.remap_axes(axes)).replace(granularity=granularity)
        return TensorConfig(spec, self.dynamic)

    def for_each(self) -> TensorConfig:
        """The configuration for a stack [tensors, ...] of tensors with separate scales, see `Granularity.for_each`."""
        return TensorConfig(self.spec.regrouped(lambda one: one.for_each()), self.dynamic)

    def to_text(self) -> str:
        """Return `str(self)`, for files; raises SpecError if it could not be read back, see `QuantSpec.to_text`."""
        self.spec.to_text()
        return str(self)

    @classmethod
    def parse(cls, text: str) -> TensorConfig:
        """The configuration that a text such as "int8 per_token dynamic" describes."""
        words = text.split()
        return cls(" ".join(word for word in words if word != "dynamic"), dynamic="dynamic" in words)


_WILDCARDS = frozenset("*?[")
"""The characters that match others: a pattern without them is a path, and matches only this path."""
_TENSORS = ("input", "weight", "output", "gradient")
"""The fields of a rule that say how tensors are quantized."""


@dataclass(frozen=True)
class Rule:
    """A rule: the layers, or the calls of functions, that it matches, and how they are quantized.

    Args:
        pattern: a pattern that matches the layer's path in the model; `*` matches any characters (fnmatch).
        preset: a preset or its name; the rule quantizes like the preset's rule for all layers: `Rule("head", "int8")`.
        input: instead of a preset, how inputs are quantized; None leaves inputs in float.
        weight: instead of a preset, how the weight is quantized; None leaves the weight in float.
        layers: classes of float layers, as names or classes ("Linear", nn.Conv2d), stored as names; empty for every
            layer that can be quantized. A subclass that computes like its base also matches by the base's name.
        ops: functions that a `forward` calls, by name ("add", "matmul", "sdpa", "cat", "softmax", "linear" ...). A rule
            with `ops` quantizes only calls of these functions; its pattern matches the path of the module whose
            `forward` calls them, or the path of one call, as "block.0._sites.add_1". In these calls `weight` quantizes
            the parameters of products; `input` quantizes computed tensors, and constants of other functions. `prepare`
            then needs an example.
        optional: whether it is allowed that the rule matches nothing.
        execution: how products are computed: "simulate", "auto" or "integer", see `fakequant.nn.Execution`.
        output: how results are quantized; None, as in all presets, does not quantize them.
        gradient: how the products of the backward pass are quantized, a `GradientConfig` or its text, such as
            "float8_e5m2"; None leaves them in float. Layers with `gradient` are simulated if a gradient is needed.
        tied: whether layers of earlier rules that share a weight with a layer of this rule follow this rule. An example
            is the head of a language model that shares the weight of its embedding.

    A rule may be for layers of all kinds, so `PerChannel` and `PerBlock` name two axes by their role. Axis 0 of a
    weight means its output channels. Axis -1 means the axis that the layer's product sums over: the input channels of
    convolutions, the last axis of linear layers, the features of embeddings. Other numbers are axes of the tensor.

    Convolutions sum over the positions of their kernel, too. So `PerBlock({-1: 32})` of their weight gives blocks of
    whole kernels with at least 32 elements, or of a part of a longer kernel; an output channel with fewer elements is
    one block. If the input has blocks, too, the blocks of both lie along the channels of one position. `PerToken()` of
    the input gives a scale for each sample, and for each pixel if the kernel has one position.

    >>> rule = Rule("head")      # leaves the layer `head` in float
    >>> print(Rule("head", "int8").weight, "and", Rule("head", weight="int4 per_channel(0)").weight)
    int8 per_channel(0) and int4 per_channel(0)
    """

    pattern: str = "*"
    preset: InitVar[Config | str | None] = None
    _: KW_ONLY
    input: TensorConfig | None = None
    weight: TensorConfig | None = None
    layers: tuple[str, ...] = ()
    optional: bool = False
    execution: Execution = Execution.SIMULATE
    ops: tuple[str, ...] = ()
    output: TensorConfig | None = None
    gradient: GradientConfig | None = None
    tied: bool = False

    def __new__(cls, *places: Any, **_: Any) -> Rule:
        if len(places) > 2:
            raise ConfigError(
                f"Rule takes two positional arguments, a pattern and a preset, got {places[2]!r:.60} too; use "
                "keywords: Rule(pattern, input=..., weight=...)"
            )
        return super().__new__(cls)

    def __post_init__(self, preset: Config | str | None) -> None:
        if not isinstance(self.pattern, str):
            raise ConfigError(f"a rule's pattern is a text, such as 'head' or '*', got {self.pattern!r:.80}")
        if preset is not None:
            if isinstance(preset, (QuantSpec, TensorConfig)) or (isinstance(preset, str) and _is_specification(preset)):
                raise ConfigError(
                    f"Rule({self.pattern!r}, ...) takes a preset as second argument, got the specification "
                    f"{str(preset)!r}; pass it by keyword, as Rule({self.pattern!r}, input={str(preset)!r}) or weight="
                )
            config: Config = preset if isinstance(preset, Config) else find_preset(preset)
            general = [rule for rule in config.layer_rules if rule.pattern == "*" and not rule.layers]
            if len(general) != 1 or any(x is not None for x in (self.input, self.weight, self.output)):
                raise ConfigError(
                    f"Rule({self.pattern!r}, {config.name}) needs a configuration with exactly one rule for all "
                    "layers, and cannot have input=, weight= or output= as well; write Rule(pattern, input=..., "
                    "weight=...)"
                )
            for name in _TENSORS:
                if getattr(self, name) is None:
                    object.__setattr__(self, name, getattr(general[0], name))
        for name in _TENSORS:
            value, kind = getattr(self, name), GradientConfig if name == "gradient" else TensorConfig
            if isinstance(value, (str, QuantSpec)):
                object.__setattr__(self, name, kind.parse(value) if isinstance(value, str) else kind(value))
            elif value is not None and not isinstance(value, kind):
                raise ConfigError(
                    f"a rule's {name} must be a {kind.__name__}, a QuantSpec, a text or None, got {value!r:.80}"
                )
        if self.gradient is not None and self.leaves_in_float:
            raise ConfigError("gradient= needs a layer whose input or weight is quantized; pass input= or weight=, too")
        object.__setattr__(self, "execution", as_execution(self.execution))
        several = isinstance(self.layers, Iterable) and not isinstance(self.layers, (str, type))
        given: tuple[Any, ...] = tuple(self.layers) if several else (self.layers,)
        for layer in given:
            if not isinstance(layer, (str, type)):
                raise ConfigError(
                    f'a rule\'s layers must be class names or classes, got {layer!r}; write "Linear" or torch.nn.Linear'
                )
        object.__setattr__(
            self, "layers", tuple(layer if isinstance(layer, str) else layer.__name__ for layer in given)
        )
        object.__setattr__(self, "ops", (self.ops,) if isinstance(self.ops, str) else tuple(self.ops))
        canonical_ops(self.ops)  # refuses unknown ones

    def __repr__(self) -> str:
        words = [repr(self.pattern)]
        for one in fields(self)[1:]:
            if (value := getattr(self, one.name)) != one.default:
                text = str(value) if isinstance(value, (TensorConfig, GradientConfig)) else value
                words.append(f"{one.name}={(text.value if isinstance(text, Execution) else text)!r}")
        return f"Rule({', '.join(words)})"

    def matches(self, name: str, module: nn.Module) -> bool:
        """Whether the rule matches a layer, by its path and its class."""
        if not matches(name, self.pattern):
            return False
        return not self.layers or not {type(module).__name__, computed_class(module).__name__}.isdisjoint(self.layers)

    def tensor(self, role: Role, axes: dict[int, int], kernel: Kernel = NO_KERNEL) -> TensorConfig | None:
        """How the tensor with a role is quantized, in terms of the tensor's axes; None if the tensor stays in float.

        Blocks of a weight hold whole kernels. If the input has blocks too, the blocks of both lie along the channels of
        one position, so that an engine can multiply block by block; not in depthwise convolutions, whose sums have a
        single channel.
        """
        config: TensorConfig | None = getattr(self, role.value)
        in_blocks = self.input is not None and isinstance(self.input.spec.granularity, PerBlock)
        if role is Role.WEIGHT and in_blocks and kernel.length != 1:
            kernel = kernel._replace(length=None)
        return None if config is None else config.placed(axes, kernel)

    @property
    def functions(self) -> frozenset[str]:
        """The canonical names of the functions in `ops`; empty for a rule for layers."""
        return canonical_ops(self.ops)

    def matches_any(self, names: Iterable[str], module: nn.Module) -> bool:
        """Whether the rule matches a layer by any of the layer's paths, `names`."""
        return any(self.matches(name, module) for name in names)

    @property
    def leaves_in_float(self) -> bool:
        """Whether the rule quantizes nothing."""
        return self.input is None and self.weight is None and self.output is None

    def to_dict(self) -> dict[str, Any]:
        """The rule as a plain dict, for JSON."""
        return {
            "pattern": self.pattern,
            **{name: (own := getattr(self, name)) and own.to_text() for name in _TENSORS},
            "layers": list(self.layers),
            "ops": list(self.ops),
            "optional": self.optional,
            "execution": self.execution.value,
            "tied": self.tied,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Rule:
        """The rule of a dict made by `to_dict`; missing keys take their defaults.

        Raises:
            ConfigError: a key or a value is unknown.

        >>> Rule.from_dict({"pattern": "head"}) == Rule("head")
        True
        """
        return cls(**_with_known_keys(cls, values, "a rule"))


TABLES = Rule(layers=("Embedding", "EmbeddingBag"), optional=True, tied=True)
"""A rule that leaves tables of embeddings in float; presets change it by `replace`."""


@dataclass(frozen=True)
class Config:
    """A configuration: a named list of rules that say which layers are quantized, and how.

    Args:
        name: the name in messages and reports; without it, as in `Config([rule, rule])`, the name is "own rules".
        rules: a rule, or several; the last rule that matches a layer is used.

    >>> config = presets.INT8.with_rule(Rule("stem"))     # as INT8, but the layer `stem` stays in float
    """

    name: str
    rules: tuple[Rule, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        is_named = isinstance(self.name, str)
        if self.rules and not is_named:
            raise ConfigError(f"a configuration's name is a text, got {self.name!r:.60}; write Config([rule, rule])")
        given = self.rules if is_named else self.name
        rules = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
        if wrong := [rule for rule in rules if not isinstance(rule, Rule)]:
            raise ConfigError(f"a configuration is made of rules, got {wrong[0]!r:.80}; write Rule(pattern, preset)")
        vars(self).update(name=self.name if is_named else "own rules", rules=rules)

    def __repr__(self) -> str:
        return f"Config({self.name!r}, {len(self.rules)} {'rule' if len(self.rules) == 1 else 'rules'})"

    def __str__(self) -> str:
        return "\n".join([repr(self), *(f"  {rule!r}" for rule in self.rules)])

    def with_rule(self, *rules: Rule) -> Config:
        """The same configuration with more rules at the end, which override earlier rules."""
        return replace(self, rules=self.rules + rules)

    def for_model(self, model: nn.Module) -> Config:
        """The configuration itself; a `ModelConfig` adds the rules that it makes for a float model."""
        return self

    @property
    def layer_rules(self) -> tuple[Rule, ...]:
        """The rules for layers."""
        return tuple(rule for rule in self.rules if not rule.ops)

    @property
    def site_rules(self) -> tuple[Rule, ...]:
        """The rules for functions."""
        return tuple(rule for rule in self.rules if rule.ops)

    def resolve(self, model: nn.Module, *, any_module: bool = False) -> dict[str, Rule]:
        """For the path of each layer that can be quantized: the last rule that matches the layer.

        A later rule with `tied` replaces this rule for layers that share a weight with a layer of the later rule. A
        layer with several paths matches by any of them, and is listed by the first.

        Args:
            any_module: whether a rule may match modules that are not layers, for the functions that these modules call.

        Raises:
            ConfigError: a rule that is not optional matches nothing; the layers that can be quantized are named. A
                rule that leaves layers in float is not refused if it matches a layer without a quantized form.
        """
        candidates = {name: module for name, module in model.named_modules() if quantized_class(module) is not None}
        names = all_names(model)
        first = {module: name for name, module in candidates.items()}
        held: dict[str, Rule] = {}
        for rule, found in _matched(self.layer_rules, names):
            matched = [first[module] for module in found if module in first]
            if not matched and not rule.optional:
                others = found if any_module else [m for m in found if rule.leaves_in_float and weights_of(m)]
                if not others:
                    raise ConfigError(_nothing_matched(rule, candidates, model))
            held.update(dict.fromkeys(matched, rule))
        leading = [name for name, rule in held.items() if rule.tied]
        leaders = {parameter: held[name] for name in leading for parameter in weights_of(candidates[name])}
        place = {id(rule): number for number, rule in enumerate(self.rules)}
        followers: dict[str, Rule] = {}  # layers with the weight of another one, which a later rule leads
        for name, rule in held.items() if leaders else ():
            for parameter in weights_of(candidates[name]):
                if parameter in leaders and place[id(rule)] < place[id(leaders[parameter])]:
                    followers[name] = leaders[parameter]
        return held | followers

    def last_rules(self, model: nn.Module) -> dict[nn.Module, Rule]:
        """For each module that rules for layers match: the last of these rules."""
        matched = _matched(self.layer_rules, all_names(model))
        return {module: rule for rule, modules in matched for module in modules}

    def left_on_purpose(self, model: nn.Module) -> set[nn.Module]:
        """The modules whose last matching rule leaves them in float."""
        return {module for module, rule in self.last_rules(model).items() if rule.leaves_in_float}

    def to_dict(self) -> dict[str, Any]:
        """The configuration as a plain dict, for JSON."""
        return {"name": self.name, "rules": [rule.to_dict() for rule in self.rules]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """The configuration of a dict made by `to_dict`.

        Raises:
            ConfigError: a key or a value is unknown, or the name is missing.

        >>> Config.from_dict(presets.INT8.to_dict()) == presets.INT8
        True
        """
        values = _with_known_keys(cls, values, "a configuration")
        if "name" not in values:
            raise ConfigError(f"a configuration needs the key 'name', got {values}")
        return cls(values["name"], tuple(Rule.from_dict(rule) for rule in values.get("rules", ())))


@dataclass(frozen=True, repr=False)
class ModelConfig(Config):
    """A configuration whose first rules depend on the model, as in a GGUF mixture; `rules` come after them.

    Args:
        make: returns the configuration for a float model.
    """

    make: Callable[[nn.Module], Config] = field(kw_only=True)

    def for_model(self, model: nn.Module) -> Config:
        """The configuration with the rules for a float model, and then `rules`."""
        return Config(self.name, self.make(model).rules + self.rules)


def _is_specification(text: str) -> bool:
    """Whether a text is the specification of a tensor, and not the name of a preset."""
    with suppress(ConfigError):
        find_preset(text)
        return False
    try:
        TensorConfig.parse(text)
        return True
    except FakeQuantError:
        return False


def all_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """For every module, all paths of the module: a shared module has several."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _matched(rules: Iterable[Rule], names: dict[nn.Module, list[str]]) -> Iterator[tuple[Rule, list[nn.Module]]]:
    """Each rule with the modules that it matches. A pattern without wildcards is looked up, not searched."""
    named = {name: module for module, own in names.items() for name in own}
    for rule in rules:
        is_path = _WILDCARDS.isdisjoint(rule.pattern)
        modules = ([named[rule.pattern]] if rule.pattern in named else []) if is_path else [*names]
        yield rule, [module for module in modules if rule.matches_any(names[module], module)]


def _with_known_keys(cls: type[Any], values: Any, what: str) -> dict[str, Any]:
    check_keys(values, [one.name for one in fields(cls)], what, ConfigError)
    for key, kind in (("name", str), ("pattern", str), ("optional", bool), ("rules", (list, tuple))):
        if key in values and not isinstance(values[key], kind):
            raise ConfigError(f"{key!r} of {what} has a wrong type: {values[key]!r}")
    return values


def _nothing_matched(rule: Rule, candidates: dict[str, nn.Module], model: nn.Module) -> str:
    own = {name: type(one).__name__ for name, one in model.named_modules() if weights_of(one)}
    if not candidates and own:
        first, kind = next(iter(own.items()))
        if any(isinstance(one, torch.jit.ScriptModule) for one in model.modules()):
            return (
                f"the rule {rule.pattern!r} matches nothing: {module_name(first)} is TorchScript, which does not show "
                "the layers of torch; prepare the model as it was written, before torch.jit.script, trace or save"
            )
        return (
            f"the rule {rule.pattern!r} matches nothing: the weights of the model are in {len(own)} modules without "
            f"a quantized form, the first is {module_name(first)} ({kind}). The functions that read them get "
            "quantizers by a target, as in prepare(model, config, example, target='onnxruntime'), or by a rule, as "
            "Rule('*', config, ops=('linear', 'matmul', 'conv')); fakequant.nn.quantizes registers a quantized form"
        )
    if not candidates:
        return (
            f"the rule {rule.pattern!r} matches nothing: the model has no layer that can be quantized "
            f"({', '.join(sorted(c.__name__ for c in layers()))}), or it is already prepared"
        )
    found = [f"{name} ({type(module).__name__})" for name, module in candidates.items()]
    kinds = f" of type {' or '.join(rule.layers)}" if rule.layers else ""
    return (
        f"the rule {rule.pattern!r}{kinds} matches no layer; layers that can be quantized are {listed(found, 8)}. "
        "Correct the pattern, or set optional=True if the rule may match nothing"
    )
