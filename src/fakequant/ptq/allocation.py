"""A preset for each layer under a budget: the error of each preset in the output, and the best mix for every size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.data.arguments import Metric, check_float_model, check_metric, measured, named
from fakequant.data.batches import Batches, Forward, HeldOut, Inputs, KeptBatches, track
from fakequant.errors import CalibrationError, ConfigError, renamed
from fakequant.model.config import Config, Rule
from fakequant.model.presets import find_preset
from fakequant.model.run.outputs import Distance, Place, float_tensors, named_tensors, record
from fakequant.model.run.recorded import Recording, read_together, weight_readers
from fakequant.model.weights import evaluating, modes, score_of, spec_bits
from fakequant.nn.products import MatrixProduct, WindowProduct
from fakequant.nn.quantized.forms import product_class
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Mode
from fakequant.ops import library
from fakequant.ptq.judging import EVERY
from fakequant.ptq.stream import LayerCall
from fakequant.ptq.trial import Trials
from fakequant.restore import attributes_of, restore_after
from fakequant.text import listed, module_name, table

_BUDGETS = {"bits": "5", "size": "1e6", "loss": "1e-3", "operations": "40", "floor": "98.5"}
"""An example of each budget, for error messages."""
_NAMED = 3
_UNITS = 20_000
"""Sizes are counted in their common divisor, or in 1 / _UNITS of the largest size if that is larger."""


@dataclass(frozen=True)
class Score:
    """The cost of a preset for one layer.

    Attributes:
        loss: the squared error of the model's output if this layer alone is quantized, over the output's energy.
        bits: the bits of the weight with its scales; 0 if an earlier layer has the same parameter.
        operations: bit operations of one pass over the first batch: multiply-accumulates times the bits of the weight
            times the bits of the input; a tensor in float counts 32 bits.
    """

    loss: float
    bits: int
    operations: int = 0


@dataclass(frozen=True)
class Allocation:
    """A mix of presets: a preset for each layer, with its size and its error.

    Attributes:
        choices: for the path of each layer, the name of its preset.
        loss: the predicted error of the model's output, as a share of the output's energy.
        bits: how many bits the weights of these layers take in all, with their scales.
        weights: how many weights these layers have.
        measured: the measured error of the model's output, as a share of the output's energy; None until `verify`.
        operations: bit operations of one pass over the first batch.
        products: multiply-accumulates of the same pass.
    """

    choices: Mapping[str, str]
    loss: float
    bits: int
    weights: int
    measured: float | None = None
    metric: float | None = None
    """The user's metric with these choices; None without a metric."""
    operations: int = 0
    products: int = 0
    why_float: Mapping[str, str] = field(default_factory=dict)
    """Why other layers with weights stay in float, by their path."""
    size: int = 0
    """Bytes of all parameters of the model, as `fakequant.summary` counts them: also those that stay in float."""
    in_float: Mapping[str, int] = field(default_factory=dict)
    """For the path of each module with parameters that stay in float: the bytes of these parameters."""

    left = renamed("left", "why_float")

    @property
    def bits_per_weight(self) -> float:
        """The mean number of bits of a weight in these layers, scales included. Weights in float do not count."""
        return self.bits / self.weights

    @property
    def operations_per_product(self) -> float:
        """The mean number of bit operations of a multiply-accumulate: 64 if all weights and inputs have 8 bits."""
        return self.operations / max(1, self.products)

    def __repr__(self) -> str:
        figures = [f"{len(self.choices)} layers with {self.bits_per_weight:.4g} bits per weight"]
        figures += [f"{self.size:,} bytes in all, {sum(self.in_float.values()):,} of them in float"]
        figures += [f"predicted loss {self.loss:.2e}"]
        figures += [] if self.measured is None else [f"measured {self.measured:.2e}"]
        figures += [] if self.metric is None else [f"metric {self.metric:.4g}"]
        figures += _stay_in_float(self.why_float)
        return table([[f"Allocation({', '.join(figures)})"]])

    def config(self) -> Config:
        """The mix as a configuration for `fakequant.prepare`; other layers stay in float."""
        name = f"mixed, {self.bits_per_weight:.2f} bits"
        return Config(name, tuple(Rule(layer, choice) for layer, choice in self.choices.items()))


