"""Read a GGUF file: its tensors by their names in a model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fakequant.delivery.gguf.activations import has_cache, inputs_for
from fakequant.delivery.gguf.architecture import MADE, GgufNames, architecture_of, check_settings
from fakequant.delivery.gguf.blocks import LAYOUTS, Array
from fakequant.delivery.gguf.file import GgufFile, GgufTensor, require_gguf
from fakequant.delivery.gguf.lattices import from_blocks, spec_of
from fakequant.delivery.places import float_names, places_of
from fakequant.errors import CheckpointError
from fakequant.model.state.plan import LayerEntry, QuantizerEntry, SitesEntry
from fakequant.model.state.snapshots import Made, QuantizedState, shared_names
from fakequant.model.state.stored_sites import sites_entry
from fakequant.model.state.weight_codes import WeightCodes
from fakequant.model.tensor_config import TensorConfig
from fakequant.nn.paths import join
from fakequant.nn.quantizer import Quantizer
from fakequant.numerics.spec import QuantSpec
from fakequant.text import listed

REST = "fakequant.rest."
"""The prefix of a key. A file holds some tensors with 1 added; the value is what rounding took from that sum."""


class NamedTensors:
    """The tensors of a file by their names in a model."""

    def __init__(self, path: Path, model: nn.Module) -> None:
        self.file, self.model, architecture = GgufFile(path), model, architecture_of(model)
        self.names, self.shared, self.places = (
            GgufNames(architecture, model.config),
            shared_names(model),
            places_of(model),
        )
        if (said := self.file.metadata.get("general.architecture")) != architecture.name:
            raise CheckpointError(f"{path} is of the architecture {said!r:.80}, and the model of {architecture.name!r}")
        state = model.state_dict()
        self.like = {name: state[name] for name in float_names(model) if name not in self.shared}
        self.stored = {name: self._find(name, tuple(one.shape)) for name, one in self.like.items()}
        if left := sorted(
            {*self.file.tensors} - {*MADE, *(one for name in self.stored for one in self.names.of(name))}
        ):
            raise CheckpointError(f"{path} has tensors for which the model has no place: {listed(left)}")
        self.coded = [name for name, one in self.stored.items() if one.kind in LAYOUTS and name in self.places]
        check_settings(self.file, architecture, model.config)

    def _find(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        places = self.names.of(name)
        stored = self.names.shape(name, shape)
        if len(places) > 1:
            stored = (*shape[:-2], shape[-2] // len(places), shape[-1])
        for place in places:
            if place not in self.file.tensors:
                raise CheckpointError(f"{self.file.path} lacks {place}, which is {name} in the model")
            if (found := self.file.tensors[place]).shape != stored:
                raise CheckpointError(
                    f"{self.file.path}: {place} is of shape {list(found.shape)}, and {name} of {list(stored)}"
                )
        first, *others = (self.file.tensors[place] for place in places)
        if any(one.kind != first.kind for one in others):
            raise CheckpointError(f"{self.file.path}: {listed(places)} are of several types, and {name} has one")
        if not others:
            return GgufTensor(first.kind, shape, lambda: first.make().reshape(*shape[:-1], -1))
        return GgufTensor(first.kind, shape, lambda: np.concatenate([one.make() for one in (first, *others)], axis=-2))

    def state(self) -> QuantizedState:
        """The state in the file."""
        layers: dict[str, LayerEntry] = {}
        for name in self.coded:
            entry = QuantizerEntry(TensorConfig(spec_of(self.stored[name].kind)))
            for place in self._readers(name):
                held = {place.attribute: entry, **self._inputs(place, entry.tensor.spec, self.stored[name].shape)}
                layers.setdefault(place.path, LayerEntry(place.kind, quantizers={})).quantizers.update(held)
        weights = Made({name: partial(self._weight, name) for name in self.coded})
        tensors = Made({name: partial(self._tensor, name) for name in self.stored if name not in weights})
        sites = sites_entry(self.model) if has_cache(self.model) else SitesEntry()  # an option of llama.cpp's
        return QuantizedState(layers=layers, shared=self.shared, tensors=tensors, weights=weights, sites=sites)

    def _readers(self, name: str) -> list[Any]:
        """The modules of a model that hold a weight."""
        names = [name, *(tied for tied, first in self.shared.items() if first == name)]
        return [self.places[one] for one in names if one in self.places]

    def _inputs(self, place: Any, weight: QuantSpec, shape: tuple[int, ...]) -> dict[str, QuantizerEntry]:
        """The quantizer of a model's inputs where it is llama.cpp's: the type of the weight in the file implies it."""
        own = getattr(self.model.get_submodule(place.path), place.input, None) if place.input else None
        config = inputs_for(weight, shape)
        same = isinstance(own, Quantizer) and own.quantizes and TensorConfig(own.spec, own.dynamic) == config
        return {place.input: QuantizerEntry(config)} if same else {}

    def _rows(self, name: str) -> Array:
        """The content of a tensor, in the order of the model's rows."""
        raw = self.stored[name].make()
        if (order := self.names.rows(name, *raw.shape[:1])) is None:
            return raw
        back = np.empty_like(raw)
        back[order] = raw
        return back

    def _weight(self, name: str) -> WeightCodes:
        try:
            found = from_blocks(self.stored[name].kind, self._rows(name), self.like[name].dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{self.file.path}: {listed(self.names.of(name))}: {error}") from error
        return replace(found, quantizers=tuple(join(one.path, one.attribute) for one in self._readers(name)))

    def _tensor(self, name: str) -> Tensor:
        """A tensor without codes; if its type is no lattice, the package gguf gives the values."""
        kind = self.stored[name].kind
        if kind not in ("F32", "F16", "BF16"):
            return self.theirs(name)
        raw = self._rows(name)
        if shift := self.names.shift(name):
            rest = self.file.metadata.get(REST + self.names.of(name)[0], np.float32(0))
            raw = raw - np.float32(shift) + rest
        values = torch.from_numpy(np.array(raw.view(np.int16) if kind == "BF16" else raw))
        return (values.view(torch.bfloat16) if kind == "BF16" else values).to(self.like[name].dtype)

    def theirs(self, name: str) -> Tensor:
        """The values that the package gguf reads, once rounded to the dtype of the model."""
        gguf = require_gguf()
        values = gguf.quants.dequantize(self._rows(name), gguf.GGMLQuantizationType[self.stored[name].kind])
        return torch.from_numpy(values).reshape(self.stored[name].shape).to(self.like[name].dtype)
