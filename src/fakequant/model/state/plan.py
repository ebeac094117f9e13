"""What is quantized in a model, and how: plain data about its layers and functions, and their form in JSON."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from fakequant.errors import CheckpointError, ConfigError, SpecError
from fakequant.model.sites.planned import site_path
from fakequant.model.state.json_values import ALWAYS, Natural, UnexpectedValue, value_of
from fakequant.model.tensor_config import TensorConfig
from fakequant.nn.backward.config import GradientConfig
from fakequant.nn.integer import Execution
from fakequant.nn.quantized.folded import FoldedLayer
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Mode, Quantizer
from fakequant.nn.ranges.by_value import ByValue
from fakequant.nn.ranges.learned import LearnedRange, make_learned_range

P = TypeVar("P", bound="Plan")


@dataclass(frozen=True)
class LearnedEntry:
    """How a range is learned: the method and its options."""

    method: str
    options: dict[str, Any]


@dataclass(frozen=True)
class ByValueEntry:
    """The argument by which ranges are chosen, and where their bins begin."""

    by: str
    boundaries: list[float]

    @classmethod
    def of(cls, quantizer: Quantizer) -> ByValueEntry | None:
        """That of a quantizer; None for one range.

        Raises:
            ConfigError: a function chooses, which no file holds.
        """
        own = quantizer.by_value
        if own is None:
            return None
        if not isinstance(own.by, str):
            raise ConfigError(
                f"the ranges of {quantizer.name or quantizer} follow the function {own.name}, which no file holds; "
                'calibrate by the name of an argument, such as by="timestep"'
            )
        return cls(own.by, list(own.boundaries))


@dataclass(frozen=True)
class QuantizerEntry:
    """One quantizer."""

    tensor: TensorConfig
    mode: Mode = field(default=Mode.QUANTIZE, metadata=ALWAYS)
    learned: LearnedEntry | None = field(default=None, metadata=ALWAYS)
    by_value: ByValueEntry | None = None

    @property
    def is_static(self) -> bool:
        """Whether its scale is fixed."""
        return self.learned is None and not self.tensor.dynamic

    def make_by_value(self) -> ByValue | None:
        """What chooses the range; None where there is one."""
        return None if self.by_value is None else ByValue(self.by_value.by, self.by_value.boundaries)

    def make_learned(self) -> LearnedRange | None:
        """The object that learns the range, without parameters yet; None where nothing is learned."""
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
    """One layer: its float class by name, its quantizers by attribute, the transform of its input if it has one, the
    rank of what it adds to its output, or 0, and how its gradients are quantized, if they are."""

    type: str
    execution: Execution = field(default=Execution.SIMULATE, metadata=ALWAYS, kw_only=True)
    quantizers: dict[str, QuantizerEntry]
    transform: TransformEntry | None = None
    low_rank: Natural = 0
    gradient: GradientConfig | None = None


@dataclass(frozen=True, kw_only=True)
class SiteQuantizerEntry(QuantizerEntry):
    """One quantizer of a site, the path of the one that it is, where several share one, and whether it is pinned."""

    kind: Kind
    group: str | None = field(default=None, metadata=ALWAYS)
    pinned: bool = field(default=False, metadata=ALWAYS)


@dataclass(frozen=True)
class SiteEntry:
    """One call of a function: its operands, those that are parameters of the owner, the quantizers by operand, and how
    its gradients are quantized, if they are."""

    operands: list[str]
    weights: dict[str, str] = field(default_factory=dict, metadata=ALWAYS, kw_only=True)
    quantizers: dict[str, SiteQuantizerEntry]
    gradient: GradientConfig | None = None


@dataclass(frozen=True)
class OwnerEntry:
    """One module whose `forward` calls functions: its class by name, the sequence of calls, and its sites by name."""

    type: str
    steps: list[str]
    sites: dict[str, SiteEntry]
    training_keys: list[str] | None = None


@dataclass(frozen=True)
class SitesEntry:
    """The sites of a model: owners by path, and the modules that they call."""

    owners: dict[str, OwnerEntry] = field(default_factory=dict, metadata=ALWAYS)
    shielded: list[str] = field(default_factory=list, metadata=ALWAYS)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that a quantized model says of itself beside its tensors; see `QuantizedState` for the fields."""

    shared: dict[str, str] = field(default_factory=dict, metadata=ALWAYS)
    versions: dict[str, Natural] | None = field(default=None, metadata=ALWAYS)
    layers: dict[str, LayerEntry] = field(default_factory=dict, metadata=ALWAYS)
    sites: SitesEntry = field(default_factory=SitesEntry, metadata=ALWAYS)
    stale: list[str] = field(default_factory=list, metadata=ALWAYS)

    def fields(self) -> dict[str, Any]:
        """The fields of a plan, without those of a subclass."""
        return {one.name: getattr(self, one.name) for one in fields(Plan)}

    def quantizers(self) -> Iterator[tuple[str, str, QuantizerEntry]]:
        """The quantizers of layers and functions: for each its path in the model, its place here, and its entry."""
        for path, layer in self.layers.items():
            for name, held in layer.quantizers.items():
                yield (f"{path}.{name}" if path else name), f"layers.{path}.quantizers.{name}", held
        for path, owner in self.sites.owners.items():
            for key, site in owner.sites.items():
                for name, held in site.quantizers.items():
                    place = f"sites.owners.{path}.sites.{key}.quantizers.{name}"
                    yield f"{site_path(path, key)}.{name}", place, held


