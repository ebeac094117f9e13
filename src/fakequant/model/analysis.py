"""Which layer hurts: signal-to-noise ratio of every quantizer, and the effect of every layer on the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.errors import ConfigError
from fakequant.model.arguments import check_metric, check_model, measured
from fakequant.model.batches import Forward, Inputs, refuse_tensor, runner
from fakequant.model.execution import simulated
from fakequant.model.failures import failure_named
from fakequant.model.html import html_result
from fakequant.model.modes import disabled, evaluating, modes
from fakequant.model.outputs import float_tensors
from fakequant.model.progress import track
from fakequant.model.reuse import ReusedOutputs
from fakequant.model.weights import warn_stale_scales
from fakequant.nn.contexts import cached_weights
from fakequant.nn.layers import QuantizedLayer
from fakequant.nn.quantizer import Mode, Quantizer, quantizers
from fakequant.nn.sites import Site
from fakequant.restore import restore_after, state_of

Metric = Callable[[nn.Module], float]

_NO_BATCHES = "the batches held no examples; give a list or a loader that can be iterated again"


@dataclass
class Power:
    """The power of a signal and of its error, summed over batches."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, exact: Tensor, approximate: Tensor) -> None:
        """Add a tensor and its approximation."""
        exact, approximate = exact.detach(), approximate.detach()
        if exact.dtype not in (torch.float32, torch.float64) or approximate.dtype is not exact.dtype:
            exact, approximate = exact.double(), approximate.double()
        # Float32 rounds a difference by 2**-24 of it, and sums are float64. Copies in double take most time.
        noise = _energy(approximate - exact)
        if not math.isfinite(noise):  # a difference may be too large for float32
            noise = _energy(approximate.double() - exact.double())
        self.signal += _energy(exact)
        self.noise += noise

    def decibels(self) -> float:
        """Signal over noise: inf without noise."""
        if self.noise == 0.0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


def _energy(x: Tensor) -> float:
    return torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2 if x.numel() else 0.0


def layer_sqnr(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    progress: bool | None = None,
) -> dict[str, float]:
    """The signal-to-quantization-noise ratio in dB of every quantizer on its own tensors, by name.

    Args:
        model: a calibrated model.
        batches, inputs, forward: as for `calibrate`.

    Raises:
        ConfigError: there was no batch, or the batches are one tensor.
        CalibrationError: the model failed on a batch.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> used = calibrate(model, [torch.ones(1, 4)])
    >>> sorted(layer_sqnr(model, [torch.ones(1, 4)]))
    ['0._input_quantizer', '0._weight_quantizer']
    """
    refuse_tensor(batches, "layer_sqnr")
    warn_stale_scales(model)
    found = quantizers(model)
    power = {name: Power() for name in found}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        return lambda _, inputs, output: power[name].add(inputs[0], output)

    with restore_after(state_of(found.values())), simulated(model):  # products of codes call no quantizer
        for name, quantizer in found.items():
            quantizer.register_forward_hook(watch(name))
        count = _run(model, batches, runner(inputs, forward), progress)
    if not count:
        raise ConfigError(_NO_BATCHES)
    return {name: value.decibels() for name, value in power.items() if value.signal or value.noise}


@dataclass(frozen=True)
class Sensitivity:
    """The effect of quantizing one layer alone.

    Attributes:
        layer: its path.
        value: the metric with only this layer quantized, larger is better: by default dB of signal to quantization
            noise at the model's output, inf where the output does not change.
        change: `value` minus the metric of the float model; by the default metric the same number as `value`.
    """

    layer: str
    value: float
    change: float


class Sensitivities(list[Sensitivity]):
    """What `sensitivity` found, the worst layer first; prints as a table.

    Attributes:
        in_decibels: whether the values are dB of signal to quantization noise, the default metric.
    """

    in_decibels: bool = True

    @property
    def header(self) -> tuple[str, ...]:
        """The names of the columns, with the unit of the values."""
        return ("layer", "dB alone") if self.in_decibels else ("layer", "metric alone", "change")

    def rows(self) -> list[tuple[str, ...]]:
        """The rows of the table, one per layer, as text."""
        if self.in_decibels:
            return [(s.layer or "(model)", "exact" if s.value == math.inf else f"{s.value:.1f}") for s in self]
        return [(s.layer or "(model)", f"{s.value:.6g}", f"{s.change:+.3g}") for s in self]

    def __repr__(self) -> str:
        rows = [self.header, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)

    def _repr_html_(self) -> str:
        return html_result(self.header, self.rows(), numbers=range(1, len(self.header)))


