"""Which tensors are quantized, and how: each case says the same to every library."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

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
    """Whether convolutions stay in float: other libraries have no groups of their weights."""
    kernels: int | None = None
    """The most weights in a group of a convolution: whole kernels of as many input channels as fit, at least of one."""

    def config(self, model: nn.Module) -> fq.Config:
        """The case as a configuration of this package, for a model."""
        kinds = [_LAYERS] if self.only_linear else list(_LAYERS_OF_CNN)
        rules = [fq.Rule(layers=kind, weight=self.weight, input=self.input, optional=True) for kind in kinds]
        if self.kernels is not None:
            rules += [
                fq.Rule(path, weight=self._blocks(layer), input=self.input)
                for path, layer in model.named_modules()
                if isinstance(layer, nn.Conv2d)
            ]
        return fq.Config(self.name, tuple(rules))

    def _blocks(self, layer: nn.Conv2d) -> str:
        height, width = layer.kernel_size
        channels = max(1, (self.kernels or 0) // (height * width))
        return f"{self.weight.split()[0]} per_block(1:{channels},2:{height},3:{width},pad)"


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

# Networks of convolutions get groups in a form of their own.
CASES_OF_CNN = [
    replace(case, only_linear=False, kernels=int(case.name.rsplit(" ", 1)[1])) if "groups" in case.name else case
    for case in CASES
    if not case.only_linear or "groups" in case.name
]
