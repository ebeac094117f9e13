"""Quantized pooling layers, which have an input quantizer and no weight; registered as those in `layers.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from fakequant.nn.leaf import Proxy, as_leaf
from fakequant.nn.quantized.layers import SpatialLayer, quantizes


class _QuantPool(SpatialLayer):
    output_channels: ClassVar[int | None] = None

    @classmethod
    def kernel_sizes(cls, layer: nn.Module) -> Sequence[int]:
        size: Any = getattr(layer, "kernel_size", 0)  # an adaptive layer has none: it is as long as the input needs
        return size if isinstance(size, tuple) else [size] * (-cls.input_reductions[0] - 1)

    def forward(self, input: Tensor) -> Any:
        return as_leaf(self, input) if isinstance(input, Proxy) else super().forward(self.quantized_input(input))


@quantizes(nn.MaxPool1d)
class QuantMaxPool1d(_QuantPool, nn.MaxPool1d):
    """MaxPool1d of a quantized input."""

    input_reductions = (-2,)


@quantizes(nn.MaxPool2d)
class QuantMaxPool2d(_QuantPool, nn.MaxPool2d):
    """MaxPool2d of a quantized input."""

    input_reductions = (-3,)


@quantizes(nn.MaxPool3d)
class QuantMaxPool3d(_QuantPool, nn.MaxPool3d):
    """MaxPool3d of a quantized input."""

    input_reductions = (-4,)


@quantizes(nn.AvgPool1d)
class QuantAvgPool1d(_QuantPool, nn.AvgPool1d):
    """AvgPool1d of a quantized input."""

    input_reductions = (-2,)


@quantizes(nn.AvgPool2d)
class QuantAvgPool2d(_QuantPool, nn.AvgPool2d):
    """AvgPool2d of a quantized input."""

    input_reductions = (-3,)


@quantizes(nn.AvgPool3d)
class QuantAvgPool3d(_QuantPool, nn.AvgPool3d):
    """AvgPool3d of a quantized input."""

    input_reductions = (-4,)


@quantizes(nn.AdaptiveAvgPool1d)
class QuantAdaptiveAvgPool1d(_QuantPool, nn.AdaptiveAvgPool1d):
    """AdaptiveAvgPool1d of a quantized input."""

    input_reductions = (-2,)


@quantizes(nn.AdaptiveAvgPool2d)
class QuantAdaptiveAvgPool2d(_QuantPool, nn.AdaptiveAvgPool2d):
    """AdaptiveAvgPool2d of a quantized input."""

    input_reductions = (-3,)


@quantizes(nn.AdaptiveAvgPool3d)
class QuantAdaptiveAvgPool3d(_QuantPool, nn.AdaptiveAvgPool3d):
    """AdaptiveAvgPool3d of a quantized input."""

    input_reductions = (-4,)
