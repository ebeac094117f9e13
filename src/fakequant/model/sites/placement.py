"""Where a target wants quantizers in a model: its table, applied to the data flow of a recorded run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from fakequant.model.config import Config, Rule, TensorConfig, all_names
from fakequant.model.run.recorded import FunctionCall, Recording, having, masked_values
from fakequant.model.sites.sites import Candidate, SiteQuantizer, candidates, operand_quantizer, rules_of_sites
from fakequant.model.sites.targets import FixedRange, Target
from fakequant.model.sites.targets.table import ATTENTION_LAYER, products
from fakequant.nn.sites.functions import SITE_FUNCTIONS, Trait
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.granularity import PerTensor


class Flow:
    """Producers and consumers of the values of a run."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.calls = recording.calls
        self.consumers = recording.consumers
        self.of_owner = recording.calls_of
        self.products = products()

    def producer(self, value: int) -> FunctionCall | None:
        """The call that made a value."""
        number = self.recording.values[value].producer
        return None if number is None else self.calls[number]

    def source(self, value: int, keeps: frozenset[str]) -> int:
        """The value from which functions that keep scales made a value."""
        while (call := self.producer(value)) is not None and call.function in keeps and call.inputs:
            value = call.inputs[0]
        return value

    def comes_from(self, value: int, wanted: set[int], keeps: frozenset[str]) -> bool:
        """Whether functions that keep scales make a value of wanted ones alone."""
        waiting, seen = [value], {value}
        while waiting:
            value = waiting.pop()
            if value in wanted:
                continue
            call = self.producer(value)
            if call is None or call.function not in keeps or not call.inputs:
                return False
            read = (
                list(call.operands.values()) if len(call.operands) > 1 else list(call.inputs[:1])
            )  # a maximum has two
            waiting += [one for one in read if one not in seen]
            seen.update(read)
        return True

    def reached(self, values: Iterable[int], keeps: frozenset[str]) -> dict[int, None]:
        """Values, and all that functions that keep scales make of them."""
        found, waiting = dict.fromkeys(values), [*values]
        while waiting:
            for consumer in self.consumers.get(waiting.pop(), []):
                made = [one for one in consumer.outputs if consumer.function in keeps and one not in found]
                found.update(dict.fromkeys(made))
                waiting += made
        return found

    def alone(self, value: int) -> bool:
        """Whether one call alone uses a value."""
        return len(self.consumers.get(value, [])) == 1 and value not in self.recording.outputs

    def products_since_common(self, values: Sequence[int]) -> list[int]:
        """For each of several values, the products on the way from the nearest value that all are computed from.

        It is the longest way, and 0 where they have nothing in common. The walk back ends at a value from which all
        others come: whatever lies before it has at least as many products.
        """
        depths = [{value: 0} for value in values]
        waiting = {value for value in values if self.producer(value) is not None}
        while waiting:
            call = max(filter(None, map(self.producer, waiting)), key=lambda call: call.number)
            if len(waiting) == 1 and self._ends_walk(depths, call, *waiting):
                break
            for own in depths:
                reached = [own[output] for output in call.outputs if output in own]
                depth = max(reached, default=0) + (call.function in self.products)
                own.update({parent: max(own.get(parent, 0), depth) for parent in call.inputs if reached})
            waiting.difference_update(call.outputs)
            waiting.update(parent for parent in call.inputs if self.producer(parent) is not None)
        common = set.intersection(*map(set, depths))
        return [min((own[value] for value in common), default=0) for own in depths]

    def _ends_walk(self, depths: Sequence[dict[int, int]], call: FunctionCall, value: int) -> bool:
        """Whether all values come from one, and no parameter or input that they share is read before it."""
        common = set.intersection(*map(set, depths))
        shared = [one for one in common if self.producer(one) is None]
        return value in common and all(c.number > call.number for one in shared for c in self.consumers[one])


Held = dict[str, SiteQuantizer]


@dataclass
class Placement:
    """What a target makes of a model.

    Attributes:
        sites: the quantizers of functions.
        layers: the rules of layers, by path.
        notes: what keeps the engine from computing on integers, and what to do.
    """

    sites: dict[Candidate, Held]
    layers: dict[str, Rule]
    notes: list[str] = field(default_factory=list)


