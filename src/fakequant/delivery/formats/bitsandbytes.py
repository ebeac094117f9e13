"""bitsandbytes: NF4 in blocks of a flattened weight; the scales may be quantized, too ("nested").

A byte holds two codes, the first one in its high bits. Source: bitsandbytes 0.50, `QuantState`.
"""

from __future__ import annotations

import json
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from fakequant.delivery.layered import FLOATS, CodedWeight, Codes, LayeredFormat, LayerTensors
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
        return _Nf4Weight(module).coded() if module.has(f"{_STATE}nf4") else None


class _Nf4Weight:
    """The tensors of a weight."""

    def __init__(self, module: LayerTensors) -> None:
        self.module, (self.rows, self.columns) = module, module.shape
        self.state = self._state()
        self.size = self._number("blocksize")
        self.blocks = -(-self.rows * self.columns // self.size)
        if self.state.get("shape") != [self.rows, self.columns]:
            module.refuse(f"codes are of a weight of shape {self.state.get('shape')!r:.80}, not {[*module.shape]}")
        table = module.get("weight.quant_map", torch.float32, (16,))
        format = _SPEC.format
        assert isinstance(format, TableFormat)
        if not torch.equal(table, torch.tensor(format.grid.table.values, dtype=torch.float32)):  # type: ignore[union-attr]
            module.refuse("weight.quant_map is another table than that of NF4")
        self._packed()
        self._scales()

    def _state(self) -> dict[str, Any]:
        key = f"{_STATE}nf4"
        length = self.module.tensors[f"{self.module.base}.{key}"].numel()
        if length > _LARGEST:
            self.module.refuse(f"{key} has {length} bytes, which are no description of a weight")
        try:
            state = json.loads(bytes(self.module.get(key, torch.uint8, (length,)).tolist()))
        except (ValueError, RecursionError) as error:
            self.module.refuse(f"{key} is no JSON: {error}")
        if not isinstance(state, dict):
            self.module.refuse(f"{key} is no object of JSON")
        return state

    def _number(self, key: str) -> int:
        value = self.state.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.module.refuse(f"{key} is {value!r:.40}, not a number of values")
        return value

    def _packed(self) -> Tensor:
        bytes, key = -(-self.rows * self.columns // 2), f"{self.module.base}.weight"
        held = self.module.tensors[key].dtype if key in self.module.tensors else torch.uint8
        count = bytes // (held.itemsize if held in _STORAGES else 1)
        return self.module.get("weight", _STORAGES, (count,), (count, 1), (1, count)).view(torch.uint8)

    def _scales(self) -> Tensor:
        """One scale for each block."""
        blocks = (self.blocks,)
        if not self.module.has("weight.nested_absmax"):
            return self.module.get("weight.absmax", torch.float32, blocks)
        size, offset = self._number("nested_blocksize"), self.state.get("nested_offset")
        if not isinstance(offset, float):
            self.module.refuse(f"nested_offset is {offset!r:.40}, not a number")
        codes = self.module.get("weight.absmax", torch.uint8, blocks)
        table = self.module.get("weight.nested_quant_map", torch.float32, (256,))
        shared = self.module.get("weight.nested_absmax", torch.float32, (-(-self.blocks // size),))
        return table[codes.long()] * shared.repeat_interleave(min(size, self.blocks))[: self.blocks] + offset

    def coded(self) -> CodedWeight:
        # Blocks go on from row to row: groups that divide rows and blocks have the scales of their blocks.
        group = gcd(self.size, self.columns)
        return CodedWeight(_SPEC.replace(granularity=PerBlock({-1: group})), lambda: self._codes(group))

    def _codes(self, group: int) -> Codes:
        packed, shape = self._packed(), self.module.shape
        codes = torch.stack([packed >> 4, packed & 15], -1).flatten()[: prod(shape)].reshape(shape)
        count = prod(shape) // group
        scale = self._scales().repeat_interleave(min(self.size // group, count))[:count]
        return codes, scale.reshape(self.rows, -1), None
