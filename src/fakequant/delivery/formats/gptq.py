"""GPTQ: 2 to 8 bits in groups of inputs; a layer may permute its inputs first (`desc_act`).

Version 1 stores zero points minus one, modulo the number of codes; version 2 as they are. Source: AutoGPTQ, GPTQModel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.delivery.layered import FLOATS, CodedWeight, Groups, LayeredFormat, LayerTensors, permutation
from fakequant.errors import warn_user
from fakequant.numerics.formats.packing import unpack
from fakequant.numerics.spec import QuantSpec

_VERSIONS = {"": 1, "gptq": 1, "gptq_v2": 0}
"""What is added to the zero points of a layout."""


class Gptq(LayeredFormat):
    """2 to 8 bits in groups of inputs."""

    name = "gptq"

    def coded(self, module: LayerTensors) -> CodedWeight | None:
        if not module.has("qweight"):
            return None
        given, (rows, columns) = module.folder.quantization, module.shape
        layout = str(given.get("checkpoint_format") or "")
        if layout not in _VERSIONS:
            known = ", ".join(filter(None, _VERSIONS))
            module.refuse(f"codes are in the layout {layout!r:.40}; this reader knows {known}")
        words = module.tensors[f"{module.base}.qweight"].shape[0]
        bits = words * 32 // columns if columns else 0
        if bits not in range(2, 9):
            module.refuse(f"qweight has {words} words for {columns} inputs, which is not 2 to 8 bits for each")
        size = given.get("group_size", 128)
        if given.get("dynamic"):  # layers may have groups of their own, which the number of scales says
            scales = module.tensors.get(f"{module.base}.scales")
            count = 0 if scales is None or scales.dim() != 2 else scales.shape[0]
            size = -(-columns // count) if 0 < count <= columns else size
        groups, half = module.groups(size), 1 << bits - 1
        packed = module.get("qweight", torch.int32, (-(-columns * bits // 32), rows))
        scale = module.get("scales", FLOATS, (groups.count, rows))
        points = _points(module, groups, bits, _VERSIONS[layout])
        is_symmetric = bool(given.get("sym")) and bool((points == half).all())
        index = module.get("g_idx", torch.int32, (columns,))().long() if module.has("g_idx") else None
        order, granularity, of_groups = module.in_order(groups, index)
        format = f"{'' if is_symmetric else 'u'}int{bits}"
        spec = QuantSpec(format, granularity, symmetric=is_symmetric, scale=FLOATS[scale().dtype])

        def codes() -> Tensor:
            found = unpack(packed().T.contiguous().view(torch.uint8), bits, columns)[:, order]
            return (found - half).to(torch.int8) if is_symmetric else found.to(torch.uint8)

        return CodedWeight(
            spec,
            codes,
            lambda: scale().float().T[:, of_groups],
            None if is_symmetric else (lambda: points[:, of_groups].contiguous()),
            transform=permutation(order),
        )


def _points(module: LayerTensors, groups: Groups, bits: int, add: int) -> Tensor:
    """The zero points [out, groups]."""
    rows, path, is_symmetric = module.shape[0], module.folder.path, module.folder.quantization.get("sym")
    words = module.get("qzeros", torch.int32, (groups.count, -(-rows * bits // 32)))()
    points = unpack(words.contiguous().view(torch.uint8), bits, rows).T
    if is_symmetric and bool((points + (1 - add) == 1 << bits - 1).all()):
        warn_user(
            f"{path} says that its zero points are those of version {2 - add}, and they are of "
            f"version {1 + add}, as sym says; they are read so: mend checkpoint_format in its configuration"
        )
        add = 1 - add
    return points + add & (1 << bits) - 1
