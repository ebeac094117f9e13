"""The named tensors of a delivery without files, as trainers hand them to a running server after each step."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from copy import copy
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from fakequant.data.arguments import check_model
from fakequant.delivery.delivering import files_of, parts_of
from fakequant.delivery.folder import CONFIG, FileNames
from fakequant.delivery.format import delivery_format, without_quantizers
from fakequant.errors import ConfigError, ExportError, nearest, shown
from fakequant.model.state.snapshots import LazyTensor, LazyTensors, QuantizedState, lazy, snapshot
from fakequant.model.state.weight_codes import QuantizedWeights
from fakequant.model.weights import merged_layers
from fakequant.nn.wrappers import accepts_wrapped_model

_CALL = "encode(model, 'compressed-tensors')"
_PATTERN = set("*?[")


class DeliveredTensors(LazyTensors):
    """The tensors of a delivery by their names in files; each is made when it is asked for, and not kept.

    Attributes:
        lazy: the tensors with shapes and dtypes, without making them.
        config: what `config.json` says of quantization.
        metadata: the texts in the header of the file.
    """

    def __init__(self, tensors: Mapping[str, Any], config: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
        super().__init__(tensors)
        self.config, self.metadata = dict(config), dict(metadata)

    def __repr__(self) -> str:
        return f"DeliveredTensors({len(self)} tensors, {self.config.get('quant_method', 'no configuration')})"


@accepts_wrapped_model
def encode(
    model: nn.Module, format: str, *, only: str | Iterable[str] | None = None, dtype: torch.dtype | None = None
) -> DeliveredTensors:
    """The tensors that `deliver` would write, by the names that programs load, without files.

    Their bits are those of the file. They are made one after the other: beside the model, memory is needed for a single
    weight. Use them before the model changes.

    Args:
        model: prepared; quantizers of weights that `calibrate` did not see take their scales from the present weights.
        format: "compressed-tensors", or another format of `fakequant.delivery.delivery_formats()` that is a folder.
        only: paths of modules or names of tensors, in the model or in files, or patterns of them (fnmatch), to which
            the tensors are limited; weights that servers merge, as q, k and v, come together. Default: all.
        dtype: to which weights and other tensors in float are rounded first: torch.bfloat16 where mixed precision, or a
            server that quantizes by itself, rounds them before the quantizer. Default: that of the model.

    Raises:
        ExportError: what the format cannot hold, each layer with the reason; a format that is no folder.
        CheckpointError: an unknown format, or a model that is not prepared.
        ConfigError: a name that the model does not have, or a dtype that is none of floats.

    >>> model = prepare(nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 8)), "fp8_block", skip=["1"])
    >>> for name, tensor in encode(model, "compressed-tensors", only=["0"]).items():
    ...     print(name, tensor.dtype, list(tensor.shape))
    0.weight torch.float8_e4m3fn [128, 256]
    0.weight_scale torch.float32 [1, 2]
    0.bias torch.float32 [128]
    """
    check_model(model, "encode", _CALL, ExportError)
    chosen = delivery_format(format)
    if chosen.suffix:
        raise ExportError(f"{chosen.name} is a single file, which has no tensors by themselves; write it by deliver")
    state = snapshot(model)
    if dtype is not None:
        state = _rounded(state, dtype)
    files = files_of(state, model, chosen)
    tensors: dict[str, Tensor | LazyTensor] = {}
    metadata: dict[str, str] = {}
    for name, content in files.items():
        if name.endswith(".safetensors") and isinstance(content, Mapping):
            tensors |= cast("Any", content)
            metadata |= getattr(content, "metadata", {})
    if only is not None:
        given = [only] if isinstance(only, str) or not isinstance(only, Iterable) else [*only]
        wanted = _wanted(state, model, given, [*tensors])
        tensors = {name: one for name, one in tensors.items() if name in wanted}
    config = files.get(CONFIG, b"{}")
    assert isinstance(config, bytes)
    return DeliveredTensors(tensors, json.loads(config).get("quantization_config", {}), metadata)


def _rounded(state: QuantizedState, dtype: torch.dtype) -> QuantizedState:
    """A state whose tensors in float, without those of quantizers, are rounded to a dtype before they are quantized."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigError(f"dtype is that of the weights in a server, such as torch.bfloat16, got {shown(dtype)}")
    own = {*without_quantizers(state.tensors, [path for path, _, _ in state.quantizers()])}

    def rounded(name: str) -> LazyTensor:
        one = lazy(state.tensors, name)
        if name not in own or not one.dtype.is_floating_point or one.dtype is dtype:
            return one
        return LazyTensor(one.shape, dtype, lambda: one.make().to(dtype))

    weights = state.weights
    assert isinstance(weights, QuantizedWeights)
    weights = copy(weights)
    weights.dtype = dtype
    return replace(state, tensors=LazyTensors({name: rounded(name) for name in state.tensors}), weights=weights)


def _wanted(state: QuantizedState, model: nn.Module, only: Collection[str], held: Collection[str]) -> set[str]:
    """The names in files, of `held`, that some names and patterns say.

    Raises:
        ConfigError: one says none.
    """
    if wrong := [one for one in only if not isinstance(one, str)]:
        raise ConfigError(f"only= takes names of layers or tensors, got {shown(wrong[0])}")
    exact, patterns, used = {*only}, [one for one in only if _PATTERN & {*one}], set[str]()

    def says(name: str) -> bool:
        names = _above(name)
        hits = exact.intersection(names).union(one for one in patterns if any(fnmatchcase(x, one) for x in names))
        used.update(hits)
        return bool(hits)

    parts = [part for part in parts_of(model, state) if "weight" in part.operands and part.weight]
    places = _places(state, model, {part.weight for part in parts}, held)
    found = {name for name in held if says(name)}.union(*(own for name, own in places.items() if says(name)))
    if left := [one for one in only if one not in used]:
        known = [*dict.fromkeys(path for name in places for path in _above(name)[-2:])]
        raise ConfigError(f"only= has {left[0]!r:.80}, and no layer or tensor is called so{nearest(left[0], known)}")
    # A server that merges layers takes all of them: vLLM 0.32 computes NaN where a part of such a weight was loaded.
    weights = {name.removesuffix(".weight"): own for name, own in places.items() if name.endswith(".weight")}
    merged = [set[str]().union(*map(weights.__getitem__, group)) for group in merged_layers(weights)]
    return found.union(*(own for own in merged if own & found))


def _above(name: str) -> list[str]:
    """The paths of the modules around a tensor, and its name."""
    return [*accumulate(name.split("."), "{}.{}".format)]


def _places(
    state: QuantizedState, model: nn.Module, coded: Collection[str], held: Collection[str]
) -> dict[str, set[str]]:
    """For each tensor of a model the names in files, of `held`, of all that stands for it."""
    names, by_layer = FileNames(model), dict[str, set[str]]()
    for name in held:
        by_layer.setdefault(name.rpartition(".")[0], set()).add(name)
    found: dict[str, set[str]] = {}
    for name in without_quantizers([*state.tensors, *state.shared], [path for path, _, _ in state.quantizers()]):
        first = state.shared.get(name, name)
        one = lazy(state.tensors, first)
        found[name] = {*names.split(first, torch.empty(one.shape, dtype=one.dtype, device="meta"))}
    others = {key for name, keys in found.items() if state.shared.get(name, name) not in coded for key in keys}
    for name, keys in found.items():
        layers = {key.rpartition(".")[0] for key in keys} if state.shared.get(name, name) in coded else set()
        found[name] = keys.union(*(by_layer.get(path, ()) for path in layers)).intersection(held) - (others - keys)
    return found
