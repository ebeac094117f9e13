"""Instance normalisation of a quantized input."""

from __future__ import annotations

from torch import nn

from fakequant.compat.pytorch_quantization.nn.modules._utils import InputModule

__all__ = ["QuantInstanceNorm1d", "QuantInstanceNorm2d", "QuantInstanceNorm3d"]


class QuantInstanceNorm1d(InputModule, nn.InstanceNorm1d):
    """nn.InstanceNorm1d that also takes `quant_desc_input`."""


class QuantInstanceNorm2d(InputModule, nn.InstanceNorm2d):
    """nn.InstanceNorm2d that also takes `quant_desc_input`."""


class QuantInstanceNorm3d(InputModule, nn.InstanceNorm3d):
    """nn.InstanceNorm3d that also takes `quant_desc_input`."""
