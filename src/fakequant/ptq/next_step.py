"""Find the next step from a quantized model: try changes that lower its error or size, or that its engine wants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.calibration import DEFAULT_METHOD, Calibrator, make_calibrator
from fakequant.data.arguments import Metric
from fakequant.data.batches import Arguments, HeldOut, KeptBatches
from fakequant.errors import CalibrationError, ConfigError
from fakequant.model.calibrate import calibrate, ranges_of, recalibrate
from fakequant.model.config import Config, Rule, TensorConfig
from fakequant.model.engine import WEIGHTS, find_engine, known_engines
from fakequant.model.prepare import configs_of, quantize_layer, quantizers_of
from fakequant.model.presets import presets
from fakequant.model.training.fuse import fuse_found, fusions_of
from fakequant.model.weights import (
    evaluating,
    fresh_weight,
    is_searched,
    nearest_params,
    quantized_weights,
    weight_bits,
)
from fakequant.nn.paths import layer_of
from fakequant.nn.quantized.forms import quantized_class
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Mode, Quantizer, quantizers
from fakequant.nn.sites import SITES, Site
from fakequant.numerics.qparams import choose_qparams as qparams_of_range
from fakequant.numerics.qparams import fill_empty_groups
from fakequant.ptq.improvement import improve
from fakequant.ptq.judging import CLEARLY, EVERY, MAY_LOSE, TRIED_ON
from fakequant.ptq.trial import METHODS, Aim, Change, ChangeTrials, NextStep, Tried
from fakequant.restore import restore_after

_ANY = (*WEIGHTS, "NF4_WEIGHT_ONLY", "NVFP4_WEIGHT_ONLY")
"""The presets to try without a target, for weights alone: quantized inputs gain nothing unless codes are multiplied."""
_BLOCKS = "MXFP4", "NVFP4"
"""Presets whose codes are multiplied by the same GPUs."""


def kinds_of(target: str | None) -> Sequence[Sequence[str]]:
    """The presets to try for a target, grouped by how its engine multiplies (see `Engine`); for None, weights alone.

    >>> kinds_of("vllm")
    (('W8A8_DYNAMIC', 'FP8_DYNAMIC'), ('INT4_GROUP128',))
    """
    kinds = (_ANY,) if target is None else find_engine(target).kinds
    if not kinds:
        raise ConfigError(f"the engine {target} has no presets; pass presets=, or define the engine with kinds=")
    return kinds


def rivals(names: Iterable[str]) -> set[str]:
    """All presets in a group with one of `names`: a group of an engine, `_ANY` or `_BLOCKS`; other names are left out.

    >>> sorted(rivals(["W8A8_DYNAMIC"]))
    ['FP8_DYNAMIC', 'W8A8_DYNAMIC']
    """
    kinds = [_BLOCKS, _ANY, *(kind for engine in known_engines().values() for kind in engine.kinds)]
    wanted = {*names}
    return {name for kind in kinds if wanted & {*kind} for name in kind}


_MOST = 0.5
"""A method counts as used if it reproduces this share of the weights' scales: some grew later, to fit biases."""


def static_inputs(model: nn.Module) -> dict[str, Quantizer]:
    """For each path, the input quantizer that is on and whose range comes from calibration."""
    return {
        name: one
        for name, one in quantizers(model).items()
        if one.kind is Kind.INPUT and not (one.dynamic or one.pinned) and one.mode is not Mode.OFF
    }


def methods_of(held: Iterable[Quantizer]) -> list[str]:
    """The calibration methods that, with default options, give all these quantizers their scales; the last used first.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), "INT8")
    >>> used = calibrate(model, [torch.randn(64, 4)], "entropy")
    >>> methods_of(static_inputs(model).values())
    ['entropy']
    """
    held = list(held)
    last = [one.collected.method for one in held[:1] if one.collected is not None]
    names = sorted((*METHODS, "entropy"), key=lambda method: method not in last)

    def gives(one: Quantizer, method: str) -> bool:
        calibrator = _calibrator(one, method)
        return (
            calibrator is not None
            and one.scale is not None
            and torch.equal(_scale(calibrator).to(one.scale.device), one.scale)
        )

    return [method for method in names if all(gives(one, method) for one in held)]