def read_plan(values: Any, kind: type[P], source: object) -> P:
    """A plan from values of JSON, every one of which is checked.

    Raises:
        CheckpointError: it is damaged; the source is named.
    """
    try:
        plan: P = value_of(values, "", kind)
        for _, place, held in plan.quantizers():
            _check_learned(held, f"{place}.learned.options")
            held.make_by_value()
        return plan
    except (SpecError, ConfigError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{source} cannot be used: {error}. It is damaged, of a later version of fakequant, or needs what your own "
            "code registers (formats, layers, learned ranges)"
        ) from error


def _check_learned(held: QuantizerEntry, place: str) -> None:
    """Raise where the options of a learned range are none, or of another type."""
    options: Mapping[str, Any] = {} if held.learned is None else held.learned.options
    if reserved := options.keys() & {"method", "spec"}:
        raise UnexpectedValue(f"{place} has {', '.join(sorted(reserved))}, which is no option")
    made = held.make_learned()
    for name, value in options.items():
        default = inspect.signature(type(made)).parameters[name].default
        if default is not inspect.Parameter.empty and type(value) is not type(default):
            raise UnexpectedValue(f"{place}.{name} is {value!r:.80}, not a {type(default).__name__}")


def quantizer_values(quantizer: Quantizer) -> dict[str, Any]:
    """The fields of a quantizer's entry."""
    learned = quantizer.learned
    return {
        "tensor": TensorConfig(quantizer.spec, quantizer.dynamic),
        "mode": quantizer.mode,
        "learned": None if learned is None else LearnedEntry(learned.method, learned.options()),
        "by_value": ByValueEntry.of(quantizer),
    }


def layer_entry(layer: QuantizedLayer) -> LayerEntry:
    """What a plan says of a layer.

    Raises:
        ConfigError: a layer that exists while the model trains alone.
    """
    if isinstance(layer, FoldedLayer):
        raise ConfigError(
            "batch normalisations are folded while the model trains (fakequant.qat.fold_batch_norm); call "
            "fakequant.qat.merge_batch_norm(model) first, or keep model.state_dict() to go on training"
        )
    held = {attribute: getattr(layer, attribute) for attribute in layer.operands(layer)}
    transform = layer.input_transform
    return LayerEntry(
        type(layer).float_class.__name__,
        {name: QuantizerEntry(**quantizer_values(one)) for name, one in held.items() if one is not None},
        None if transform is None else TransformEntry(transform.kind, transform.options()),
        0 if layer.low_rank is None else layer.low_rank.rank,
        layer.gradient,
        execution=layer.execution,
    )
