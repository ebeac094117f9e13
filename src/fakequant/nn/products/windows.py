"""Convolutions as products of a matrix with rows: every window of the input is a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant.nn.products.product import MatrixProduct, TurnedProduct, own_forward, with_attributes

_MOST = 2**22
"""Values of the windows that are there at a time. Another number gives other roundings of float32 products."""
_WINDOW = ["kernel_size", "stride", "padding", "dilation", "groups", "padding_mode", "output_padding", "same_pad"]
"""The attributes by which a convolution makes rows of its input."""


class WindowProduct(MatrixProduct):
    """The windows of an input [n, in, ...] multiplied with a weight [out, in / groups, ...]."""

    takes_parts = True

    @property
    def geometry(self) -> Any:
        """The layer that says how windows lie in the input."""
        return self.layer

    @property
    def groups(self) -> int:
        return self.geometry.groups

    def with_axis(self, x: Tensor) -> Tensor:
        return x[None] if x.dim() == len(self.geometry.kernel_size) + 1 else x

    def pieces(self, x: Tensor) -> Sequence[Tensor]:
        if not x.numel():
            return [x]
        x = self.with_axis(x)
        values = x[0].numel() * math.prod(self.geometry.kernel_size)
        return x.split(max(1, _MOST * self._step() // values))  # at least one example each

    def _step(self) -> int:
        """How many positions of the input there are for a window."""
        return math.prod(self.geometry.stride)

    def rows(self, x: Tensor) -> Tensor:
        """Rows, by a convolution of each channel with kernels that pick one value of the window each."""
        own = self.has_own_forward
        return self._windows(x, own_forward if own else lambda one, picks, x: one._conv_forward(x, picks, None))

    def _windows(self, x: Tensor, convolve: Callable[[Any, Tensor, Tensor], Tensor]) -> Tensor:
        """The rows [groups, rows, columns]: each channel is an example, so that the work is that of a copy."""
        x, kernel, groups = self.with_axis(x), self.geometry.kernel_size, self.groups
        positions = math.prod(kernel)
        picks = torch.eye(positions, dtype=x.dtype, device=x.device).view(positions, 1, *kernel)
        one = with_attributes(self.geometry, groups=1)
        windows = convolve(one, picks, x.flatten(0, 1)[:, None]).flatten(2)  # with the layer's padding
        columns, places = x.shape[1] // groups * positions, windows.shape[2]
        windows = windows.reshape(len(x), groups, columns, places)
        return windows.permute(1, 0, 3, 2).reshape(groups, len(x) * places, columns)

    def multiplied(self, weight: Tensor, x: Tensor) -> Tensor:
        return self.geometry._conv_forward(x, weight, None)

    def channels_last(self, y: Tensor) -> Tensor:
        return y.movedim(1, -1)

    def makes_same_rows(self, other: MatrixProduct) -> bool:
        return (
            isinstance(other, WindowProduct)
            and type(self) is type(other)
            and all(getattr(self.geometry, name, None) == getattr(other.geometry, name, None) for name in _WINDOW)
        )


class TransposedWindowProduct(TurnedProduct, WindowProduct):
    """The values that each output of a transposed convolution sums, multiplied with a weight [in, out, ...]."""

    takes_parts = False

    @property
    def is_matrix(self) -> bool:
        """Whether the weight is a matrix with its first two axes exchanged; with groups it is not."""
        return self.groups == 1

    @property
    def kind(self) -> str:
        return super().kind if self.is_matrix else f"{super().kind} with groups"

    def _step(self) -> int:
        return 1

    def rows(self, x: Tensor) -> Tensor:
        """Rows, by a transposed convolution with kernels that put one value of the window each."""
        return self._windows(x, lambda one, picks, x: _transposed(one, picks.transpose(0, 1), x))

    def multiplied(self, weight: Tensor, x: Tensor) -> Tensor:
        return _transposed(self.geometry, weight, x)


def _transposed(layer: Any, weight: Tensor, x: Tensor) -> Tensor:
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(layer.kernel_size) - 1]
    return convolve(x, weight, None, layer.stride, layer.padding, layer.output_padding, 1, layer.dilation)
