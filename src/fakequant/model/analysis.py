"""Which layer hurts: signal-to-noise ratio of every quantizer, and the effect of every layer on the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.errors import ConfigError
from fakequant.model.prepare import Forward, disabled, evaluating, modes, run_batch
from fakequant.model.progress import track
from fakequant.nn.layers import QuantizedLayer
from fakequant.nn.quantizer import Mode, Quantizer, quantizers

Metric = Callable[[nn.Module], float]


@dataclass
class _Power:
    signal: float = 0.0
    noise: float = 0.0

    def add(self, exact: Tensor, approximate: Tensor) -> None:
        exact = exact.detach().double()
        self.signal += exact.square().sum().item()
        self.noise += (approximate.detach().double() - exact).square().sum().item()

    def decibels(self) -> float:
        if self.noise == 0.0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


def layer_sqnr(
    model: nn.Module, batches: Iterable[Any], *, forward: Forward | None = None, progress: bool | None = None
) -> dict[str, float]:
    """The signal-to-quantization-noise ratio in dB of every quantizer on its own tensors, by name.

    Args:
        model: a calibrated model.
        batches: as for `calibrate`.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> used = calibrate(model, [torch.ones(1, 4)])
    >>> sorted(layer_sqnr(model, [torch.ones(1, 4)]))
    ['0._input_quantizer', '0._weight_quantizer']
    """
    found = quantizers(model)
    power = {name: _Power() for name in found}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        return lambda _, inputs, output: power[name].add(inputs[0], output)

    hooks = [quantizer.register_forward_hook(watch(name)) for name, quantizer in found.items()]
    try:
        _run(model, batches, forward or run_batch, progress)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: value.decibels() for name, value in power.items() if value.signal or value.noise}


@dataclass(frozen=True)
class Sensitivity:
    """The effect of quantizing one layer alone.

    Attributes:
        layer: its path.
        value: the metric with only this layer quantized.
        change: `value` minus the metric of the float model (for the default metric: `value` itself, in dB).
    """

    layer: str
    value: float
    change: float


def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    metric: Metric | None = None,
    *,
    forward: Forward | None = None,
    progress: bool | None = None,
) -> list[Sensitivity]:
    """How much every layer hurts: the model is measured with only that layer quantized. The worst comes first.

    Args:
        model: a calibrated model.
        batches: as for `calibrate`; iterated once per layer, so no one-time iterator. May be empty with a metric.
        metric: called as metric(model), larger is better; by default the signal-to-noise ratio in dB of the model's
            outputs against those of the float model.

    Raises:
        ConfigError: the model has no quantized layers, or its batches can be iterated only once.
    """
    held = [
        (name, {id(q) for q in layer.children() if isinstance(q, Quantizer)})
        for name, layer in model.named_modules()
        if isinstance(layer, QuantizedLayer)
    ]
    if not held:
        raise ConfigError("sensitivity needs a prepared model; call fakequant.prepare and fakequant.calibrate first")
    if iter(batches) is batches:
        raise ConfigError("sensitivity runs the batches once per layer; give a list or a loader, not an iterator")
    run = forward or run_batch
    with disabled(model):
        exact = None if metric else _outputs(model, batches, run)
        baseline = metric(model) if metric else 0.0
    found = []
    for name, own in track(held, "measuring layers", len(held), progress):
        with modes(model, lambda _, q, own=own: Mode.QUANTIZE if id(q) in own else Mode.OFF):
            value = metric(model) if metric else _output_sqnr(exact or [], _outputs(model, batches, run))
        found.append(Sensitivity(name, value, value - baseline))
    return sorted(found, key=lambda s: s.value)


def _output_sqnr(exact: list[Tensor], approximate: list[Tensor]) -> float:
    power = _Power()
    for a, b in zip(exact, approximate, strict=True):
        power.add(a, b)
    return power.decibels()


def _outputs(model: nn.Module, batches: Iterable[Any], run: Forward) -> list[Tensor]:
    outputs: list[Tensor] = []
    with evaluating(model), torch.no_grad():
        for batch in batches:
            outputs += _tensors(run(model, batch))
    return outputs


def _tensors(output: Any) -> list[Tensor]:
    """All floating tensors in a model's output."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    items = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _run(model: nn.Module, batches: Iterable[Any], run: Forward, progress: bool | None) -> None:
    with evaluating(model), torch.no_grad():
        for batch in track(batches, "measuring", None, progress):
            run(model, batch)
