"""Pictures of a quantized model for notebooks, drawn with matplotlib: values, channels, errors of layers, presets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fakequant.calibration import make_calibrator
from fakequant.data.batches import Batches, Forward, Inputs
from fakequant.distributed import gathered
from fakequant.errors import ConfigError, nearest, shown
from fakequant.functional import dequantize
from fakequant.model.engine import simulated
from fakequant.model.sensitivity import Sensitivities
from fakequant.model.weights import evaluating, fresh_weight, quantized_weights
from fakequant.nn.products import MatrixProduct, Product
from fakequant.nn.quantizer import quantizers
from fakequant.ptq.comparison import Comparison, check_axis
from fakequant.ptq.judging import Improvement
from fakequant.report.measure import distribution_of
from fakequant.restore import restore_after, state_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["channels", "comparison", "errors", "histogram"]

_EXACT_DECIBELS = 100.0
"""The ratio in dB of the longest bar: above it the noise is negligible."""
_RANGE = "#d55e00"
"""The colour of the ends of a range."""


def __dir__() -> list[str]:
    return sorted(__all__)


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
        quantizer: the path of the quantizer, such as "head._input_quantizer"; `fakequant.layer_sqnr` lists all paths.
        batches, inputs, forward: as for `calibrate`. A weight needs no batches.
        bins: the number of bars.
        axes: where to draw; by default in a new figure.

    Raises:
        ConfigError: the model lacks the quantizer, no batch reaches the quantizer, or matplotlib is not installed.
        CalibrationError: the model failed on a batch.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> used = calibrate(model, [torch.ones(1, 4)])
    >>> histogram(model, "0._weight_quantizer").get_title()
    '0._weight_quantizer: int8 per_channel(0)'
    """
    _check_matplotlib()
    data = Batches(batches, "histogram", inputs=inputs, forward=forward)
    held = quantizers(model)
    if quantizer not in held:
        raise ConfigError(f"the model has no quantizer {quantizer!r}{nearest(quantizer, list(held))}")
    counts = make_calibrator("percentile", "int8")
    if (weight := quantized_weights(model).get(quantizer)) is not None:
        counts.observe(gathered(fresh_weight(weight, quantizer).detach()))
    else:
        with restore_after(state_of([model])), simulated(model), evaluating(model), torch.no_grad():
            held[quantizer].register_forward_pre_hook(lambda _, args: counts.observe(args[0].detach()))
            for batch in data:
                data.run(model, batch)
    seen = counts.histogram() if counts.observed else None
    shown = None if seen is None else distribution_of(quantizer, seen, {}, held[quantizer].spec, bins=bins)
    if shown is None:
        raise ConfigError(f"no batch reaches {quantizer}, or all values are equal; give batches that reach {quantizer}")
    own, ends = held[quantizer], list[float]()
    if own.scale is not None and not own.dynamic:  # the widest range over the groups
        scale, format = own.scale.double(), own.spec.format
        zero = 0.0 if own.zero_point is None else own.zero_point.double()
        highest = ((format.quant_max - zero) * scale).max().item()
        lowest = ((format.quant_min - zero) * scale).min().item()
        ends = [lowest, highest] if lowest < 0 else [highest]
    axes = _axes(axes, 3.2)
    axes.stairs(shown.counts, shown.edges, fill=True, alpha=0.5)
    axes.set_yscale("symlog")
    axes.set_xlabel("value")
    axes.set_ylabel("count")
    axes.set_title(f"{quantizer}: {own.spec}{' dynamic' if own.dynamic else ''}", parse_math=False)
    for end in ends:
        axes.axvline(end, color=_RANGE, linestyle="--", label=f"range ends at {end:.4g}")
    if ends:
        axes.legend()
    return axes


