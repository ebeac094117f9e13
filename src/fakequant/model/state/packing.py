"""Weights as codes in a checkpoint: as many bits for each as its format has, and back to the same values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fakequant.distributed import is_sharded
from fakequant.errors import CheckpointError, warn_user
from fakequant.functional import dequantize
from fakequant.model.state.manifest import LayerEntry, PackedEntry, QuantizerEntry
from fakequant.model.weights import quantized_weights
from fakequant.nn.paths import join
from fakequant.nn.quantizer import Mode, Quantizer
from fakequant.numerics.format import Format
from fakequant.numerics.qparams import QParams
from fakequant.ops import library

_CHUNK = 1 << 18
"""Codes whose bits are spread at once, of a multiple of 8 so that each chunk ends with a byte."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.float16)}
_DTYPES["bfloat16"] = torch.bfloat16
_NAMED = 4
_Held = list[tuple[str, Quantizer]]


class Packed(NamedTuple):
    """The tensors of a checkpoint, and what its manifest says of those that are codes."""

    tensors: dict[str, Tensor]
    entries: dict[str, PackedEntry]


def pack(model: nn.Module, tensors: Mapping[str, Tensor], shared: Mapping[str, str]) -> Packed:
    """Replace the quantized weights of a state dict by their codes, and their scales by those of their format.

    A weight without scales yet gets those of its next call. One stays in float where codes would not give its layers
    the same bits; one warning names these.

    Args:
        model: the prepared model.
        tensors: its state dict without tied names.
        shared: tied names, each with its name in `tensors`.
    """
    by_parameter: dict[int, _Held] = {}
    for path, weight in quantized_weights(model).items():
        by_parameter.setdefault(id(weight.parameter), []).append((path, weight.quantizer))
    tied = _grouped((first, other) for other, first in shared.items())
    packed, entries, left = dict(tensors), {}, {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        held = by_parameter.get(id(parameter), [])
        if name not in packed or not held:
            continue
        names = [name, *tied.get(name, [])]
        reason = _float_reason(held, names, parameter)
        fixed = [] if reason else [_fixed(quantizer, parameter) for _, quantizer in held]
        if reason := reason or _codes_reason(fixed, parameter):
            left[name] = reason
            continue
        path, quantizer = held[0][0], fixed[0]
        coded = quantizer.codes(parameter)
        assert coded is not None, "a weight with NaN stays in float, see `_codes_reason`"
        codes = coded[0]
        for (place, own), user in zip(held, fixed, strict=True):
            if user is not own:
                packed |= {f"{place}.{key}": value for key, value in user.named_buffers()}
        packed[name] = _to_bytes(codes.cpu(), quantizer.spec.format)
        dtype = str(parameter.dtype).removeprefix("torch.")
        entries[name] = PackedEntry(path, list(parameter.shape), dtype, False)
    weights = quantized_weights(model)
    for path, names in _grouped((entry.quantizer, name) for name, entry in entries.items()).items():
        if _pack_scale(packed, path, weights[path].quantizer):
            entries |= {name: replace(entries[name], packed_scale=True) for name in names}
    _warn(left, len(entries))
    return Packed(packed, entries)


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The second items of pairs, grouped by the first."""
    found: dict[str, list[str]] = {}
    for first, second in pairs:
        found.setdefault(first, []).append(second)
    return found


def _float_reason(held: _Held, names: list[str], parameter: Tensor) -> str:
    """Why a weight stays in float, or an empty text."""
    if len(held) != len(names):
        return "a layer without a quantizer reads it, too"
    if is_sharded(parameter):
        return "it is sharded over processes"
    if parameter.is_meta:
        return "it is offloaded"
    for _, quantizer in held:
        if quantizer.mode is not Mode.QUANTIZE:
            return "its quantizer is switched off"
        if quantizer.learned is not None:
            return "its range is learned; fakequant.qat.set_scales(model, fakequant.qat.Scales.FIXED) fixes it"
        if quantizer.dynamic:
            return "its range is dynamic"
        if not quantizer.calibrated and not bool(parameter.isfinite().all()):
            return "it holds NaN or inf"
    return ""


@torch.no_grad()
def _fixed(quantizer: Quantizer, weight: Tensor) -> Quantizer:
    """A quantizer with scales: that of a weight, or while it has none, another with those of its next call."""
    if quantizer.calibrated:
        return quantizer
    fixed = Quantizer(quantizer.spec, kind=quantizer.kind)
    fixed.freeze(weight)
    return fixed


@torch.no_grad()
def _codes_reason(fixed: list[Quantizer], parameter: Tensor) -> str:
    """Why the codes of a weight cannot stand for it, or an empty text."""
    first = fixed[0]
    wanted, found = first(parameter), first.codes(parameter)
    if found is None:
        return "it holds NaN"
    values = dequantize(found[0], found[1], first.spec, dtype=parameter.dtype)
    # Not `quantizer(values)`: the quantizer compares the weight of every call with the last one.
    again = [library.fake_quantize(values, one.qparams(values), one.spec) for one in fixed]
    same = all(torch.equal(one, quantizer(parameter)) for one, quantizer in zip(again, fixed, strict=True))
    return "" if same and torch.equal(values, wanted) else "its codes do not give the same values"


def _pack_scale(packed: dict[str, Tensor], path: str, quantizer: Quantizer) -> bool:
    """Store the scale in its own format where that loses nothing, and say whether it was."""
    key, format = f"{path}.scale", quantizer.spec.scale.format
    if format is None or key not in packed or quantizer.spec.scale.granularity is not None:
        return False
    scale = packed[key]
    codes = format.to_storage(format.round(scale))
    if scale.dtype is not torch.float32 or not torch.equal(format.from_storage(codes, scale.dtype), scale):
        return False
    packed[key] = codes.contiguous().view(torch.uint8)
    return True


def _warn(left: Mapping[str, str], packed: int) -> None:
    if left:
        shown = "; ".join(f"{name}: {reason}" for name, reason in list(left.items())[:_NAMED])
        more = f"; and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        warn_user(f"packed=True stores {len(left)} of {len(left) + packed} quantized weights in float: {shown}{more}")


class Unpacked(NamedTuple):
    """Tensors whose packed weights are codes in their shapes, and what gives these their values."""

    tensors: dict[str, Tensor]
    weights: dict[str, tuple[PackedEntry, QuantizerEntry]]

    def values(self) -> dict[str, Tensor]:
        """All tensors, weights with their values; call it after the scales are checked."""
        found = dict(self.tensors)
        for name, (entry, held) in self.weights.items():
            scale, zero_point = (self.tensors.get(f"{entry.quantizer}.{key}") for key in ("scale", "zero_point"))
            assert scale is not None
            groups = held.tensor.spec.granularity.group_shape(tuple(entry.shape))
            zero_point = None if zero_point is None else zero_point.to(torch.int32).reshape(groups)
            params = QParams(scale.reshape(groups), zero_point)
            found[name] = dequantize(found[name], params, held.tensor.spec, dtype=_DTYPES[entry.dtype])
        return found


def unpack(
    packed: Mapping[str, PackedEntry], tensors: Mapping[str, Tensor], layers: Mapping[str, LayerEntry], source: str
) -> Unpacked:
    """The codes of a checkpoint in the shapes of their weights, checked.

    Raises:
        CheckpointError: an entry that fits neither its tensor nor a static quantizer of the checkpoint.
    """
    found, weights = dict(tensors), {}
    quantizers = {join(path, key): held for path, layer in layers.items() for key, held in layer.quantizers.items()}
    for name, entry in packed.items():
        held = quantizers.get(entry.quantizer)
        if held is None or held.learned is not None or held.tensor.dynamic:
            raise CheckpointError(f"{source} is damaged: {name} has codes, but {entry.quantizer} has no static range")
        format = held.tensor.spec.format
        try:
            found[name] = _from_bytes(tensors.get(name), format, entry.shape)
            if entry.packed_scale and f"{entry.quantizer}.scale" in found:
                key = f"{entry.quantizer}.scale"
                found[key] = _unpacked_scale(tensors[key], held)
        except _BadCodes as error:
            raise CheckpointError(f"{source} is damaged: the codes of {name} {error}") from error
        if f"{entry.quantizer}.scale" not in found:
            raise CheckpointError(f"{source} is damaged: {name} has codes, but {entry.quantizer} has no scale")
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{source} is damaged: {name} has dtype {entry.dtype!r:.80}, not one of a weight")
        weights[name] = entry, held
    return Unpacked(found, weights)


class _BadCodes(Exception):
    """Codes that are not what a manifest says."""


def _unpacked_scale(stored: Tensor, held: QuantizerEntry) -> Tensor:
    format = held.tensor.spec.scale.format
    if format is None or stored.dtype is not torch.uint8:
        raise _BadCodes(f"have scales of {stored.dtype}, which {held.tensor.spec} does not store")
    return format.from_storage(stored.view(format.storage), torch.float32)


def _lowest(format: Format) -> int:
    """The lowest code of an integer format, which is subtracted so that patterns are not negative; else 0."""
    is_integer = format.grid.table is None and format.grid.mantissa_bits is None
    return int(format.quant_min) if is_integer else 0


def _count(format: Format) -> int:
    """How many patterns a format has."""
    if format.grid.table is not None:
        return len(format.grid.table.values)
    return int(format.quant_max - format.quant_min) + 1 if format.grid.mantissa_bits is None else 1 << format.bits


def _to_bytes(codes: Tensor, format: Format) -> Tensor:
    """Codes as bytes [ceil(codes * bits / 8)], the first code in the lowest bits."""
    flat = codes.contiguous().flatten()
    flat = flat.view(torch.uint8) if flat.dtype.is_floating_point and flat.element_size() == 1 else flat
    # A float of 16 bits has its sign in that of the int16 that stores it: only its bits count.
    patterns = ((flat.to(torch.int32) - _lowest(format)) & (1 << format.bits) - 1).numpy()
    return torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *_spread(patterns, format.bits)]))


def _spread(patterns: np.ndarray, bits: int) -> Iterable[np.ndarray]:
    places = np.arange(bits, dtype=np.int32)
    for start in range(0, len(patterns), _CHUNK):
        part = (patterns[start : start + _CHUNK, None] >> places) & 1
        yield np.packbits(part.astype(np.uint8).reshape(-1), bitorder="little")


def _from_bytes(stored: Tensor | None, format: Format, shape: list[int]) -> Tensor:
    """The codes of `_to_bytes` in the storage of their format and a shape."""
    elements, bits = prod(shape), format.bits
    expected = -(-elements * bits // 8)
    if stored is None or stored.dtype is not torch.uint8 or stored.dim() != 1 or len(stored) != expected:
        got = "are missing" if stored is None else f"are {stored.dtype} of shape {list(stored.shape)}"
        raise _BadCodes(f"{got}, but {format} of shape {shape} takes {expected} bytes")
    patterns = np.empty(elements, np.int32)
    raw, step = stored.numpy(), _CHUNK * bits // 8
    places = np.arange(bits, dtype=np.int32)
    for number, start in enumerate(range(0, expected, step)):
        here = patterns[number * _CHUNK : (number + 1) * _CHUNK]
        part = np.unpackbits(raw[start : start + step], bitorder="little", count=len(here) * bits)
        here[:] = (part.reshape(-1, bits).astype(np.int32) << places).sum(1)
    if elements and int(patterns.max()) >= _count(format):
        raise _BadCodes(f"hold {int(patterns.max())}, but {format} has {_count(format)} codes")
    codes = torch.from_numpy(patterns + _lowest(format))
    floats = format.storage.is_floating_point
    return (codes.to(torch.uint8).view(format.storage) if floats else codes.to(format.storage)).reshape(shape)
