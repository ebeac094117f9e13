"""MXFP4 of GPT-OSS: experts of a layer in one tensor of codes and one of scales, and all else in float.

A byte has two inputs, the first one in its low bits, under an exponent for 32. Source: transformers 5.23,
`integrations/mxfp4.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.delivery.layered import CodedWeight, LayeredFormat, LayerTensors, Read
from fakequant.numerics.formats.packing import unpack
from fakequant.numerics.spec import QuantSpec

_SPEC = QuantSpec.parse("float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor")
_GROUP = 32


class Mxfp4(LayeredFormat):
    """Stacks of experts as GPT-OSS has them."""

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

        return CodedWeight(_SPEC, in_place(codes), in_place(scale))
