"""A preset for each layer of a model: the best mix for a budget, or the smallest that is good enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fakequant.data.arguments import Metric, check_float_model, check_metric, named
from fakequant.data.batches import Batches, Forward, Inputs, KeptBatches
from fakequant.errors import ConfigError
from fakequant.model.modes import score_of
from fakequant.ptq.formats.allocation import quantized_copy, scores, verify
from fakequant.ptq.formats.mixes import Allocation, check_budget


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
) -> Allocation:
    """Choose a preset for each layer under one budget: the mix with the least error of the model's output.

    Args:
        model: in float; it stays as it is.
        batches: to calibrate and measure on; a few are enough.
        choices: names of presets.
        bits: the largest number of bits per weight of the layers that get a preset, with scales; what stays in float
            does not count.
        size: the largest number of bytes of all parameters, as `fakequant.summary` counts them: also those that stay in
            float.
        loss: at most so much predicted error of the output, as a share of its energy; the smallest such mix.
        metric: called as metric(model), larger is better; only with `floor`.
        floor: the metric that the mix keeps; the smallest such mix, found in about ten measurements.
        inputs, forward: as for `calibrate`.

    Returns:
        The mix with its measured error; `fakequant.prepare(model, mix.config())` applies it.

    Raises:
        ConfigError: not exactly one budget, one that is no number, a floor without a metric, or nothing fits
            (names the nearest).
        CalibrationError: no batches, or the model fails on one (names it, and the layer).

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
        raise ConfigError("give one budget: bits= per weight, size= in bytes, loss=, or floor= with metric=")
    if (metric is None) != (floor is None):
        raise ConfigError("metric= and floor= belong together: the metric is called as metric(model), larger is better")
    for name, value in (("bits", bits), ("size", size), ("loss", loss), ("floor", floor)):
        check_budget(name, value, any_number=name == "floor")
    given = Batches(batches, "search", inputs=inputs, forward=forward).kept()
    found = scores(model, given, choices, forward=given.run)
    if metric is None or floor is None:
        mix = found.allocate(bits=bits, size=size, loss=loss)
    else:
        mix = _smallest(model, given, found.curve(), metric, floor)
    return replace(verify(model, given, [mix], forward=given.run)[0], metric=mix.metric)


def _smallest(
    model: nn.Module, batches: KeptBatches, curve: list[Allocation], metric: Metric, floor: float
) -> Allocation:
    """The first point of a curve that keeps the floor, by bisection: larger points are taken to be no worse."""

    def score(mix: Allocation) -> float:
        return score_of(metric, quantized_copy(model, mix.config(), batches))

    best = replace(curve[-1], metric=score(curve[-1]))
    if best.metric is None or not best.metric >= floor:
        asked, found = (named(metric).shown(value) for value in (floor, best.metric or 0.0))
        raise ConfigError(
            f"no mix of these choices keeps {asked:.6g}: the largest, {best.bits_per_weight:.2f} bits per weight, "
            f"gives {found:.6g}; give other choices or another floor"
        )
    low, high = 0, len(curve) - 1
    while low < high:
        middle = (low + high) // 2
        value = score(curve[middle])
        if value >= floor:
            high, best = middle, replace(curve[middle], metric=value)
        else:
            low = middle + 1
    return best
