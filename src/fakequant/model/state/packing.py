"""The tensors of a checkpoint: all in float, or weights as codes with as many bits for each as its format has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fakequant.errors import CheckpointError, QParamsError, warn_user
from fakequant.model.state.manifest import Manifest, PackedEntry
from fakequant.model.state.snapshots import LazyTensor, LazyTensors, QuantizedState, lazy
from fakequant.model.state.weight_codes import WeightCodes, uncoded
from fakequant.nn.ranges.fixed_codes import KEY
from fakequant.numerics.formats.codes import count_of, integers_of, lowest_of, of_integers, patterns_of
from fakequant.numerics.formats.format import Format
from fakequant.numerics.scales import ScaleSpec
from fakequant.numerics.spec import QuantSpec
from fakequant.numerics.stored_scales import StoredScales
from fakequant.text import listed

_CHUNK = 1 << 18
"""Codes whose bits are spread at once, of a multiple of 8 so that each chunk ends with a byte."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.float16)}
_DTYPES["bfloat16"] = torch.bfloat16
_NAMED = 4


class Encoded(NamedTuple):
    """The tensors of a file, and what its manifest says of those that are codes."""

    tensors: dict[str, Tensor | LazyTensor]
    packed: dict[str, PackedEntry]


def encode(state: QuantizedState, *, packed: bool) -> Encoded:
    """The tensors that are written for a state.

    Args:
        state: what is written.
        packed: write weights as codes where they have some; one warning names those that stay in float.
    """
    weights = dict.fromkeys(state.weights) if packed else {}
    tensors: dict[str, Tensor | LazyTensor] = {
        name: lazy(state.tensors, name) for name in state.tensors if name not in weights
    }
    entries = {name: _coded(name, state.weights, tensors) for name in weights}
    if packed and (left := state.in_float):
        shown = listed((f"{name}: {reason}" for name, reason in left.items()), _NAMED, between="; ")
        total = len(left) + len(entries)
        warn_user(f"packed=True stores {len(left)} of {total} quantized weights in float: {shown}")
    return Encoded(tensors, entries)


