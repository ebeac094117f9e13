"""Convolutions with quantized input and weight; weights have a scale per output channel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fakequant.compat.pytorch_quantization import tensor_quant
from fakequant.compat.pytorch_quantization.nn.modules._utils import WeightedModule
from fakequant.nn.quantized.layers import conv_transpose

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
]


class _QuantConv(WeightedModule):
    bias: Tensor | None
    _conv_forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(self._input_quantizer(input), self.quantized_weight(), self.bias)


class _QuantConvTranspose(WeightedModule, nn.Module):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return conv_transpose(self, self._input_quantizer(input), self.quantized_weight(), output_size)


class QuantConv1d(_QuantConv, nn.Conv1d):
    """nn.Conv1d that also takes `quant_desc_input` and `quant_desc_weight`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL


class QuantConv2d(_QuantConv, nn.Conv2d):
    """nn.Conv2d that also takes `quant_desc_input` and `quant_desc_weight`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL


class QuantConv3d(_QuantConv, nn.Conv3d):
    """nn.Conv3d that also takes `quant_desc_input` and `quant_desc_weight`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL


class QuantConvTranspose1d(_QuantConvTranspose, nn.ConvTranspose1d):
    """nn.ConvTranspose1d that also takes `quant_desc_input` and `quant_desc_weight`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL


class QuantConvTranspose2d(_QuantConvTranspose, nn.ConvTranspose2d):
    """nn.ConvTranspose2d that also takes `quant_desc_input` and `quant_desc_weight`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL


class QuantConvTranspose3d(_QuantConvTranspose, nn.ConvTranspose3d):
    """nn.ConvTranspose3d that also takes `quant_desc_input` and `quant_desc_weight`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL


Conv1d = QuantConv1d
Conv2d = QuantConv2d
Conv3d = QuantConv3d
ConvTranspose1d = QuantConvTranspose1d
ConvTranspose2d = QuantConvTranspose2d
ConvTranspose3d = QuantConvTranspose3d
