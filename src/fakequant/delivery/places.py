"""Where a model, in float or prepared, has weights that can be quantized, and what their quantizers are called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from fakequant.nn.operands import Operand, Role
from fakequant.nn.paths import join
from fakequant.nn.quantized.forms import own_class, quantized_class
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import quantizers
from fakequant.nn.stored.weight import with_stored

_ROLES = Role.WEIGHT, Role.INPUT


class Place(NamedTuple):
    """A weight of a layer.

    Attributes:
        path: of the layer.
        kind: the class of the float layer.
        classes: that class and its bases, by name.
        attribute: the name of the weight's quantizer.
        input: the name of the quantizer of what it multiplies; "" where there is none.
        operand: where it has its axes.
    """

    path: str
    kind: str
    classes: tuple[str, ...]
    attribute: str
    input: str
    operand: Operand


def places_of(model: nn.Module) -> dict[str, Place]:
    """The weights of a model that can be quantized, by their names in the state dict."""
    found: dict[str, Place] = {}
    for path, module in model.named_modules():
        form = type(module) if isinstance(module, QuantizedLayer) else quantized_class(module)
        if form is None:
            continue
        own = getattr(module, "float_class", None) or own_class(module)
        operands = form.operands(module)
        classes = tuple(cls.__name__ for cls in own.__mro__)
        for name, source in paired(operands).items():
            place = Place(path, own.__name__, classes, name, source, operands[name])
            found[join(path, operands[name].weight)] = place
    return found


def paired(operands: Mapping[str, Operand]) -> dict[str, str]:
    """The quantizers of weights, each with that of the input that it multiplies; "" where none belongs to it alone."""
    weights, inputs = ([name for name, one in operands.items() if one.role is role] for role in _ROLES)
    return dict(zip(weights, inputs if len(inputs) == len(weights) else [""] * len(weights), strict=True))


def float_names(model: nn.Module) -> list[str]:
    """The names in the state dict without those of quantizers: the state dict of the float model."""
    return without_quantizers(with_stored(model, model.state_dict()), quantizers(model))


def without_quantizers(names: Iterable[str], quantizers: Iterable[str]) -> list[str]:
    """The names of tensors that belong to none of the quantizers at these paths."""
    own = tuple(f"{path}." for path in quantizers)
    return [name for name in names if not name.startswith(own)]
