"""Pictures of a quantized model for notebooks, drawn with matplotlib: the values of a tensor, the error of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fakequant.calibration import make_calibrator
from fakequant.errors import ConfigError, nearest, shown
from fakequant.model.analysis import Sensitivities
from fakequant.model.batches import Forward, Inputs, refuse_tensor, runner
from fakequant.model.execution import simulated
from fakequant.model.modes import evaluating
from fakequant.model.weights import fresh_weight, quantized_weights
from fakequant.nn.quantizer import Quantizer, quantizers
from fakequant.ptq.results import Improvement
from fakequant.report.data import Distribution
from fakequant.report.histograms import distribution_of
from fakequant.restore import restore_after, state_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_EXACT_DECIBELS = 100.0
"""The longest bar: above this ratio the noise is negligible."""


def histogram(
    model: nn.Module,
    quantizer: str,
    batches: Iterable[Any] = (),
    *,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    bins: int = 128,
    axes: Axes | None = None,
) -> Axes:
    """Draw the values that a quantizer gets, counted on a logarithmic scale, and the ends of its range.

    Args:
        model: a calibrated model.
        quantizer: its path, such as "head._input_quantizer"; `fakequant.layer_sqnr` lists them.
        batches, inputs, forward: as for `calibrate`. A weight needs no batches.
        bins: the number of bars.
        axes: where to draw; by default in a new figure.

    Raises:
        ConfigError: there is no such quantizer, no batch reaches it, or matplotlib is not installed.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> used = calibrate(model, [torch.ones(1, 4)])
    >>> histogram(model, "0._weight_quantizer").get_title()
    '0._weight_quantizer: int8 per_channel(0)'
    """
    _check_matplotlib()
    refuse_tensor(batches, "histogram")
    held = quantizers(model)
    if quantizer not in held:
        raise ConfigError(f"the model has no quantizer {quantizer!r}{nearest(quantizer, list(held))}")
    counts = make_calibrator("percentile", "int8")
    if (weight := quantized_weights(model).get(quantizer)) is not None:
        counts.observe(fresh_weight(weight, quantizer).detach())
    else:
        run = runner(inputs, forward)
        with restore_after(state_of([model])), simulated(model), evaluating(model), torch.no_grad():
            held[quantizer].register_forward_pre_hook(lambda _, args: counts.observe(args[0].detach()))
            for batch in batches:
                run(model, batch)
    seen = counts.histogram() if counts.observed else None
    shown = None if seen is None else distribution_of(quantizer, seen, {}, held[quantizer].spec, bins=bins)
    if shown is None:
        raise ConfigError(f"no batch reaches {quantizer}, or all its values are equal; give batches that reach it")
    return _draw_histogram(held[quantizer], shown, axes)


def errors(found: Sensitivities | Mapping[str, float] | Improvement, *, axes: Axes | None = None) -> Axes:
    """Draw the error of every layer as bars, the worst on top.

    Args:
        found: the result of `fakequant.sensitivity`, `fakequant.layer_sqnr` or `fakequant.ptq.improve`. Of the first
            two a bar is dB or the metric, so that short bars are bad; of the last it is the error before and after.
        axes: where to draw; by default in a new figure.

    Raises:
        ConfigError: matplotlib is not installed.

    >>> errors({"0._input_quantizer": 30.0, "0._weight_quantizer": 45.0}).get_xlabel()
    'dB of signal to quantization noise'
    """
    _check_matplotlib()
    if not isinstance(found, (Improvement, Sensitivities, Mapping)):
        raise ConfigError(
            f"errors takes what sensitivity, layer_sqnr or ptq.improve returned, got {shown(found)}; write "
            "errors(layer_sqnr(model, batches))"
        )
    if isinstance(found, Improvement):
        layers = sorted((one for one in found.layers if not one.note), key=lambda one: -one.after)
        bars = {"rounding to nearest": [one.before for one in layers], "as chosen": [one.after for one in layers]}
        axes = _draw_bars([one.layer or "(model)" for one in layers], bars, axes)
        axes.set_xlabel("error, as a share of the output's energy")
        axes.legend()
        return axes
    by_name = {one.layer: one.value for one in found} if isinstance(found, Sensitivities) else dict(found)
    decibels = not isinstance(found, Sensitivities) or found.in_decibels
    ordered = sorted(by_name.items(), key=lambda pair: pair[1])
    lengths = [min(max(value, 0.0), _EXACT_DECIBELS) if decibels else value for _, value in ordered]
    axes = _draw_bars([name or "(model)" for name, _ in ordered], {"": lengths}, axes)
    axes.set_xlabel("dB of signal to quantization noise" if decibels else "metric with this layer alone quantized")
    return axes


def _check_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise ConfigError("fakequant.plot needs matplotlib, not installed here; run pip install 'fakequant[report]'")


def _axes(axes: Axes | None, height: float) -> Axes:
    if axes is not None:
        return axes
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(7.0, height), layout="constrained")[1]


def _draw_histogram(quantizer: Quantizer, shown: Distribution, axes: Axes | None) -> Axes:
    axes = _axes(axes, 3.2)
    axes.stairs(shown.counts, shown.edges, fill=True, alpha=0.5)
    axes.set_yscale("symlog")
    axes.set_xlabel("value")
    axes.set_ylabel("count")
    axes.set_title(f"{shown.name}: {quantizer.spec}{' dynamic' if quantizer.dynamic else ''}", parse_math=False)
    for end in _ends(quantizer):
        axes.axvline(end, color="#d55e00", linestyle="--", label=f"range ends at {end:.4g}")
    if _ends(quantizer):
        axes.legend()
    return axes


def _ends(quantizer: Quantizer) -> list[float]:
    """The widest range of a quantizer over its groups; none if it is dynamic or not calibrated."""
    if quantizer.dynamic or quantizer.scale is None:
        return []
    scale, format = quantizer.scale.double(), quantizer.spec.format
    zero = 0.0 if quantizer.zero_point is None else quantizer.zero_point.double()
    highest = ((format.quant_max - zero) * scale).max().item()
    lowest = ((format.quant_min - zero) * scale).min().item()
    return [lowest, highest] if lowest < 0 else [highest]


def _draw_bars(names: list[str], bars: Mapping[str, list[float]], axes: Axes | None) -> Axes:
    axes = _axes(axes, 1.0 + 0.25 * len(names) * len(bars))
    height = 0.8 / len(bars)
    for at, (label, lengths) in enumerate(bars.items()):
        axes.barh([place + at * height for place in range(len(names))], lengths, height, label=label)
    middle = height * (len(bars) - 1) / 2
    axes.set_yticks([place + middle for place in range(len(names))], names, parse_math=False)
    axes.invert_yaxis()
    return axes
