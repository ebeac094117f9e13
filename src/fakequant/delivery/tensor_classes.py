"""Weights of torchao's files: from the tensors and the JSON of a layer to codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fakequant.delivery.layered import FLOATS, CodedWeight, LayerTensors
from fakequant.numerics.formats import parse_format
from fakequant.numerics.formats.packing import unpack
from fakequant.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor
from fakequant.numerics.spec import QuantSpec

INT8, INTX, FP8, NVFP4 = "Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor", "NVFP4Tensor"
E4M3 = parse_format("float8_e4m3fn")
NVFP4_SPEC = QuantSpec.parse("float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor")


def _granularity(module: LayerTensors, block: object) -> tuple[Granularity, tuple[int, int]]:
    """How blocks of a size lie in a weight, and how many there are."""
    rows, columns = module.shape
    if not isinstance(block, list) or len(block) != 2 or not all(type(one) is int and one > 0 for one in block):
        module.refuse(f"block_size is {block!r:.60}, not two numbers")
    high, wide = block
    if block == [rows, columns]:
        return PerTensor(), (1, 1)
    if high != 1 or columns % wide:
        module.refuse(f"block_size is {block}, not the whole weight, rows, or groups that divide {columns} inputs")
    return (PerChannel(0) if wide == columns else PerBlock({-1: wide})), (rows, columns // wide)


def _scale(module: LayerTensors, groups: tuple[int, int]) -> Callable[[], Tensor]:
    found = partial(module.get, "_weight_scale", FLOATS, groups, *([(), (1,)] if groups == (1, 1) else []))
    found()
    return found


def _integers(module: LayerTensors, data: Mapping[str, Any], *, bits: int = 0) -> CodedWeight:
    target = data["target_dtype"]["_data"] if not bits else f"int{bits}"
    if target not in {f"int{n}" for n in range(2, 9)}:
        module.refuse(f"target_dtype is {target!r:.40}; this reader knows int2 to int8")
    granularity, groups = _granularity(module, data["block_size"])
    codes, scale = partial(module.get, "_weight_qdata", torch.int8, module.shape), _scale(module, groups)
    codes()
    points = None
    if module.has("_weight_zero_point"):
        shapes = [groups, *([(), (1,)] if groups == (1, 1) else [])]
        points = module.get("_weight_zero_point", [torch.int8, torch.int32, torch.int64, *FLOATS], *shapes)
        if not bool((points == points.round()).all()):
            module.refuse("zero points are no whole numbers, which this reader does not know")
        points = points if bool(points.any()) else None
    spec = QuantSpec(target, granularity, symmetric=points is None, scale=FLOATS[scale().dtype])
    return CodedWeight(spec, lambda: (codes(), scale().float(), points))


def _fp8(module: LayerTensors, data: Mapping[str, Any]) -> CodedWeight:
    granularity, groups = _granularity(module, data["block_size"] or [*module.shape])
    codes, scale = partial(module.get, "_weight_qdata", torch.float8_e4m3fn, module.shape), _scale(module, groups)
    codes()
    return CodedWeight(QuantSpec(E4M3, granularity), lambda: (codes(), scale().float(), None))


def _nvfp4(module: LayerTensors, data: Mapping[str, Any]) -> CodedWeight:
    rows, columns = module.shape
    if data["block_size"] != 16 or columns % 16:
        module.refuse(f"block_size is {data['block_size']!r:.40} for {columns} inputs; NVFP4 has groups of 16")
    codes = partial(module.get, "_weight_qdata", torch.uint8, (rows, columns // 2))
    scale = partial(module.get, "_weight_scale", torch.float8_e4m3fn, (rows, columns // 16))
    shared = partial(module.get, "_weight_per_tensor_scale", torch.float32, (1,), ())
    for tensor in (codes, scale, shared):
        tensor()
    return CodedWeight(
        NVFP4_SPEC, lambda: (unpack(codes(), 4, columns).to(torch.uint8), scale().float() * shared(), None)
    )


READERS: dict[str, Callable[[LayerTensors, Mapping[str, Any]], CodedWeight]] = {
    INT8: partial(_integers, bits=8),
    INTX: _integers,
    FP8: _fp8,
    NVFP4: _nvfp4,
}
