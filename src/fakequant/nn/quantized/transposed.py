"""Quantized transposed convolutions."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.nn.leaf import Proxy, as_leaf
from fakequant.nn.products.windows import TransposedWindowProduct
from fakequant.nn.quantized.layers import SpatialLayer, quantizes

_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def conv_transpose(layer: nn.Module, input: Tensor, weight: Tensor, output_size: list[int] | None) -> Tensor:
    """What a transposed convolution of torch computes, with another weight [in, out / groups, ...]."""
    # All of them have the same attributes.
    layer = cast("nn.ConvTranspose2d", layer)
    axes = len(layer.kernel_size)
    output_padding = layer._output_padding(
        input,
        output_size,
        list(layer.stride),
        list(cast("tuple[int, ...]", layer.padding)),
        list(layer.kernel_size),
        axes,
        list(layer.dilation),
    )
    options: Any = layer.stride, layer.padding, output_padding, layer.groups, layer.dilation
    return _TRANSPOSED[axes](input, weight, layer.bias, *options)


class _QuantConvTranspose(SpatialLayer):
    output_channels: ClassVar[int | None] = 1
    weight_reduction: ClassVar[int] = 0
    product_class = TransposedWindowProduct

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if isinstance(input, Proxy):
            return as_leaf(self, input, output_size)
        return conv_transpose(self, self.quantized_input(input), self.quantized_weight(), output_size)


@quantizes(nn.ConvTranspose1d)
class QuantConvTranspose1d(_QuantConvTranspose, nn.ConvTranspose1d):
    """ConvTranspose1d with quantized input [n, in, length] and weight [in, out / groups, k]."""

    input_reductions = (-2,)


@quantizes(nn.ConvTranspose2d)
class QuantConvTranspose2d(_QuantConvTranspose, nn.ConvTranspose2d):
    """ConvTranspose2d with quantized input [n, in, h, w] and weight [in, out / groups, kh, kw]."""

    input_reductions = (-3,)


@quantizes(nn.ConvTranspose3d)
class QuantConvTranspose3d(_QuantConvTranspose, nn.ConvTranspose3d):
    """ConvTranspose3d with quantized input [n, in, d, h, w] and weight [in, out / groups, kd, kh, kw]."""

    input_reductions = (-4,)
