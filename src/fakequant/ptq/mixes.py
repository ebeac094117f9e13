"""What each choice of a format costs each layer, and the best mix of choices for every size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fakequant.errors import ConfigError, renamed
from fakequant.model.config import Config, Rule
from fakequant.text import listed, module_name, table

_BUDGETS = {"bits": "5", "size": "1e6", "loss": "1e-3", "operations": "40", "floor": "98.5"}
"""Examples."""
_NAMED = 3
_UNITS = 20_000
"""Steps in which sizes are counted where they have no larger common divisor: 0.005 % of the largest size."""


@dataclass(frozen=True)
class Score:
    """What a choice costs one layer.

    Attributes:
        loss: the squared error that it alone makes in the model's output, as a share of the output's energy.
        bits: of the weight with its scales; 0 where an earlier layer holds the same parameter.
        operations: bit operations of one pass over the first batch: multiply-accumulates times the bits of the weight
            times those of the input, which are 32 where it stays in float.
    """

    loss: float
    bits: int
    operations: int = 0


@dataclass(frozen=True)
class Allocation:
    """A choice for each layer.

    Attributes:
        choices: the name of a preset by layer.
        loss: the predicted error of the model's output, as a share of its energy.
        bits: of the weights of these layers, with their scales.
        weights: how many weights these are.
        measured: the error of the model's output with these choices, as a share of its energy; None until `verify`.
        operations: bit operations of one pass over the first batch.
        products: multiply-accumulates of the same pass.
    """

    choices: Mapping[str, str]
    loss: float
    bits: int
    weights: int
    measured: float | None = None
    metric: float | None = None
    """What a metric gives with these choices; None where none was asked."""
    operations: int = 0
    products: int = 0
    why_float: Mapping[str, str] = field(default_factory=dict)
    """Why other layers with weights stay in float, by their path."""
    size: int = 0
    """Bytes of all parameters of the model, as `fakequant.summary` counts them: also those that stay in float."""
    in_float: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the parameters that stay in float, by the path of the module that holds them."""

    left = renamed("left", "why_float")

    @property
    def bits_per_weight(self) -> float:
        """The bits of a weight in the chosen layers, scales included. Weights in float do not count."""
        return self.bits / self.weights

    @property
    def operations_per_product(self) -> float:
        """Bit operations of a multiply-accumulate on average: 64 where weights and inputs have 8 bits."""
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
        """The choices as a configuration for `fakequant.prepare`; other layers stay in float."""
        name = f"mixed, {self.bits_per_weight:.2f} bits"
        return Config(name, tuple(Rule(layer, choice) for layer, choice in self.choices.items()))


