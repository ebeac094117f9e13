"""FP8 of DeepSeek, Qwen and Mistral, MXFP4 of GPT-OSS, and NF4 of bitsandbytes.

FP8 has a scale for each tile or for the whole weight, which multiplies the codes. Source: transformers 5.23,
`integrations/finegrained_fp8.py`; vLLM 0.32, `quantization/fp8.py`.

MXFP4 has the experts of a layer in a tensor of codes and a tensor of scales, and all else in float. A byte holds the
codes of two inputs, the first in its low bits; 32 inputs share an exponent. Source: transformers 5.23,
`integrations/mxfp4.py`.

NF4 has blocks of a flattened weight; the scales may be quantized, too ("nested"). A byte holds two codes, the first in
its high bits. Source: bitsandbytes 0.50, `QuantState`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import gcd
from typing import Any

import torch
from torch import Tensor

from fakequant.delivery.layered import FLOATS, CodedWeight, LayeredFormat, LayerTensors, Read
from fakequant.model.config import TensorConfig
from fakequant.numerics.formats.floats import TableFormat
from fakequant.numerics.formats.packing import unpack
from fakequant.numerics.granularity import PerBlock, PerToken
from fakequant.numerics.scales import ScaleRounding, ScaleSpec
from fakequant.numerics.spec import QuantSpec

_FP8, _E4M3 = QuantSpec("float8_e4m3fn"), torch.float8_e4m3fn
_POWERS = {torch.uint8, torch.float8_e8m0fnu}
_SCALES, _INPUTS = ("weight_scale_inv", "weight_scale"), ("activation_scale", "input_scale")
"""The names of scales in transformers, and in vLLM and AutoFP8."""


class Fp8(LayeredFormat):
    """FP8 with scales of tiles and dynamic ranges of groups of inputs, or with a scale of the whole weight."""

    name = "fp8"

    def coded(self, module: LayerTensors) -> CodedWeight | None:
        weight = module.tensors.get(f"{module.base}.weight")
        end = next(filter(module.has, _SCALES), None)
        if weight is None or (end is None and weight.dtype in FLOATS):
            return None
        if weight.dtype is not _E4M3 or end is None:
            module.refuse(f"weight is {weight.dtype} with the scale {end}; this reader knows {_E4M3}")
        given: Any = module.folder.quantization
        tile, (rows, columns) = given.get("weight_block_size"), module.shape  # None: a scale is that of the weight
        is_pair = isinstance(tile, list) and len(tile) == 2 and all(type(one) is int and one > 0 for one in tile)
        if tile is not None and not is_pair:
            module.refuse(f"weight_block_size is {tile!r:.60}, not two numbers of rows and columns")
        groups = (1, 1) if tile is None else (-(-rows // tile[0]), -(-columns // tile[1]))
        shapes = [groups, *([(), (1,)] if groups == (1, 1) else [])]
        scale: Read = module.get(end, {*FLOATS, *_POWERS}, *shapes)
        spec = _FP8 if tile is None else _FP8.replace(granularity=PerBlock({0: tile[0], -1: tile[1]}, pad=True))
        if (dtype := scale().dtype) in _POWERS:
            spec, scale = spec.replace(scale=ScaleSpec("float8_e8m0fnu")), module.powers(end, groups)
        else:
            spec = spec.replace(scale=FLOATS[dtype])
        scheme, ranges = str(given.get("activation_scheme", "dynamic")).lower(), dict[str, Tensor]()
        if scheme not in ("static", "dynamic"):
            module.refuse(f"activation_scheme is {scheme!r:.40}; this reader knows 'dynamic' and 'static'")
        if scheme == "static":
            end = next(filter(module.has, _INPUTS), _INPUTS[0])
            config, ranges["input.scale"] = TensorConfig(_FP8), module.get(end, FLOATS, (1,), ())().float()
        else:
            own = _FP8.replace(granularity=PerToken() if tile is None else PerBlock({-1: tile[1]}, pad=True))
            if given.get("scale_fmt") == "ue8m0":  # DeepSeek V3.1 rounds scales of inputs, too, up to powers of two
                own = own.replace(scale=ScaleSpec("float8_e8m0fnu", ScaleRounding.CEIL))
            config = TensorConfig(own, dynamic=True)
        return CodedWeight(spec, module.get("weight", _E4M3, module.shape), scale, input=config, ranges=ranges)


_MXFP4 = QuantSpec.parse("float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor")
_GROUP = 32


class Mxfp4(LayeredFormat):
    """MXFP4 in the stacks of experts of GPT-OSS."""

    name = "mxfp4"

    def coded(self, module: LayerTensors) -> CodedWeight | None:
        name = module.key.rpartition(".")[2]
        if not (module.has(f"{name}_blocks") or module.has(f"{name}_scales")):
            return None
        (rows, columns), experts = module.shape, module.experts
        if not experts or columns % _GROUP:
            module.refuse(f"{name}_blocks are of a stack of experts with groups of {_GROUP}, not of {[rows, columns]}")
        groups = (experts, rows, columns // _GROUP)
        packed = module.get(f"{name}_blocks", torch.uint8, (*groups, _GROUP // 2))
        scale = module.powers(f"{name}_scales", groups)

        def in_place(read: Read) -> Read:
            return (lambda: read().mT.contiguous()) if module.inputs_first else read

        def codes() -> Tensor:
            return unpack(packed().flatten(-2), 4, columns).to(torch.uint8)

        return CodedWeight(_MXFP4, in_place(codes), in_place(scale))


_STATE = "weight.quant_state.bitsandbytes__"
_NF4 = QuantSpec("nf4")
_STORAGES = (torch.uint8, *FLOATS)
"""The dtypes of tensors that hold the bytes of codes. Floats are among them, because FSDP shards only floats."""
_LARGEST = 1 << 16
"""The most bytes of the JSON text of a `QuantState`."""


class BitsAndBytes(LayeredFormat):
    """NF4, plain and nested."""

    name = "bitsandbytes"

    def coded(self, module: LayerTensors) -> CodedWeight | None:
        for end, what in {f"{_STATE}fp4": "FP4 of bitsandbytes", "SCB": "LLM.int8()"}.items():
            if module.has(end):
                module.refuse(f"codes are {what}; this reader knows only NF4")
        if not module.has(f"{_STATE}nf4"):
            return None
        key, (rows, columns), format = f"{_STATE}nf4", module.shape, _NF4.format
        length = module.tensors[f"{module.base}.{key}"].numel()
        if length > _LARGEST:
            module.refuse(f"{key} has {length} bytes, which are not a description of a weight")
        try:
            state = json.loads(bytes(module.get(key, torch.uint8, (length,))().tolist()))
        except (ValueError, RecursionError) as error:
            module.refuse(f"{key} is not JSON: {error}")
        if not isinstance(state, dict):
            module.refuse(f"{key} is not an object of JSON")
        size, values = _number(module, state, "blocksize"), rows * columns
        if state.get("shape") != [rows, columns]:
            module.refuse(f"codes are of a weight of shape {state.get('shape')!r:.80}, not {[*module.shape]}")
        table = module.get("weight.quant_map", torch.float32, (16,))()
        assert isinstance(format, TableFormat)
        if not torch.equal(table, torch.tensor(format.grid.table.values, dtype=torch.float32, device="cpu")):  # type: ignore[union-attr]
            module.refuse("weight.quant_map is another table than that of NF4")
        key = f"{module.base}.weight"
        held = module.tensors[key].dtype if key in module.tensors else torch.uint8
        count = -(-values // 2) // held.itemsize
        packed = module.get("weight", _STORAGES, (count,), (count, 1), (1, count))
        scales = _scales(module, state, -(-values // size))
        # Blocks go on from row to row: groups that divide rows and blocks have the scales of their blocks.
        group = gcd(size, columns)
        groups = values // group

        def codes() -> Tensor:
            pairs = packed().view(torch.uint8)
            return torch.stack([pairs >> 4, pairs & 15], -1).flatten()[:values].reshape(rows, columns)

        def scale() -> Tensor:
            return scales().repeat_interleave(min(size // group, groups))[:groups].reshape(rows, -1)

        return CodedWeight(_NF4.replace(granularity=PerBlock({-1: group})), codes, scale)


def _number(module: LayerTensors, state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        module.refuse(f"{key} is {value!r:.40}, not a number of values")
    return value


def _scales(module: LayerTensors, state: Mapping[str, Any], blocks: int) -> Read:
    """A function that reads the scale of each block [blocks]."""
    if not module.has("weight.nested_absmax"):
        return module.get("weight.absmax", torch.float32, (blocks,))
    size, offset = _number(module, state, "nested_blocksize"), state.get("nested_offset")
    if not isinstance(offset, float):
        module.refuse(f"nested_offset is {offset!r:.40}, not a number")
    codes = module.get("weight.absmax", torch.uint8, (blocks,))
    table = module.get("weight.nested_quant_map", torch.float32, (256,))
    shared = module.get("weight.nested_absmax", torch.float32, (-(-blocks // size),))
    return lambda: table()[codes().long()] * shared().repeat_interleave(min(size, blocks))[:blocks] + offset