def weight_methods_of(model: nn.Module) -> list[str | None]:
    """A list with the first method that gives the weights their scales (None: the default); [] if none does."""
    held = {path: one for path, one in quantized_weights(model).items() if one.quantizer.scale is not None}
    try:
        tensors = {path: fresh_weight(one, path).detach() for path, one in held.items()}
    except CalibrationError:  # the weight of a function that no call has shown
        return []
    for method in dict.fromkeys([None, "max", *METHODS, "entropy"]):
        same = total = 0
        for path, one in held.items():
            weight, spec = tensors[path], one.quantizer.spec
            if is_searched(spec, method):
                found = nearest_params(weight, spec).scale
            else:
                calibrator = make_calibrator(method or "max", spec)
                calibrator.observe(weight)
                found = _scale(calibrator)
            same, total = same + int((found == one.quantizer.scale).sum()), total + found.numel()
        if same >= _MOST * total:
            return [method]
    return []


def keeps_enough(quantizer: Quantizer, method: str) -> bool:
    """Whether the data that a quantizer stored in calibration suffice for the range of another method."""
    return _calibrator(quantizer, method) is not None


def _calibrator(quantizer: Quantizer, method: str) -> Calibrator | None:
    if quantizer.collected is None:
        return None
    calibrator = make_calibrator(method, quantizer.spec)
    try:
        calibrator.load_from(quantizer.collected)
    except ConfigError:  # the kept data are not enough for the method
        return None
    return calibrator


def _scale(calibrator: Calibrator) -> Tensor:
    return qparams_of_range(fill_empty_groups(calibrator.compute_range(), calibrator.spec), calibrator.spec).scale


@dataclass(frozen=True)
class Provenance:
    """The preset that made all quantized layers of a model; `skip` lists layers in float that it would quantize."""

    preset: Config
    skip: tuple[str, ...] = ()

    @property
    def relatives(self) -> list[Config]:
        """Other presets with as many bits: first those with the same weight format, then `rivals` of all these."""
        own = self.preset.layer_rules[0]
        rules = {one: rule for one in presets().values() if _bits(rule := one.layer_rules[0]) == _bits(own)}
        same = [one for one, rule in rules.items() if rule.weight == own.weight and rule.input != own.input]
        names = rivals(one.name for one in (self.preset, *same))
        return [*same, *(one for one, rule in rules.items() if rule.weight != own.weight and one.name in names)]

    def code(self, preset: Config | None = None, skip: tuple[str, ...] = (), model: str = "float_model") -> str:
        """The code of a call of `prepare` with this or another preset; layers in `skip` stay in float, too."""
        name, left = (preset or self.preset).name.lower(), [*self.skip, *skip]
        return f'model = fq.prepare({model}, "{name}"{f", skip={left}" if left else ""})'


def made_by(model: nn.Module) -> Provenance | None:
    """The preset that quantized every layer of a model; None if there is no such preset, or functions are quantized.

    >>> found = made_by(prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "int8", skip=["1"]))
    >>> found.preset.name, found.skip, [preset.name for preset in found.relatives]
    ('INT8', ('1',), ['INT8_AFFINE', 'INT8_PER_TOKEN', 'W8A8_DYNAMIC', 'W8A8_TRANSFORMERS', 'FP8', 'FP8_DYNAMIC'])
    """
    if has_sites(model):
        return None
    held = dict[QuantizedLayer, dict[str, TensorConfig]]()
    for layer in quantized_layers(model).values():
        own = {attribute: getattr(layer, attribute) for attribute in layer.operands(layer)}
        held[layer] = {name: TensorConfig(q.spec, q.dynamic) for name, q in own.items() if q is not None}
    floats = {path: layer for path, layer in model.named_modules() if quantized_class(layer) is not None}
    for preset in presets().values():
        if all(configs_of(type(layer), layer, rule_of(preset, layer)) == own for layer, own in held.items()):
            return Provenance(
                preset, tuple(p for p, layer in floats.items() if not rule_of(preset, layer).leaves_in_float)
            )
    return None


