"""GPTQ: 2 to 8 bits in groups of inputs; a layer may permute its inputs first (`desc_act`).

Version 1 stores zero points minus one, modulo the number of codes; version 2 as they are. Source: AutoGPTQ, GPTQModel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.delivery.layered import FLOATS, CodedWeight, Codes, Groups, LayeredFormat, LayerTensors
from fakequant.errors import warn_user
from fakequant.numerics.formats.packing import unpack
from fakequant.numerics.granularity import PerBlock
from fakequant.numerics.spec import QuantSpec

_VERSIONS = {"": 1, "gptq": 1, "gptq_v2": 0}
"""What is added to the zero points of a layout."""


class Gptq(LayeredFormat):
    """2 to 8 bits in groups of inputs."""

    name = "gptq"

    def coded(self, module: LayerTensors) -> CodedWeight | None:
        return _GptqWeight(module).coded() if module.has("qweight") else None


class _GptqWeight:
    """The tensors of a weight."""

    def __init__(self, module: LayerTensors) -> None:
        self.module, given = module, module.folder.quantization
        layout = str(given.get("checkpoint_format") or "")
        if layout not in _VERSIONS:
            module.refuse(
                f"codes are in the layout {layout!r:.40}; this reader knows {', '.join(filter(None, _VERSIONS))}"
            )
        self.rows, self.columns = module.shape
        words = module.tensors[f"{module.base}.qweight"].shape[0]
        self.bits = words * 32 // self.columns if self.columns else 0
        if self.bits not in range(2, 9):
            module.refuse(f"qweight has {words} words for {self.columns} inputs, which is not 2 to 8 bits for each")
        self.groups = self._groups(given.get("group_size", 128))
        self.shapes = (
            (-(-self.columns * self.bits // 32), self.rows),
            (self.groups.count, -(-self.rows * self.bits // 32)),
        )
        module.get("qweight", torch.int32, self.shapes[0])
        self.scale = FLOATS[module.get("scales", FLOATS, (self.groups.count, self.rows)).dtype]
        self.points = self._points(_VERSIONS[layout])
        self.is_symmetric = bool(given.get("sym")) and bool((self.points == 1 << self.bits - 1).all())

    def _groups(self, size: object) -> Groups:
        if not self.module.folder.quantization.get("dynamic"):
            return self.module.groups(size)
        # Layers may have groups of their own, which the number of scales says.
        scales = self.module.tensors.get(f"{self.module.base}.scales")
        count = 0 if scales is None or scales.dim() != 2 else scales.shape[0]
        return self.module.groups(-(-self.columns // count) if 0 < count <= self.columns else size)

    def _points(self, add: int) -> Tensor:
        """The zero points [out, groups]."""
        words = self.module.get("qzeros", torch.int32, self.shapes[1]).contiguous().view(torch.uint8)
        points, half = unpack(words, self.bits, self.rows).T, 1 << self.bits - 1
        if self.module.folder.quantization.get("sym") and bool((points + (1 - add) == half).all()):
            warn_user(
                f"{self.module.folder.path} says that its zero points are those of version {2 - add}, and they are of "
                f"version {1 + add}, as sym says; they are read so: mend checkpoint_format in its configuration"
            )
            add = 1 - add
        return points + add & (1 << self.bits) - 1

    def coded(self) -> CodedWeight:
        order = self._order()
        is_plain = order is None or bool((order == torch.arange(self.columns)).all())
        granularity, takes = self.groups.granularity, None if is_plain else order
        if order is None:  # groups of one input each say any order
            warn_user(
                "gptq: weights whose groups lie in no order of equal groups, and stacks of weights with an order, have "
                "groups of one input each: the same values with more scales"
            )
            granularity = PerBlock({-1: 1})
        format = f"{'' if self.is_symmetric else 'u'}int{self.bits}"
        spec = QuantSpec(format, granularity, symmetric=self.is_symmetric, scale=self.scale)
        transform = None if takes is None else ("permutation", {"order": takes})

        def make() -> Codes:
            return self._codes(takes, order is None)

        return CodedWeight(spec, make, transform=transform)

    def _index(self) -> Tensor:
        """The group of each input."""
        return self.module.get("g_idx", torch.int32, (self.columns,)).long()

    def _order(self) -> Tensor | None:
        """The permutation of inputs that makes groups contiguous; None if the layer cannot use a permutation."""
        plain = torch.arange(self.columns)
        if not self.module.has("g_idx"):
            return plain
        index, size = self._index(), self.groups.size
        if bool((index < 0).any()) or bool((index >= self.groups.count).any()):
            self.module.refuse(f"g_idx names groups beyond the {self.groups.count} that have scales")
        order = torch.sort(index, stable=True).indices
        fits = bool((index[order] == plain // size).all())
        return order if fits and (self.module.is_alone or bool((order == plain).all())) else None

    def _codes(self, order: Tensor | None, is_spread: bool) -> Codes:
        words = self.module.get("qweight", torch.int32, self.shapes[0]).T.contiguous().view(torch.uint8)
        codes = unpack(words, self.bits, self.columns)
        scale = self.module.get("scales", FLOATS, (self.groups.count, self.rows)).float().T.contiguous()
        points = self.points
        if order is not None:
            codes = codes[:, order]
        if is_spread:
            index = self._index()
            scale, points = scale[:, index], points[:, index]
        if self.is_symmetric:
            return (codes - (1 << self.bits - 1)).to(torch.int8), scale, None
        return codes.to(torch.uint8), scale, points.contiguous()
