"""A plan: plain data that says which layers and functions of a model are quantized, and how; and its JSON form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from torch import nn

from fakequant.errors import CheckpointError, ConfigError, SpecError
from fakequant.model.config import TensorConfig
from fakequant.model.sites import PlannedSite, SitePlan, SiteQuantizer, apply_sites, site_path, site_plan
from fakequant.nn.backward import GradientConfig
from fakequant.nn.functions import SITE_FUNCTIONS
from fakequant.nn.integer import Execution
from fakequant.nn.paths import module_at
from fakequant.nn.quantized.folded import FoldedLayer
from fakequant.nn.quantized.forms import bypasses_class
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Mode, Quantizer
from fakequant.nn.ranges import ByValue, LearnedRange, make_learned_range
from fakequant.nn.sites import functions_of, site_keys

T = TypeVar("T")
E = TypeVar("E", bound=Enum)
Natural = Annotated[int, "of at least 0"]
"""A whole number of at least 0, as the type of a field."""
ALWAYS = {"always": True}
"""Metadata of a field that `plain_of` writes even if it has its default."""


class UnexpectedValue(ValueError):
    """A value in a file that lacks the type or the range that its key requires."""


def keys_of(values: Any, place: str, *keys: str) -> list[Any]:
    """The values that the JSON object `values` has for `keys`, in the order of `keys`."""
    if not isinstance(values, dict):
        raise UnexpectedValue(f"{place or 'it'} is {values!r:.80}, not an object")
    if missing := [key for key in keys if key not in values]:
        raise UnexpectedValue(f"{place or 'it'} lacks {', '.join(missing)}")
    return [values[key] for key in keys]


def mapping_of(values: Any, place: str, read: Callable[[Any, str], T]) -> dict[str, T]:
    """A JSON object as a dict; `read(value, place)` reads each value, and `place` says where the value stands."""
    if not isinstance(values, dict):
        raise UnexpectedValue(f"{place} is {values!r:.80}, not an object")
    return {key: read(value, f"{place}.{key}") for key, value in values.items()}


def text(value: Any, place: str) -> str:
    """The value, checked to be a text."""
    if not isinstance(value, str):
        raise UnexpectedValue(f"{place} is {value!r:.80}, not a text")
    return value


def number(value: Any, place: str) -> int:
    """The value, checked to be a whole number of at least 0."""
    if type(value) is not int or value < 0:
        raise UnexpectedValue(f"{place} is {value!r:.80}, not a number of at least 0")
    return value


def member(value: Any, place: str, kind: type[E]) -> E:
    """The member of the enumeration `kind` whose value is `value`."""
    known = {member.value: member for member in kind}
    if not isinstance(value, str) or value not in known:
        raise UnexpectedValue(f"{place} is {value!r:.80}, which is none of {', '.join(known)}")
    return known[value]


def value_of(value: Any, place: str, kind: Any) -> Any:
    """A value of JSON as an object of `kind`: a dataclass, text, number, None, or a list, tuple or mapping of these.

    Floats may be the texts "inf", "-inf" and "nan", which JSON lacks. A member of an enumeration is read from its
    value, or if it is the key of a mapping, from its name. A class with a method `parse` is read from a text.

    >>> value_of({"a": [1, "inf"]}, "values", Mapping[str, Sequence[float]])
    {'a': [1.0, inf]}
    """
    origin, kinds = get_origin(kind), get_args(kind)
    if hasattr(kind, "__dataclass_fields__") and not hasattr(kind, "parse"):
        hints = _hints(kind)
        keys_of(value, place, *[f.name for f in fields(kind) if _default_of(f) is MISSING])
        if unknown := sorted(set(value) - set(hints)):
            raise UnexpectedValue(f"{place or 'it'} has the unknown key {unknown[0]!r:.80}")
        held = {name: value_of(item, f"{place}.{name}".lstrip("."), hints[name]) for name, item in value.items()}
        return kind(**held)
    if origin is UnionType:
        return None if value is None else value_of(value, place, next(one for one in kinds if one is not NoneType))
    if origin in (Sequence, list, tuple):
        expected = "a list" if origin is not tuple else f"a list of {len(kinds)}"
        if not isinstance(value, list) or (origin is tuple and len(value) != len(kinds)):
            raise UnexpectedValue(f"{place} is {value!r:.80}, not {expected}")
        own = kinds if origin is tuple else kinds * len(value)
        found = [value_of(item, f"{place}[{n}]", k) for n, (item, k) in enumerate(zip(value, own, strict=True))]
        return tuple(found) if origin is tuple else found
    if origin in (Mapping, dict):
        read = mapping_of(value, place, lambda item, where: value_of(item, where, kinds[1]))
        if kinds[0] is str:
            return read
        if unknown := sorted(set(read) - set(kinds[0].__members__)):
            raise UnexpectedValue(f"{place} has {unknown[0]!r:.80}, which is none of {', '.join(kinds[0].__members__)}")
        return {kinds[0][key]: item for key, item in read.items()}
    if kind is Any:
        return value
    if hasattr(kind, "parse"):
        return kind.parse(text(value, place))
    if kind in (str, Natural):
        return text(value, place) if kind is str else number(value, place)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return member(value, place, kind)
    if kind is bool and not isinstance(value, bool):
        raise UnexpectedValue(f"{place} is {value!r:.80}, not true or false")
    is_large = type(value) is int and not -(2**63) <= value < 2**63
    if kind is float and not is_large and (type(value) in (int, float) or value in ("inf", "-inf", "nan")):
        return float(value)
    if type(value) is not kind or is_large:
        raise UnexpectedValue(f"{place} is {value!r:.80}, not a {kind.__name__}")
    return value


def plain_of(value: Any) -> Any:
    """The value in JSON's types, for `value_of` to read; fields with their default are omitted, except `ALWAYS` fields.

    >>> plain_of([{"a": 1.5}])
    [{'a': 1.5}]
    """
    if hasattr(value, "to_text"):
        return value.to_text()
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        named = [one.name for one in fields(value) if one.metadata or getattr(value, one.name) != _default_of(one)]
        return {name: plain_of(getattr(value, name)) for name in named}
    if isinstance(value, Mapping):
        return {key: plain_of(item) for key, item in value.items()}
    return [plain_of(item) for item in value] if isinstance(value, (list, tuple)) else value


def _default_of(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


_hints = cache(partial(get_type_hints, include_extras=True))


P = TypeVar("P", bound="Plan")


@dataclass(frozen=True)
class LearnedEntry:
    """How a range is learned: the method and its options."""

    method: str
    options: dict[str, Any]


@dataclass(frozen=True)
class ByValueEntry:
    """The argument whose value chooses a range, and the values at which the bins begin."""

    by: str
    boundaries: list[float]

    @classmethod
    def of(cls, quantizer: Quantizer) -> ByValueEntry | None:
        """The entry of a quantizer; None if the quantizer has a single range.

        Raises:
            ConfigError: a function chooses the range, which a file cannot store.
        """
        own = quantizer.by_value
        if own is None:
            return None
        if not isinstance(own.by, str):
            raise ConfigError(
                f"the ranges of {quantizer.name or quantizer} are chosen by the function {own.name}, which a file "
                'cannot store; calibrate by the name of an argument, such as by="timestep"'
            )
        return cls(own.by, list(own.boundaries))


@dataclass(frozen=True)
class QuantizerEntry:
    """How one quantizer quantizes: specification, mode, and how its range is learned or chosen."""

    tensor: TensorConfig
    mode: Mode = field(default=Mode.QUANTIZE, metadata=ALWAYS)
    learned: LearnedEntry | None = field(default=None, metadata=ALWAYS)
    by_value: ByValueEntry | None = None

    @property
    def is_static(self) -> bool:
        """Whether the scale of the quantizer is fixed, neither learned nor dynamic."""
        return self.learned is None and not self.tensor.dynamic

    def make_by_value(self) -> ByValue | None:
        """The object that chooses among several ranges; None for a single range."""
        return None if self.by_value is None else ByValue(self.by_value.by, self.by_value.boundaries)

    def make_learned(self) -> LearnedRange | None:
        """The object that learns the range, without parameters yet; None if the range is not learned."""
        if self.learned is None:
            return None
        return make_learned_range(self.learned.method, self.tensor.spec, **self.learned.options)


@dataclass(frozen=True)
class TransformEntry:
    """The transform of a layer's input: its kind and its options."""

    kind: str
    options: dict[str, Natural]


