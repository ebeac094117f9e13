"""The specifications of GGUF's types: find the type for a weight, and convert its codes to blocks and back."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fakequant.delivery.gguf.blocks import LAYOUTS, Array, pack, unpack
from fakequant.errors import CheckpointError, ShapeError
from fakequant.model.state.weight_codes import WeightCodes
from fakequant.numerics.scales import StoredScales
from fakequant.numerics.spec import QuantSpec

_SPECS = {
    "TQ1_0": "int2_narrow per_block(-1:256) scale=float16",
    "TQ2_0": "int2_narrow per_block(-1:256) scale=float16",
    "Q2_K": "uint2 per_block(-1:16) scale=uint4@per_block(-1:16)/float16 offset=uint4@per_block(-1:16)/float16",
    "Q3_K": "int3 per_block(-1:16) scale=int6@per_block(-1:16)/float16",
    "IQ4_XS": "iq4_nl per_block(-1:32) scale=int6@per_block(-1:8)/float16",
    "MXFP4": "float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor",
    "Q4_K": "uint4 per_block(-1:32) scale=uint6@per_block(-1:8)/float16 offset=uint6@per_block(-1:8)/float16",
    "IQ4_NL": "iq4_nl per_block(-1:32) scale=float16:signed",
    "Q4_0": "int4 per_block(-1:32) scale=float16:signed",
    "Q4_1": "uint4 per_block(-1:32) scale=float16 offset=float16",
    "Q5_K": "uint5 per_block(-1:32) scale=uint6@per_block(-1:8)/float16 offset=uint6@per_block(-1:8)/float16",
    "Q5_0": "int5 per_block(-1:32) scale=float16:signed",
    "Q5_1": "uint5 per_block(-1:32) scale=float16 offset=float16",
    "Q6_K": "int6 per_block(-1:16) scale=int8@per_block(-1:16)/float16",
    "Q8_0": "int8 per_block(-1:32) scale=float16",
}
"""The types, the smallest first: the first that holds a weight is taken."""
_INSTEAD = {"IQ4_XS": "IQ4_NL", **dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0")}
_INSTEAD |= {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What llama.cpp stores where rows are no whole blocks of 256."""


@cache
def spec_of(kind: str) -> QuantSpec:
    """The specification of a type."""
    return QuantSpec.parse(_SPECS[kind])


def for_rows(kind: str, columns: int) -> str:
    """The type that llama.cpp stores instead, where rows are no whole blocks of a type."""
    return kind if columns % LAYOUTS[kind].weights == 0 else _INSTEAD.get(kind, kind)


def kind_of(spec: QuantSpec, shape: tuple[int, ...]) -> str:
    """The smallest type that holds weights with a specification and a shape.

    Raises:
        ShapeError: no type holds them; the message is the reason.
    """
    found = [kind for kind in _SPECS if _holds(spec_of(kind), spec)]
    if not found:
        raise ShapeError(f"no type of GGUF is {spec}")
    for kind in found:
        if shape[-1] % LAYOUTS[kind].weights == 0:
            return kind
    instead = _INSTEAD.get(found[0], "F16")
    raise ShapeError(
        f"its rows of {shape[-1]} are no whole blocks of {LAYOUTS[found[0]].weights}, as {found[0]} has; llama.cpp "
        f"stores such weights as {instead}{f', the preset GGUF_{instead}' if instead in _SPECS else ', in float'}"
    )


def _holds(own: QuantSpec, spec: QuantSpec) -> bool:
    """Whether a type's specification `own` has all codes and scales of `spec`, with the same values."""
    if not spec.arithmetic.is_linear or _form(spec) != _form(own):
        return False
    format, all_of_own = spec.format, own.format
    if not (format.has_zero_point and all_of_own.has_zero_point):
        return format == all_of_own
    within = all_of_own.quant_min <= format.quant_min and format.quant_max <= all_of_own.quant_max
    return within and format.signed == all_of_own.signed


