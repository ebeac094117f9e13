"""Quantized forms of layers of other libraries, registered by name: nothing is imported, see `layers.py`."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant.nn.integer import IntegerProduct
from fakequant.nn.layers import QuantConv2d, QuantizedLayer, QuantLinear, quantizes

quantizes("timm.layers.linear.Linear")(QuantLinear)


class _SamePadding(QuantConv2d):
    """Conv2d that pads its input [n, in, h, w] with zeros, so that output sizes are ceil(size / stride)."""

    product: ClassVar[IntegerProduct | None] = None
    same_pad = True

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.same_pad:  # after it was quantized, as in Conv2d: calibration does not see the zeros
            input = F.pad(input, self._padding(input))
        return super()._conv_forward(input, weight, bias)

    def _padding(self, x: Tensor) -> list[int]:
        """How many zeros an input gets on both sides of its axes, the last axis first, as `F.pad` takes them."""
        axes = zip(x.shape[:-3:-1], self.kernel_size[::-1], self.stride[::-1], self.dilation[::-1], strict=True)
        padding: list[int] = []
        for size, kernel, stride, dilation in axes:
            missing = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
            padding += [missing // 2, missing - missing // 2]
        return padding


class _Standardized(QuantConv2d):
    """Conv2d whose weight [out, in / groups, kh, kw] is standardized per output channel; the result is quantized."""

    eps: float
    scale: float

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """What the convolution multiplies; the parameter is in `state_dict` as ever."""
        own = self._parameters["weight"]
        assert own is not None
        gain = self._parameters.get("gain")
        factors = None if gain is None else (gain * self.scale).view(-1)
        rows = own.reshape(1, self.out_channels, -1)
        return F.batch_norm(rows, None, None, weight=factors, training=True, momentum=0.0, eps=self.eps).reshape_as(own)


class _StandardizedSamePadding(_SamePadding, _Standardized):
    """A standardized weight with padding to the same size."""


quantizes("timm.layers.conv2d_same.Conv2dSame")(_SamePadding)
quantizes("timm.layers.std_conv.StdConv2d")(_Standardized)
quantizes("timm.layers.std_conv.ScaledStdConv2d")(_Standardized)
quantizes("timm.layers.std_conv.StdConv2dSame")(_StandardizedSamePadding)
quantizes("timm.layers.std_conv.ScaledStdConv2dSame")(_StandardizedSamePadding)


@quantizes("transformers.pytorch_utils.Conv1D")
class QuantConv1D(QuantizedLayer):
    """Linear layer with quantized input [..., in] and weight [in, out]."""

    output_channels: ClassVar[int | None] = 1
    weight_reduction: ClassVar[int] = 0
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.quantized_input(x)
        weight = self.quantized_weight()
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])
