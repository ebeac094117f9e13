"""Measure the layers of a calibrated model for a report: in a pass over all batches, and alone on the first batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fakequant.calibration import Calibrator, make_calibrator
from fakequant.calibration.calibrator import Histogram, outside_of_transforms
from fakequant.data.arguments import refuse_unprepared
from fakequant.data.batches import Batches, Forward, KeptBatches
from fakequant.model.engine import calling_quantizers
from fakequant.model.run.outputs import Distance, decibels, float_tensors
from fakequant.model.sensitivity import run_all, sensitivity
from fakequant.model.summary import LayerSummary, summary
from fakequant.model.weights import WeightBits, evaluating, weight_bits
from fakequant.nn.device import plain
from fakequant.nn.paths import layer_of
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Quantizer, quantizers
from fakequant.numerics.granularity import PerChannel, PerTensor
from fakequant.numerics.qparams import QParams, Range, choose_qparams
from fakequant.numerics.spec import QuantSpec, Rounding
from fakequant.ops import library
from fakequant.ptq.judging import TRIED_ON
from fakequant.report.data import Channels, Clip, Distribution, Layer
from fakequant.restore import restore_after, state_of

VALUES = 65_536
"""The number of values of the model's output for a ratio in dB; with fewer values the ratio would be uncertain."""
_FEWEST = 2


def first_examples(model: nn.Module, batch: Any, output: Any, run: Forward) -> tuple[Any, str]:
    """The first examples of a batch that give enough values of the output, and a sentence that says how many.

    A batch is cut only if all its tensors and all outputs have the same first dimension, and if the model accepts the
    smaller batch and returns as many rows; else it stays whole.
    """
    whole = "Each layer is measured alone on the whole first batch."
    rows, found = _rows(tree_leaves(batch)), float_tensors(output)
    if rows is None or _rows(found) != rows:
        return batch, whole
    few = max(_FEWEST, -(-VALUES * rows // max(1, sum(tensor.numel() for tensor in found))))
    if few >= rows:
        return batch, whole
    part = tree_map(lambda tensor: tensor[:few], batch)
    try:
        with evaluating(model), torch.no_grad():
            taken = _rows(float_tensors(run(model, part))) == few
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):  # the model wants the whole batch
        taken = False
    if not taken:
        return batch, whole
    return part, f"Each layer is measured alone on {few} of the {rows} examples of the first batch."


def _rows(leaves: list[Any]) -> int | None:
    """The length of the first axis that all tensors share; None if lengths differ, or if something is not a tensor."""
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return None
    lengths = {len(leaf) for leaf in leaves}
    return lengths.pop() if len(lengths) == 1 else None


BINS = 64
CHOSEN = "chosen"
"""The name of the model's range among the ranges of calibrators."""


def readable(quantizer: str) -> str:
    """The layer and the tensor of a quantizer, without the names of attributes.

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
    """The picture of a histogram, with the ranges and the cost of each; None if all values are equal.

    The range by `params`, the parameters of the model, is shown as "chosen".
    """
    lowest, highest = histogram.range.lo.min().double().item(), histogram.range.hi.max().double().item()
    if lowest == highest:
        return None
    edges, counts = (values.cpu() for values in histogram.line())
    centres = ((edges[:, 1:] + edges[:, :-1]) / 2).clamp(lowest, highest)
    index = ((centres - lowest) * (bins / (highest - lowest))).long().clamp(0, bins - 1)
    total = torch.zeros(bins, dtype=torch.int64, device="cpu").scatter_add_(0, index.reshape(-1), counts.reshape(-1))
    ends = {method: (found.lo.min().item(), found.hi.max().item()) for method, found in ranges.items()}
    clips, whole = {}, None
    if len(counts) == 1:
        spec = spec.replace(granularity=PerTensor(), rounding=Rounding.NEAREST_EVEN)
        kept = counts[0] > 0
        values, weights = centres[0][kept], counts[0][kept]
        if params is not None:
            zero = 0.0 if params.zero_point is None else params.zero_point.double().item()
            scale = params.scale.double().item()
            low, high = (spec.format.quant_min - zero) * scale, (spec.format.quant_max - zero) * scale
            # The lowest code of two's complement has no partner; a symmetric range ends at the highest on both sides.
            ends[CHOSEN] = max(low, -high) if params.zero_point is None and low < 0 else low, high
            clips[CHOSEN] = _clip(values, weights, params, spec, ends[CHOSEN])
        for method, found in ranges.items():
            one = Range(found.lo.reshape(1).cpu(), found.hi.reshape(1).cpu())
            clips[method] = _clip(values, weights, choose_qparams(one, spec), spec, ends[method])
        if clips:
            full = Range(histogram.range.lo.reshape(1).cpu(), histogram.range.hi.reshape(1).cpu())
            whole = _clip(values, weights, choose_qparams(full, spec), spec, (lowest, highest)).sqnr
    line = torch.linspace(lowest, highest, bins + 1, dtype=torch.float64, device="cpu").tolist()
    return Distribution(name, line, total.tolist(), ends, histogram.counts.shape[0], clips, whole)


def _clip(values: Tensor, counts: Tensor, params: QParams, spec: QuantSpec, ends: tuple[float, float]) -> Clip:
    """The cost of a range, computed from the centres of a histogram's bins."""
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


_POINTS = 48
"""The number of points in a picture of a weight's channels."""


@dataclass
class Measured:
    """The result of `measure`: the layers in the order in which they run, and pictures of their tensors."""

    layers: list[Layer] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)
    channels: list[Channels] = field(default_factory=list)
    alone_on: str = ""
    """A sentence that names the examples on which the layers were measured alone; "" if they were not measured."""
    batches: KeptBatches = field(default_factory=lambda: KeptBatches(Batches([], "report"), {}))
    """The first batches, on which changes are tried."""

    @property
    def worst(self) -> list[str]:
        """The paths of the layers, ordered by `Layer.worst`, the lowest first."""
        return [layer.name for layer in sorted(self.layers, key=lambda layer: layer.worst)]