@dataclass
class Scores:
    """The scores of each preset for each layer; prints as a table.

    Attributes:
        layers: for the path of each layer, the score of each preset.
        weights: how many weights each layer has; 0 if an earlier layer has the same parameter.
        ties: groups of layers that get the same preset, because they read the same tensor or have the same parameter.
        arriving: for each layer and preset, errors of the output [samples]; the loss is their mean square. A mix
            has the sums of these errors over its layers.
        products: how many multiply-accumulates each layer has for the first batch.
        why_float: for the path of each other layer with weights: why it has no scores, and stays in float.
        in_float: for the path of each module, the bytes of its parameters that stay in float.
        computed: layers whose weight is computed; the parameters from which it is computed stay in float.
    """

    layers: dict[str, dict[str, Score]]
    weights: dict[str, int]
    ties: list[list[str]]
    arriving: dict[tuple[str, str], Tensor] = field(repr=False)
    products: dict[str, int] = field(default_factory=dict)
    why_float: dict[str, str] = field(default_factory=dict)
    in_float: dict[str, int] = field(default_factory=dict)
    computed: frozenset[str] = frozenset()

    left = renamed("left", "why_float")

    def predict(self, choices: Mapping[str, str]) -> Allocation:
        """The `Allocation` for `choices`, with the predicted loss, in which errors of layers may add up or cancel."""
        loss = torch.stack([self.arriving[layer, name] for layer, name in choices.items()]).sum(0).square().mean()
        taken = [self.layers[layer][name] for layer, name in choices.items()]
        stored = sum(self.layers[layer][name].bits for layer, name in choices.items() if layer not in self.computed)
        return Allocation(
            choices,
            float(loss),
            sum(score.bits for score in taken),
            sum(self.weights[layer] for layer in choices),
            operations=sum(score.operations for score in taken),
            products=sum(self.products.get(layer, 0) for layer in choices),
            why_float=self.why_float,
            size=sum(self.in_float.values()) + -(-stored // 8),
            in_float=self.in_float,
        )

    def curve(self, over: str = "bits") -> list[Allocation]:
        """The best mix for every size, from small to large; each larger mix has a smaller loss.

        Mixes are chosen by the sum of the scores; then `predict` gives the loss of each mix. The choice is the
        multiple-choice knapsack problem, solved exactly by dynamic programming over sizes. The unit of sizes is
        their common divisor, or 0.005 % of the largest size if that is larger; sizes are rounded up.

        Args:
            over: "bits" of weights, or bit "operations".
        """
        if over not in ("bits", "operations"):
            raise ConfigError(f'over= must be "bits" or "operations", got {over!r}')
        groups = list[tuple[Sequence[str], dict[str, Score]]]()  # layers that share a choice, and scores by choice
        for group in self.ties:
            scored = [self.layers[layer] for layer in group]
            names = [name for name in scored[0] if all(name in own for own in scored)]
            sums = {
                name: Score(
                    sum(own[name].loss for own in scored),
                    sum(own[name].bits for own in scored),
                    sum(own[name].operations for own in scored),
                )
                for name in names
            }
            groups.append((group, sums))
        costs = [{name: getattr(score, over) for name, score in own.items()} for _, own in groups]
        largest = sum(max(own.values()) for own in costs)
        unit = max(gcd(*(cost for own in costs for cost in own.values())), -(-largest // _UNITS))
        sizes = [{name: -(-cost // unit) for name, cost in own.items()} for own in costs]
        capacity = sum(max(own.values()) for own in sizes)
        best = torch.full((capacity + 1,), torch.inf, dtype=torch.float64, device="cpu")
        best[0] = 0.0
        taken = []
        for (_, own), size in zip(groups, sizes, strict=True):
            padded = torch.cat([torch.full((capacity,), torch.inf, dtype=best.dtype, device="cpu"), best])
            shifted = (padded[capacity - size[name] : len(padded) - size[name]] for name in own)
            tried = torch.stack([one + own[name].loss for one, name in zip(shifted, own, strict=True)])
            best, chosen = tried.min(0)
            taken.append(chosen)
        kept, least = list[Allocation](), float("inf")
        for end in torch.nonzero(best.isfinite()).flatten().tolist():
            if float(best[end]) >= least:
                continue
            least, place, choices = float(best[end]), end, dict[str, str]()
            for (group, own), size, chosen in zip(groups[::-1], sizes[::-1], taken[::-1], strict=True):
                name = list(own)[int(chosen[place])]
                choices |= dict.fromkeys(group, name)
                place -= size[name]
            point = self.predict({layer: choices[layer] for layer in self.layers})
            if not kept or point.loss < kept[-1].loss:
                kept.append(point)
        return kept

    def allocate(
        self,
        *,
        bits: float | None = None,
        size: float | None = None,
        loss: float | None = None,
        operations: float | None = None,
    ) -> Allocation:
        """The best mix within a budget.

        Args:
            bits: the largest mean number of bits per weight, scales included, over the layers that have scores.
            size: the largest number of bytes of all parameters of the model, as `fakequant.summary` counts them: also
                those that stay in float.
            loss: the largest loss; the smallest mix with at most this loss is taken.
            operations: the largest mean number of bit operations of a multiply-accumulate. The number is 64 if weight
                and input have 8 bits each.

        Raises:
            ConfigError: not exactly one budget, a budget that is not a positive number, or no mix that fits it (the
                nearest is named).
        """
        if sum(budget is not None for budget in (bits, size, loss, operations)) != 1:
            raise ConfigError(
                "exactly one budget is needed: pass bits= per weight, size= in bytes, loss=, or operations= per product"
            )
        for name, value in (("bits", bits), ("size", size), ("loss", loss), ("operations", operations)):
            check_budget(name, value)
        curve = self.curve("bits" if operations is None else "operations")
        if loss is not None:
            fitting = [point for point in curve if point.loss <= loss][:1]
            nearest = f"the smallest loss is {curve[-1].loss:.3g}"
        elif operations is not None:
            fitting = [point for point in curve if point.operations_per_product <= operations][-1:]
            nearest = f"the fewest bit operations for a multiply-accumulate are {curve[0].operations_per_product:.4g}"
        elif bits is not None:
            fitting = [point for point in curve if point.bits <= bits * point.weights][-1:]
            mix = curve[0]  # the message names the layers that exceed the budget most
            own = {layer: self.layers[layer][name].bits for layer, name in mix.choices.items() if self.weights[layer]}
            excess = sorted(own, key=lambda layer: bits * self.weights[layer] - own[layer])
            large = [layer for layer in excess[:_NAMED] if own[layer] > bits * self.weights[layer]]
            named = [f"{own[layer] / self.weights[layer]:.2f} in {layer} as {mix.choices[layer]}" for layer in large]
            nearest = f"the smallest mix has {mix.bits_per_weight:.3f} bits per weight, scales included"
            nearest += f": {', '.join(named)}"
        else:
            fitting = [point for point in curve if point.size <= (size or 0.0)][-1:]
            nearest = f"the smallest mix has {curve[0].size:,} bytes"
            if self.in_float:
                rest = sorted(self.in_float.items(), key=lambda item: -item[1])
                shown = ", ".join(f"{size:,} in {module_name(name)}" for name, size in rest[:_NAMED])
                more = f" and the others in {len(rest) - _NAMED} more modules" if len(rest) > _NAMED else ""
                nearest += f", of which {sum(self.in_float.values()):,} stay in float ({shown}{more})"
        if not fitting:
            raise ConfigError(
                f"no mix of these choices fits the budget: {nearest}; pass other presets, or a larger budget"
            )
        return fitting[0]

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for own in self.layers.values() for name in own))
        rows = [["layer", "weights", *names]]
        for layer, own in self.layers.items():
            losses = [f"{own[name].loss:.2e}" if name in own else "-" for name in names]
            rows.append([layer, f"{self.weights[layer]:,}", *losses])
        return table(rows, _stay_in_float(self.why_float), numbers=range(1, len(rows[0])))

    __repr__ = __str__  # what notebooks and consoles show


def _stay_in_float(why_float: Mapping[str, str]) -> list[str]:
    """A list with a text that names the first layers that stay in float; [] if there are none."""
    named = [f"{module_name(layer)} ({why})" for layer, why in why_float.items()]
    return [f"{len(why_float)} stay in float: {listed(named, _NAMED)}"] if why_float else []


def check_budget(name: str, value: Any, *, any_number: bool = False) -> None:
    """Raise ConfigError unless a budget is None or a number >= 0; with `any_number`, only NaN is refused."""
    if value is None:
        return
    number = isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
    if not number or not (any_number or float(value) >= 0):
        kind = "a number" if any_number else "a number from 0 on"
        raise ConfigError(f"{name}={value!r:.40}: a budget is {kind}, such as {name}={_BUDGETS[name]}")


_PROBES = 16
"""Random directions of the output, for each batch."""


def divergence(model: nn.Module, batches: KeptBatches, axis: int | None = None) -> Metric:
    """A function of another model: its mean Kullback-Leibler divergence from `model`, KL(p of model || q of other).

    Args:
        model: the model in float and in eval mode; its first floating output holds logits, of which p is the softmax.
        axis: the axis of the classes; None: the last axis, of at most three.
    """
    with torch.no_grad(), batches.one_pass(model):
        wanted = [_logits(batches.run(model, batch), axis) for batch in batches]

    def loss(other: nn.Module) -> float:
        with batches.one_pass(other):
            found = [_logits(batches.run(other, batch), axis) for batch in batches]
        pairs = zip(found, wanted, strict=True)
        total = sum(float(nn.functional.kl_div(own, one, log_target=True, reduction="sum")) for own, one in pairs)
        return total / max(sum(one.numel() // max(one.shape[-1 if axis is None else axis], 1) for one in wanted), 1)

    return loss


def _logits(outputs: Any, axis: int | None) -> Tensor:
    found = float_tensors(outputs)
    if not found or not found[0].dim():
        raise ConfigError('measure="kl" needs a model that gives logits [..., classes]; pass a function as measure=')
    if axis is None and found[0].dim() > 3:
        raise ConfigError(
            f'measure="kl" does not say which axis of the logits {list(found[0].shape)} has the classes; pass '
            'measure=("kl", 1) for maps [N, classes, H, W], or ("kl", -1)'
        )
    return found[0].double().log_softmax(-1 if axis is None else axis)


@torch.no_grad()
def losses_alone(
    model: nn.Module, quantized: Mapping[str, nn.Module], layers: Sequence[str], loss: Metric, progress: bool | None
) -> dict[tuple[str, str], Tensor]:
    """For each layer and preset, a vector [layers]: its mean square is the loss that the preset adds in this layer.

    `loss(model)` is a number, smaller is better. A layer that lowers the loss counts as 0.
    """
    with evaluating(model):
        before = measured(loss, model)
    found: dict[tuple[str, str], Tensor] = {}
    tried = [(place, layer, name) for place, layer in enumerate(layers) for name in quantized]
    for place, layer, name in track(tried, "scoring layers", len(tried), progress):
        twin, prefix = quantized[name], f"{layer}." if layer else ""
        with modes(twin, lambda path, own, prefix=prefix: own.mode if path.startswith(prefix) else Mode.OFF):
            added = measured(loss, twin) - before
        if math.isnan(added):
            alone = f"{module_name(layer)} alone in {name}"
            raise ConfigError(f"the loss with {alone} is NaN; leave {name} out of choices, or pass another measure=")
        found[layer, name] = torch.zeros(len(layers), dtype=torch.float64, device="cpu")
        found[layer, name][place] = (len(layers) * max(added, 0.0)) ** 0.5
    return found


@torch.no_grad()
def arriving_errors(
    model: nn.Module,
    layers: Mapping[str, Any],
    quantized: Mapping[str, nn.Module],
    batches: KeptBatches,
) -> dict[tuple[str, str], Tensor]:
    """For each layer and name of a preset: errors of the output, projected on random directions [samples].

    The mean of their squares estimates the error as a share of the output's energy; for several outputs the mean share.

    Raises:
        CalibrationError: an output or a gradient holds NaN; the number of the batch is named.
        ConfigError: no output has a gradient to a layer, all outputs are 0, or none holds floats.
    """
    parts: dict[tuple[str, str], list[Tensor]] = {(layer, name): [] for layer in layers for name in quantized}
    outputs = Distance()  # values that are infinite, as those of a mask are, have no error
    with batches.one_pass(model):
        for number, batch in batches.numbered.items():
            found = named_tensors(batches.run(model, batch))
            if any(bool(y.isnan().any()) for y in found.values()):
                raise _nan(number)
            outputs.add(found, found)
    energies = {place: energy for place, energy in outputs.energies.items() if energy}
    if not energies:
        why = "every output of the model is 0" if outputs.energies else "the model returns no floats"
        raise ConfigError(f"{why}, but scores are shares of the energy of its output; pass measure=")
    least = min(energies.values())
    weights = {place: (least / energy) ** 0.5 for place, energy in energies.items()}  # at most 1, for half precision
    # Without gradients of parameters, torch need not keep inputs of layers, which a model may write into.
    with batches.one_pass(model), restore_after(attributes_of(model.parameters(), "requires_grad")):
        model.requires_grad_(requires_grad=False)
        for number, batch in zip(batches.numbered, batches.tracked("scoring layers"), strict=True):
            _add_errors(layers, quantized, lambda b=batch: batches.run(model, b), parts, (number, weights))
            if not all(bool(values[-1].isfinite().all()) for values in parts.values()):
                raise _nan(number)
    # The mean of squares over all samples and directions times their number for one direction is the error's energy.
    share = 1 / (_PROBES * least * len(energies))
    return {key: torch.cat(values) * (len(torch.cat(values)) * share) ** 0.5 for key, values in parts.items()}


def _nan(number: int) -> CalibrationError:
    return CalibrationError(f"batch {number + 1}: an output or its gradient holds NaN; leave the batch out")


def _add_errors(
    layers: Mapping[str, Any],
    quantized: Mapping[str, nn.Module],
    call: Callable[[], Any],
    parts: dict[tuple[str, str], list[Tensor]],
    drawn: tuple[int, Mapping[Place, float]],
) -> None:
    """Append a batch's errors of outputs in random directions to `parts`; `drawn` is a seed and a factor per output."""
    seed, weights = drawn
    calls: list[tuple[dict[tuple[str, str], Tensor], Tensor]] = []

    def see(name: str, x: Tensor, y: Tensor) -> Tensor:
        errors = {(name, choice): _error(twin.get_submodule(name), x.detach()) for choice, twin in quantized.items()}
        y = y if y.requires_grad else y.detach().requires_grad_()  # the gradients begin at the first layers
        calls.append((errors, y))
        return y.clone()  # a copy, because the model may write into the output

    hooks = [
        layer.register_forward_hook(
            lambda _, args, kwargs, y, name=name: see(name, LayerCall(args, kwargs).first, y), with_kwargs=True
        )
        for name, layer in layers.items()
    ]
    undo = restore_after(lambda: [hook.remove() for hook in hooks])
    with undo, torch.inference_mode(mode=False), torch.enable_grad():
        found = {place: y for place, y in named_tensors(call()).items() if y.requires_grad and place in weights}
        result, scales = [*found.values()], [weights[place] for place in found]
        if not result:
            raise ConfigError("no layer gets a gradient from an output of the model; pass measure=")
        examples = max(len(result[0]), 1) if result[0].dim() else 1  # a detector may find nothing
        random = torch.Generator().manual_seed(seed)
        for _ in range(_PROBES):
            signs = [
                (torch.randint(0, 2, y.shape, generator=random, device="cpu").to(y.device, y.dtype) * 2 - 1) * scale
                for y, scale in zip(result, scales, strict=True)
            ]
            outputs = [y for _, y in calls]
            gradients = torch.autograd.grad(result, outputs, signs, retain_graph=True, allow_unused=True)
            sums = {key: torch.zeros(examples, dtype=torch.float64, device="cpu") for key in parts}
            for (errors, _), gradient in zip(calls, gradients, strict=True):
                for key, error in errors.items() if gradient is not None else ():
                    values = (gradient * error).double()
                    if values.numel() and values.dim() and len(values) == examples:
                        sums[key] += values.reshape(examples, -1).sum(1).cpu()
                    else:  # the first axis does not hold the examples
                        sums[key][0] += values.sum().cpu()
            for key, values in sums.items():
                parts[key].append(values)


@torch.no_grad()
def _error(layer: nn.Module, x: Tensor) -> Tensor:
    """The change of a layer's output when it is quantized, for a float input; 0 for a layer in float."""
    if not isinstance(layer, QuantizedLayer) or layer.weight_quantizer is None:
        return torch.zeros((), device="cpu")
    (product,) = layer.products()
    assert isinstance(product, MatrixProduct)
    weight, quantizer = product.tensor, product.quantizer
    rounded = library.fake_quantize(weight, quantizer.qparams(weight), quantizer.spec)
    return product.product(rounded, layer.quantized_input(x)) - product.product(weight, x)


def scores(
    model: nn.Module,
    batches: Iterable[Any],
    choices: Sequence[str] | str = ("INT8", "INT4_GROUP32"),
    *,
    measure: Metric | str | tuple[str, int] | None = None,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    progress: bool | None = None,
) -> Scores:
    """Measure the error of the model's output if each layer alone is quantized, with each preset in `choices`.

    The error that a preset makes in a layer's output is multiplied with the gradients of random sums of the model's
    output. The mean square of these products estimates the squared error of the model's output (Hutchinson's
    estimator), as a share of the output's energy; for several outputs it is the mean share. With `measure`, the model
    runs once for each layer and preset instead, and the losses of a mix add up.

    Args:
        model: the float model; it is not changed.
        batches: as from a data loader; a few are enough.
        choices: names of presets.
        measure: "kl", the divergence from the float model's logits [..., classes]; ("kl", 1) where axis 1 has the
            classes, as in maps [N, classes, H, W]; or a function called as measure(model), smaller is better, such as 1
            - accuracy. Losses of `Scores` and `Allocation` are then the increase of the measure.
        inputs, forward, progress: as for `calibrate`.

    Raises:
        ConfigError: an unknown preset or measure, no preset, or a model without linear layers and convolutions.
        CalibrationError: there are no batches, or an output holds NaN (its batch is named).

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> found = scores(model, [torch.randn(16, 32)], ["INT8_WEIGHT_ONLY", "INT4_GROUP32"])
    >>> found.allocate(bits=6).choices
    {'0': 'INT4_GROUP32', '2': 'INT8_WEIGHT_ONLY'}
    """
    check_float_model(model, "scores", "scores(model, batches)", "score the layers of")
    given = Batches(batches, "scores", inputs=inputs, forward=forward, progress=progress).kept()
    return _scores(model, given, choices, measure, progress)


def _scores(
    model: nn.Module,
    given: KeptBatches,
    choices: Sequence[str] | str,
    measure: Metric | str | tuple[str, int] | None = None,
    progress: bool | None = None,
) -> Scores:
    """Like `scores`, for batches that are stored already."""
    choices = [choices] if isinstance(choices, str) else [*choices]
    if not choices:
        raise ConfigError('choices is empty; pass names of presets, such as ["INT8", "INT4_GROUP32"]')
    layers: dict[str, Any] = {name: layer for name, layer in model.named_modules() if _is_scored(layer)}
    if not layers:
        raise ConfigError(
            "the model has no linear layers and no convolutions for which presets could be chosen; quantize it by "
            "fakequant.prepare"
        )
    trials, alone = Trials(model, HeldOut.of(given, 1, [])), _left_in_float(model)
    quantized = {name: trials.quantized(find_preset(name).with_rule(*alone)) for name in choices}
    with evaluating(model):
        ran = record(model, lambda: given.run_first(model))
        siblings = read_together(ran, layers)
        reached = [layer for layer in layers if layer in siblings]
        if measure is None:
            arriving = arriving_errors(model, layers, quantized, given)
        else:
            name, axis = measure if isinstance(measure, tuple) and len(measure) == 2 else (measure, None)
            chosen = divergence(model, given, axis) if name == "kl" else measure
            if not callable(chosen):
                raise ConfigError(f'measure= must be "kl", ("kl", axis) or a function of the model, got {measure!r}')
            arriving = losses_alone(model, quantized, reached, chosen, progress)

    def score(layer: Any, loss: float, products: int, weights: int) -> Score:
        weight, x = layer.weight_quantizer.spec, layer.input_quantizer
        bits = spec_bits(weight, tuple(layer.weight.shape))
        each = weight.format.bits * (32 if x is None else x.spec.format.bits)
        return Score(loss, bits.codes + bits.scales if weights else 0, products * each)

    products = {layer: ran.multiplications[layer] for layer in layers}
    weights, found, seen = dict[str, int](), dict[str, dict[str, Score]](), set[nn.Parameter]()
    for name in reached:
        parameter = _parameter(layers[name])
        weights[name] = 0 if parameter in seen else layers[name].weight.numel()
        seen |= set() if parameter is None else {parameter}
    holders = dict[nn.Parameter, list[str]]()
    for name in siblings:
        if (parameter := _parameter(layers[name])) is not None:
            holders.setdefault(parameter, []).append(name)
    tied = {name: [name] for name in siblings}
    for group in (*siblings.values(), *holders.values()):
        joined = list(dict.fromkeys(other for name in group for other in tied[name]))
        tied |= dict.fromkeys(joined, joined)
    ties = [list(group) for group in dict.fromkeys(map(tuple, tied.values()))]
    in_float, seen = dict[str, int](), {own for layer in reached if (own := _parameter(layers[layer])) is not None}
    for path, module in model.named_modules():
        rest = set(module.parameters(recurse=False)) - seen
        seen |= rest
        if rest:
            in_float[path] = sum(p.numel() * p.element_size() for p in rest)
    for layer in reached:
        twins = {name: twin.get_submodule(layer) for name, twin in quantized.items()}
        found[layer] = {
            name: score(own, float(arriving[layer, name].square().mean()), products[layer], weights[layer])
            for name, own in twins.items()
            if isinstance(own, QuantizedLayer) and own.weight_quantizer is not None
        }
    return Scores(
        found,
        weights,
        ties,
        arriving,
        products,
        _left(model, reached, ran),
        in_float,
        frozenset(layer for layer in reached if _parameter(layers[layer]) is None),
    )


def _parameter(layer: nn.Module) -> nn.Parameter | None:
    """The weight of a layer; None if the weight is not a parameter."""
    return layer._parameters.get("weight")


def _left(model: nn.Module, reached: Sequence[str], recording: Recording) -> dict[str, str]:
    """For the path of each layer without scores whose weight has two or more axes: why it has no scores."""
    matrices = {
        name: module
        for name, module in model.named_modules()
        if any(p is not None and p.dim() > 1 for p in module._parameters.values()) and name not in reached
    }
    uncalled = [module for module in matrices.values() if _is_scored(module)]
    readers = weight_readers(model, recording, uncalled)

    def why(module: nn.Module) -> str:
        if module in readers:
            return f"{module_name(readers[module])} uses its weight in float"
        return "the first batch does not reach it" if _is_scored(module) else f"a {type(module).__name__} has no score"

    return {name: why(module) for name, module in matrices.items()}


def _is_scored(module: nn.Module) -> bool:
    return product_class(module) in (MatrixProduct, WindowProduct)


def _left_in_float(model: nn.Module) -> list[Rule]:
    """A list with a rule that leaves classes without scores in float, without warnings; [] if there are none."""
    kinds = {type(module).__name__ for module in model.modules() if not _is_scored(module)}
    return [Rule("*", layers=tuple(sorted(kinds)), optional=True)] if kinds else []


def verify(
    model: nn.Module,
    batches: Iterable[Any],
    allocations: Iterable[Allocation],
    *,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    progress: bool | None = None,
) -> list[Allocation]:
    """Measure the error of the model's output with each allocation; returns the allocations with `measured`.

    Args:
        model: the float model; it is not changed.
        batches: every second batch, up to eight, only measures; the others calibrate. A single batch does both.
        allocations: the allocations to measure, such as those of `Scores.curve`.
        inputs, forward, progress: as for `calibrate`.
    """
    given = Batches(batches, "verify", inputs=inputs, forward=forward, progress=progress).kept()
    trials = Trials(model, HeldOut.of(given, EVERY))
    trials.check()
    wanted = list(allocations)
    return [_measured(trials, one) for one in track(wanted, "measuring mixes", len(wanted), progress)]


def _measured(trials: Trials, mix: Allocation) -> Allocation:
    """The allocation with `measured`: the error of the output on the batches that judge, see `HeldOut`."""
    return replace(mix, measured=trials.outputs.of(_quantized(trials, mix)).mean)


def _quantized(trials: Trials, mix: Allocation) -> nn.Module:
    return trials.quantized(mix.config().with_rule(*_left_in_float(trials.model)))


def search(  # noqa: PLR0913  all but the first three by name
    model: nn.Module,
    batches: Iterable[Any],
    choices: Sequence[str] | str = ("INT8_WEIGHT_ONLY", "INT4_GROUP32"),
    *,
    bits: float | None = None,
    size: float | None = None,
    loss: float | None = None,
    metric: Metric | None = None,
    floor: float | None = None,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    progress: bool | None = None,
) -> Allocation:
    """Choose a preset for each layer under one budget: the mix with the least error of the model's output.

    Args:
        model: the float model; it is not changed.
        batches: a few are enough. Every second batch, up to eight, is held back to measure the error; the others
            calibrate and choose. A single batch does both.
        choices: names of presets.
        bits: the largest mean number of bits per weight, scales included, over the layers that get a preset.
        size: the largest number of bytes of all parameters, as `fakequant.summary` counts them: also those that stay in
            float.
        loss: the largest predicted error of the output, as a share of the output's energy; the smallest mix with at
            most this error is taken.
        metric: called as metric(model), larger is better; only with `floor`.
        floor: the least metric; the smallest mix with at least this metric is taken, after about ten measurements.
        inputs, forward, progress: as for `calibrate`.

    Returns:
        The mix with its measured error; `fakequant.prepare(model, mix.config())` applies it.

    Raises:
        ConfigError: not exactly one budget, a budget that is not a number, a floor without a metric, or no mix that
            fits (the nearest is named).
        CalibrationError: there are no batches, or the model fails on a batch (the batch and the layer are named).

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> mix = search(model, [torch.randn(16, 32)], bits=6)
    >>> mix.choices
    {'0': 'INT4_GROUP32', '2': 'INT8_WEIGHT_ONLY'}
    """
    check_float_model(model, "search", "search(model, batches, bits=5)", "search a mix of presets for")
    check_metric(metric, "search")
    if sum(budget is not None for budget in (bits, size, loss, floor)) != 1:
        raise ConfigError(
            "exactly one budget is needed: pass bits= per weight, size= in bytes, loss=, or floor= with metric="
        )
    if (metric is None) != (floor is None):
        raise ConfigError("metric= and floor= belong together: the metric is called as metric(model), larger is better")
    for name, value in (("bits", bits), ("size", size), ("loss", loss), ("floor", floor)):
        check_budget(name, value, any_number=name == "floor")
    given = Batches(batches, "search", inputs=inputs, forward=forward, progress=progress).kept()
    held_out = HeldOut.of(given, EVERY)
    trials, found = Trials(model, held_out), _scores(model, held_out.made, choices, progress=progress)
    trials.check()
    if metric is None or floor is None:
        return _measured(trials, found.allocate(bits=bits, size=size, loss=loss))

    # The first point of the curve that keeps the floor, by bisection: larger points are taken to be no worse.
    def score(mix: Allocation) -> float:
        return score_of(metric, _quantized(trials, mix))

    curve = found.curve()
    largest = score(curve[-1])
    if not largest >= floor:
        asked, most = (named(metric).shown(value) for value in (floor, largest))
        raise ConfigError(
            f"no mix of these choices meets the floor {asked:.6g}: the largest mix, {curve[-1].bits_per_weight:.2f} "
            f"bits per weight, has the metric {most:.6g}; pass other presets, or another floor"
        )
    best, low, high = replace(curve[-1], metric=largest), 0, len(curve) - 1
    while low < high:
        middle = (low + high) // 2
        value = score(curve[middle])
        if value >= floor:
            high, best = middle, replace(curve[middle], metric=value)
        else:
            low = middle + 1
    return _measured(trials, best)
