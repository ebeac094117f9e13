"""Where quantizers go in a model, by the data flow of a recorded run and the rules of an engine (`Target`).

A site is the call of a function, such as + or @, that is quantized; operands are the float tensors that it takes.
Without a target, a layer whose overridden `forward` computes a single product with its weight gets quantizers at this
product.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from typing import Any, NamedTuple

import torch
from torch import nn

from fakequant.data.batches import Arguments
from fakequant.errors import ConfigError, nearest
from fakequant.model.config import Config, Rule, TensorConfig, all_names
from fakequant.model.run.outputs import record
from fakequant.model.run.recorded import FunctionCall, Recording, has, having, masked_values
from fakequant.model.sites import SiteQuantizer, candidates, operand_quantizer, path_of, rules_of_sites
from fakequant.model.weights import evaluating
from fakequant.nn.functions import SITE_FUNCTIONS, Trait
from fakequant.nn.integer import Execution
from fakequant.nn.quantized.forms import output_channels, own_class, why_changed
from fakequant.nn.sites import OF_LAYERS
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.granularity import PerTensor
from fakequant.restore import restore_after, structure_of
from fakequant.text import listed, module_name


class FixedRange(NamedTuple):
    """A range that an engine gives the result of a function, whatever the data.

    Attributes:
        low: the smallest value.
        high: the largest value; or, if `has_high` is False, the end of the range, which has no code.
        has_high: whether `high` has a code: 8 bits then divide the range into 255 steps, otherwise into 256.
    """

    low: float
    high: float
    has_high: bool


class InnerFunction(NamedTuple):
    """A function inside an outer one, such as the softmax in attention; the engine stores the inner result as codes.

    Attributes:
        name: the name of the result's quantizer in a site of the outer function.
        function: the name of the inner function; the target may have a fixed range for it.
        most_bits: the most bits of codes that are stored; with more bits the engine computes the outer function in
            float.
    """

    name: str
    function: str
    most_bits: float = math.inf


ATTENTION_IN_PARTS = {"scaled_dot_product_attention": InnerFunction("probabilities", "softmax")}
"""Attention as two products and a softmax, so that the probabilities are quantized, too."""


@dataclass(frozen=True)
class Target:
    """The rules of an engine that say which values of a model get quantizers; functions have their canonical names.

    Attributes:
        name: the name of the engine.
        inputs: functions whose operands are quantized. A layer counts as the function that it calls.
        keeps: functions whose result has the scale of their input, so that the result needs no quantizer.
        shared: functions whose operands share a scale.
        fixed: functions whose result has a fixed range, whatever the data.
        outputs: functions whose result gets a quantizer, unless every function that reads the result quantizes it.
        floats_before: normalisations that read sums in float. A sum stays in float if all its readers are these
            normalisations, or sums that stay in float. The result of a linear layer (three or more axes) stays in
            float, too, if all its readers are such sums. Functions in `keeps` may stand before a reader.
        fused: pairs of functions that the engine computes as one if nothing else uses the value in between.
        identity_only: whether only the residual branch of a residual sum is quantized, because the engine computes the
            sum together with the product in the other branch.
        moved_back: functions across which the engine moves a quantizer from their result to their input, if nothing
            else reads this input. None: all functions in `keeps`, even if others read the input.
        parts: for each function that the engine computes in parts: the part whose result is stored as codes.
        symmetric: which activations let the engine compute all products on integers: symmetric (True), asymmetric
            (False), or both (None).
        folds_norms: whether the engine folds a batch normalisation into a product with a quantized weight.

    Raises:
        ConfigError: a function is unknown.

    >>> Target("mine", inputs=frozenset({"linear", "conv2d"}), keeps=frozenset({"relu"})).symmetric is None
    True
    """

    name: str
    inputs: frozenset[str]
    keeps: frozenset[str]
    shared: frozenset[str] = frozenset()
    fixed: dict[str, FixedRange] = field(default_factory=dict)
    outputs: frozenset[str] = frozenset()
    floats_before: frozenset[str] = frozenset()
    fused: frozenset[tuple[str, str]] = frozenset()
    identity_only: bool = False
    moved_back: frozenset[str] | None = None
    parts: Mapping[str, InnerFunction] = field(default_factory=dict)
    symmetric: bool | None = None
    folds_norms: bool = True

    def __repr__(self) -> str:
        return f"Target({self.name!r}, {len(self.inputs)} functions with quantized operands)"

    def __post_init__(self) -> None:
        known = {*SITE_FUNCTIONS, *RECURRENT, ATTENTION_LAYER}
        for name in (*self.inputs, *self.shared, *self.fixed, *self.outputs):
            if name not in known:
                raise ConfigError(f"the target {self.name} names an unknown function {name!r}{nearest(name, [*known])}")


POOLS = frozenset(f"{kind}_pool{n}d" for kind in ("avg", "adaptive_avg") for n in (1, 2, 3))
ATTENTION = frozenset({"scaled_dot_product_attention"})
ATTENTION_LAYER = "multi_head_attention_forward"
"""The function that `nn.MultiheadAttention` calls: projections, both products and the softmax together."""
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""The functions that recurrent layers call, each for a whole sequence."""