def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    metric: Metric | None = None,
    *,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    progress: bool | None = None,
) -> Sensitivities:
    """How much every layer hurts: the model is measured with only that layer quantized. The worst comes first.

    The quantized layer computes as its `execution` says. By the default metric, what of a pass is as in the float model
    is not computed again: all activations of one batch are held.

    Args:
        model: a calibrated model.
        batches, inputs, forward: as for `calibrate`, passed over once. May be empty with a metric, which does not see
            them.
        metric: called as metric(model), larger is better; by default the ratio of signal to quantization noise in dB
            of the model's outputs, against those of the float model.

    Returns:
        A list that prints as a table: for every quantized layer the metric with only that layer quantized (`value`),
        and its difference from that of the float model (`change`; by the default metric the same number).

    Raises:
        ConfigError: the model has no quantized layers, the batches are one tensor, or, by the default metric, there was
            no batch or the model's output holds no float tensor.
        CalibrationError: the model failed on a batch.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), presets.INT8.with_rule(Rule("1")))
    >>> x = torch.linspace(-1, 1, 40).view(10, 4)
    >>> used = calibrate(model, [x])
    >>> [(found.layer, 30 < found.value < 60) for found in sensitivity(model, [x])]  # in dB
    [('0', True)]
    """
    check_model(model, "sensitivity", "sensitivity(model, batches)")
    check_metric(metric, "sensitivity")
    refuse_tensor(batches, "sensitivity")
    warn_stale_scales(model)
    held = {
        name: [quantizer for quantizer in layer.children() if isinstance(quantizer, Quantizer)]
        for name, layer in model.named_modules()
        if isinstance(layer, (QuantizedLayer, Site))
    }
    if not held:
        raise ConfigError("sensitivity needs a prepared model; call fakequant.prepare and fakequant.calibrate first")
    if metric is None:
        values, baseline = _output_sqnr(model, batches, held, runner(inputs, forward), progress), 0.0
    else:
        values = {}
        with disabled(model):
            baseline = measured(metric, model)
        for name, own in track(held.items(), "measuring layers", len(held), progress):
            with modes(model, lambda _, q, own=own: Mode.QUANTIZE if q in own else Mode.OFF):
                values[name] = measured(metric, model)
    found = [Sensitivity(name, value, value - baseline) for name, value in values.items()]
    result = Sensitivities(sorted(found, key=lambda s: s.value))
    result.in_decibels = metric is None
    return result


def _output_sqnr(
    model: nn.Module, batches: Iterable[Any], held: dict[str, list[Quantizer]], run: Forward, progress: bool | None
) -> dict[str, float]:
    """The signal-to-noise ratio of the outputs with the quantizers of one layer on, by layer."""
    power, kept = {name: Power() for name in held}, ReusedOutputs(model)
    batches_seen = measured = 0
    total = len(batches) if isinstance(batches, Sized) else None
    with disabled(model), evaluating(model), cached_weights(model), torch.no_grad():
        for batch in track(batches, "measuring layers", total, progress):
            with kept.record():
                with failure_named(model, batches_seen + 1, batch):
                    output = run(model, batch)
                exact = [tensor.clone() for tensor in float_tensors(output)]
            if not exact:
                raise ConfigError(
                    f"the model's output of type {type(output).__name__} holds no float tensor; give metric="
                )
            batches_seen += 1
            measured += sum(tensor.numel() for tensor in exact)
            for name, own in held.items():
                try:
                    _set(own, Mode.QUANTIZE)
                    with kept.reuse():
                        outputs = float_tensors(run(model, batch))
                finally:
                    _set(own, Mode.OFF)  # where it is interrupted, `disabled` gives all modes back
                for right, approximate in zip(exact, outputs, strict=True):
                    power[name].add(right, approximate)
    if not batches_seen:
        raise ConfigError(_NO_BATCHES)
    if not measured:
        raise ConfigError(
            "the model's float outputs are empty: the batches hold no rows, or the model found nothing in them, as a "
            "detector may; give other batches, or metric="
        )
    return {name: value.decibels() for name, value in power.items()}


def _set(own: list[Quantizer], mode: Mode) -> None:
    for quantizer in own:
        quantizer.mode = mode


def _run(model: nn.Module, batches: Iterable[Any], run: Forward, progress: bool | None) -> int:
    """Run all batches; how many there were is returned."""
    count = 0
    with evaluating(model), torch.no_grad():
        for batch in track(batches, "measuring", None, progress):
            with failure_named(model, count + 1, batch):
                run(model, batch)
            count += 1
    return count