class _Planner:
    """Walks the data flow of one run with one table.

    Args:
        target: the table.
        recording: of the float model.
        configs: how tensors are quantized, for every call that could be a site.
        layers: the rules that hold for layers, by path.
    """

    def __init__(
        self,
        target: Target,
        recording: Recording,
        configs: Mapping[Candidate, Rule],
        layers: Mapping[str, Rule],
    ) -> None:
        self.target = target
        self.flow = Flow(recording)
        self.configs = configs
        self.given = layers
        self.layers = dict(layers)
        self.candidates = {(one.owner, one.function, one.index): one for one in configs}
        self.same: dict[tuple[str | None, str, int], list[FunctionCall]] = {}  # calls, which differ by visit alone
        for call in recording.calls:
            self.same.setdefault(call.site, []).append(call)
        self.calls_of = {one: self.same[one.owner, one.function, one.index] for one in configs}
        self.call_of = {one: calls[0] for one, calls in self.calls_of.items()}
        masks = masked_values(recording)
        infinite = {value.number for value in recording.values if not math.isfinite(value.size)}
        self.unfit = infinite | masks  # values that no range can hold
        self.masked = {
            call.site
            for call in recording.calls
            if not masks.isdisjoint([*call.operands.values(), *call.outputs]) and not call.is_product
        }
        self.held: dict[Candidate, Held] = {}
        self.quantized: set[int] = set()  # values with a quantizer of their own
        self.new: dict[frozenset[str], list[int]] = {}  # of these, those that `_drop_after` has not seen, by `through`
        self.readers: dict[int, list[tuple[Candidate, str] | str]] = {}  # what gets a value: operands, layers' inputs
        for one, calls in self.calls_of.items():
            for call in calls:
                for name in one.operands:
                    self.readers.setdefault(call.operands[name], []).append((one, name))
        self.values_of = {path: _first_operands(self.flow.of_owner.get(path, [])) for path in layers}
        for path, values in self.values_of.items():
            for value in values:
                self.readers.setdefault(value, []).append(path)

    def _candidate(self, call: FunctionCall) -> Candidate | None:
        return None if call.owner is None else self.candidates.get((call.owner, call.function, call.index))

    def place(self) -> Placement:
        """The quantizers of all candidates and layers."""
        self._layers()
        self._inputs()
        self._fixed()
        self._share()
        self._outputs()
        return Placement({one: held for one, held in self.held.items() if held}, self.layers, self._notes())

    def _layers(self) -> None:
        """Layers that keep scales, and those that the target computes in float, have no quantizers."""
        for path, rule in self.layers.items():
            calls = self.flow.of_owner.get(path, [])
            called = {call.function for call in calls}
            if self._is_unfit(value for call in calls for value in call.operands.values()):
                self.layers[path] = _without_input(rule)
            if called and called <= self.target.keeps | set(SITE_FUNCTIONS) and not called & self.target.inputs:
                self.layers[path] = replace(rule, input=None, weight=None, gradient=None)

    def _inputs(self) -> None:
        for one, call in self.call_of.items():
            if one.function not in self.target.inputs or call.site in self.masked or self._adds_bias(one, call):
                continue
            names = [name for name in one.operands if not self._is_fused(call.operands[name], one.function)]
            names = [name for name in names if not self._is_unfit(same.operands[name] for same in self.calls_of[one])]
            if self.target.identity_only and one.function == "add":
                names = [name for name in names if name != self._main_branch(one, call)]
            held = {name: operand_quantizer(one, name, self.configs[one]) for name in names}
            if self.target.attention_in_parts and one.function == "scaled_dot_product_attention":
                held["probabilities"] = self._probabilities(one)
            self.held[one] = {name: quantizer for name, quantizer in held.items() if quantizer is not None}

    def _probabilities(self, one: Candidate) -> SiteQuantizer | None:
        config, known = self.configs[one].input, self.target.fixed.get("softmax")
        fixed = None if known is None else _fixed_quantizer(config, known)
        return fixed if fixed is not None or config is None else SiteQuantizer(config)

    def _is_unfit(self, values: Iterable[int]) -> bool:
        """Whether a value of the run holds inf, NaN or the numbers of a mask."""
        return not self.unfit.isdisjoint(values)

    def _is_fused(self, value: int, function: str) -> bool:
        producer = self.flow.producer(value)
        return producer is not None and (producer.function, function) in self.target.fused and self.flow.alone(value)

    def _adds_bias(self, one: Candidate, call: FunctionCall) -> bool:
        """Whether a parameter is added to the result of a product, as its bias."""
        if one.function != "add" or not one.constants:
            return False
        other = [call.operands[name] for name in one.operands if name not in one.constants]
        return any(self._is_of_product(value, ()) for value in other)

    def _is_of_product(self, value: int, through: Iterable[str]) -> bool:
        producer = self.flow.producer(value)
        while producer is not None and self.flow.alone(value):
            if producer.function in self.flow.products:
                return True
            if producer.function not in through or not producer.inputs:
                return False
            value = producer.inputs[0]
            producer = self.flow.producer(value)
        return False

    def _main_branch(self, one: Candidate, call: FunctionCall) -> str | None:
        """The operand that the engine computes together with the sum: a product's result that nothing else uses."""
        main = [name for name in one.operands if self._is_of_product(call.operands[name], ("batch_norm",))]
        if len(main) < 2:
            return main[0] if main else None
        # The branch with more products before both meet; the identity branch of a block may have one, to fit its shape.
        depths = self.flow.products_since_common([call.operands[name] for name in main])
        return main[depths.index(max(depths))]

    def _fixed(self) -> None:
        """Ranges that do not depend on the data, after which no other quantizer is needed."""
        for one in self.call_of:
            known = self.target.fixed.get(one.function)
            fixed = None if known is None else _fixed_quantizer(self.configs[one].input, known)
            if fixed is not None:
                self.held.setdefault(one, {})["output"] = fixed
                self._drop_after({value for same in self.calls_of[one] for value in same.outputs}, self.target.keeps)

    def _drop_after(self, quantized: set[int], through: frozenset[str]) -> None:
        """Take quantizers away from operands and layers that read quantized values in all their calls.

        Args:
            quantized: values whose results have a quantizer.
            through: functions between a result and what reads it.
        """
        self.quantized |= quantized
        new = self.new.setdefault(through, [*(self.quantized - quantized)])
        for other in self.new.values():
            other += quantized
        reached, new[:] = self.flow.reached(new, through), []
        # Only what reads these may have changed: a scan of all operands for each call takes the square of the calls.
        for reader in dict.fromkeys(reader for value in reached for reader in self.readers.get(value, [])):
            if isinstance(reader, str):
                if all(self.flow.comes_from(value, self.quantized, through) for value in self.values_of[reader]):
                    self.layers[reader] = _without_input(self.layers[reader])
                continue
            one, name = reader
            if one.function not in self.target.shared and name in self.held.get(one, {}):
                values = [call.operands[name] for call in self.calls_of[one]]
                if all(self.flow.comes_from(value, self.quantized, through) for value in values):
                    del self.held[one][name]

    def _share(self) -> None:
        """One quantizer for all operands of a function such as `cat`, and for those that are joined further on."""
        groups: dict[int, str] = {}  # of the results
        members: dict[str, list[tuple[Candidate, str]]] = {}
        for one, call in sorted(self.call_of.items(), key=lambda item: item[1].number):
            held = self.held.get(one, {})
            if one.function not in self.target.shared or not held:
                continue
            first = f"{one.path}.{next(iter(held))}"
            members[first] = [(one, name) for name in held]
            for name in held:
                group = groups.get(self.flow.source(call.operands[name], self.target.keeps))
                if group is not None and group != first:
                    members[first] = members.pop(group) + members[first]
                    groups = {value: first if own == group else own for value, own in groups.items()}
            groups.update(dict.fromkeys(call.outputs, first))
        for same in members.values():
            same.sort(key=lambda member: self.call_of[member[0]].number)
            one, name = same[0]
            shared = replace(self.held[one][name], group=f"{one.path}.{name}")
            for one, name in same:
                self.held[one][name] = shared

    def _outputs(self) -> None:
        """Results that no other quantizer reaches."""
        for call in self.flow.calls:
            if call.function not in self.target.outputs or call.site in self.masked:
                continue
            last = self._last_of_chain(call)
            inside = call.function == ATTENTION_LAYER  # whose first products no quantizer of another call reaches
            if not inside and all(self._is_quantized_after(value) for value in last.outputs[:1]):
                continue
            if not self._quantize_output(last):
                continue
            # `nn.MultiheadAttention` transposes its result; engines move quantizers over that.
            quantized = {value for same in self.same[last.site] for value in same.outputs[:1]}
            self._drop_after(quantized, self.target.keeps if inside else having(Trait.IDENTITY))

    def _quantize_output(self, call: FunctionCall) -> bool:
        """Give the result of a call the quantizer of its layer or its site; False where it stays in float."""
        if self._is_unfit(value for same in self.same[call.site] for value in same.outputs[:1]):
            return False
        rule = self.given.get(call.owner or "")
        if call.owner in self.layers and rule is not None:
            output = rule.output or rule.input
            self.layers[call.owner] = replace(self.layers[call.owner], output=output)
            return output is not None
        at = self._candidate(call)
        config = None if at is None else self.configs[at].output or self.configs[at].input
        if at is not None and config is not None:
            self.held.setdefault(at, {}).setdefault("output", SiteQuantizer(config))
        return config is not None

    def _last_of_chain(self, call: FunctionCall) -> FunctionCall:
        """The last of the calls that are computed as one, from a call on."""
        while call.outputs and self.flow.alone(call.outputs[0]):
            after = self.flow.consumers[call.outputs[0]][0]
            if (call.function, after.function) not in self.target.fused:
                break
            call = after
        return call

    def _is_quantized_after(self, value: int) -> bool:
        """Whether all that use a value get it quantized, by quantizers that the engine moves to the value."""
        moved = self.target.moved_back
        through = self.target.keeps if moved is None else moved
        waiting, seen = [value], {value}
        while waiting:
            value = waiting.pop()
            if value in self.flow.recording.outputs:
                return False
            readers = self.flow.consumers.get(value, [])
            if moved is not None and len(readers) > 1 and any(reader.function in moved for reader in readers):
                return False
            for consumer in readers:
                if consumer.function in through:
                    waiting += [output for output in consumer.outputs if output not in seen]
                    seen.update(consumer.outputs)
                elif not self._quantizes(consumer, value):
                    return False
        return True

    def _notes(self) -> list[str]:
        """What keeps the engine from computing on integers."""
        notes, name = [], self.target.name
        norms = [c for c in self.flow.calls if c.function == "batch_norm" and self._is_of_product(c.inputs[0], ())]
        if norms and not self.target.folds_norms:
            follow = f"{len(norms)} batch normalisations follow" if len(norms) > 1 else "a batch normalisation follows"
            notes.append(
                f"{follow} products with quantized weights, so that {name} computes both in float; call "
                "fakequant.fuse_batch_norm(model, example) before prepare, or to train them, "
                "fakequant.qat.fold_batch_norm(model, example) after it"
            )
        wanted = self.target.symmetric
        specs = [rule.input.spec for rule in self.given.values() if rule.input is not None]
        other = [spec for spec in specs if isinstance(spec.format, IntegerFormat) and spec.symmetric is not wanted]
        if other and wanted is not None:
            kind, preset = ("symmetric", "INT8") if wanted else ("asymmetric", "INT8_AFFINE")
            notes.append(
                f"{name} computes all products on integers only with {kind} activations, and the configuration has "
                f"{other[0]}; presets.{preset} suits it"
            )
        return notes

    def _quantizes(self, consumer: FunctionCall, value: int) -> bool:
        if consumer.owner in self.layers:
            return self.layers[consumer.owner].input is not None
        one = self._candidate(consumer)
        held = {} if one is None else self.held.get(one, {})
        names = [name for name, operand in consumer.operands.items() if operand == value]
        return bool(names) and all(name in held for name in names)