@cache
def _form(spec: QuantSpec) -> tuple[Any, ...]:
    """The shapes of blocks of weights and of scales in two rows, and the stored numbers of each block."""
    try:
        groups = spec.granularity.group_shape(_ROWS)
        stored = [
            None if one is None else (one.format, one.shared, one.granularity and one.granularity.block_shape(groups))
            for one in (spec.scale, spec.offset)
        ]
        return spec.symmetric, tuple(spec.granularity.block_shape(_ROWS)), *stored
    except ShapeError:
        return (spec,)


_ROWS = 2, 512


def to_blocks(kind: str, weight: WeightCodes) -> Array:
    """The bytes of a weight, [..., bytes of a row]."""
    layout = LAYOUTS[kind]
    numbers = {"codes": _numbers(weight.codes, layout.weights)}
    scales = weight.spec.scale.split(weight.scale)
    if "exponent" in layout.integers:
        numbers["exponent"] = _numbers(scales.codes.view(torch.uint8), 1)
    elif scales.shared is None:
        numbers["d"] = _numbers(scales.codes, 1)
    else:
        numbers |= {"scales": _numbers(scales.codes, layout.integers["scales"].count), "d": _halfs(scales.shared)}
    if weight.spec.offset is not None:
        assert weight.zero_point is not None, "a specification with offsets has some"
        offsets = weight.spec.offset.split(weight.zero_point)
        if offsets.shared is None:  # that of the file is added
            numbers["m"] = -_numbers(offsets.codes, 1)
        else:
            numbers |= {"minima": _numbers(offsets.codes, layout.integers["minima"].count), "m": _halfs(offsets.shared)}
    return pack(kind, numbers).reshape(*weight.shape[:-1], -1)


def from_blocks(kind: str, raw: Array, dtype: torch.dtype) -> WeightCodes:
    """The weight in some bytes [..., bytes of a row].

    Raises:
        CheckpointError: integers that the type does not hold, or scales that are not finite.
    """
    layout, spec = LAYOUTS[kind], spec_of(kind)
    rows = raw.shape[:-1]
    numbers = {name: torch.from_numpy(one) for name, one in unpack(kind, raw.reshape(-1, layout.size)).items()}
    for name in ("d", "m"):
        if name in numbers and not bool(numbers[name].isfinite().all()):
            raise CheckpointError("has scales that are inf or NaN")
    if "exponent" in numbers:
        stored = StoredScales(numbers["exponent"].view(torch.float8_e8m0fnu).reshape(*rows, -1), None)
    else:
        stored = _stored(numbers.get("scales"), numbers["d"], rows)
    offset = None
    if spec.offset is not None:
        m = numbers["m"] if "minima" in numbers else -numbers["m"]
        offset = spec.offset.join(_stored(numbers.get("minima"), m, rows))
    codes = numbers["codes"].reshape(*rows, -1)
    if codes.dtype is not spec.format.storage:
        codes = codes.view(spec.format.storage)
    return WeightCodes(codes, spec.scale.join(stored), offset, spec, tuple(codes.shape), dtype)


def _stored(codes: Tensor | None, halfs: Tensor, rows: tuple[int, ...]) -> StoredScales:
    if codes is None:
        return StoredScales(halfs.reshape(*rows, -1), None)
    return StoredScales(codes.reshape(*rows, -1), halfs.float().reshape(*rows, -1))


def _numbers(values: Tensor, count: int) -> Array:
    """Numbers of blocks [blocks, count]."""
    values = values.detach().cpu().contiguous()
    raw = values.view(torch.uint8) if values.is_floating_point() and values.itemsize == 1 else values
    return raw.numpy().reshape(-1, count) if count > 1 else raw.numpy().reshape(-1)


def _halfs(values: Tensor) -> Array:
    return values.detach().cpu().to(torch.float16).numpy().reshape(-1)
