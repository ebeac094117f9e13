"""Which tensors are quantized, and how: each case says the same to every library."""

from __future__ import annotations

from dataclasses import dataclass

import fakequant as fq

_LAYERS = "Linear"
_LAYERS_OF_CNN = "Linear", "Conv2d"


@dataclass(frozen=True)
class Case:
    """A format of the weights, and of the inputs, of all linear layers and convolutions; all else stays in float."""

    name: str
    weight: str
    input: str | None = None
    only_linear: bool = False
    """Whether convolutions stay in float: groups of 128 along their 9 to 64 input channels say nothing."""

    def config(self) -> fq.Config:
        """The case as a configuration of this package."""
        kinds = [_LAYERS] if self.only_linear else list(_LAYERS_OF_CNN)
        return fq.Config(
            self.name,
            tuple(fq.Rule(layers=kind, weight=self.weight, input=self.input, optional=True) for kind in kinds),
        )


CASES = [
    Case("W8A8", "int8 per_channel(0)", "int8"),
    Case("W4, groups of 128", "int4 per_block(-1:128,pad)", only_linear=True),
    Case("W4, groups of 32", "int4 per_block(-1:32,pad)", only_linear=True),
    Case("W4 per channel", "int4 per_channel(0)"),
    Case("W3 per channel", "int3 per_channel(0)"),
    Case("W4A8 per channel", "int4 per_channel(0)", "int8"),
    Case(
        "NVFP4 W4A4",
        "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor",
        "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor dynamic",
        only_linear=True,
    ),
    Case(
        "MXFP4 W4A4",
        "float4_e2m1fn per_block(-1:32,pad) scale=float8_e8m0fnu:floor",
        "float4_e2m1fn per_block(-1:32,pad) scale=float8_e8m0fnu:floor dynamic",
        only_linear=True,
    ),
]
