"""Replace weights by their quantized values, and take their quantizers away."""

from __future__ import annotations

import warnings
from typing import TypeVar

import torch
from torch import Tensor, nn

from fakequant.distributed import refuse_sharded
from fakequant.errors import ConfigError
from fakequant.model.weights import warn_stale_scales, weighted_layers
from fakequant.nn.layers import QuantizedLayer
from fakequant.nn.quantizer import Mode
from fakequant.restore import restore_on_error

Model = TypeVar("Model", bound=nn.Module)


def bake_weights(model: Model) -> Model:
    """Replace every quantized weight by its quantized values, in place, and take its quantizer away.

    The model computes the same as before, without quantizing weights again in every pass. A weight that several layers
    share, as embedding and head of a language model do, is replaced once for all of them. An interrupt is raised
    when all weights are replaced.

    Raises:
        ConfigError: a weight whose quantizer is off, that another layer uses too and quantizes otherwise (names both),
            that is computed from other tensors, or that is sharded over processes; nothing is changed.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8_WEIGHT_ONLY)
    >>> before = model(torch.ones(1, 4))
    >>> torch.equal(bake_weights(model)(torch.ones(1, 4)), before)
    True
    """
    refuse_sharded(model, "bake the weights of")
    held = weighted_layers(model)
    for name, layer in held.items():
        _check(name, layer)
    groups = _by_weight(model, held)
    with torch.no_grad():
        for names in groups:
            _check_alike(names, held)
        warn_stale_scales(model)
    _bake_all([[held[name] for name in names] for names in groups])
    return model


def fold(model: Model) -> Model:
    """The old name of `bake_weights`, which goes with the next release.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as said:
    ...     warnings.simplefilter("always")
    ...     model = fold(prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8_WEIGHT_ONLY))
    >>> print(said[0].message)
    fakequant.fold is now called fakequant.bake_weights, and the old name goes with the next release
    """
    warnings.warn(
        "fakequant.fold is now called fakequant.bake_weights, and the old name goes with the next release",
        DeprecationWarning,
        stacklevel=2,
    )
    return bake_weights(model)


@torch.no_grad()
def _bake_all(groups: list[list[QuantizedLayer]]) -> None:
    """Replace the weight that the layers of each group share; an interrupt is raised when all weights are replaced."""
    begun: dict[int, Tensor] = {}

    def finish() -> None:
        for index, layers in enumerate(groups):
            if all(layer._weight_quantizer is None for layer in layers):
                continue
            if index not in begun:
                begun.clear()
                begun[index] = layers[0].quantized_weight()
            layers[0].weight.copy_(begun[index])
            for layer in layers:
                layer._weight_quantizer = None

    with restore_on_error(finish):  # forwards, because keeping all float weights would take their memory once more
        finish()


def _check(name: str, layer: QuantizedLayer) -> None:
    quantizer = layer._weight_quantizer
    if quantizer is not None and quantizer.mode is not Mode.QUANTIZE:
        raise ConfigError(f"{name}: its weight quantizer is {quantizer.mode.value}; set its mode to QUANTIZE first")
    own = layer._parameters.get("weight", layer._buffers.get("weight"))
    if own is None or layer.weight is not own:
        raise ConfigError(
            f"{name}: its weight is computed (weight_norm, pruning, a parametrization) and cannot be replaced; "
            "make it permanent first, as by prune.remove or remove_parametrizations"
        )


def _by_weight(model: nn.Module, held: dict[str, QuantizedLayer]) -> list[list[str]]:
    """The paths of all modules that use each of the quantized weights."""
    users: dict[int, list[str]] = {id(layer.weight): [] for layer in held.values()}
    for name, module in model.named_modules():
        for tensor in {id(p) for p in (*module._parameters.values(), *module._buffers.values()) if p is not None}:
            if tensor in users:
                users[tensor].append(name)
    return list(users.values())


def _check_alike(names: list[str], held: dict[str, QuantizedLayer]) -> None:
    """Raise unless all users of one weight quantize it to the same values."""
    if len(names) == 1:
        return
    first = next(name for name in names if name in held)
    for name in names:
        difference = _difference(held[first], held.get(name))
        if difference is not None:
            pair = " and ".join(other for other in names if other in (first, name))
            raise ConfigError(
                f"the layers {pair} share one weight, which {difference}, so that replacing it would "
                "change the others; quantize it alike, or give each its own: "
                "layer.weight = nn.Parameter(layer.weight.detach().clone())"
            )


def _difference(layer: QuantizedLayer, other: QuantizedLayer | None) -> str | None:
    """How the values of a weight differ that two layers share; None if they are the same."""
    one, two = layer._weight_quantizer, None if other is None else other._weight_quantizer
    if other is None or one is None or two is None:
        return "only one of them quantizes"
    if one.spec != two.spec:
        return f"they quantize as {one.spec} and as {two.spec}"
    same = layer is other or torch.equal(layer.quantized_weight(), other.quantized_weight())
    return None if same else f"they quantize as {one.spec} with different scales"
