"""Keep the weights of a model as packed codes in place of floats, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fakequant.data.arguments import check_model, refuse_unprepared
from fakequant.distributed import refuse_sharded
from fakequant.errors import ConfigError, warn_user
from fakequant.model.state.snapshots import shared_names
from fakequant.model.state.weight_codes import QuantizedWeights
from fakequant.model.weights import quantized_weights
from fakequant.nn.paths import layer_of, matches
from fakequant.nn.products.product import Product
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.stored.layer import StoringLayer
from fakequant.nn.stored.weight import StoredWeight
from fakequant.nn.wrappers import unwraps
from fakequant.restore import restore_on_error
from fakequant.text import listed

Model = TypeVar("Model", bound=nn.Module)
_NAMED = 4


@unwraps
@torch.no_grad()
def store_codes(model: Model, pattern: str = "*") -> Model:
    """Keep quantized weights as packed codes and scales alone, in place, for training with frozen weights.

    Calls and gradients stay the same to the bit. A layer unpacks its weight for its product, and again in the backward
    pass, so that a model takes the memory of its codes. The weights are frozen: what writes to them is refused. Their
    scales are fixed; weights without scales get those of their next call.

    Args:
        model: a prepared model; one warning names the quantized weights that stay in float, and why.
        pattern: of the layers' paths in the model; `*` matches any characters (fnmatch).

    Raises:
        ConfigError: the model has no quantizers, no quantized weight matches, or weights that are sharded or offloaded.

    >>> model = prepare(nn.Sequential(nn.Linear(64, 64)), "int4_weight_only", skip=[])
    >>> before = model(torch.ones(64))
    >>> torch.equal(store_codes(model)(torch.ones(64)), before), model[0].weight.packed.shape
    (True, torch.Size([64, 32]))
    """
    check_model(model, "store_codes", "store_codes(model)")
    refuse_unprepared(model)
    refuse_sharded(model, "store the codes of")
    shared = shared_names(model)
    weights, places = QuantizedWeights(model, shared), dict(_places(model, pattern))
    found = weights.in_float.items()
    left = {name: why for name, why in found if name in places or matches(layer_of(name), pattern)}
    if not (places or left):
        raise ConfigError(f"no quantized weight matches {pattern!r}; correct the pattern")
    for name, readers in places.items():
        if name not in left and not all(isinstance(one.owner, QuantizedLayer) for one in readers):
            left[name] = "it is held by a function or by a part of its layer"
    for name, readers in places.items():
        if name not in left and type(readers[0].tensor) is not StoredWeight:
            _store(weights, name, readers)
    if left:
        told = listed((f"{name}: {why}" for name, why in left.items()), _NAMED, between="; ")
        warn_user(f"{len(left)} quantized weights stay in float: {told}")
    return model


def _places(model: nn.Module, pattern: str) -> Iterator[tuple[str, list[Product]]]:
    """The quantized parameters of layers that match, by name, each with the products that read it."""
    readers: dict[int, dict[str, Product]] = {}
    for path, product in quantized_weights(model).items():
        readers.setdefault(id(product.parameter), {})[path] = product
    for name, parameter in model.named_parameters():
        held = readers.get(id(parameter), {})
        if any(matches(layer_of(path), pattern) for path in held):
            yield name, list(held.values())


def _store(weights: QuantizedWeights, name: str, readers: list[Product]) -> None:
    (weight, scaled), first = weights.scaled(name), readers[0].quantizer
    params = scaled.qparams(weight)
    if (codes := scaled.codes_of_weight(weight)) is None:
        made = StoredWeight.quantized(weight, params, scaled.spec)
    else:
        made = StoredWeight.of(codes, params, scaled.spec, weight.dtype)
    stored: Any = nn.Parameter(made, requires_grad=False)

    def finish() -> None:
        for product in readers:
            product.quantizer.set_qparams(params)
        # One copy of the scale: that of the first quantizer.
        stored.scale, stored.zero_point = first.qparams(stored)[:2]
        for product in readers:
            cast("StoringLayer", product.owner).put(product.name, stored)

    with restore_on_error(finish):  # forwards: an interrupt leaves each weight as it was, or as codes
        finish()


@unwraps
@torch.no_grad()
def store_floats(model: Model, pattern: str = "*") -> Model:
    """Keep weights that `store_codes` packed as floats with fixed codes again, in place; they stay frozen.

    Args:
        model: a prepared model; weights that are in float stay as they are.
        pattern: as for `store_codes`.

    >>> model = store_codes(prepare(nn.Sequential(nn.Linear(64, 64)), "int4_weight_only", skip=[]))
    >>> store_floats(model)[0].weight.dtype, type(model[0].weight)
    (torch.float32, <class 'torch.nn.parameter.Parameter'>)
    """
    check_model(model, "store_floats", "store_floats(model)")
    refuse_unprepared(model)
    for _, readers in _places(model, pattern):
        stored = readers[0].tensor
        if type(stored) is StoredWeight:
            _give_floats(stored, readers)
    return model


def _give_floats(stored: StoredWeight, readers: list[Product]) -> None:
    codes, parameter = stored.codes(), nn.Parameter(stored.values(), requires_grad=False)

    def finish() -> None:
        for product in readers:
            cast("StoringLayer", product.owner).put(product.name, parameter)
            product.quantizer.fix_codes(codes, parameter)

    with restore_on_error(finish):
        finish()