def _coded(name: str, weights: Mapping[str, WeightCodes], tensors: dict[str, Tensor | LazyTensor]) -> PackedEntry:
    """Add the tensors of a weight that is written as codes, once: those of its quantizers are left out."""
    weight = uncoded(weights, name)
    for path, (key, value) in product(weight.quantizers, (("scale", weight.scale), ("zero_point", weight.zero_point))):
        if value is not None:
            tensors.setdefault(f"{path}.{key}", value)
        tensors.pop(f"{path}.{KEY}", None)
    path, packed = weight.quantizers[0], _packed_scales(weight)
    tensors |= {f"{path}.{key}": value for key, value in packed.items()}
    size = -(-prod(weight.shape) * weight.spec.format.bits // 8)
    tensors[name] = LazyTensor((size,), torch.uint8, partial(_codes_as_bytes, weights, name))
    return PackedEntry(path, list(weight.shape), str(weight.dtype).removeprefix("torch."), bool(packed))


def _codes_as_bytes(weights: Mapping[str, WeightCodes], name: str) -> Tensor:
    weight = weights[name]
    return _to_bytes(weight.codes.cpu(), weight.spec.format)


def _packed_scales(weight: WeightCodes) -> dict[str, Tensor]:
    """Scales, and offsets, in their own format, as bytes; nothing where they have none, or would lose something."""
    if weight.scale.dtype is not torch.float32 or weight.spec.scale.format is None:
        return {}
    try:
        return {key: _bytes_of(rule, getattr(weight, key)) for key, rule in _rules(weight.spec).items()}
    except QParamsError:
        return {}


def _rules(spec: QuantSpec) -> dict[str, ScaleSpec]:
    return {"scale": spec.scale} if spec.offset is None else {"scale": spec.scale, "zero_point": spec.offset}


def _bytes_of(rule: ScaleSpec, values: Tensor) -> Tensor:
    """Codes as their storage has them; those with shared scales as bits, and these behind them."""
    codes, shared = rule.split(values.cpu())
    if rule.format is None or shared is None:
        return codes.contiguous().view(torch.uint8)
    last = shared if rule.shared is None else rule.shared.to_storage(shared)
    return torch.cat([_to_bytes(codes, rule.format), last.contiguous().view(torch.uint8).flatten()])


def _of_bytes(rule: ScaleSpec, stored: Tensor | None, groups: tuple[int, ...], spec: QuantSpec) -> Tensor:
    """The values of `_bytes_of`, float32 [groups, axes kept]."""
    if stored is None or stored.dtype is not torch.uint8 or not stored.dim() or not str(rule):
        kind = "no scales" if stored is None else f"scales of {stored.dtype}"
        raise _BadCodes(f"have {kind}, which {spec} does not store")
    fmt, granularity = rule.format, rule.granularity
    if fmt is None or granularity is None:
        return rule.join(StoredScales(_viewed(stored, torch.float32 if fmt is None else fmt.storage)))
    size = -(-prod(groups) * fmt.bits // 8)
    codes, of_groups = _from_bytes(stored[:size], fmt, list(groups)), granularity.group_shape(groups)
    shared = _viewed(stored[size:].clone(), torch.float32 if rule.shared is None else rule.shared.storage)
    if shared.numel() != prod(of_groups):
        raise _BadCodes(f"have {shared.numel()} scales of scales, but {rule} has {prod(of_groups)}")
    last = shared if rule.shared is None else rule.shared.from_storage(shared, torch.float32)
    return rule.join(StoredScales(codes, last.reshape(of_groups)))


def _viewed(stored: Tensor, kind: torch.dtype) -> Tensor:
    if stored.shape[-1] % kind.itemsize:
        raise _BadCodes(f"have {stored.shape[-1]} bytes of scales, which are no numbers of {kind}")
    return stored.view(kind)


def decode(manifest: Manifest, tensors: LazyTensors, source: str) -> QuantizedState:
    """The state of a checkpoint, whose tensors are read at each access.

    Args:
        manifest: of the checkpoint.
        tensors: of its file.
        source: the path of the manifest, for messages.

    Raises:
        CheckpointError: an entry for codes that fits neither its tensor nor a static quantizer of the checkpoint.
    """
    found: dict[str, Tensor | LazyTensor] = {key: tensors.lazy[key] for key in tensors if key not in manifest.packed}
    entries: dict[str, tuple[PackedEntry, QuantSpec]] = {}
    specs = {path: held.tensor.spec for path, _, held in manifest.quantizers() if held.is_static}
    for name, entry in manifest.packed.items():
        spec = specs.get(entry.quantizer)
        damage = f"{source} is damaged: {name} has"
        if spec is None:
            raise CheckpointError(f"{damage} codes, but {entry.quantizer} has no static range")
        scale = found.get(f"{entry.quantizer}.scale")
        if scale is None:
            raise CheckpointError(f"{damage} codes, but {entry.quantizer} has no scale")
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{damage} dtype {entry.dtype!r:.80}, not one of a weight")
        try:
            _check_bytes(tensors.lazy.get(name), spec.format, entry.shape)
            if entry.packed_scale and isinstance(scale, LazyTensor):  # else of a weight before
                groups = spec.granularity.group_shape(entry.shape)
                for key, rule in _rules(spec).items():
                    path = f"{entry.quantizer}.{key}"
                    found[path] = _of_bytes(rule, tensors.get(path), groups, spec)
        except _BadCodes as error:
            raise CheckpointError(f"{source} is damaged: the codes of {name} {error}") from error
        entries[name] = entry, spec
    return QuantizedState.of(manifest, LazyTensors(found), PackedWeights(entries, tensors, LazyTensors(found), source))


class PackedWeights(Mapping[str, WeightCodes]):
    """Weights that a file holds as codes, made at each access and not kept.

    Args:
        entries: what the manifest says of each, and its specification.
        packed: the tensors of the file.
        tensors: those of the state, with the scales.
        source: the path of the manifest, for messages.
    """

    def __init__(
        self,
        entries: Mapping[str, tuple[PackedEntry, QuantSpec]],
        packed: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        source: str,
    ) -> None:
        self._entries, self._packed, self._tensors, self._source = entries, packed, tensors, source

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> WeightCodes:
        entry, spec = self._entries[name]
        try:
            return self._with(name, _from_bytes(self._packed[name], spec.format, entry.shape))
        except _BadCodes as error:
            raise CheckpointError(f"{self._source} is damaged: the codes of {name} {error}") from error

    def uncoded(self, name: str) -> WeightCodes:
        """A weight with codes on the meta device, without the time that its codes take."""
        entry, spec = self._entries[name]
        return self._with(name, torch.empty(entry.shape, dtype=spec.format.storage, device="meta"))

    def _with(self, name: str, codes: Tensor) -> WeightCodes:
        entry, spec = self._entries[name]
        params = self._tensors[f"{entry.quantizer}.scale"], self._tensors.get(f"{entry.quantizer}.zero_point")
        return WeightCodes(codes, *params, spec, tuple(entry.shape), _DTYPES[entry.dtype], (entry.quantizer,))


class _BadCodes(Exception):
    """Codes that are not what a manifest says."""


def _to_bytes(codes: Tensor, format: Format) -> Tensor:
    """Codes as bytes [ceil(codes * bits / 8)], the first code in the lowest bits."""
    patterns = patterns_of(codes.flatten(), format).numpy()
    return torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *_spread(patterns, format.bits)]))


def _spread(patterns: np.ndarray, bits: int) -> Iterable[np.ndarray]:
    places = np.arange(bits, dtype=np.int32)
    for start in range(0, len(patterns), _CHUNK):
        part = (patterns[start : start + _CHUNK, None] >> places) & 1
        yield np.packbits(part.astype(np.uint8).reshape(-1), bitorder="little")


def _check_bytes(stored: Tensor | LazyTensor | None, format: Format, shape: Sequence[int]) -> None:
    expected = -(-prod(shape) * format.bits // 8)
    if stored is None or stored.dtype is not torch.uint8 or tuple(stored.shape) != (expected,):
        got = "are missing" if stored is None else f"are {stored.dtype} of shape {list(stored.shape)}"
        raise _BadCodes(f"{got}, but {format} of shape {list(shape)} takes {expected} bytes")


def _from_bytes(stored: Tensor, format: Format, shape: Sequence[int]) -> Tensor:
    """The codes of `_to_bytes` in the storage of their format and a shape."""
    _check_bytes(stored, format, shape)
    elements, bits = prod(shape), format.bits
    patterns = np.empty(elements, np.int32)
    raw, step = stored.numpy(), _CHUNK * bits // 8
    places = np.arange(bits, dtype=np.int32)
    for number, start in enumerate(range(0, len(raw), step)):
        here = patterns[number * _CHUNK : (number + 1) * _CHUNK]
        part = np.unpackbits(raw[start : start + step], bitorder="little", count=len(here) * bits)
        here[:] = (part.reshape(-1, bits).astype(np.int32) << places).sum(1)
    if elements and int(patterns.max()) >= count_of(format):
        raise _BadCodes(f"hold {int(patterns.max())}, but {format} has {count_of(format)} codes")
    codes = torch.from_numpy(patterns + lowest_of(format)).to(integers_of(format))
    return of_integers(codes, format).reshape(shape)
