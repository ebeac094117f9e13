"""Scales of the channels that a module gives and a layer reads, in their weights."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from fakequant.nn.quantized.forms import computed_class

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def has_matrix(module: nn.Module) -> bool:
    """Whether a module multiplies channels with a weight [out, in / groups, ...] that is a parameter of its own."""
    if computed_class(module) not in (nn.Linear, *CONVOLUTIONS):
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() > 1


def input_channels(layer: nn.Module) -> int:
    """The channels that a layer with a matrix reads."""
    weight = cast("Tensor", layer._parameters["weight"])
    return weight.shape[1] * _groups(layer)


def along_inputs(weight: Tensor, layer: nn.Module) -> Tensor:
    """A view [groups, out / groups, in / groups, ...] of a weight; the input channels are axes 0 and 2."""
    return weight.unflatten(0, (_groups(layer), -1))


def of_inputs(factor: Tensor, layer: nn.Module) -> Tensor:
    """A factor for each input channel, in the shape that multiplies `along_inputs`."""
    weight = cast("Tensor", layer._parameters["weight"])
    return factor.view(_groups(layer), 1, -1, *(1 for _ in weight.shape[2:]))


def _groups(layer: nn.Module) -> int:
    return cast("int", getattr(layer, "groups", 1))
