"""Store weights as codes, or replace weights by their quantized values and remove their quantizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fakequant.data.arguments import check_model, refuse_unprepared
from fakequant.distributed import refuse_sharded
from fakequant.errors import ConfigError, warn_renamed, warn_user
from fakequant.memory import separate
from fakequant.model.state.snapshots import shared_names
from fakequant.model.state.weight_codes import QuantizedWeights
from fakequant.model.weights import quantized_weights, warn_stale_scales
from fakequant.nn.paths import layer_of, matches
from fakequant.nn.products import Product
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Mode
from fakequant.nn.stored import StoredWeight, StoringLayer
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.restore import restore_on_error
from fakequant.text import listed

Model = TypeVar("Model", bound=nn.Module)
_NAMED = 4


@accepts_wrapped_model
@torch.no_grad()
def store_codes(model: Model, pattern: str = "*") -> Model:
    """Replace quantized weights by packed codes and scales, in place, for training with frozen weights.

    Outputs and gradients stay the same to the bit. A layer unpacks its weight for its product, and again in the
    backward pass, so that a stored weight takes the memory of its codes and scales. The weights are frozen: a write to
    a weight is refused. Scales are fixed; a weight without fixed scales gets those that its next call would compute.

    Args:
        model: a prepared model; a warning names the quantized weights that stay in float, with the reasons.
        pattern: a pattern of the layers' paths in the model; `*` matches any characters (fnmatch).

    Raises:
        ConfigError: the model has no quantizers, no quantized weight matches, or weights are sharded or offloaded.

    >>> model = prepare(nn.Sequential(nn.Linear(64, 64)), "int4_weight_only", skip=[])
    >>> before = model(torch.ones(64))
    >>> torch.equal(store_codes(model)(torch.ones(64)), before), model[0].weight.packed.shape
    (True, torch.Size([64, 32]))
    """
    check_model(model, "store_codes", "store_codes(model)")
    refuse_unprepared(model)
    refuse_sharded(model, "store the codes of")
    shared = shared_names(model)
    weights, places = QuantizedWeights(model, shared, quantized_weights(model)), dict(_places(model, pattern))
    found = weights.in_float.items()
    left = {name: why for name, why in found if name in places or matches(layer_of(name), pattern)}
    if not (places or left):
        raise ConfigError(f"no quantized weight matches {pattern!r}; correct the pattern")
    for name, readers in places.items():
        if name not in left and not all(isinstance(one.owner, QuantizedLayer) for one in readers):
            left[name] = "a function or a submodule of its layer reads it"
    for name, readers in places.items():
        if name not in left and type(readers[0].tensor) is not StoredWeight:
            _store(weights, name, readers)
    if left:
        told = listed((f"{name}: {why}" for name, why in left.items()), _NAMED, between="; ")
        warn_user(f"{len(left)} quantized weights stay in float: {told}")
    return model


def _places(model: nn.Module, pattern: str) -> Iterator[tuple[str, list[Product]]]:
    """The name of each quantized parameter whose layer matches `pattern`, and the products that read the parameter."""
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


@accepts_wrapped_model
@torch.no_grad()
def store_floats(model: Model, pattern: str = "*") -> Model:
    """Unpack to floats, in place, the weights that `store_codes` packed; codes stay fixed, and weights stay frozen.

    Args:
        model: a prepared model; weights that are in float are not changed.
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


