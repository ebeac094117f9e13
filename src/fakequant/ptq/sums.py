"""Sums over the inputs of a layer, from which the error of its output follows for any change of its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fakequant.errors import CalibrationError, ConfigError

_ROWS = 16_384
"""Rows that are multiplied at a time: float32 products of them, added in float64."""


class InputSums:
    """Sums over the rows that a layer multiplies with the rows of its weight matrix.

    Attributes:
        moments: the sum of x x^T, float64 [groups, columns, columns].
        total: the sum of x, float64 [groups, columns].
        count: the number of rows of each group.

    >>> sums = InputSums()
    >>> sums.add(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    >>> sums.moments
    tensor([[[10., 14.],
             [14., 20.]]], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self.moments = self.total = torch.zeros(0)
        self.count = 0

    def add(self, rows: Tensor) -> None:
        """Add rows [groups, rows, columns].

        Raises:
            CalibrationError: they hold NaN or inf.
        """
        if not bool(rows.isfinite().all()):
            raise CalibrationError("an input holds NaN or inf; leave out the batch that makes it")
        if not self.count:
            groups, _, columns = rows.shape
            self.moments = torch.zeros(groups, columns, columns, dtype=torch.float64, device=rows.device)
            self.total = torch.zeros(groups, columns, dtype=torch.float64, device=rows.device)
        for part in rows.float().split(_ROWS, 1):
            self.moments += part.transpose(1, 2) @ part
            self.total += part.sum(1, dtype=torch.float64)
        self.count += rows.shape[1]

    def merge(self, other: InputSums) -> None:
        """Add what another one saw of the same layer."""
        if not self.count:
            self.moments, self.total, self.count = other.moments, other.total, other.count
        elif other.count:
            self.moments = self.moments + other.moments
            self.total = self.total + other.total
            self.count += other.count

    def about_mean(self) -> Tensor:
        """The moments of x less its mean [groups, columns, columns]: what a bias cannot make good."""
        return self.moments - self.total[:, :, None] * self.total[:, None, :] / max(self.count, 1)

    def mean(self) -> Tensor:
        """The mean of x [groups, columns]."""
        return self.total / max(self.count, 1)


def rows_of(layer: nn.Module, x: Tensor) -> Tensor:
    """The rows [groups, rows, columns] that a layer multiplies with its weight matrix, of an input x.

    Raises:
        ConfigError: the layer is of a kind without a weight matrix.
    """
    for kind, rows in _KINDS.items():
        if isinstance(layer, kind) and not isinstance(layer, _ConvTransposeNd):
            return rows(layer, x)
    raise ConfigError(f"a {type(layer).__name__} has no weight matrix")


def has_rows(layer: nn.Module) -> bool:
    """Whether a layer multiplies rows of its input with a weight matrix [out, columns]."""
    return isinstance(layer, tuple(_KINDS)) and not isinstance(layer, _ConvTransposeNd)


def _of_linear(layer: nn.Module, x: Tensor) -> Tensor:
    return x.reshape(1, -1, x.shape[-1])


def _of_convolution(layer: Any, x: Tensor) -> Tensor:
    """Every window as a row, by a convolution with a weight that picks one value of it each."""
    axes = len(layer.kernel_size)
    x = x if x.dim() == axes + 2 else x[None]
    padding: Any = layer.padding
    if layer.padding_mode != "zeros":
        x, padding = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), 0
    channels, columns = x.shape[1] // layer.groups, layer.weight[0].numel()
    picks = torch.eye(columns, dtype=x.dtype, device=x.device).view(columns, channels, *layer.kernel_size)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    windows = [
        convolve(part, picks, None, layer.stride, padding, layer.dilation).movedim(1, -1).reshape(-1, columns)
        for part in x.split(channels, 1)
    ]
    return torch.stack(windows)


_KINDS: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {nn.Linear: _of_linear, _ConvNd: _of_convolution}
"""Layers with a weight matrix, and how their input becomes rows."""