def moves() -> frozenset[str]:
    """Functions that move or pick values."""
    return having(Trait.MOVES)


def products() -> frozenset[str]:
    """The functions that compute a product; all engines quantize them alike."""
    return (having(Trait.PRODUCT) & frozenset(SITE_FUNCTIONS)) - having(Trait.ATTENTION) - lookups()


def lookups() -> frozenset[str]:
    """Functions that read rows of a quantized table."""
    return having(Trait.LOOKUP) & frozenset(SITE_FUNCTIONS)


def after_products(*functions: str) -> frozenset[tuple[str, str]]:
    """Pairs for `Target.fused`: each product and batch normalisation, with each function that engines fuse into it."""
    return frozenset((first, second) for first in (*products(), "batch_norm") for second in ("batch_norm", *functions))


class Flow:
    """The data flow of a recorded run: which call makes each value, and which calls read the value."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.calls = recording.calls
        self.consumers = recording.consumers
        self.of_owner = recording.calls_of
        self.products = products()

    def producer(self, value: int) -> FunctionCall | None:
        """The call that made a value; None for a parameter or an input."""
        number = self.recording.values[value].producer
        return None if number is None else self.calls[number]

    def source(self, value: int, keeps: frozenset[str]) -> int:
        """The value from which functions in `keeps` compute `value`; `value` itself if another function made it."""
        while (call := self.producer(value)) is not None and call.function in keeps and call.inputs:
            value = call.inputs[0]
        return value

    def comes_from(self, value: int, wanted: set[int], keeps: frozenset[str]) -> bool:
        """Whether `value` is computed from values in `wanted` by functions in `keeps` alone."""
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
        """All of `values`, and all that functions in `keeps` compute from these."""
        found, waiting = dict.fromkeys(values), [*values]
        while waiting:
            for consumer in self.consumers.get(waiting.pop(), []):
                made = [one for one in consumer.outputs if consumer.function in keeps and one not in found]
                found.update(dict.fromkeys(made))
                waiting += made
        return found

    def alone(self, value: int) -> bool:
        """Whether only a single call uses a value, and the model does not return the value."""
        return len(self.consumers.get(value, [])) == 1 and value not in self.recording.outputs

    def products_since_common(self, values: Sequence[int]) -> list[int]:
        """For each value, the number of products on the way to it from the nearest common ancestor of all `values`.

        The longest way counts; without a common ancestor the number is 0. The search ends at a value from which all of
        `values` come; from any earlier value, the way has at least as many products.
        """
        depths = [{value: 0} for value in values]
        waiting = {value for value in values if self.producer(value) is not None}
        while waiting:
            call = max(filter(None, map(self.producer, waiting)), key=lambda call: call.number)
            if len(waiting) == 1:  # all come from one value, and what they share otherwise is not read before it
                common = set.intersection(*map(set, depths))
                shared = [one for one in common if self.producer(one) is None]
                later = all(c.number > call.number for one in shared for c in self.consumers[one])
                if waiting <= common and later:
                    break
            for own in depths:
                reached = [own[output] for output in call.outputs if output in own]
                depth = max(reached, default=0) + (call.function in self.products)
                own.update({parent: max(own.get(parent, 0), depth) for parent in call.inputs if reached})
            waiting.difference_update(call.outputs)
            waiting.update(parent for parent in call.inputs if self.producer(parent) is not None)
        common = set.intersection(*map(set, depths))
        return [min((own[value] for value in common), default=0) for own in depths]


Held = dict[str, SiteQuantizer]


@dataclass
class Placement:
    """Where a target places quantizers: the quantizers of each call, and the rule for the path of each layer.

    Attributes:
        notes: lines that say why the engine cannot compute some parts on integers, with a cure.
        unsuited: a line that says why the engine computes no product on integers, and names a better preset; or "".
    """

    sites: dict[FunctionCall, Held]
    layers: dict[str, Rule]
    notes: list[str] = field(default_factory=list)
    unsuited: str = ""


class _Planner:
    """Applies the rules of a target to the data flow of a run.

    Args:
        configs: the rule of the configuration for each call that could be a site; a call that repeats is listed once.
    """

    def __init__(
        self, target: Target, recording: Recording, configs: Mapping[FunctionCall, Rule], layers: Mapping[str, Rule]
    ) -> None:
        self.target = target
        self.flow = Flow(recording)
        self.configs = configs
        self.given = layers
        self.layers = dict(layers)
        self.same = recording.same
        masks = masked_values(recording)
        infinite = {value.number for value in recording.values if not math.isfinite(value.size)}
        self.unfit = infinite | masks  # values that no range can hold
        self.streams = self._streams()
        self.in_float = self.streams | {
            call.site
            for call in recording.calls
            if not masks.isdisjoint([*call.operands.values(), *call.outputs]) and not call.is_product
        }
        self.held: dict[FunctionCall, Held] = {}
        self.quantized: set[int] = set()  # values with a quantizer of their own
        self.new: dict[frozenset[str], list[int]] = {}  # of these, those that `_drop_after` has not seen, by `through`
        self.readers: dict[
            int, list[tuple[FunctionCall, str] | str]
        ] = {}  # what gets a value: operands, layers' inputs
        for first in configs:
            for call in self.same[first.site]:
                for name in first.operands:
                    self.readers.setdefault(call.operands[name], []).append((first, name))
        self.values_of = {
            path: [value for call in self.flow.of_owner.get(path, []) for value in [*call.operands.values()][:1]]
            for path in layers
        }
        for path, values in self.values_of.items():
            for value in values:
                self.readers.setdefault(value, []).append(path)

    def place(self) -> Placement:
        """Decide which functions and layers get which quantizers."""
        without = list[str]()
        for path, rule in self.layers.items():
            calls = self.flow.of_owner.get(path, [])
            called = {call.function for call in calls}
            read = [value for call in calls for value in call.operands.values()]
            if self._is_unfit(read):
                self.layers[path] = _without_input(rule)
                if rule.input is not None and any(math.isnan(self.flow.recording.values[value].size) for value in read):
                    without.append(module_name(path))
            if called and called <= self.target.keeps | set(SITE_FUNCTIONS) and not called & self.target.inputs:
                self.layers[path] = replace(rule, input=None, weight=None, gradient=None)
        self._inputs()
        for call, rule in self.configs.items():  # ranges that do not depend on the data need no other quantizer after
            known = self.target.fixed.get(call.function)
            fixed = None if known is None else _fixed_quantizer(rule.input, known)
            if fixed is not None:
                self.held.setdefault(call, {})["output"] = fixed
                self._drop_after({value for same in self.same[call.site] for value in same.outputs}, self.target.keeps)
        self._share()
        self._outputs()
        notes, unsuited, name = [], "", self.target.name
        if without:  # inf may be meant, as for experts that are not chosen
            notes.append(
                f"in the run of the example the inputs of {listed(without)} hold NaN, so that they stay in float; give "
                "an example without NaN, or correct the layer that makes it"
            )
        norms = Counter(
            c.site for c in self.flow.calls if c.function == "batch_norm" and self._is_of_product(c.inputs[0], ())
        )
        if norms and not self.target.folds_norms:
            follow = f"{len(norms)} batch normalisations follow" if len(norms) > 1 else "a batch normalisation follows"
            ways = [
                "call fakequant.fuse_batch_norm(model, example) before prepare, or to train them, "
                "fakequant.qat.fold_batch_norm(model, example) after it"
            ]
            if repeated := sum(calls > 1 for calls in norms.values()):  # these functions leave them
                ways = ways if repeated < len(norms) else []
                ways.append("a normalisation that is called several times stays: give each call a separate one")
            notes.append(
                f"{follow} products with quantized weights, so that {name} computes both in float; {'; '.join(ways)}"
            )
        wanted = self.target.symmetric
        specs = [rule.input.spec for rule in self.given.values() if rule.input is not None]
        other = [spec for spec in specs if isinstance(spec.format, IntegerFormat) and spec.symmetric is not wanted]
        if other and wanted is not None:
            kind, preset = ("symmetric", "INT8") if wanted else ("asymmetric", "INT8_AFFINE")
            unsuited = (
                f"{name} computes all products on integers only with {kind} activations, but the configuration has "
                f"{other[0]}; presets.{preset} suits {name}"
            )
        return Placement({call: held for call, held in self.held.items() if held}, self.layers, notes, unsuited)

    def _streams(self) -> set[Any]:
        """The sites of sums that stay in float: only normalisations, or other sums that stay in float, read them."""
        found, others, norms = set[Any](), set[Any](), self.target.floats_before
        for call in reversed(self.flow.calls) if norms else ():
            if call.function == "add":
                readers = self._readers(call)
                fits = readers and all(one.function in norms or one.site in found for one in readers)
                (found if fits else others).add(call.site)
                found -= others  # a site may be called several times
        return found

    def _readers(self, call: FunctionCall) -> list[FunctionCall]:
        """The calls that read a call's result, also through functions in `keeps`; none if the result is an output."""
        values = self.flow.reached(call.outputs, self.target.keeps)
        if any(value in self.flow.recording.outputs for value in values):
            return []
        readers = [reader for value in values for reader in self.flow.consumers.get(value, [])]
        return [reader for reader in readers if reader.function not in self.target.keeps]

    def _inputs(self) -> None:
        for call, rule in self.configs.items():
            if call.function not in self.target.inputs or call.site in self.in_float:
                continue
            constants = self.flow.recording.constants(call) if call.function == "add" else ()
            others = [value for name, value in call.operands.items() if constants and name not in constants]
            if any(self._is_of_product(value, ()) for value in others):  # a parameter is added as its bias
                continue
            names = []
            for name, value in call.operands.items():
                producer = self.flow.producer(value)
                is_fused = producer is not None and (producer.function, call.function) in self.target.fused
                unfit = self._is_unfit(one.operands[name] for one in self.same[call.site])
                if not unfit and not (is_fused and self.flow.alone(value)):
                    names.append(name)
            if self.target.identity_only and call.function == "add":
                # The engine computes the sum with a product whose result nothing else uses: of two with the one that
                # has more products before both meet; the identity branch may have one, to fit its shape.
                main = [name for name, value in call.operands.items() if self._is_of_product(value, ("batch_norm",))]
                if len(main) > 1:
                    depths = self.flow.products_since_common([call.operands[name] for name in main])
                    main = [main[depths.index(max(depths))]]
                names = [name for name in names if name not in main]
            held = {name: operand_quantizer(self.flow.recording, call, name, rule) for name in names}
            part, config = self.target.parts.get(call.function), rule.input
            if part is not None and config is not None and config.spec.format.bits <= part.most_bits:
                known = self.target.fixed.get(part.function)
                fixed = None if known is None else _fixed_quantizer(config, known)
                held[part.name] = SiteQuantizer(config) if fixed is None else fixed
            self.held[call] = {name: quantizer for name, quantizer in held.items() if quantizer is not None}

    def _is_unfit(self, values: Iterable[int]) -> bool:
        """Whether one of these tensors fits no range, because it contains inf, NaN or large numbers of a mask."""
        return not self.unfit.isdisjoint(values)

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

    def _drop_after(self, quantized: set[int], through: frozenset[str]) -> None:
        """Remove quantizers from operands, and from inputs of layers, that get quantized values in all calls.

        Args:
            quantized: the values that just got a quantizer.
            through: the functions that may stand between a value and its reader.
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
            first, name = reader
            if first.function not in self.target.shared and name in self.held.get(first, {}):
                values = [call.operands[name] for call in self.same[first.site]]
                if all(self.flow.comes_from(value, self.quantized, through) for value in values):
                    del self.held[first][name]

    def _share(self) -> None:
        """Give all operands of a call in `shared`, such as `cat`, the same quantizer; chained calls share it, too."""
        groups: dict[int, str] = {}  # of the results
        members: dict[str, list[tuple[FunctionCall, str]]] = {}
        for call in sorted(self.configs, key=lambda call: call.number):
            held = self.held.get(call, {})
            if call.function not in self.target.shared or not held:
                continue
            first = f"{path_of(call)}.{next(iter(held))}"
            members[first] = [(call, name) for name in held]
            for name in held:
                group = groups.get(self.flow.source(call.operands[name], self.target.keeps))
                if group is not None and group != first:
                    members[first] = members.pop(group) + members[first]
                    groups = {value: first if own == group else own for value, own in groups.items()}
            groups.update(dict.fromkeys(call.outputs, first))
        for same in members.values():
            same.sort(key=lambda member: member[0].number)
            call, name = same[0]
            shared = replace(self.held[call][name], group=f"{path_of(call)}.{name}")
            for call, name in same:
                self.held[call][name] = shared

    def _outputs(self) -> None:
        """Give the result of each function in `outputs` a quantizer, unless all readers of the result quantize it."""
        for call in self.flow.calls:
            if call.function not in self.target.outputs or call.site in self.in_float:
                continue
            if call.function == "linear" and len(self.flow.recording.values[call.inputs[0]].shape) > 2:
                sites = {reader.site for reader in self._readers(call)}
                if sites and sites <= self.streams:
                    continue
            last = call  # of those that are computed as one
            while last.outputs and self.flow.alone(last.outputs[0]):
                after = self.flow.consumers[last.outputs[0]][0]
                if (last.function, after.function) not in self.target.fused:
                    break
                last = after
            inside = call.function == ATTENTION_LAYER  # whose first products no quantizer of another call reaches
            if not inside and all(self._is_quantized_after(value) for value in last.outputs[:1]):
                continue
            if not self._quantize_output(last):
                continue
            # `nn.MultiheadAttention` transposes its result; engines move quantizers over that.
            quantized = {value for same in self.same[last.site] for value in same.outputs[:1]}
            self._drop_after(quantized, self.target.keeps if inside else having(Trait.IDENTITY))

    def _quantize_output(self, call: FunctionCall) -> bool:
        """Put a quantizer on the result of a call; returns False if the result stays in float."""
        if self._is_unfit(value for same in self.same[call.site] for value in same.outputs[:1]):
            return False
        rule = self.given.get(call.owner or "")
        if call.owner in self.layers and rule is not None:
            output = rule.output or rule.input
            self.layers[call.owner] = replace(self.layers[call.owner], output=output)
            return output is not None
        first = self.same[call.site][0]
        rule = self.configs.get(first)
        config = None if rule is None else rule.output or rule.input
        if config is not None:
            self.held.setdefault(first, {}).setdefault("output", SiteQuantizer(config))
        return config is not None

    def _is_quantized_after(self, value: int) -> bool:
        """Whether every reader of a value quantizes it, so that the engine moves these quantizers back to the value."""
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
                elif consumer.owner in self.layers:
                    if self.layers[consumer.owner].input is None:
                        return False
                else:
                    held = self.held.get(self.same[consumer.site][0], {})
                    names = [name for name, operand in consumer.operands.items() if operand == value]
                    if not names or any(name not in held for name in names):
                        return False
        return True


def _fixed_quantizer(config: TensorConfig | None, known: FixedRange) -> SiteQuantizer | None:
    """A quantizer with an engine's fixed range; None without a configuration, or if its format is not integer."""
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
    """Decide where a target wants quantizers, with the specifications that a configuration gives them.

    Args:
        config: the configuration. The functions that a module calls follow the last matching rule that has neither
            `layers` nor `ops`.
    """
    names, rules = all_names(model), dict[str, Rule]()
    for rule in config.layer_rules:
        if not rule.layers:
            rules.update({path: rule for path, m in model.named_modules() if rule.matches_any(names[m], m)})
    found = candidates(model, recording)
    spoken = rules_of_sites(model, config, found)
    varying = {call.site for call in recording.calls if not recording.is_constant(call)}
    unspoken = [call for call in found if call not in spoken and call.site in varying]
    configs = {call: rules[call.owner or ""] for call in unspoken if (call.owner or "") in rules}
    return _Planner(target, recording, configs, layers).place()


