"""Layers with a forward of their own that ends in one product of their weight, by what a recorded run shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fakequant.model.flow import Arguments
from fakequant.model.modes import evaluating
from fakequant.model.recorded import Recording
from fakequant.model.recording import record
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
        recording = record(model, lambda: model(*arguments[0], **arguments[1]))
        numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
        return {layer for layer, path in layers.items() if _ends(layer, path, recording, numbers)}


def _ends(layer: nn.Module, path: str, recording: Recording, numbers: Mapping[nn.Parameter, int]) -> bool:
    own = {numbers[p] for p in layer._parameters.values() if p is not None and p in numbers}
    reads = [call for call in recording.calls if own & {*call.inputs}]
    if len(reads) != 1 or len(own) != 2 or recording.visits[path] != 1:
        return False
    (call,) = reads
    weight = numbers.get(layer._parameters["weight"])  # type: ignore[arg-type]  it has one
    last = call.owner == path and call.function.startswith(("linear", "conv")) and call.factors[1:] == (weight,)
    return last and own <= {*call.inputs} and all(other.number <= call.number for other in _of(path, recording))


def _of(path: str, recording: Recording) -> list[Any]:
    """The calls that a layer, or a module in it, makes."""
    return [call for call in recording.calls if call.owner == path or (call.owner or "").startswith(f"{path}.")]


def _outputs(layer: Any) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