def has_sites(model: nn.Module) -> bool:
    """Whether the model has quantized functions, which `prepare` finds with an example."""
    return any(name.rpartition(".")[2] == SITES for name, _ in model.named_modules())


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """For each path, the quantized layer of a model."""
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}


def rule_of(preset: Config, layer: nn.Module) -> Rule:
    """The last rule of a preset that applies to the class of a layer, float or quantized."""
    classes = {base.__name__ for base in getattr(type(layer), "float_class", type(layer)).__mro__}
    rules = [rule for rule in preset.layer_rules if not rule.layers or not classes.isdisjoint(rule.layers)]
    return rules[-1]


def _bits(rule: Rule) -> list[int]:
    """The bits that a rule gives to the weight and to the input; 0 for float."""
    return [0 if one is None else one.spec.format.bits for one in (rule.weight, rule.input)]


def requantize(model: nn.Module, preset: Config) -> None:
    """Replace the quantizers of all quantized layers by those of a preset, without ranges, in place."""
    for path, layer in quantized_layers(model).items():
        requantize_layer(layer, rule_of(preset, layer), path)


def requantize_layer(layer: QuantizedLayer, rule: Rule, path: str) -> None:
    """Replace the quantizers of a layer by those of a rule, without ranges, in place."""
    configs = configs_of(type(layer), layer, rule)
    for attribute, quantizer in quantizers_of(type(layer), layer, configs, path).items():
        setattr(layer, attribute, quantizer)


NO_SIGNAL = 0.5
"""From this share of the output's energy on, an error leaves almost no signal: 3 dB."""
LITTLE = 1e-3
"""The share below which an error is small: 30 dB."""
_LARGE, _WIDER = 1 / 3, 1.5
"""A layer is tried with fewer bits if it has this share of the bytes, and this multiple of the others' mean bits."""
_NAMES = {
    "float_model": "the model before prepare",
    "config": "what prepare got",
    "example": "one input of the model, or a tuple or dict of inputs",
}
"""What the names in printed code stand for; the user defines them."""
_MUCH = 0.5
"""If a change leaves less than this share of the error, changes that take longer are not tried."""
_WORST = 2
"""How many layers are tried in float: those that hurt the output most."""


Command = Callable[..., str]


@dataclass(frozen=True)
class AdviceContext:
    """The facts about a model that a caller of `next_step` knows.

    Args:
        lost: the share of the float model's metric that the model lost; None without a metric.
        worst: paths of the model's layers, first the layer that hurts the output most.
        metric: called as metric(model), larger is better.
        score: the metric of the model.
        improved: whether `improve` already chose the weights.
        arguments: the further arguments of `calibrate` as text for the code, such as ", inputs=0".
        call: the positional and keyword arguments of a call of the model; None if they are not known.
        command: returns the command that makes the model with other arguments (preset=, method=, improve=, float=,
            rule=, folds=); None if the code is Python.
        target: the engine that will run the model; None for no engine in particular.
    """

    lost: float | None = None
    worst: Sequence[str] = ()
    metric: Metric | None = None
    score: float | None = None
    improved: bool = False
    arguments: str = ""
    call: Arguments | None = None
    command: Command | None = None
    target: str | None = None


USUAL = AdviceContext()


