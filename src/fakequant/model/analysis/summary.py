"""A table of the layers of a model: how each is quantized, how it runs, and what it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fakequant.data.batches import Inputs
from fakequant.errors import renamed
from fakequant.model.analysis.in_float import Operation, left_of, record_example
from fakequant.model.run.recorded import modules_called, weight_readers
from fakequant.model.unregistered import warn_of_new_layers
from fakequant.model.weights import (
    bits_of_all,
    is_searched,
    quantized_weights,
    warn_stale_scales,
    weight_bits,
)
from fakequant.nn.integer import Execution
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Mode, Quantizer
from fakequant.nn.sites.sites import TRAINED, Site
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.text import html_result, module_name, table


@dataclass(frozen=True)
class LayerSummary:
    """One layer, or one function that has quantizers: path, type, quantizers by attribute, whether it has a weight."""

    name: str
    type: str
    quantizers: dict[str, str]
    calibrated: bool
    has_weight: bool
    execution: str = "simulate"
    why_simulated: str | None = None
    """Why a layer that is set to integer execution is simulated."""
    why_never_called: str | None = None
    """Why the model does not call the layer with the example, if there is one."""
    gradient: str = ""
    """How its gradients are quantized; empty where they are in float."""

    @property
    def state(self) -> str:
        """The state of the layer in one word or two, for the table."""
        if self.why_never_called is not None:
            return "never called"
        return "ready" if self.calibrated else "not calibrated"


@dataclass(frozen=True)
class Summary:
    """What `summary` found; prints as a table."""

    layers: list[LayerSummary]
    unquantized: list[Operation] | None = None
    parameters: int = 0
    bytes_float: int = 0
    bytes_quantized: int = 0
    """Bytes with quantized weights as codes and scales."""
    bits_per_weight: float = 0.0
    """The bits of codes and scales for each quantized weight; 0.0 if there are none."""
    unsearched: int = 0
    """The weights whose scales are those of their largest values, where `calibrate` would search nearer ones."""

    left = renamed("left", "unquantized")

    @property
    def header(self) -> tuple[str, ...]:
        """The names of the columns; of outputs there is one if any is quantized."""
        outputs = ("output",) if any(_is_of_output(name) for layer in self.layers for name in layer.quantizers) else ()
        return ("layer", "type", "input", "weight", *outputs, "execution", "state")

    @property
    def size(self) -> str:
        """The size of the weights, in a line."""
        per_weight = f" ({self.bits_per_weight:.4g} bits per weight)" if self.bits_per_weight else ""
        return f"weights: {self.bytes_float:,} bytes in float, {self.bytes_quantized:,} quantized{per_weight}"

    def rows(self) -> list[tuple[str, ...]]:
        """The rows of the table, one per layer, as text."""
        rows = []
        for layer in self.layers:
            texts: dict[str, list[str]] = {"input": [], "weight": [], "output": []}
            for name, text in layer.quantizers.items():
                is_weight = name.endswith("_weight_quantizer")
                texts["output" if _is_of_output(name) else "weight" if is_weight else "input"].append(text)
            cells = {
                "layer": layer.name or "(model)",
                "type": layer.type,
                "input": _joined(texts["input"]) or "float",
                "weight": _joined(texts["weight"]) or ("float" if layer.has_weight else ""),
                "output": _joined(texts["output"]),
                "execution": layer.execution,
                "state": layer.state,
            }
            rows.append(tuple(cells[column] for column in self.header))
        return rows

    def __str__(self) -> str:
        return table([self.header, *self.rows()], self._lines(), line=True)

    __repr__ = __str__  # what notebooks and consoles show

    def _repr_html_(self) -> str:
        return html_result(self.header, self.rows(), self._lines())

    def _lines(self) -> list[str]:
        """What is said below the table."""
        lines = [
            f"{module_name(layer.name)} is simulated: {layer.why_simulated}"
            for layer in self.layers
            if layer.why_simulated
        ]
        lines += [
            f"{module_name(layer.name)} is never called with this example: {layer.why_never_called}"
            for layer in self.layers
            if layer.why_never_called is not None
        ]
        gradients = Counter(layer.gradient for layer in self.layers if layer.gradient)
        lines += [f"gradients of layers and functions, in {count} of them: {text}" for text, count in gradients.items()]
        if self.unsearched:
            weights = "1 weight has" if self.unsearched == 1 else f"{self.unsearched} weights have"
            cure = "fakequant.calibrate(model) searches nearer ones"
            lines.append(f"{weights} the scales of the largest values; {cure}")
        lines.append(self.size)
        if self.unquantized is not None:
            products = [operation for operation in self.unquantized if operation.is_product]
            lines.append(
                f"left in float: {len(products)} products, {len(self.unquantized) - len(products)} other operations"
            )
            others = [operation for operation in self.unquantized if not operation.is_product]
            shown = Counter(map(str, (*products, *others)))  # a recurrent layer has those of all steps
            lines += [f"  {text}{f', {count} times' if count > 1 else ''}" for text, count in shown.items()]
        return lines


@accepts_wrapped_model
def summary(model: nn.Module, example: Any = None, *, inputs: Inputs | None = None) -> Summary:
    """What of a model is quantized, how, and whether it is calibrated; with an example also what was left in float.

    Args:
        model: a prepared model.
        example: an input, a tuple or a dict of inputs; with it the model runs, and the operations that were left
            unquantized are listed, and layers that it does not call are told; their weights count as float.
        inputs: which part of the example the model gets, as for `calibrate`; for a batch of a data loader.

    >>> print(summary(prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), presets.INT8)))
    layer  type    input            weight               execution  state
    -----  ------  ---------------  -------------------  ---------  --------------
    0      Linear  int8 per_tensor  int8 per_channel(0)  simulate   not calibrated
    weights: 80 bytes in float, 48 quantized (16 bits per weight)
    """
    warn_stale_scales(model)
    warn_of_new_layers(model)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}
    recording = None if example is None else record_example(model, example, inputs)
    left = None if recording is None else left_of(model, recording)
    idle: dict[nn.Module, str] = {}
    if recording is not None:
        readers = weight_readers(model, recording)
        for layer in {*layers.values()} - modules_called(model, recording):
            read = layer in readers
            idle[layer] = f"{module_name(readers[layer])} uses its weight in float" if read else _UNREAD
    rows = []
    for name, layer in layers.items():
        own = {attribute: getattr(layer, attribute) for attribute in layer.operands(layer)}
        held = {attribute: quantizer for attribute, quantizer in own.items() if quantizer is not None}
        told = layer.execution is not Execution.SIMULATE
        why = layer.why_simulated() if told else None
        rows.append(
            LayerSummary(
                name,
                type(layer).float_class.__name__,
                {attribute: _shown(quantizer) for attribute, quantizer in held.items()},
                _is_calibrated(held),
                bool(layer.products()),
                "integer" if told and why is None else _execution(held),
                why,
                idle.get(layer),
                "" if layer.gradient is None else str(layer.gradient),
            )
        )
    for name, site in model.named_modules():
        if isinstance(site, Site):
            held = {operand: q for operand, q in site._modules.items() if isinstance(q, Quantizer)}
            weights = ", ".join(_shown(q) for q in held.values() if q.kind is Kind.WEIGHT)
            texts = {operand: _shown(q) for operand, q in held.items() if q.kind is Kind.INPUT}
            texts |= {"_weight_quantizer": weights} if weights else {}
            gradient = str(site.gradient) if site.gradient is not None and site.function in TRAINED else ""
            calibrated = _is_calibrated(held)
            how = _execution(held)
            rows.append(LayerSummary(name, site.function, texts, calibrated, bool(weights), how, gradient=gradient))
    follow = [w.quantizer for w in quantized_weights(model).values() if w.quantizer.scales_each_call]
    unsearched = sum(is_searched(one.spec, None) and not one.dynamic for one in follow)
    return Summary(rows, left, sum(p.numel() for p in model.parameters()), *parameter_bytes(model, idle), unsearched)


_UNREAD = "no function of this run reads its weight either"


def _execution(quantizers: Mapping[str, Quantizer]) -> str:
    """The name of the device whose codes all quantizers store, else "simulate"."""
    names = {q.device.name if q.device and q.why_simulated(q.device) is None else "" for q in quantizers.values()}
    return names.pop() or "simulate" if len(names) == 1 else "simulate"


def _is_of_output(quantizer: str) -> bool:
    return quantizer in ("output", "_output_quantizer")


def _joined(texts: list[str]) -> str:
    """Texts in one cell; if there are many, equal ones once with their number."""
    if len(texts) <= 2:
        return ", ".join(texts)
    return ", ".join(f"{count} x {text}" if count > 1 else text for text, count in Counter(texts).items())


def parameter_bytes(model: nn.Module, unused: Collection[nn.Module] = ()) -> tuple[int, int, float]:
    """Bytes of all parameters as they are, and with quantized weights as codes and scales; their bits per weight.

    Tied weights count once.

    Args:
        unused: layers whose quantizers are not used, so that their weights stay in float.
    """
    bits = {
        parameter: found
        for weight in quantized_weights(model).values()
        if weight.layer not in unused
        and weight.quantizer.mode is Mode.QUANTIZE
        # Not its value: a computed one is no parameter, and may change when it is read.
        and (parameter := weight.parameter) is not None
        and (found := weight_bits(weight)) is not None
    }
    now = sum(p.numel() * p.element_size() for p in model.parameters())
    left = sum(p.numel() * p.element_size() for p in model.parameters() if p not in bits)
    together = bits_of_all(bits.values())
    return now, left + -(-(together.codes + together.scales) // 8), together.per_weight


def _is_calibrated(held: Mapping[str, Quantizer]) -> bool:
    """Whether all quantizers have what they need, except those that are off."""
    return not any(quantizer.needs_calibration and quantizer.mode is not Mode.OFF for quantizer in held.values())


def _shown(quantizer: Quantizer) -> str:
    if quantizer.needs_calibration and quantizer.mode is Mode.OFF:  # by `calibrate(unseen="float")`
        return "float"
    words = [str(quantizer.spec), *quantizer.by_value_text()]
    words += (["dynamic"] if quantizer.dynamic else []) + (["off"] if quantizer.mode is Mode.OFF else [])
    return " ".join(words)
