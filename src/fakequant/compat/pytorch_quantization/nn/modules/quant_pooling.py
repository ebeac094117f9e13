"""Pooling of a quantized input."""

from __future__ import annotations

from torch import nn

from fakequant.compat.pytorch_quantization.nn.modules._utils import InputModule

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "QuantAdaptiveAvgPool1d",
    "QuantAdaptiveAvgPool2d",
    "QuantAdaptiveAvgPool3d",
    "QuantAvgPool1d",
    "QuantAvgPool2d",
    "QuantAvgPool3d",
    "QuantMaxPool1d",
    "QuantMaxPool2d",
    "QuantMaxPool3d",
]


class QuantMaxPool1d(InputModule, nn.MaxPool1d):
    """nn.MaxPool1d that also takes `quant_desc_input`."""


class QuantMaxPool2d(InputModule, nn.MaxPool2d):
    """nn.MaxPool2d that also takes `quant_desc_input`."""


class QuantMaxPool3d(InputModule, nn.MaxPool3d):
    """nn.MaxPool3d that also takes `quant_desc_input`."""


class QuantAvgPool1d(InputModule, nn.AvgPool1d):
    """nn.AvgPool1d that also takes `quant_desc_input`."""


class QuantAvgPool2d(InputModule, nn.AvgPool2d):
    """nn.AvgPool2d that also takes `quant_desc_input`."""


class QuantAvgPool3d(InputModule, nn.AvgPool3d):
    """nn.AvgPool3d that also takes `quant_desc_input`."""


class QuantAdaptiveAvgPool1d(InputModule, nn.AdaptiveAvgPool1d):
    """nn.AdaptiveAvgPool1d that also takes `quant_desc_input`."""


class QuantAdaptiveAvgPool2d(InputModule, nn.AdaptiveAvgPool2d):
    """nn.AdaptiveAvgPool2d that also takes `quant_desc_input`."""


class QuantAdaptiveAvgPool3d(InputModule, nn.AdaptiveAvgPool3d):
    """nn.AdaptiveAvgPool3d that also takes `quant_desc_input`."""


MaxPool1d = QuantMaxPool1d
MaxPool2d = QuantMaxPool2d
MaxPool3d = QuantMaxPool3d
AvgPool1d = QuantAvgPool1d
AvgPool2d = QuantAvgPool2d
AvgPool3d = QuantAvgPool3d
AdaptiveAvgPool1d = QuantAdaptiveAvgPool1d
AdaptiveAvgPool2d = QuantAdaptiveAvgPool2d
AdaptiveAvgPool3d = QuantAdaptiveAvgPool3d