def next_step(model: nn.Module, batches: KeptBatches, known: AdviceContext = USUAL) -> NextStep | None:
    """Try changes that may lower the error of a model's output or its size; afterwards, the model is restored.

    The changes are tried in this order; a model that lost little gets only 1 and 4:

    1. A large layer gets fewer bits, unless the error has half of the output's energy or more. If that helps, no
       other change is tried.
    2. Other methods of calibration, and other presets with the same numbers of bits.
    3. If these do not halve the error: `improve` with the steps "fast", and each of the worst layers in float.
    4. If nothing helped: batch normalisations are folded, as engines fold them.

    Up to four batches make the changes, for example by a calibration, and up to four others measure the errors. If a
    change of 2 or 3 lowers the error, the two sets of batches are swapped, and the change must lower the error again.
    Unless the model lost little, static ranges are first calibrated again, by the method that made them, on the
    batches that make the changes. So errors differ because of the change, not because of the data. A change costs a
    run of the batches that measure; a preset also costs a run of the others, and `improve` its usual time. There
    are at most twelve changes with the presets of this package, for any number of layers.

    Args:
        batches: numbered from 0. Of the first eight, those with odd numbers measure, and the others make the changes.

    Returns:
        The changes that were tried; None if the model returns no floats that could have an error.

    >>> from fakequant.data.batches import Batches
    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), "INT8")
    >>> used = calibrate(model, [torch.ones(1, 4)])
    >>> next_step(model, Batches([torch.ones(1, 4)], "report").kept()).judged
    'on the one batch there is, which also made it'
    """
    held_out = HeldOut.of(batches.part([*batches.numbered][:TRIED_ON]), EVERY)
    trials = ChangeTrials(model, held_out, known.metric, known.score)
    if not trials.judges:
        return None
    changes = _Changes(model, known)
    has_signal = trials.error < NO_SIGNAL
    little = (
        trials.error < LITTLE if known.lost is None else known.lost <= MAY_LOSE
    )  # the metric decides, and without a metric the error
    tried, best = list[Tried](), None
    if changes.method is not None and not little:
        trials.take_ranges_by(changes.take_ranges)
    if has_signal or little:
        best = _best_of(trials, changes.of_size(), tried)
    if best is None and not little:
        best = _best_of(trials, changes.of_ranges(), tried)
        if best is None or tried[best].after >= _MUCH * trials.error:
            best = _best_of(trials, changes.of_layers(), tried, best)
    if best is None:
        best = _best_of(trials, changes.of_fusions(), tried)
    return NextStep(trials.error, trials.bytes, str(held_out), little, tried, best, trials.score)


def _best_of(
    trials: ChangeTrials, changes: Iterable[Change], tried: list[Tried], best: int | None = None
) -> int | None:
    """Try changes; returns the index in `tried` of the best, or None. A later change must be clearly better."""
    for change in changes:
        tried.append(trials.of(change))
        if tried[-1].helps and (best is None or tried[-1].after < CLEARLY * tried[best].after):
            best = len(tried) - 1
    return best