@dataclass(frozen=True)
class LayerEntry:
    """One layer: the name of its float class, the quantizer in each of its attributes, the transform of its input or
    None, and how gradients are quantized (None: not at all)."""

    type: str
    execution: Execution = field(default=Execution.SIMULATE, metadata=ALWAYS, kw_only=True)
    quantizers: dict[str, QuantizerEntry]
    transform: TransformEntry | None = None
    gradient: GradientConfig | None = None


@dataclass(frozen=True, kw_only=True)
class SiteQuantizerEntry(QuantizerEntry):
    """A quantizer of a function's call: its kind, the path of the shared quantizer, whether its range never changes."""

    kind: Kind
    group: str | None = field(default=None, metadata=ALWAYS)
    pinned: bool = field(default=False, metadata=ALWAYS)


@dataclass(frozen=True)
class SiteEntry:
    """A function's call: its operands, the paths of those that are parameters, the quantizers of operands, and how
    gradients are quantized (None: not at all)."""

    operands: list[str]
    weights: dict[str, str] = field(default_factory=dict, metadata=ALWAYS, kw_only=True)
    quantizers: dict[str, SiteQuantizerEntry]
    gradient: GradientConfig | None = None


@dataclass(frozen=True)
class OwnerEntry:
    """A module whose `forward` calls functions: its class, the order of calls, and the quantized calls with names."""

    type: str
    steps: list[str]
    sites: dict[str, SiteEntry]
    training_keys: list[str] | None = None