def _without_input(rule: Rule) -> Rule:
    return replace(rule, input=None, gradient=None if rule.weight is None else rule.gradient)


def ends_in_product(model: nn.Module, layers: Mapping[Any, str], arguments: Arguments) -> set[Any]:
    """The layers whose `forward` returns the result of one linear function or convolution with their weight and bias.

    Args:
        layers: the layers with their paths; each has the attributes of the layer of torch from which it inherits.
    """
    with restore_after(structure_of([model])), evaluating(model), torch.no_grad():
        for layer in layers:
            if layer._parameters.get("bias") is None:  # one that is not used would not be seen
                own: Any = layer
                layer._parameters["bias"] = nn.Parameter(own.weight.new_zeros(output_channels(own)))
        recording = record(model, lambda: arguments.run(model))
        numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
        return {layer for layer, path in layers.items() if _ends(layer, path, recording, numbers)}


def own_forwards(config: Config, model: nn.Module) -> dict[str, Rule]:
    """For the path of each layer whose class overrides the `forward` of a class with a quantized form: its rule."""
    names = all_names(model)
    return {
        names[layer][0]: rule
        for layer, rule in config.last_rules(model).items()
        if not rule.leaves_in_float
        and rule.execution is Execution.SIMULATE
        and why_changed(own_class(layer)) is not None
        and layer._parameters.get("weight") is not None
    }


