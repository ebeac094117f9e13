"""The tensors of a folder in which each layer has some of its own: made one after the other while they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fakequant.delivery.folder import FileNames
from fakequant.delivery.format import Part
from fakequant.delivery.places import without_quantizers
from fakequant.errors import ExportError, QParamsError
from fakequant.model.state.codecs import TensorFile
from fakequant.model.state.snapshots import LazyTensor, QuantizedState, lazy
from fakequant.model.state.weight_codes import QuantizedWeights
from fakequant.nn.paths import module_at
from fakequant.text import listed


class Stored(NamedTuple):
    """A tensor of a file: which field of a weight it is, its shape and dtype, and how the one becomes the other.

    Fields are "codes", "scale" and "zero_point" of `WeightCodes`, "scale_codes" and "shared" of scales that have one of
    their own, and "values".
    """

    field: str
    shape: Sequence[int]
    dtype: torch.dtype
    store: Callable[[Tensor], Tensor] = lambda x: x
    load: Callable[[Tensor], Tensor] = lambda x: x


def written_in_float(parts: Sequence[Part], shared: Mapping[str, str]) -> list[Part]:
    """Parts whose weights are floats with the values of their codes: tables, and what is tied by `shared` names."""
    tied = {*shared, *shared.values()}
    return [part for part in parts if part.weight and (isinstance(part.module, nn.Embedding) or part.weight in tied)]


def undivided(model: nn.Module, parts: Sequence[Part]) -> dict[str, str]:
    """Why files cannot hold stacks of weights piece by piece: a scale that belongs to several pieces."""
    names, reasons = FileNames(model), dict[str, str]()
    for part in (one for one in parts if one.is_stack and "weight" in one.operands):
        grid = part.operands["weight"].spec.granularity
        high, wide = grid.block_shape(part.shape)[-2:]
        try:
            scales = names.split(part.weight, torch.empty(grid.group_shape(part.shape), device="meta"))
        except ValueError:  # of transformers, which cannot divide them
            scales = {}
        for key, piece in names.split(part.weight, torch.empty(part.shape, device="meta")).items():
            expected = (-(-piece.shape[-2] // high), -(-piece.shape[-1] // wide))
            is_cut = piece.shape[-2] < part.shape[-2] and piece.shape[-2] % high
            if is_cut or key not in scales or tuple(scales[key].shape[-2:]) != expected:
                why = f"files have {key} by itself, of {piece.shape[-2]} rows, and scales are of {high}"
                reasons.setdefault(part.name, why)
    return reasons


class LayeredWriter:
    """The tensors of a model by their names in files, of stacked experts one for each.

    Args:
        state: of the model.
        model: that is delivered.
        parts: of it.
        stored: for a layer, the shape [out, in] and dtype of a weight: its tensors by the ends of their names.

    Attributes:
        tensors: of the file.
        in_float: weights that are written as floats with the values of their codes: tables, which programs read as
            floats, and what is tied.
        pieces: for each coded weight the names that it has in files.
        under: of some weights, the scale of the tensor that is above the others.
        ignored: layers in float, by their names in files, and in the model where they differ: transformers looks for
            modules of the model.
    """

    def __init__(
        self,
        state: QuantizedState,
        model: nn.Module,
        parts: Sequence[Part],
        stored: Callable[[Part, Sequence[int], torch.dtype], Mapping[str, Stored]],
    ) -> None:
        self.state, self._model, self._names, self._stored = state, model, FileNames(model), stored
        self.in_float = [part.weight for part in written_in_float(parts, state.shared)]
        self.coded = {part.weight: part for part in parts if part.weight and part.weight not in self.in_float}
        self.tensors, self.ignored = TensorFile({}, {"format": "pt"}), list[str]()
        self.pieces: dict[str, list[str]] = {}
        self.under: dict[str, Tensor] = {}
        # The pieces of a stack are made from the whole: the last one is kept.
        self.field = lru_cache(maxsize=1)(self._field)
        own = (path for path, _, _ in state.quantizers())
        for name in without_quantizers([*state.tensors, *state.shared], own):
            tensor = lazy(state.tensors, state.shared.get(name, name))
            pieces = self._names.split(name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
            for key, piece in pieces.items():
                if name in self.coded:
                    self._add_codes(self.coded[name], key, piece)
                else:
                    self._add_float(name, key, piece, tensor)

    def _add_codes(self, part: Part, key: str, piece: Tensor) -> None:
        base = key.removesuffix(".weight")
        self.pieces.setdefault(part.weight, []).append(base)
        for end, one in self._stored(part, piece.shape, piece.dtype).items():
            self.tensors[f"{base}.{end}"] = self._piece(part.weight, key, one)

    def _add_float(self, name: str, key: str, piece: Tensor, tensor: LazyTensor) -> None:
        base, module = key.removesuffix(".weight"), module_at(self._model, name.rpartition(".")[0])
        if base != key and piece.dim() == 2 and not isinstance(module, nn.Embedding):
            self.ignored += dict.fromkeys(
                [base, name.removesuffix(".weight")] if piece.shape == tensor.shape else [base]
            )
        if name not in self.state.shared:
            is_whole = name not in self.in_float and piece.shape == tensor.shape
            plain = Stored("values", piece.shape, piece.dtype)
            self.tensors[key] = tensor if is_whole else self._piece(name, key, plain)

    def _piece(self, name: str, key: str, one: Stored) -> LazyTensor:
        return LazyTensor(tuple(one.shape), one.dtype, lambda: one.store(self.field(name, one.field)[key]))

    def _field(self, name: str, field: str) -> dict[str, Tensor]:
        """A field of a weight, or the values of a tensor, in the pieces that files hold."""
        state = self.state
        if field == "values":
            is_coded = name in self.in_float
            return self._names.split(name, state.weights[name].values() if is_coded else state.tensors[name])
        if field == "codes":
            return self._names.split(name, state.weights[name].codes)
        part = self.coded[name]
        spec = part.operands["weight"].spec
        groups = spec.granularity.group_shape(part.shape)
        if field == "zero_point" and spec.symmetric:
            return self._names.split(name, torch.zeros(groups, dtype=torch.int32))
        found = self._params(name, "zero_point" if field == "zero_point" else "scale")
        if field in ("scale_codes", "shared"):
            codes, shared = spec.scale.split(found, self.under.get(name))
            assert shared is not None
            found = codes if field == "scale_codes" else shared.expand(*groups[:-1], 1)
        return self._names.split(name, found)

    def _params(self, name: str, one: str) -> Tensor:
        """The scales or zero points [groups, axes kept] of a coded weight."""
        part, weights = self.coded[name], self.state.weights
        found = self.state.tensors.get(f"{part.paths['weight']}.{one}")
        if found is None:  # of a weight that no call has shown
            found = getattr(weights.params(name) if isinstance(weights, QuantizedWeights) else weights[name], one)
        return found.reshape(part.operands["weight"].spec.granularity.group_shape(part.shape))

    def merge_scales(self, names: Sequence[str]) -> None:
        """Write scales of several weights that are under a scale of the tensor all under the largest, unchanged.

        Raises:
            ExportError: their scales are not numbers under it.
        """
        spec, scales = self.coded[names[0]].operands["weight"].spec, [self._params(name, "scale") for name in names]
        if not spec.scale.is_under_a_tensor:
            return
        largest = torch.stack([x for x in map(spec.scale.shared_by, scales) if x is not None]).amax(0)
        try:
            for scale in scales:
                spec.scale.split(scale, largest)
        except QParamsError as error:
            raise ExportError(
                f"servers merge {listed(names)} into a matrix with a single scale of the tensor, and these have "
                "several: call fakequant.calibrate(model) before deliver, and before improve"
            ) from error
        self.under |= dict.fromkeys(names, largest)
