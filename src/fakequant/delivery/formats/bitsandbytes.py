"""bitsandbytes: NF4 in blocks of a flattened weight; the scales may be quantized, too ("nested").

A byte holds two codes, the first one in its high bits. Source: bitsandbytes 0.50, `QuantState`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import gcd
from typing import Any

import torch
from torch import Tensor

from fakequant.delivery.layered import FLOATS, CodedWeight, LayeredFormat, LayerTensors, Read
from fakequant.numerics.formats.floats import TableFormat
from fakequant.numerics.granularity import PerBlock
from fakequant.numerics.spec import QuantSpec

_STATE = "weight.quant_state.bitsandbytes__"
_SPEC = QuantSpec("nf4")
_STORAGES = (torch.uint8, *FLOATS)
"""Types as which a file has bytes of two codes: sharded training of floats (FSDP) takes these alone."""
_LARGEST = 1 << 16
"""Bytes from which a text is not that of a state."""


class BitsAndBytes(LayeredFormat):
    """NF4, plain and nested."""

    name = "bitsandbytes"

    def coded(self, module: LayerTensors) -> CodedWeight | None:
        for end, what in {f"{_STATE}fp4": "FP4 of bitsandbytes", "SCB": "LLM.int8()"}.items():
            if module.has(end):
                module.refuse(f"codes are {what}, and this reader knows its NF4")
        if not module.has(f"{_STATE}nf4"):
            return None
        key, (rows, columns), format = f"{_STATE}nf4", module.shape, _SPEC.format
        length = module.tensors[f"{module.base}.{key}"].numel()
        if length > _LARGEST:
            module.refuse(f"{key} has {length} bytes, which are no description of a weight")
        try:
            state = json.loads(bytes(module.get(key, torch.uint8, (length,))().tolist()))
        except (ValueError, RecursionError) as error:
            module.refuse(f"{key} is no JSON: {error}")
        if not isinstance(state, dict):
            module.refuse(f"{key} is no object of JSON")
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

        return CodedWeight(_SPEC.replace(granularity=PerBlock({-1: group})), codes, scale)


def _number(module: LayerTensors, state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        module.refuse(f"{key} is {value!r:.40}, not a number of values")
    return value


def _scales(module: LayerTensors, state: Mapping[str, Any], blocks: int) -> Read:
    """Reads a scale for each block."""
    if not module.has("weight.nested_absmax"):
        return module.get("weight.absmax", torch.float32, (blocks,))
    size, offset = _number(module, state, "nested_blocksize"), state.get("nested_offset")
    if not isinstance(offset, float):
        module.refuse(f"nested_offset is {offset!r:.40}, not a number")
    codes = module.get("weight.absmax", torch.uint8, (blocks,))
    table = module.get("weight.nested_quant_map", torch.float32, (256,))
    shared = module.get("weight.nested_absmax", torch.float32, (-(-blocks // size),))
    return lambda: table()[codes().long()] * shared().repeat_interleave(min(size, blocks))[:blocks] + offset
