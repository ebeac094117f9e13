"""The quantized weights of a model that is exported, with scales that are constants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fakequant.model.execution import simulated
from fakequant.model.weights import quantized_weights
from fakequant.nn.products.product import Product
from fakequant.nn.quantizer import Mode, Quantizer
from fakequant.restore import attributes_of, restore_after


def active_weights(model: nn.Module) -> list[Product]:
    """The weights of layers that will be quantized in the file."""
    return [weight for weight in quantized_weights(model).values() if weight.quantizer.mode is Mode.QUANTIZE]


@torch.no_grad()
def codes_to_write(model: nn.Module) -> dict[str, Tensor]:
    """Fixed codes that quantizing the weights again does not give, by the path of the quantizer."""
    weights = quantized_weights(model).items()
    found = {path: own.quantizer.codes_of_weight(own.parameter) for path, own in weights if own.parameter is not None}
    return {path: codes.cpu() for path, codes in found.items() if codes is not None}


@contextmanager
def weights_fixed(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Fix the scales that follow the weights for a while, so that the quantized weights are constants.

    Weights with fixed codes are quantized as others, so that each has its node; `lower` writes the codes.
    """
    dynamic = [w for w in active_weights(model) if w.quantizer.follows_input]
    coded = [w.quantizer for w in active_weights(model) if w.quantizer.fixed_codes is not None]
    with (
        restore_after(attributes_of([w.quantizer for w in dynamic], "scale", "zero_point", "follows", "dynamic")),
        restore_after(attributes_of(coded, "fixed_codes")),
    ):
        for quantizer in coded:
            quantizer.fixed_codes = None
        # A layer may compute its weight from the parameter of that name, as one with a folded batch normalisation does.
        plain = {id(w): w.parameter for w in dynamic if w.parameter is not None and w.tensor is w.parameter}
        for weight in dynamic:
            if (parameter := plain.get(id(weight))) is not None:
                weight.quantizer.freeze(parameter)
        _freeze_as_called(model, [w.quantizer for w in dynamic if id(w) not in plain], args, kwargs)
        for weight in dynamic:
            weight.quantizer.dynamic = False
        yield


def _freeze_as_called(
    model: nn.Module, waiting: list[Quantizer], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Fix the scales of computed weights in a forward pass, because `layer.weight` may be outdated."""
    if not waiting:
        return
    hooks: list[RemovableHandle] = []
    with restore_after(lambda: [hook.remove() for hook in hooks]), simulated(model), torch.no_grad():
        for quantizer in waiting:
            hooks.append(_freezing(quantizer))
        model(*args, **kwargs)


def _freezing(quantizer: Quantizer) -> RemovableHandle:
    def freeze(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        quantizer.freeze(args[0])

    return quantizer.register_forward_pre_hook(freeze)