def _first_operands(calls: Iterable[FunctionCall]) -> list[int]:
    return [value for call in calls for value in [*call.operands.values()][:1]]


def _fixed_quantizer(config: TensorConfig | None, known: FixedRange) -> SiteQuantizer | None:
    """The quantizer of a range that is always the same; None where the format has no zero point."""
    if config is None or not isinstance(config.spec.format, IntegerFormat):
        return None
    low, high = int(config.spec.format.quant_min), int(config.spec.format.quant_max)
    scale = (known.high - known.low) / (high - low if known.has_high else high - low + 1)
    spec = config.spec.replace(granularity=PerTensor(), symmetric=False)
    zero_point = min(max(round(low - known.low / scale), low), high)
    return SiteQuantizer(TensorConfig(spec), fixed=(scale, zero_point))


def place(
    model: nn.Module, config: Config, recording: Recording, target: Target, layers: Mapping[str, Rule]
) -> Placement:
    """The quantizers of functions and layers that a target wants, with the specifications of a configuration.

    Args:
        model: the float model.
        config: its rules; of those that speak of no types and functions the last that matches a module holds for the
            functions that the module calls.
        recording: of a run of the model.
        target: the table.
        layers: the rules that hold for layers, by path.
    """
    names, rules = all_names(model), dict[str, Rule]()
    for rule in config.layer_rules:
        if not rule.layers:
            rules.update({path: rule for path, m in model.named_modules() if rule.matches_any(names[m], m)})
    found = candidates(model, recording)
    spoken = rules_of_sites(model, config, found)
    varying = {call.site for call in recording.calls if not recording.is_constant(call)}
    configs = {
        one: rules[one.owner]
        for one in found
        if one.owner in rules and one not in spoken and (one.owner, one.function, one.index) in varying
    }
    return _Planner(target, recording, configs, layers).place()


def _without_input(rule: Rule) -> Rule:
    return replace(rule, input=None, gradient=None if rule.weight is None else rule.gradient)