@dataclass(frozen=True)
class SitesEntry:
    """The modules that call functions with quantizers (`owners`), and the modules that owners call (`shielded`)."""

    owners: dict[str, OwnerEntry] = field(default_factory=dict, metadata=ALWAYS)
    shielded: list[str] = field(default_factory=list, metadata=ALWAYS)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All data of a quantized model except its tensors; `QuantizedState` describes the fields."""

    shared: dict[str, str] = field(default_factory=dict, metadata=ALWAYS)
    versions: dict[str, Natural] | None = field(default=None, metadata=ALWAYS)
    layers: dict[str, LayerEntry] = field(default_factory=dict, metadata=ALWAYS)
    sites: SitesEntry = field(default_factory=SitesEntry, metadata=ALWAYS)
    stale: list[str] = field(default_factory=list, metadata=ALWAYS)

    def fields(self) -> dict[str, Any]:
        """The fields of a plan, without the fields of a subclass."""
        return {one.name: getattr(self, one.name) for one in fields(Plan)}

    def quantizers(self) -> Iterator[tuple[str, str, QuantizerEntry]]:
        """For each quantizer of layers and functions: its path, the place of its entry in the JSON, and its entry."""
        for path, layer in self.layers.items():
            for name, held in layer.quantizers.items():
                yield (f"{path}.{name}" if path else name), f"layers.{path}.quantizers.{name}", held
        for path, owner in self.sites.owners.items():
            for key, site in owner.sites.items():
                for name, held in site.quantizers.items():
                    place = f"sites.owners.{path}.sites.{key}.quantizers.{name}"
                    yield f"{site_path(path, key)}.{name}", place, held


def read_plan(values: Any, kind: type[P], source: object) -> P:
    """Make a plan of the class `kind` from `values` of JSON, and check every value.

    Raises:
        CheckpointError: a value is damaged or unknown; the source is named.
    """
    try:
        plan: P = value_of(values, "", kind)
        for _, place, held in plan.quantizers():
            options: Mapping[str, Any] = {} if held.learned is None else held.learned.options
            if reserved := options.keys() & {"method", "spec"}:
                named = ", ".join(sorted(reserved))
                raise UnexpectedValue(f"{place}.learned.options has {named}, which is not an option")
            made = held.make_learned()
            parameters = {} if made is None else inspect.signature(type(made)).parameters
            for name, value in options.items():
                default = parameters[name].default
                if default is not inspect.Parameter.empty and type(value) is not type(default):
                    kind_of = type(default).__name__
                    raise UnexpectedValue(f"{place}.learned.options.{name} is {value!r:.80}, not a {kind_of}")
            held.make_by_value()
        return plan
    except (SpecError, ConfigError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{source} cannot be used: {error}. It is damaged, of a later version of fakequant, or needs what your own "
            "code registers (formats, layers, learned ranges)"
        ) from error


def quantizer_values(quantizer: Quantizer) -> dict[str, Any]:
    """For the name of each field of a `QuantizerEntry`: its value, from a quantizer."""
    learned = quantizer.learned
    return {
        "tensor": TensorConfig(quantizer.spec, quantizer.dynamic),
        "mode": quantizer.mode,
        "learned": None if learned is None else LearnedEntry(learned.method, learned.options()),
        "by_value": ByValueEntry.of(quantizer),
    }


def layer_entry(layer: QuantizedLayer) -> LayerEntry:
    """The entry of a layer in a plan.

    Raises:
        ConfigError: the layer folds a batch normalisation while the model trains, which an entry cannot store.
    """
    if isinstance(layer, FoldedLayer):
        raise ConfigError(
            "the model has batch normalisations that are folded while it trains (fakequant.qat.fold_batch_norm), which "
            "a snapshot cannot hold; call fakequant.qat.merge_batch_norm(model) first, or keep model.state_dict() to "
            "go on training"
        )
    held = {attribute: getattr(layer, attribute) for attribute in layer.operands(layer)}
    transform = layer.input_transform
    return LayerEntry(
        type(layer).float_class.__name__,
        {name: QuantizerEntry(**quantizer_values(one)) for name, one in held.items() if one is not None},
        None if transform is None else TransformEntry(transform.kind, transform.options()),
        layer.gradient,
        execution=layer.execution,
    )


def sites_entry(model: nn.Module) -> SitesEntry:
    """The entry of a model's sites in a plan."""
    plan = site_plan(model)
    trained = {path: list(keys) for path, keys in plan.training_keys.items()}
    owners = {
        path: OwnerEntry(type(module_at(model, path)).__name__, list(steps), {}, trained.get(path))
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
    """Raise CheckpointError if a model's `modules` lack the calls that an entry quantizes; keys are paths."""
    if missing := [path for path in (*entry.owners, *entry.shielded) if path not in modules]:
        raise CheckpointError(
            f"the checkpoint has modules that the model lacks: {', '.join(missing)}; make the model that was saved"
        )
    for path, owner in entry.owners.items():
        shown, cls = path or "(the model)", type(modules[path])
        if cls.__name__ != owner.type:
            raise CheckpointError(
                f"the checkpoint's module {shown} is a {owner.type}, the model's is a {cls.__name__}; make the model "
                "that was saved"
            )
        if bypasses_class(modules[path]):
            raise CheckpointError(
                f"the forward of the model's module {shown} was replaced, for example by a hook, so that calls would "
                "bypass the quantizers of its functions; remove the hook before load"
            )
        steps = (*owner.steps, *functions_of(owner.training_keys or ()))
        unknown = sorted({*steps} - {*SITE_FUNCTIONS}) or sorted({*owner.sites} - {*site_keys(tuple(owner.steps))})
        if unknown:
            raise CheckpointError(
                f"the checkpoint's module {shown} has quantizers of the calls {', '.join(unknown)}, which this "
                "version of fakequant does not know; the checkpoint is damaged, or of a later version"
            )


def restore_sites(model: nn.Module, plan: Plan) -> None:
    """Add the quantizers of functions in a plan to a float model, without ranges."""
    owners = plan.sites.owners
    planned = [
        PlannedSite(
            path,
            key.rpartition("_")[0],
            int(key.rpartition("_")[2]),
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
            first.setdefault(module_at(model, path), held)  # functions may share a quantizer
    for quantizer, held in first.items():
        assert isinstance(quantizer, Quantizer)
        quantizer.mode, quantizer.pinned, quantizer.by_value = held.mode, held.pinned, held.make_by_value()
        if (learned := held.make_learned()) is not None:
            quantizer.attach_learned(learned)