@dataclass
class _Watched:
    """The errors of a quantizer, and counts of its inputs, over all batches."""

    quantizer: Quantizer
    distance: Distance = field(default_factory=Distance)
    calls: int = 0
    counts: Calibrator = field(default_factory=lambda: make_calibrator("percentile", "int8"))
    weight: Tensor | None = None

    def see(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        with outside_of_transforms(plain(args[0]).detach(), plain(output)) as (x, y):
            if self.quantizer.kind is not Kind.WEIGHT:
                self.distance.add({self.calls: x}, {self.calls: y})
                self.calls += 1
                if bool(x.isfinite().all()):
                    self.counts.observe(x)
            elif self.weight is None:  # the weight is the same for all batches
                self.weight = x
                self.distance.add({0: x}, {0: y})


def measure(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    alone: bool = True,
    progress: bool | None = None,
) -> Measured:
    """Measure every quantizer on all batches, and every layer alone on examples of the first batch.

    To measure a layer alone takes about half a run of the model. So if the first batch can be cut, only its first
    examples are used, with at least 65,536 values of the output; `alone_on` says how many.

    Args:
        model: a calibrated model.
        batches: as for `calibrate`.
        forward: called as forward(model, batch).
        alone: whether to quantize each layer alone, too.
        progress: whether to show a progress bar; by default on a terminal.

    Raises:
        ConfigError: there is no batch, or the model has no quantizers.
    """
    refuse_unprepared(model)
    data = Batches(batches, "report", forward=forward, progress=progress)
    watched = {name: _Watched(quantizer) for name, quantizer in quantizers(model).items()}
    described = {layer.name: layer for layer in summary(model).layers}
    order, first, few = dict[str, None](), list[tuple[Any, Any]](), list[Any]()

    def after(number: int, batch: Any, output: Any) -> None:
        for one in watched.values():
            one.calls = 0
        first.extend([] if number else [(batch, output)])
        few.extend([batch] if number < TRIED_ON else [])

    with restore_after(state_of([model])), calling_quantizers(model):
        for name, one in watched.items():
            one.quantizer.register_forward_hook(one.see)
            one.quantizer.register_forward_pre_hook(lambda *_, name=name: order.setdefault(layer_of(name)))
        run_all(model, data, after)
    own: dict[str, dict[str, _Watched]] = {name: {} for name in (*order, *described)}
    for name, one in watched.items():
        own.setdefault(layer_of(name), {})[name] = one
    values, alone_on = {}, ""
    if alone:
        part, alone_on = first_examples(model, *first[0], data.call)
        values = {s.layer: s.value for s in sensitivity(model, [part], forward=data.call, progress=progress)}
    bits = dict[str, tuple[WeightBits, int]]()  # of the quantized weights of each layer, and their bytes in float
    for name, layer in model.named_modules():
        for weight in layer.products() if isinstance(layer, QuantizedLayer) else ():
            if (found := weight_bits(weight)) is not None and weight.parameter is not None:
                before, size = bits.get(name, (WeightBits(0, 0, 0), 0))
                bits[name] = before.plus(found), size + found.elements * weight.parameter.element_size()
    ran = [item for layer in own.values() for item in layer.items()]
    return Measured(
        [
            _layer(described[name], [*quantized.values()], values.get(name), bits.get(name))
            for name, quantized in own.items()
            if name in described
        ],
        _distributions(ran),
        [_channels(name, one, w) for name, one in ran if (w := one.weight) is not None and w.dim() >= 2],
        alone_on,
        Batches(few, "report", forward=data.call).kept(),
    )


def _layer(
    described: LayerSummary,
    own: list[_Watched],
    alone: float | None,
    sized: tuple[WeightBits, int] | None,
) -> Layer:
    def lowest(kind: Kind) -> float | None:
        seen = [one.distance for one in own if one.quantizer.kind is kind and not one.distance.is_silent]
        return min((decibels(distance.mean) for distance in seen), default=None)

    def specs(kind: Kind) -> str:
        texts = [
            f"{o.quantizer.spec}{' dynamic' if o.quantizer.dynamic else ''}" for o in own if o.quantizer.kind is kind
        ]
        return ", ".join(dict.fromkeys(texts))

    bits, float_bytes = sized or (WeightBits(0, 0, 0), 0)
    return Layer(
        described.name or "(model)",
        described.type,
        specs(Kind.INPUT),
        specs(Kind.WEIGHT),
        alone,
        lowest(Kind.INPUT),
        lowest(Kind.WEIGHT),
        bits.elements,
        (bits.codes + bits.scales + 7) // 8,
        float_bytes,
    )


def _distributions(watched: Iterable[tuple[str, _Watched]]) -> list[Distribution]:
    found = []
    for name, one in watched:
        own = one.quantizer
        histogram = one.counts.histogram() if own.kind is not Kind.WEIGHT and one.counts.observed else None
        if histogram is not None:
            params = None  # unless the range is fixed and of the whole tensor
            if not own.dynamic and own.scale is not None and own.scale.numel() == 1:
                zero_point = None if own.zero_point is None else own.zero_point.reshape(1).cpu()
                params = QParams(own.scale.reshape(1).cpu(), zero_point)
            shown = distribution_of(readable(name), histogram, {}, own.spec, params)
            found += [] if shown is None else [shown]
    return found


def _channels(name: str, one: _Watched, weight: Tensor) -> Channels:
    granularity = one.quantizer.spec.granularity
    axis = granularity.axes[0] if isinstance(granularity, PerChannel) else 0
    rows = weight.float().movedim(axis, 0).flatten(1)
    lowest, highest = rows.amin(1), rows.amax(1)
    largest = torch.maximum(-lowest, highest)
    step = -(-len(rows) // _POINTS)
    return Channels(
        layer_of(name) or "(model)",
        [part.min().item() for part in lowest.split(step)],
        [part.max().item() for part in highest.split(step)],
        len(rows),
        (largest.max() / largest.median().clamp(min=torch.finfo(torch.float32).tiny)).item(),
    )