def with_own_products(config: Config, own: Mapping[str, Rule], model: nn.Module, recording: Recording) -> Config:
    """The configuration with new rules before the others, which quantize products that layers in `own` compute."""
    numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
    added = []
    for path, rule in own.items():
        function = _own_product(path, numbers[model.get_parameter(f"{path}.weight".lstrip("."))], recording)
        if function is not None:
            added.append(replace(rule, pattern=escape(path), layers=(), ops=(function,), optional=True))
    return Config(config.name, (*added, *config.rules))


def _own_product(path: str, weight: int, recording: Recording) -> str | None:
    """The function that multiplies by a layer's weight; None unless each `forward` computes only this product.

    Args:
        weight: the number of the weight among the values of the recording.
    """
    products = [call for call in recording.calls_of.get(path, ()) if call.multiplications]
    if not len({call.visit for call in products}) == len(products) == recording.visits[path] > 0:
        return None
    function = products[0].function
    for call in products:
        read = {_moved_from(value, recording) for value in call.factors}
        if not call.operands or call.function != function or weight not in read:
            return None
    return function


def _moved_from(value: int, recording: Recording) -> int:
    """The value at the start of a chain of functions that only move values, such as a weight before its transpose."""
    producer = recording.values[value].producer
    while producer is not None and has(recording.calls[producer].function, Trait.CODES):
        value = recording.calls[producer].inputs[0]
        producer = recording.values[value].producer
    return value


def _ends(layer: nn.Module, path: str, recording: Recording, numbers: Mapping[nn.Parameter, int]) -> bool:
    own = {numbers[p] for p in layer._parameters.values() if p is not None and p in numbers}
    reads = [call for call in recording.calls if own & {*call.inputs}]
    if len(reads) != 1 or len(own) != 2 or recording.visits[path] != 1:
        return False
    (call,) = reads
    weight = numbers.get(layer._parameters["weight"])  # type: ignore[arg-type]  it has one
    last = call.owner == path and call.function in OF_LAYERS and call.factors[1:] == (weight,)
    inside = [one for one in recording.calls if one.owner == path or (one.owner or "").startswith(f"{path}.")]
    return last and own <= {*call.inputs} and all(one.number <= call.number for one in inside)
