"""Find the layers that hurt: signal-to-noise ratios of quantizers, and the effect of every layer on the model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fakequant.calibration.calibrator import outside_of_transforms
from fakequant.data.again import SeveralPasses, same_bits
from fakequant.data.arguments import Metric, check_metric, check_model, measured, refuse_unprepared
from fakequant.data.batches import Batches, Forward, Inputs, track
from fakequant.errors import ConfigError, nearest
from fakequant.model.engine import calling_quantizers
from fakequant.model.run.outputs import Distance, check_again, decibels, named_tensors, shown_place
from fakequant.model.summary import warn_of_new_layers
from fakequant.model.weights import disabled, evaluating, modes, warn_stale_scales
from fakequant.nn.device import plain
from fakequant.nn.paths import join, layer_of
from fakequant.nn.quantized.layers import Add, MatMul, QuantizedLayer
from fakequant.nn.quantizer import Mode, Quantizer, quantizers
from fakequant.nn.sites import Site
from fakequant.nn.wrappers import accepts_wrapped_model, cached_weights
from fakequant.restore import forwards_of, restore_after, state_of
from fakequant.text import html_result, table


class _RecordedCall(NamedTuple):
    inputs: tuple[Tensor, ...]
    output: Tensor
    versions: list[int]
    """The versions of inputs and output, which show whether an operation in place wrote to them since."""


class ReusedOutputs:
    """A record of the module calls of a float pass; later, modules with equal inputs return the recorded outputs.

    Only modules of torch and their quantized forms take part, because they compute the same from the same inputs. All
    inputs and outputs of the recorded pass stay in memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules: dict[nn.Module, Callable[..., Any]] = {}  # those that compute alone
        for module in model.modules():
            made_by = type(module).float_class if isinstance(module, QuantizedLayer) else type(module)
            known = made_by in (Add, MatMul) or made_by.__module__.startswith("torch.nn.modules.")
            changed = "forward" in module.__dict__
            if known and not changed and all(isinstance(child, Quantizer) for child in module.children()):
                self._modules[module] = module.forward
        self._calls: dict[nn.Module, list[_RecordedCall]] = {}
        self._next: dict[nn.Module, int] = {}
        self._recording = False

    @contextmanager
    def record(self) -> Iterator[None]:
        """A context that records a pass through the model; the record replaces an earlier record."""
        self._calls, self._recording = {module: [] for module in self._modules}, True
        try:
            with self._watching():
                yield
        finally:
            self._recording = False

    @contextmanager
    def reuse(self) -> Iterator[None]:
        """A context for one pass, in which a module with recorded inputs returns the recorded output."""
        self._next = dict.fromkeys(self._modules, 0)
        with self._watching():
            yield

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with restore_after(forwards_of(self._modules)):
            for module, forward in self._modules.items():
                module.forward = self._watched(module, forward)
            yield

    def _watched(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        own = [child for child in module.children() if isinstance(child, Quantizer)]

        @wraps(forward)
        def run(*inputs: Any, **options: Any) -> Any:
            plain = not options and all(isinstance(x, Tensor) and not x.is_inference() for x in inputs)
            plain = plain and not torch._C._are_functorch_transforms_active()  # whose values cannot be compared
            if not plain or any(quantizer.mode is not Mode.OFF for quantizer in own):
                return forward(*inputs, **options)
            if not self._recording:
                calls, place = self._calls[module], self._next[module]
                self._next[module] = place + 1
                call = calls[place] if place < len(calls) else None
                held = () if call is None else (*call.inputs, call.output)
                if call is None or [tensor._version for tensor in held] != call.versions:
                    return forward(*inputs)
                same = len(inputs) == len(call.inputs) and all(
                    a is b
                    or (a.shape == b.shape and a.stride() == b.stride() and not a.is_complex() and same_bits(a, b))
                    for a, b in zip(inputs, call.inputs, strict=True)
                )
                return call.output if same else forward(*inputs)
            versions = [x._version for x in inputs]
            output = forward(*inputs)
            if isinstance(output, Tensor) and not output.is_inference():
                self._calls[module].append(_RecordedCall(inputs, output, [*versions, output._version]))
            return output

        return run


_NO_BATCHES = "the batches held no examples; give a list or a loader that can be iterated again"


@accepts_wrapped_model
def layer_sqnr(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    progress: bool | None = None,
) -> dict[str, float]:
    """For the name of every quantizer, the signal-to-quantization-noise ratio in dB of the tensors that it quantizes.

    If a batch calls a quantizer several times, as in a head shared by the levels of a pyramid, noise / signal is
    computed for each call, and the result is the mean of these ratios in dB.

    If `set_execution` has set an engine, the noise is that of the codes that the engine stores. Layers that multiply
    integers are simulated.

    Args:
        model: a calibrated model.
        batches, inputs, forward: as for `calibrate`.

    Raises:
        ConfigError: the model has no quantizers, there was no batch, or `batches` is a tensor.
        CalibrationError: the model failed on a batch.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> used = calibrate(model, [torch.ones(1, 4)])
    >>> sorted(layer_sqnr(model, [torch.ones(1, 4)]))
    ['0._input_quantizer', '0._weight_quantizer']
    """
    data = Batches(batches, "layer_sqnr", inputs=inputs, forward=forward, progress=progress)
    refuse_unprepared(model)
    warn_stale_scales(model)
    found = quantizers(model)
    distances, calls = {name: Distance() for name in found}, Counter[str]()

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def see(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            with outside_of_transforms(plain(inputs[0]), plain(output)) as (x, y):
                distances[name].add({calls[name]: x}, {calls[name]: y})
            calls[name] += 1

        return see

    with restore_after(state_of(found.values())), calling_quantizers(model):
        for name, quantizer in found.items():
            quantizer.register_forward_hook(watch(name))
        run_all(model, data, lambda *_: calls.clear())
    return {name: decibels(found.mean) for name, found in distances.items() if not found.is_silent}


@dataclass(frozen=True)
class Sensitivity:
    """The effect on a model if only a single layer, or a single quantizer, is quantized.

    Attributes:
        layer: the path of the layer or quantizer.
        value: the metric with only this layer quantized, larger is better: by default dB of signal to quantization
            noise at the model's output, inf if the output does not change. With several outputs, the noise of each
            output is divided by the output's energy, and the mean is taken.
        change: `value` minus the metric of the float model; with the default metric the same number as `value`.
        output: if there are several outputs, the output with the most noise, such as "scores"; "" for a single output,
            and with a metric of the user.
        worst: the dB of `output`; None if `output` is "".
    """

    layer: str
    value: float
    change: float
    output: str = ""
    worst: float | None = None


_SEVERAL, _COSTS = 3, 20.0
"""The least number of layers, and the dB below which the worst layer is named."""


class Sensitivities(list[Sensitivity]):
    """The result of `sensitivity`, a list with the worst layer first; prints as a table.

    Attributes:
        in_decibels: whether the values are dB of signal to quantization noise, the default metric.
        each: "layer" or "quantizer", whichever was quantized alone.
    """

    in_decibels: bool = True
    each: str = "layer"

    @property
    def line(self) -> str:
        """A line on the layer that costs more than all others together, and how to leave it in float; or "".

        Only a layer below 20 dB counts: alone, it gives an error with more than 1 % of the output's energy.
        """
        if not self.in_decibels or len(self) < _SEVERAL or self[0].value >= _COSTS:
            return ""
        first, *others = (10 ** (-one.value / 10) for one in self)
        path = self[0].layer if self.each == "layer" else layer_of(self[0].layer)
        if first <= sum(others) or not path:
            return ""
        times = f"{first / sum(others):.3g}" if 1000 * sum(others) > first else "over 1,000"
        return (
            f"{self[0].layer} alone adds {times} times the error of all other {self.each}s together; "
            f"fakequant.prepare(..., skip=[{path!r}]) leaves {path} in float, in the engine, too"
        )

    @property
    def header(self) -> tuple[str, ...]:
        """The names of the columns, with the unit of the values."""
        if not self.in_decibels:
            return self.each, "metric alone", "change"
        return (self.each, "dB alone", "worst output") if any(s.output for s in self) else (self.each, "dB alone")

    def rows(self) -> list[tuple[str, ...]]:
        """The texts of the table's rows, a row for each layer or quantizer."""
        if self.in_decibels:
            shown = [(s.layer or "(model)", "exact" if s.value == math.inf else f"{s.value:.1f}") for s in self]
            worst = [f"{s.output} {s.worst:.1f}" if s.worst is not None else "" for s in self]
            return [(*row, one) for row, one in zip(shown, worst, strict=True)] if len(self.header) > 2 else shown
        return [(s.layer or "(model)", f"{s.value:.6g}", f"{s.change:+.3g}") for s in self]

    def __repr__(self) -> str:
        return "\n".join(filter(None, [table([self.header, *self.rows()], numbers=(1, 2)), self.line]))

    def _repr_html_(self) -> str:
        lines = [self.line] if self.line else []
        return html_result(self.header, self.rows(), lines, numbers=range(1, len(self.header)))


@accepts_wrapped_model
def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    metric: Metric | None = None,
    *,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    progress: bool | None = None,
    each: str = "layer",
) -> Sensitivities:
    """How much each layer hurts: the model is measured with only this layer quantized. The worst comes first.

    `each="quantizer"` measures each quantizer alone, to find the tensor that hurts in a layer such as an LSTM.

    The quantized layer computes as `set_execution` says, also with the arithmetic of an engine. With the default
    metric, modules whose inputs equal those of the float pass do not run again: all activations of a batch stay in
    memory.

    Args:
        model: a calibrated model.
        batches, inputs, forward: as for `calibrate`; the batches run once. With a metric no batches are needed: the
            metric does not use them.
        metric: called as metric(model), larger is better; by default the ratio of signal to quantization noise in dB
            of the model's outputs, against the float model's. All outputs count alike.
        each: "layer", or "quantizer" to measure each quantizer alone.

    Returns:
        A list that prints as a table: for every quantized layer the metric with only that layer quantized (`value`),
        and its difference from the metric of the float model (`change`; with the default metric the same number). If a
        layer costs more than all others together, a line under the table says how to leave it in float.

    Raises:
        ConfigError: `each` is unknown; the model has no quantized layers; `batches` is a tensor; or, with the default
            metric, there was no batch, or the model's output holds no float tensor, or only NaN and 0.
        CalibrationError: the model failed on a batch.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), presets.INT8.with_rule(Rule("1")))
    >>> x = torch.linspace(-1, 1, 40).view(10, 4)
    >>> used = calibrate(model, [x])
    >>> [(found.layer, 30 < found.value < 60) for found in sensitivity(model, [x])]  # in dB
    [('0', True)]
    """
    check_model(model, "sensitivity", "sensitivity(model, batches)")
    check_metric(metric, "sensitivity")
    refuse_unprepared(model)
    warn_of_new_layers(model)
    data = Batches(batches, "sensitivity", inputs=inputs, forward=forward, progress=progress)
    warn_stale_scales(model)
    if each not in ("layer", "quantizer"):
        raise ConfigError(f'each= must be "layer" or "quantizer", got {each!r}{nearest(each, ["layer", "quantizer"])}')
    held: dict[str, list[Quantizer]] = {}  # quantizers that are on together
    for name, layer in model.named_modules():
        if isinstance(layer, (QuantizedLayer, Site)):
            own = {key: one for key, one in layer._modules.items() if isinstance(one, Quantizer)}
            # Calibration switches off those of inputs that are always zero.
            own = {key: one for key, one in own.items() if not (one.mode is Mode.OFF and one.needs_calibration)}
            held |= {name: [*own.values()]} if each == "layer" else {join(name, key): [one] for key, one in own.items()}
    if not held:
        raise ConfigError("all quantizers of the model are off; call fakequant.calibrate first")
    if metric is None:
        found = []
        for name, distance in _output_distances(model, data, held).items():
            value, several = decibels(distance.mean), len(distance.shares) > 1
            found.append(Sensitivity(name, value, value))
            if several and value != math.inf:
                worst = distance.worst
                found[-1] = Sensitivity(name, value, value, shown_place(worst), decibels(distance.shares[worst]))
    else:
        values = {}
        with disabled(model):
            baseline = measured(metric, model)
        for name, own in track(held.items(), "measuring layers", len(held), progress):
            with modes(model, lambda _, q, own=own: Mode.QUANTIZE if q in own else Mode.OFF):
                values[name] = measured(metric, model)
        found = [Sensitivity(name, value, value - baseline) for name, value in values.items()]
    result = Sensitivities(sorted(found, key=lambda s: s.value))
    result.in_decibels, result.each = metric is None, each
    return result


def _output_distances(model: nn.Module, batches: Batches, held: dict[str, list[Quantizer]]) -> dict[str, Distance]:
    """For each layer, the distance of the outputs from the float outputs if only this layer is quantized."""
    distances, kept = {name: Distance() for name in held}, ReusedOutputs(model)
    passes = SeveralPasses(model)
    measured: int | None = None
    with disabled(model), evaluating(model), cached_weights(model), torch.no_grad():
        for batch in batches.tracked("measuring layers"):
            with kept.record():
                output = passes.run("float", lambda batch=batch: batches.run(model, batch))
                exact = {place: tensor.clone() for place, tensor in named_tensors(output).items()}
            if measured is None:
                check_again(model, batches, batch, exact)
            if not exact:
                raise ConfigError(
                    f"the model's output of type {type(output).__name__} holds no float tensor; pass metric="
                )
            measured = (measured or 0) + sum(tensor.numel() for tensor in exact.values())
            for name, own in held.items():
                try:
                    _set(own, Mode.QUANTIZE)
                    with kept.reuse():
                        outputs = named_tensors(passes.run(name, lambda batch=batch: batches.run(model, batch)))
                finally:
                    _set(own, Mode.OFF)  # where it is interrupted, `disabled` gives all modes back
                distances[name].add(exact, outputs)
    if measured is None:
        raise ConfigError(_NO_BATCHES)
    if not measured:
        raise ConfigError(
            "the model's float outputs are empty: the batches hold no rows, or the model, such as a detector, found "
            "nothing in them; pass other batches, or metric="
        )
    if all(distance.is_silent for distance in distances.values()):  # errors of NaN would count as 0
        raise ConfigError("all values of the model's float outputs are NaN or 0; pass other batches, or metric=")
    return distances


def _set(own: list[Quantizer], mode: Mode) -> None:
    for quantizer in own:
        quantizer.mode = mode


def run_all(model: nn.Module, batches: Batches, after: Callable[[int, Any, Any], object]) -> None:
    """Run all batches; after each of them, `after` is called with its number, the batch and the output.

    Raises:
        ConfigError: there is no batch.
    """
    number = -1
    with batches.one_pass(model), evaluating(model), cached_weights(model), torch.no_grad():
        for number, batch in enumerate(batches.tracked("measuring")):
            after(number, batch, batches.run(model, batch))
    if number < 0:
        raise ConfigError(_NO_BATCHES)
