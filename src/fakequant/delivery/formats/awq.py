"""AWQ: 4 bits in groups of inputs, in the layout "gemm" of AutoAWQ. Source: compressed-tensors 0.20, AutoRound 0.16."""

from __future__ import annotations

import torch

from fakequant.delivery.layered import FLOATS, CodedWeight, LayeredFormat, LayerTensors, Read
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
        codes, scales = _outputs(module, "qweight", columns), module.get("scales", FLOATS, (groups.count, rows))
        points = _outputs(module, "qzeros", groups.count) if module.has("qzeros") else None
        signed = (lambda: codes().view(torch.int8) - 8) if points is None else codes
        spec = QuantSpec("uint4" if points else "int4", groups.granularity, scale=FLOATS[scales().dtype])
        return CodedWeight(spec, signed, lambda: scales().T, points)


def _outputs(module: LayerTensors, end: str, count: int) -> Read:
    """What unpacks words [count, out / 8] into integers [out, count]."""
    rows = module.shape[0]
    words = module.get(end, torch.int32, (count, rows // _WORD))

    def read() -> torch.Tensor:
        packed = unpack(words().contiguous().view(torch.uint8), _BITS, rows).to(torch.uint8)
        return packed.unflatten(-1, (-1, _WORD))[..., _PLACES].flatten(-2).T.contiguous()

    return read
