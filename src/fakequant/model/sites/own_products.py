"""Layers with a forward of their own that computes one product of their weight, by what a recorded run shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from glob import escape
from typing import Any

import torch
from torch import nn

from fakequant.data.batches import Arguments
from fakequant.model.config import Config, Rule, all_names
from fakequant.model.run.outputs import record
from fakequant.model.run.recorded import Recording, has
from fakequant.model.weights import evaluating
from fakequant.nn.integer import Execution
from fakequant.nn.quantized.forms import own_class, why_changed
from fakequant.nn.sites.functions import Trait
from fakequant.nn.sites.products import OF_LAYERS
from fakequant.restore import restore_after, structure_of


def ends_in_product(model: nn.Module, layers: Mapping[Any, str], arguments: Arguments) -> set[Any]:
    """The layers whose call gives the result of one linear function or convolution of their own weight and bias.

    Args:
        model: in float; it is not changed.
        layers: with their paths, each with the attributes of a torch layer of the kind.
        arguments: positional and keyword arguments of the run.
    """
    with restore_after(structure_of([model])), evaluating(model), torch.no_grad():
        for layer in layers:
            if layer._parameters.get("bias") is None:  # one that is not used would not be seen
                own: Any = layer
                layer._parameters["bias"] = nn.Parameter(own.weight.new_zeros(_outputs(own)))
        recording = record(model, lambda: arguments.run(model))
        numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
        return {layer for layer, path in layers.items() if _ends(layer, path, recording, numbers)}


def own_forwards(config: Config, model: nn.Module) -> dict[str, Rule]:
    """The rules for layers whose class changes the `forward` of one with a quantized form, by path."""
    names = all_names(model)
    return {
        names[layer][0]: rule
        for layer, rule in config.last_rules(model).items()
        if not rule.leaves_in_float
        and rule.execution is Execution.SIMULATE
        and why_changed(own_class(layer)) is not None
        and layer._parameters.get("weight") is not None
    }


def with_own_products(config: Config, own: Mapping[str, Rule], model: nn.Module, recording: Recording) -> Config:
    """The configuration with rules for the products of layers with a `forward` of their own, before all others."""
    numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
    added = []
    for path, rule in own.items():
        function = _own_product(path, numbers[model.get_parameter(f"{path}.weight".lstrip("."))], recording)
        if function is not None:
            added.append(replace(rule, pattern=escape(path), layers=(), ops=(function,), optional=True))
    return Config(config.name, (*added, *config.rules))


def _own_product(path: str, weight: int, recording: Recording) -> str | None:
    """The function by which a layer multiplies with its weight, if its forward computes this one product in each call.

    Args:
        path: of the layer.
        weight: the number of the value of its weight.
        recording: of a run of the model in float.
    """
    products = [call for call in recording.calls_of.get(path, ()) if call.multiplications]
    if not len({call.visit for call in products}) == len(products) == recording.visits[path] > 0:
        return None
    function = products[0].function
    for call in products:
        read = {_moved_from(value, recording) for value in call.factors}
        if not call.operands or call.function != function or weight not in read:
            return None
    return function


def _moved_from(value: int, recording: Recording) -> int:
    """The value from which functions that only move values made another, such as the weight behind its transpose."""
    producer = recording.values[value].producer
    while producer is not None and has(recording.calls[producer].function, Trait.CODES):
        value = recording.calls[producer].inputs[0]
        producer = recording.values[value].producer
    return value


def _ends(layer: nn.Module, path: str, recording: Recording, numbers: Mapping[nn.Parameter, int]) -> bool:
    own = {numbers[p] for p in layer._parameters.values() if p is not None and p in numbers}
    reads = [call for call in recording.calls if own & {*call.inputs}]
    if len(reads) != 1 or len(own) != 2 or recording.visits[path] != 1:
        return False
    (call,) = reads
    weight = numbers.get(layer._parameters["weight"])  # type: ignore[arg-type]  it has one
    last = call.owner == path and call.function in OF_LAYERS and call.factors[1:] == (weight,)
    return last and own <= {*call.inputs} and all(other.number <= call.number for other in _of(path, recording))


def _of(path: str, recording: Recording) -> list[Any]:
    """The calls that a layer, or a module in it, makes."""
    return [call for call in recording.calls if call.owner == path or (call.owner or "").startswith(f"{path}.")]


def _outputs(layer: Any) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
