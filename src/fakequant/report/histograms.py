"""Histograms of tensors, and what a range costs: the share that it clips and the noise that it makes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fakequant.calibration import Calibrator
from fakequant.calibration.counts import Histogram
from fakequant.numerics.granularity import PerTensor
from fakequant.numerics.qparams import QParams, Range, choose_qparams
from fakequant.numerics.spec import QuantSpec, Rounding
from fakequant.ops import library
from fakequant.report.data import Clip, Distribution

BINS = 64
CHOSEN = "chosen"
"""The name of the range that the model has."""


def readable(quantizer: str) -> str:
    """The layer and the operand of a quantizer, without the names of attributes.

    >>> readable("blocks.0._input_quantizer"), readable("_weight_quantizer")
    ('blocks.0, input', '(model), weight')
    """
    layer, _, attribute = quantizer.rpartition(".")
    operand = attribute.strip("_").removesuffix("quantizer").strip("_").replace("_", " ")
    return f"{layer or '(model)'}, {operand or attribute}"


def distribution_of(
    name: str,
    histogram: Histogram,
    ranges: Mapping[str, Range],
    spec: QuantSpec,
    params: QParams | None = None,
    bins: int = BINS,
) -> Distribution | None:
    """The picture of a histogram, with the ranges and what each of them costs; None if all values are equal.

    Args:
        name: of the tensor.
        histogram: its counts.
        ranges: by calibrator.
        spec: how the tensor is quantized.
        params: those of the model, whose range is shown as "chosen".
        bins: the number of bars.
    """
    lowest, highest = histogram.range.lo.min().double().item(), histogram.range.hi.max().double().item()
    if lowest == highest:
        return None
    edges, counts = (values.cpu() for values in histogram.line())
    centres = ((edges[:, 1:] + edges[:, :-1]) / 2).clamp(lowest, highest)
    index = ((centres - lowest) * (bins / (highest - lowest))).long().clamp(0, bins - 1)
    total = torch.zeros(bins, dtype=torch.int64).scatter_add_(0, index.reshape(-1), counts.reshape(-1))
    ends = {method: (found.lo.min().item(), found.hi.max().item()) for method, found in ranges.items()}
    clips, whole = {}, None
    if len(counts) == 1:
        spec = spec.replace(granularity=PerTensor(), rounding=Rounding.NEAREST_EVEN)
        kept = counts[0] > 0
        values, weights = centres[0][kept], counts[0][kept]
        if params is not None:
            ends[CHOSEN] = _ends(params, spec)
            clips[CHOSEN] = _clip(values, weights, params, spec, ends[CHOSEN])
        for method, found in ranges.items():
            one = Range(found.lo.reshape(1).cpu(), found.hi.reshape(1).cpu())
            clips[method] = _clip(values, weights, choose_qparams(one, spec), spec, ends[method])
        if clips:
            full = Range(histogram.range.lo.reshape(1).cpu(), histogram.range.hi.reshape(1).cpu())
            whole = _clip(values, weights, choose_qparams(full, spec), spec, (lowest, highest)).sqnr
    scale = torch.linspace(lowest, highest, bins + 1, dtype=torch.float64).tolist()
    return Distribution(name, scale, total.tolist(), ends, histogram.counts.shape[0], clips, whole)


def _ends(params: QParams, spec: QuantSpec) -> tuple[float, float]:
    """The lowest and the highest value that codes have."""
    zero = 0.0 if params.zero_point is None else params.zero_point.double().item()
    scale = params.scale.double().item()
    lowest, highest = (spec.format.quant_min - zero) * scale, (spec.format.quant_max - zero) * scale
    # The lowest code of two's complement has no partner; a symmetric range ends at the highest one on both sides.
    return (max(lowest, -highest) if params.zero_point is None and lowest < 0 else lowest), highest


def _clip(values: Tensor, counts: Tensor, params: QParams, spec: QuantSpec, ends: tuple[float, float]) -> Clip:
    """The cost of a range, by the centres of a histogram's bins."""
    approximate = library.fake_quantize(values.float(), params, spec).double()
    noise = ((approximate - values).square() * counts).sum().item()
    signal = (values.square() * counts).sum().item()
    # A bin whose centre is outside by less than rounding is not clipped.
    slack = 1e-3 * max(abs(ends[0]), abs(ends[1]))
    outside = counts[(values < ends[0] - slack) | (values > ends[1] + slack)].sum().item()
    share = outside / max(counts.sum().item(), 1)
    return Clip(share, 10 * math.log10(signal / noise) if signal and noise else math.inf if not noise else -math.inf)


def with_ranges(shown: list[Distribution], calibrators: Mapping[str, Mapping[str, Calibrator]]) -> list[Distribution]:
    """Distributions with the ranges that calibrators chose, by method and quantizer."""
    named: dict[str, dict[str, tuple[float, float]]] = {}
    for method, by_name in calibrators.items():
        for name, calibrator in by_name.items():
            found = calibrator.compute_range()
            named.setdefault(readable(name), {})[method] = found.lo.min().item(), found.hi.max().item()
    return [replace(one, ranges={**named.get(one.name, {}), **one.ranges}) for one in shown]


def distributions(calibrators: Mapping[str, Mapping[str, Calibrator]], *, bins: int = BINS) -> list[Distribution]:
    """The histogram and the chosen ranges of every quantizer.

    Args:
        calibrators: the results of `fakequant.calibrate`, by method. The counts of a quantizer come from the first
            method that keeps a histogram; a quantizer without any histogram is left out.
        bins: the number of bars in the plot.
    """
    found = []
    for name in dict.fromkeys(name for by_name in calibrators.values() for name in by_name):
        own = {method: by_name[name] for method, by_name in calibrators.items() if name in by_name}
        histogram = next((h for c in own.values() if (h := c.histogram()) is not None), None)
        if histogram is not None:
            ranges = {method: calibrator.compute_range() for method, calibrator in own.items()}
            spec = next(iter(own.values())).spec
            shown = distribution_of(readable(name), histogram, ranges, spec, bins=bins)
            found += [] if shown is None else [shown]
    return found
