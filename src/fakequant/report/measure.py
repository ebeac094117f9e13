"""Measure the layers of a calibrated model for a report, in one pass over the batches and one of the first batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.calibration import Calibrator, make_calibrator
from fakequant.calibration.transformed import outside_of_transforms
from fakequant.data.arguments import refuse_unprepared
from fakequant.data.batches import Batches, Forward, run_batch
from fakequant.model.analysis.analysis import run_all, sensitivity
from fakequant.model.analysis.summary import LayerSummary, summary
from fakequant.model.execution import simulated
from fakequant.model.run.outputs import Distance, decibels
from fakequant.model.sizes import WeightBits, weight_bits
from fakequant.nn.paths import layer_of
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Quantizer, quantizers
from fakequant.numerics.granularity import PerChannel
from fakequant.numerics.qparams import QParams
from fakequant.ptq.advising.trial import Halves
from fakequant.report.data import Channels, Distribution, Layer
from fakequant.report.examples import first_examples
from fakequant.report.histograms import distribution_of, readable
from fakequant.restore import restore_after, state_of

_POINTS = 48
"""Points of a picture of the channels of a weight."""


@dataclass
class Measured:
    """What `measure` found: the layers in the order in which they run, and pictures of their tensors."""

    layers: list[Layer] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)
    channels: list[Channels] = field(default_factory=list)
    alone_on: str = ""
    """The examples on which the layers were measured alone, as a sentence; "" where they were not."""
    parts: Halves = field(default_factory=Halves)
    """Some of the batches, to try changes on."""
    run: Forward = run_batch
    """Calls a model with one of them."""

    @property
    def worst(self) -> list[str]:
        """The paths of the layers, the one first with which the output is worst, and then those not measured so."""
        return [layer.name for layer in sorted(self.layers, key=lambda layer: layer.worst)]


@dataclass
class _Watched:
    """What one quantizer saw."""

    quantizer: Quantizer
    distance: Distance = field(default_factory=Distance)
    calls: int = 0
    counts: Calibrator = field(default_factory=lambda: make_calibrator("percentile", "int8"))
    weight: Tensor | None = None

    def see(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        with outside_of_transforms(args[0].detach(), output) as (x, y):
            self._see(x, y)

    def _see(self, x: Tensor, output: Tensor) -> None:
        if self.quantizer.kind is Kind.WEIGHT:
            if self.weight is None:  # it is the same for all batches
                self.weight = x
                self.distance.add({0: x}, {0: output})
            return
        self.distance.add({self.calls: x}, {self.calls: output})
        self.calls += 1
        if bool(x.isfinite().all()):
            self.counts.observe(x)


def measure(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    alone: bool = True,
    progress: bool | None = None,
) -> Measured:
    """Measure every quantizer on all batches, and every layer alone on examples of the first batch.

    A layer alone takes about half a run of the model. So only as many examples of the first batch are taken as give
    65,536 values of the output, if the batch can be cut; `alone_on` says how many.

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
    order, first, parts = _run(model, data, watched)
    own: dict[str, dict[str, _Watched]] = {name: {} for name in (*order, *described)}
    for name, one in watched.items():
        own.setdefault(layer_of(name), {})[name] = one
    values, alone_on = {}, ""
    if alone:
        part, alone_on = first_examples(model, *first, data.call)
        values = {s.layer: s.value for s in sensitivity(model, [part], forward=data.call, progress=progress)}
    bits, ran = _bits(model), [item for layer in own.values() for item in layer.items()]
    return Measured(
        [
            _layer(described[name], [*quantized.values()], values.get(name), bits.get(name))
            for name, quantized in own.items()
            if name in described
        ],
        _distributions(ran),
        [_channels(name, one, w) for name, one in ran if (w := one.weight) is not None and w.dim() >= 2],
        alone_on,
        parts,
        data.run,
    )


def _run(model: nn.Module, data: Batches, watched: dict[str, _Watched]) -> tuple[list[str], tuple[Any, Any], Halves]:
    """Show all batches to what watches; the layers in order, the first batch with its output, and some batches."""
    order, first, parts = dict[str, None](), list[tuple[Any, Any]](), Halves()

    def after(number: int, batch: Any, output: Any) -> None:
        for one in watched.values():
            one.calls = 0
        first.extend([] if number else [(batch, output)])
        parts.see(number, batch)

    with restore_after(state_of([model])), simulated(model):
        for name, one in watched.items():
            one.quantizer.register_forward_hook(one.see)
            one.quantizer.register_forward_pre_hook(lambda *_, name=name: order.setdefault(layer_of(name)))
        run_all(model, data, after)
    return [*order], first[0], parts


def _bits(model: nn.Module) -> dict[str, tuple[WeightBits, int]]:
    """The bits of the quantized weights of each layer, and their bytes in float."""
    found: dict[str, tuple[WeightBits, int]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLayer):
            for weight in layer.products():
                if (bits := weight_bits(weight)) is not None and weight.parameter is not None:
                    before, size = found.get(name, (WeightBits(0, 0, 0), 0))
                    found[name] = before.plus(bits), size + bits.elements * weight.parameter.element_size()
    return found


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
        if one.quantizer.kind is Kind.WEIGHT:
            continue
        histogram = one.counts.histogram() if one.counts.observed else None
        if histogram is not None:
            shown = distribution_of(readable(name), histogram, {}, one.quantizer.spec, _params(one.quantizer))
            found += [] if shown is None else [shown]
    return found


def _params(quantizer: Quantizer) -> QParams | None:
    """The parameters of an input whose range is fixed and one for the tensor, else None."""
    if quantizer.dynamic or quantizer.scale is None or quantizer.scale.numel() != 1:
        return None
    zero_point = quantizer.zero_point
    return QParams(quantizer.scale.reshape(1).cpu(), None if zero_point is None else zero_point.reshape(1).cpu())


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