@dataclass
class _Changes:
    """Makes the changes that `next_step` can try with a model."""

    model: nn.Module
    known: AdviceContext
    made_by: Provenance | None = field(init=False)
    fresh: bool = field(init=False)
    """Whether `prepare` and `calibrate` alone made the model, so that calling both again can make it with a change."""
    method: str | None = field(init=False)
    """The method by which `calibrate` found the ranges of the inputs; None if there are none, or it is not known."""
    has_example: bool = field(init=False)

    def __post_init__(self) -> None:
        self.made_by = made_by(self.model)
        self.has_example = has_sites(self.model)
        learned = any(one.learned is not None for one in quantizers(self.model).values())
        chosen = self.known.improved or any(own.has_fixed_codes for own in quantized_weights(self.model).values())
        self._inputs = {} if learned else static_inputs(self.model)
        self._methods = methods_of(self._inputs.values()) if self._inputs else []
        self.method = next(iter(self._methods), None)
        weights = [] if learned or chosen else weight_methods_of(self.model)
        self.fresh, self._weights = bool(weights), next(iter(weights), None)
        self._seen = dict[int, dict[str, Calibrator]]()  # by the batches

    def take_ranges(self, batches: KeptBatches, method: str | None = None) -> None:
        """Set the ranges of inputs on `batches` by a method of calibration; by default by the method used before."""
        if (key := id(batches)) not in self._seen:
            found = quantizers(self.model)
            owners = [self.model.get_submodule(layer_of(name)) for name in found]
            with restore_after(ranges_of(found.values(), owners)):
                used = self._calibrate(batches, DEFAULT_METHOD)  # this method collects enough for all methods
            self._seen[key] = {name: one for name, one in used.items() if found[name].kind is Kind.INPUT}
        recalibrate(self.model, self._seen[key], method or self.method or DEFAULT_METHOD)

    def of_ranges(self) -> Iterator[Change]:
        """Changes of the method or the preset. They change ranges, cost no bytes and take little time."""
        yield from self.of_methods()
        yield from self.of_presets()

    def of_methods(self) -> Iterator[Change]:
        """Changes to another method of calibration for the inputs."""
        if self.known.command is not None and not self.fresh:  # the command would choose or train weights anew
            return
        if self._inputs and self.method is None:

            def refuse(_: KeptBatches) -> None:
                raise ConfigError(
                    "not tried: no single method of calibration gives the ranges of all inputs, so that methods "
                    "cannot be compared; call fq.calibrate(model, batches, 'mse'), or with another method, and report "
                    "again"
                )

            yield Change("Calibrate the inputs by another method", "", refuse)
            return
        for method in METHODS if self._inputs else ():
            if method not in self._methods:
                anew = f', method="{method}"'
                kept = all(keeps_enough(one, method) for one in self._inputs.values())
                yield Change(
                    f"Calibrate the inputs by {method!r}",
                    self._code(
                        f"used = fq.recalibrate(model{anew})" if kept else self._calibrated(anew), method=method
                    ),
                    partial(self.take_ranges, method=method),
                )

    def of_presets(self) -> Iterator[Change]:
        """Changes to other presets with the same numbers of bits that the target is known to run."""
        own = self.made_by
        for preset in own.relatives if own and self.fresh else []:

            def make(batches: KeptBatches, preset: Config = preset) -> None:
                requantize(self.model, preset)
                self._calibrate(batches)

            dynamic = any(rule.input is not None and rule.input.dynamic for rule in preset.rules)
            if own is None or not (dynamic or self.method or not self._inputs):
                continue
            if self.known.target is not None and not find_engine(self.known.target).takes(preset.name):
                continue
            what = f"Take the preset {preset.name.lower()}{', which takes ranges at run time' if dynamic else ''}"
            if (weight := preset.layer_rules[0].weight) and weight != own.preset.layer_rules[0].weight:
                what += f", with weights of {weight.spec.format.name}"
            how = {} if self.method is None else {"method": self.method}
            code = self._code(self._anew(own.code(preset), dynamic=dynamic), preset=preset.name.lower(), **how)
            yield Change(what, code, make)

    def of_fusions(self) -> Iterator[Change]:
        """A change that folds batch normalisations into the quantized layers before them, as engines do."""
        try:
            with evaluating(self.model):
                found = fusions_of(self.model, self.known.call)
        except ConfigError:  # torch.fx cannot trace the model, and there is no call of it
            return

        layers = quantized_layers(self.model)
        found = replace(found, fused={norm: layer for norm, layer in found.fused.items() if layer in layers})

        def make(_: KeptBatches) -> None:
            fuse_found(self.model, found)
            for layer in {self.model.get_submodule(path) for path in found.fused.values()}:
                for one in layer.children():
                    if isinstance(one, Quantizer) and one.kind is Kind.WEIGHT:
                        one.reset()  # the range follows the weight

        if found.fused and self.fresh and self.made_by is not None:
            code = self.made_by.code(model="fq.fuse_batch_norm(float_model, example)")
            count = len(found.fused)
            what = f"Fold {count} batch normalisation{'s' if count > 1 else ''} into the layers before, as engines do"
            yield Change(what, self._code(self._anew(code), folds=True), make, Aim.ENGINE)

    def of_layers(self) -> Iterator[Change]:
        """The change that `improve` makes; then the worst layers in float, each with less than half of all weights."""
        if not self.fresh:
            return
        if quantized_weights(self.model):
            yield Change(
                "Choose the weights by the error of their layers",
                self._code(f'print(fq.ptq.improve(model, batches, "fast"{self.known.arguments}))', improve="fast"),
                lambda batches: improve(self.model, batches, "fast", forward=batches.run, progress=False),
            )
        layers = {path: one for path, one in self.model.named_modules() if isinstance(one, (QuantizedLayer, Site))}
        total = sum(p.numel() for p in self.model.parameters())
        for path in [path for path in self.known.worst if path in layers][:_WORST]:
            if 2 * sum(p.numel() for p in layers[path].parameters()) < total:  # else most of the model is in float
                example = ", example" if self.has_example else ""
                call = f'model = fq.prepare(float_model, config{example}, skip=["{path}"])  # and its skip and target'
                code = self.made_by.code(skip=(path,)) if self.made_by else call
                held = [one for one in layers[path].modules() if isinstance(one, Quantizer)]
                code = self._code(self._anew(code), float=path)

                def make(_: KeptBatches, held: Sequence[Quantizer] = held) -> None:
                    for one in held:
                        one.mode = Mode.OFF

                yield Change(f"Leave {path} in float", code, make)

    def of_size(self) -> Iterator[Change]:
        """Changes that give a large layer fewer bits: the weight format of the other layers, or INT8."""
        sizes = dict[str, tuple[int, int]]()  # elements and bits of layers that are quantized, or could be
        for path, layer in self.model.named_modules():
            elements = bits = 0
            form = None if isinstance(layer, QuantizedLayer) else quantized_class(layer)
            held = layer.products() if isinstance(layer, QuantizedLayer) else form.products_of(layer) if form else ()
            for weight in held:
                if (parameter := weight.parameter) is not None:
                    found = weight_bits(weight)
                    in_float = 8 * parameter.numel() * parameter.element_size()
                    elements += parameter.numel()
                    bits += in_float if found is None else found.codes + found.scales
            if elements:
                sizes[path] = elements, bits
        largest = max(sizes, key=lambda path: sizes[path][1], default=None)
        if largest is None or self.made_by is None or not self.fresh:
            return
        elements, bits = (sum(column) for column in zip(*sizes.values(), strict=True))
        count, size = sizes[largest]
        if size < _LARGE * bits or count == elements or size / count < _WIDER * (bits - size) / (elements - count):
            return
        spec = self.made_by.preset.layer_rules[0].weight
        left = [path for path in self.made_by.skip if path != largest]
        own = [str(one.spec) for one in self.model.get_submodule(largest).children() if isinstance(one, Quantizer)]
        for weight in dict.fromkeys([spec, TensorConfig("int8 per_channel(0)")]):
            rules = {name.lower(): preset.layer_rules[0] for name, preset in presets().items()}
            alone = next((name for name, own in rules.items() if own.input is None and own.weight == weight), None)
            if str(weight) in own or (self.known.command is not None and alone is None):
                continue

            def narrow(_: KeptBatches, weight: TensorConfig | None = weight) -> None:
                rule = Rule(largest, weight=weight)
                layer = self.model.get_submodule(largest)
                if isinstance(layer, QuantizedLayer):
                    requantize_layer(layer, rule, largest)
                else:
                    quantize_layer(layer, rule, largest)

            config = f'fq.presets.{self.made_by.preset.name}.with_rule(fq.Rule("{largest}", weight="{weight}"))'
            code = self._anew(f"model = fq.prepare(float_model, {config}{f', skip={left}' if left else ''})")
            yield Change(
                f"Give {largest}, which has {size / bits:.0%} of the bytes of all layers, the weights {weight}",
                self._code(code, rule=f"{largest}={alone}"),
                narrow,
                Aim.SIZE,
            )

    def _code(self, python: str, **changed: Any) -> str:
        """The code of a change: a command if the user works on the command line, else Python."""
        return python if self.known.command is None else self.known.command(**changed)

    def _anew(self, code: str, *, dynamic: bool = False) -> str:
        """Code that makes and calibrates the model again, with a comment that explains its names."""
        said = "; ".join(f"{name}: {what}" for name, what in _NAMES.items() if name in code)
        method = "" if dynamic or self.method in (None, DEFAULT_METHOD) else f', method="{self.method}"'
        unknown = self._inputs and self.method is None and not dynamic
        own = "  # with the method that the model was calibrated by" if unknown else ""
        return f"# {said}\n{code}\n{self._calibrated(method)}{own}"

    def _calibrated(self, method: str) -> str:
        weights = "" if self._weights is None else f', weight_method="{self._weights}"'
        return f"used = fq.calibrate(model, batches{self.known.arguments}{method}{weights})"

    def _calibrate(self, batches: KeptBatches, method: str | None = None) -> dict[str, Calibrator]:
        how: dict[str, Any] = {"forward": batches.run, "progress": False, "unseen": "float"}
        return calibrate(
            self.model, batches, method or self.method or DEFAULT_METHOD, weight_method=self._weights, **how
        )
