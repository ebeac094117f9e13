"""AWQ: 4 bits in groups of inputs, in the layout "gemm" of AutoAWQ. Source: compressed-tensors 0.20, AutoRound 0.16."""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.delivery.layered import FLOATS, CodedWeight, Codes, LayeredFormat, LayerTensors
from fakequant.numerics.formats.packing import unpack
from fakequant.numerics.spec import QuantSpec

_WORD, _BITS = 8, 4
"""Codes of 4 bits in an int32."""
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""The place in a word of each of its eight outputs."""


class Awq(LayeredFormat):
    """4 bits in groups of inputs, with zero points."""

    name = "awq"

    def coded(self, module: LayerTensors) -> CodedWeight | None:
        if not module.has("qweight"):
            return None
        given = module.folder.quantization
        version, bits = str(given.get("version", "gemm")).lower(), given.get("bits", given.get("w_bit", _BITS))
        if version != "gemm" or bits != _BITS:
            module.refuse(f"codes have {bits!r:.20} bits in the layout {version!r:.20}; this reader knows 4 in 'gemm'")
        rows, columns = module.shape
        groups = module.groups(given.get("group_size", given.get("q_group_size", 128)))
        if rows % _WORD:
            module.refuse(f"codes are in words of {_WORD} outputs, which do not divide {rows}")
        words = (columns, rows // _WORD), (groups.count, rows // _WORD)
        module.get("qweight", torch.int32, words[0])
        scales = FLOATS[module.get("scales", FLOATS, (groups.count, rows)).dtype]
        has_points = module.has("qzeros")
        if has_points:
            module.get("qzeros", torch.int32, words[1])

        def make() -> Codes:
            codes = _outputs(module.get("qweight", torch.int32, words[0]), rows)
            scale = module.get("scales", FLOATS, (groups.count, rows)).float().T.contiguous()
            if not has_points:
                return (codes - (1 << _BITS - 1)).to(torch.int8), scale, None
            return codes.to(torch.uint8), scale, _outputs(module.get("qzeros", torch.int32, words[1]), rows)

        return CodedWeight(QuantSpec("uint4" if has_points else "int4", groups.granularity, scale=scales), make)


def _outputs(words: Tensor, rows: int) -> Tensor:
    """Unpack words [n, out / 8] into integers [out, n]."""
    packed = unpack(words.contiguous().view(torch.uint8), _BITS, rows)
    return packed.unflatten(-1, (-1, _WORD))[..., _PLACES].flatten(-2).T.contiguous()