@accepts_wrapped_model
def bake_weights(model: Model) -> Model:
    """Replace every quantized weight by its quantized values, in place, and remove its quantizer.

    The model computes the same as before, without quantizing weights again in every pass. Only recurrent layers without
    other quantizers may change in their last bits, because torch's kernel computes them from then on. A weight that
    several layers share, like that of the embedding and the head of a language model, is replaced once for all of them.
    A parameter that a model's own `forward` passes to functions is replaced if a single call reads the parameter;
    otherwise the parameter keeps its quantizers. An interrupt (Ctrl-C) is raised after the last weight was replaced.

    Raises:
        ConfigError: the model has no quantizers; a weight's quantizer is off; two layers, which are named, share a
            weight and quantize it in different ways; or a weight is computed from other tensors, or sharded over
            processes. Nothing is changed.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8_WEIGHT_ONLY)
    >>> before = model(torch.ones(1, 4))
    >>> torch.equal(bake_weights(model)(torch.ones(1, 4)), before)
    True
    """
    check_model(model, "bake_weights", "bake_weights(model)")
    refuse_unprepared(model)
    refuse_sharded(model, "bake the weights of")
    store_floats(model)
    weights = quantized_weights(model)
    for name, weight in weights.items():
        path = layer_of(name)
        if weight.quantizer.mode is not Mode.QUANTIZE:
            raise ConfigError(
                f"{path}: the mode of the weight quantizer is {weight.quantizer.mode.value!r}; set it to Mode.QUANTIZE"
            )
        own = weight.owner._buffers.get(weight.name) if weight.parameter is None else weight.parameter
        if own is None or weight.tensor is not own:
            raise ConfigError(
                f"{path}: the weight is computed from other tensors (weight_norm, pruning, a parametrization), so that "
                "it cannot be replaced; make it a parameter first, as by prune.remove or remove_parametrizations"
            )
    by_tensor: dict[int, dict[str, Product | None]] = {id(weight.tensor): {} for weight in weights.values()}
    by_place = {(weight.owner, id(weight.tensor)): weight for weight in weights.values()}
    for path, module in model.named_modules():
        for tensor in {id(p) for p in (*module._parameters.values(), *module._buffers.values()) if p is not None}:
            if tensor in by_tensor:
                by_tensor[tensor][path] = by_place.get((module, tensor))
    groups = list(by_tensor.values())
    with torch.no_grad():
        for users in groups:
            first = next(name for name, weight in users.items() if weight is not None)
            for name, weight in users.items():
                one, other, difference = users[first], weight, None
                if one is None or other is None:
                    difference = "only one of them quantizes it"
                elif one.quantizer.spec != other.quantizer.spec:
                    difference = f"they quantize it as {one.quantizer.spec} and as {other.quantizer.spec}"
                elif one is not other and not torch.equal(one.quantizer(one.tensor), other.quantizer(other.tensor)):
                    difference = f"they quantize it as {one.quantizer.spec} with different scales"
                if difference is not None:
                    pair = " and ".join(other for other in users if other in (first, name))
                    raise ConfigError(
                        f"the layers {pair} share one weight, but {difference}, so that no replacement of the weight "
                        "fits both; quantize the weight alike in both layers, or give each layer a copy: "
                        "layer.weight = nn.Parameter(layer.weight.detach().clone())"
                    )
        warn_stale_scales(model)
    _bake_all([[weight for weight in users.values() if weight is not None] for users in groups])
    return model


def fold(model: Model) -> Model:
    """Deprecated name of `bake_weights`, which the next release removes.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as said:
    ...     warnings.simplefilter("always")
    ...     model = fold(prepare(nn.Sequential(nn.Linear(64, 4)), presets.INT8_WEIGHT_ONLY))
    >>> print(said[0].message)
    fakequant.fold is now called fakequant.bake_weights, and the next release removes the old name
    """
    warn_renamed("fakequant.fold", "fakequant.bake_weights")
    return bake_weights(model)


@torch.no_grad()
def _bake_all(groups: list[list[Product]]) -> None:
    """Quantize the tensor that each group of products shares, in place; an interrupt waits for the last group."""
    begun: dict[int, Tensor] = {}
    separate(weights[0].tensor for weights in groups)

    def finish() -> None:
        for index, weights in enumerate(groups):
            if all(weight.quantizer is None for weight in weights):
                continue
            if index not in begun:
                begun.clear()
                begun[index] = weights[0].quantizer(weights[0].tensor)
            weights[0].tensor.copy_(begun[index])
            for weight in weights:
                setattr(weight.layer, weight.attribute, None)

    with restore_on_error(finish):  # forwards, because keeping all float weights would take their memory once more
        finish()