def channels(model: nn.Module, quantizer: str, *, axes: Axes | None = None) -> Axes:
    """Draw the smallest and the largest value of every output channel of a weight, and the range of its quantizer.

    A channel whose band is thin between the ends of the range uses few codes; a channel that exceeds the ends is
    clipped. If a channel has several ranges, as with groups, the widest range is shown.

    Args:
        model: a prepared model.
        quantizer: the path of the quantizer of a weight, such as "head._weight_quantizer".
        axes: where to draw; by default in a new figure.

    Raises:
        ConfigError: no weight has this quantizer, or matplotlib is not installed.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8_WEIGHT_ONLY)
    >>> channels(model, "0._weight_quantizer").get_title()
    '0._weight_quantizer: int8 per_channel(0)'
    """
    _check_matplotlib()
    weights = quantized_weights(model)
    if (weight := weights.get(quantizer)) is None:
        raise ConfigError(f"no weight has the quantizer {quantizer!r}{nearest(quantizer, list(weights))}")
    with torch.no_grad():
        values = gathered(fresh_weight(weight, quantizer))
        params, spec = weight.quantizer.qparams(values), weight.quantizer.spec
        bands = [_extremes(weight, values)]
        for code in (spec.format.quant_min, spec.format.quant_max):
            codes = spec.format.to_storage(torch.full_like(values, code, dtype=torch.float32))
            bands.append(_extremes(weight, dequantize(codes, params, spec)))
    (low, high), (bottom, _), (_, top) = bands
    axes = _axes(axes, 3.2)
    edges = [place - 0.5 for place in range(len(low) + 1)]
    axes.stairs(high, edges, baseline=low, fill=True, alpha=0.5, label="smallest to largest value")
    for end, label in ((bottom, "range of the quantizer"), (top, None)):
        axes.stairs(end, edges, baseline=None, color=_RANGE, linestyle="--", label=label)
    axes.margins(x=0.01, y=0.05)
    axes.autoscale()
    axes.set_ylim(top=axes.get_ylim()[1] + 0.2 * (axes.get_ylim()[1] - axes.get_ylim()[0]))  # room for the legend
    axes.set_xlabel("output channel")
    axes.set_ylabel("value")
    axes.set_title(f"{quantizer}: {spec}", parse_math=False)
    axes.legend(loc="upper right", ncols=2)
    return axes


def comparison(found: Comparison, *, over: str = "bits", axes: Axes | None = None) -> Axes:
    """Draw the presets that `fakequant.compare` tried: the metric (or, without a metric, the error) over size or time.

    A line joins the presets that no other preset surpasses in both respects. `Comparison.plot` writes the same picture
    to a file.

    Args:
        found: the result of `fakequant.compare`.
        over: "bits" per weight or "milliseconds".
        axes: where to draw; by default in a new figure.

    Raises:
        ConfigError: an unknown `over`, another type of `found`, or matplotlib is not installed.

    >>> found = compare(nn.Sequential(nn.Linear(4, 4)), [torch.ones(1, 4)], ["INT8", "FP8"])
    >>> comparison(found).get_xlabel()
    'bits per weight, with scales'
    """
    _check_matplotlib()
    if not isinstance(found, Comparison):
        raise ConfigError(f"comparison takes the result of fakequant.compare, got {shown(found)}")
    check_axis(over)
    axes = _axes(axes, 4.4)
    found.draw(axes, over)
    return axes


def errors(found: Sensitivities | Mapping[str, float] | Improvement, *, axes: Axes | None = None) -> Axes:
    """Draw the error of every layer as bars, the worst on top.

    Args:
        found: the result of `fakequant.sensitivity` or `fakequant.layer_sqnr`, whose bars are dB or the metric, so
            that short bars are bad; or of `fakequant.ptq.improve`, whose bars are errors before and after.
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


def _extremes(weight: Product, values: Tensor) -> tuple[list[float], list[float]]:
    """The smallest and the largest value of every output channel; a stack has the channels of all its weights."""
    if isinstance(weight, MatrixProduct) and weight.is_stack:
        rows = values.movedim(weight.channels, 1).flatten(0, 1)
    else:
        rows = values.movedim(weight.channels, 0)
    rows = rows.double().flatten(1)
    return rows.amin(1).tolist(), rows.amax(1).tolist()


def _draw_bars(names: list[str], bars: Mapping[str, list[float]], axes: Axes | None) -> Axes:
    axes = _axes(axes, 1.0 + 0.25 * len(names) * len(bars))
    height = 0.8 / len(bars)
    for at, (label, lengths) in enumerate(bars.items()):
        axes.barh([place + at * height for place in range(len(names))], lengths, height, label=label)
    middle = height * (len(bars) - 1) / 2
    axes.set_yticks([place + middle for place in range(len(names))], names, parse_math=False)
    axes.invert_yaxis()
    return axes