@dataclass
class Scores:
    """The scores of all layers and choices; prints as a table.

    Attributes:
        layers: scores by layer and choice.
        weights: how many weights each layer has; 0 where an earlier layer holds the same parameter.
        ties: layers that get one choice, because they read the same tensor or hold the same parameter.
        arriving: by layer and choice, the error that arrives in random directions of the output [samples].
        products: how many multiply-accumulates each layer has for the first batch.
        why_float: why other layers with weights have no scores, and stay in float, by their path.
        in_float: bytes of all parameters that stay in float, by the path of the module that holds them.
        computed: layers whose weight is no parameter; what it is computed from stays in float.
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
        """A mix with its predicted loss, which counts how errors of different layers add up or cancel."""
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
        """The best mix for every size, from the smallest to the largest; none is larger and worse than another.

        Mixes are chosen by the sum of the scores, and what they cost together is predicted then. The choice is the
        multiple-choice knapsack, solved exactly by dynamic programming over sizes: they are counted in
        their common divisor, or in 0.005 % of the largest size, rounded up, where that is more.

        Args:
            over: "bits" of weights, or bit "operations".
        """
        if over not in ("bits", "operations"):
            raise ConfigError(f'expected over="bits" or "operations", got {over!r}')
        groups = [(group, self._of_group(group)) for group in self.ties]
        costs = [{name: getattr(score, over) for name, score in own.items()} for _, own in groups]
        largest = sum(max(own.values()) for own in costs)
        unit = max(gcd(*(cost for own in costs for cost in own.values())), -(-largest // _UNITS))
        sizes = [{name: -(-cost // unit) for name, cost in own.items()} for own in costs]
        capacity = sum(max(own.values()) for own in sizes)
        best = torch.full((capacity + 1,), torch.inf, dtype=torch.float64)
        best[0] = 0.0
        taken = []
        for (_, own), size in zip(groups, sizes, strict=True):
            tried = torch.stack([_shifted(best, size[name]) + score.loss for name, score in own.items()])
            best, chosen = tried.min(0)
            taken.append(chosen)
        found, least = [], float("inf")
        for place in torch.nonzero(best.isfinite()).flatten().tolist():
            if float(best[place]) < least:
                least = float(best[place])
                found.append(self._traced(place, groups, sizes, taken))
        kept: list[Allocation] = []
        for point in found:
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
            bits: the largest number of bits per weight of the layers with scores, with scales; what stays in float does
                not count.
            size: the largest number of bytes of all parameters of the model, as `fakequant.summary` counts them: also
                those that stay in float.
            loss: the smallest size with at most this loss.
            operations: the largest mean of bit operations for a multiply-accumulate. It is 64 where weights and inputs
                have 8 bits.

        Raises:
            ConfigError: not exactly one budget, one that is no positive number, or none of the mixes fits it
                (names the nearest).
        """
        if sum(budget is not None for budget in (bits, size, loss, operations)) != 1:
            raise ConfigError("give one budget: bits= per weight, size= in bytes, loss=, or operations= per product")
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
            large = self._largest(curve[0], bits)
            nearest = f"the smallest mix has {curve[0].bits_per_weight:.3f} bits per weight, scales included{large}"
        else:
            fitting = [point for point in curve if point.size <= (size or 0.0)][-1:]
            nearest = f"the smallest mix has {curve[0].size:,} bytes{_of_these(self.in_float)}"
        if not fitting:
            raise ConfigError(f"no mix of these choices fits the budget: {nearest}; give other choices or more room")
        return fitting[0]

    def _largest(self, mix: Allocation, bits: float) -> str:
        """A text that names the layers by which a mix exceeds a budget most."""
        own = {layer: self.layers[layer][name].bits for layer, name in mix.choices.items() if self.weights[layer]}
        excess = sorted(own, key=lambda layer: bits * self.weights[layer] - own[layer])
        large = [layer for layer in excess[:_NAMED] if own[layer] > bits * self.weights[layer]]
        named = [f"{own[layer] / self.weights[layer]:.2f} in {layer} as {mix.choices[layer]}" for layer in large]
        return f": {', '.join(named)}"

    def _of_group(self, group: Sequence[str]) -> dict[str, Score]:
        """The scores of layers that get one choice."""
        names = [name for name in self.layers[group[0]] if all(name in self.layers[layer] for layer in group)]
        return {
            name: Score(
                sum(self.layers[layer][name].loss for layer in group),
                sum(self.layers[layer][name].bits for layer in group),
                sum(self.layers[layer][name].operations for layer in group),
            )
            for name in names
        }

    def _traced(self, place: int, groups: Any, sizes: list[dict[str, int]], taken: list[Tensor]) -> Allocation:
        """The mix that led to a place of the last table."""
        choices: dict[str, str] = {}
        for (group, own), size, chosen in zip(reversed(groups), reversed(sizes), reversed(taken), strict=True):
            name = list(own)[int(chosen[place])]
            choices |= dict.fromkeys(group, name)
            place -= size[name]
        return self.predict({layer: choices[layer] for layer in self.layers})

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for own in self.layers.values() for name in own))
        rows = [["layer", "weights", *names]]
        for layer, own in self.layers.items():
            losses = [f"{own[name].loss:.2e}" if name in own else "-" for name in names]
            rows.append([layer, f"{self.weights[layer]:,}", *losses])
        return table(rows, _stay_in_float(self.why_float), numbers=range(1, len(rows[0])))

    __repr__ = __str__  # what notebooks and consoles show


def _stay_in_float(why_float: Mapping[str, str]) -> list[str]:
    """A text that names the first layers that stay in float; none if there are none."""
    named = [f"{module_name(layer)} ({why})" for layer, why in why_float.items()]
    return [f"{len(why_float)} stay in float: {listed(named, _NAMED)}"] if why_float else []


def _of_these(in_float: Mapping[str, int]) -> str:
    """A text of how many bytes stay in float, with the modules that hold most of them."""
    if not in_float:
        return ""
    largest = sorted(in_float.items(), key=lambda item: -item[1])[:_NAMED]
    named = ", ".join(f"{size:,} in {module_name(name)}" for name, size in largest)
    more = f" and the others in {len(in_float) - _NAMED} more modules" if len(in_float) > _NAMED else ""
    return f", of which {sum(in_float.values()):,} stay in float ({named}{more})"


def check_budget(name: str, value: Any, *, any_number: bool = False) -> None:
    """Raise if a budget is neither None nor a positive number; with `any_number`, any number but NaN."""
    if value is None:
        return
    number = isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
    if not number or not (any_number or float(value) >= 0):
        kind = "a number" if any_number else "a positive number"
        raise ConfigError(f"{name}={value!r:.40}: a budget is {kind}, such as {name}={_BUDGETS[name]}")


def _shifted(values: Tensor, places: int) -> Tensor:
    return torch.cat([torch.full((places,), torch.inf, dtype=values.dtype), values[: len(values) - places]])
