"""Products of codes, the definition: the exact sum of integers, then the scales, then the bias.

    sums = sum of (x_code - x_zero_point) * (w_code - w_zero_point)     exact
    y    = float32(sums) * (x_scale * w_scale) + bias                   each operation rounded to float32

A simulated layer multiplies and adds float32 numbers instead, in an order that depends on the machine. The two
results differ at most by the rounding of a float32 product while x_scale * w_scale is a normal number of float32. The
result here is the same everywhere, and it is the result of integer engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class QuantizedOperand(NamedTuple):
    """One factor of a product.

    Attributes:
        codes: integers.
        scale: units per code, float32, broadcasts with the codes.
        zero_point: the code of 0.0, integers, broadcasts with the codes; None: 0.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None = None

    def centred(self) -> Tensor:
        """The codes counted from the zero point, int64."""
        codes = self.codes.long()
        return codes if self.zero_point is None else codes - self.zero_point.long()


class ConvParams(NamedTuple):
    """The stride, padding and dilation of a convolution, a number per axis, and its groups."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int


@dataclass(frozen=True)
class FixedPoint:
    """How an integer unit rounds sums of products to codes: float64 tensors that broadcast with the sums.

    Attributes:
        constant: the number that is added to the sum first.
        down: a power of two that multiplies this sum; the product is rounded down.
        factor: the number that multiplies the result; half is added to the product, and the sum is rounded down.
    """

    constant: Tensor
    down: Tensor
    factor: Tensor

    @cached_property
    def steps(self) -> Tensor:
        """Constant, down and factor of each channel, [3, ...]."""
        return torch.stack(torch.broadcast_tensors(self.constant, self.down, self.factor))


def linear(x: QuantizedOperand, weight: QuantizedOperand, bias: Tensor | None) -> Tensor:
    """x [..., in] times the transposed weight [out, in], scales [..., 1] and [out, 1], bias [out]; float32 [..., out].

    >>> x = QuantizedOperand(torch.tensor([[3, -2]], dtype=torch.int8), torch.tensor([[0.5]]))
    >>> weight = QuantizedOperand(torch.tensor([[4, 1]], dtype=torch.int8), torch.tensor([[0.25]]))
    >>> linear(x, weight, torch.tensor([1.0]))
    tensor([[2.2500]])
    """
    sums = x.centred() @ weight.centred().t()
    return scaled(sums, x.scale * weight.scale.reshape(-1), bias)


def matmul(x: QuantizedOperand, other: QuantizedOperand) -> Tensor:
    """x [..., n, k] times other [..., k, m], scales that broadcast with the result; float32."""
    return scaled(x.centred() @ other.centred(), x.scale * other.scale, None)


def convolution(x: QuantizedOperand, weight: QuantizedOperand, bias: Tensor | None, places: ConvParams) -> Tensor:
    """x [n, in, ...] convolved with weight [out, in / groups, ...] as `places` says, plus bias [out]; float32."""
    axes = weight.codes.dim() - 2
    sums = _CONVOLUTIONS[axes](x.centred(), weight.centred(), None, *places)
    one_per_channel = [-1] + [1] * axes
    bias = None if bias is None else bias.reshape(one_per_channel)
    return scaled(sums, x.scale * weight.scale.reshape(one_per_channel), bias)


def scaled(sums: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Exact sums in float32, times scale, plus bias."""
    y = sums.to(torch.float32) * scale
    return y if bias is None else y + bias


def fixed_point(sums: Tensor, by: FixedPoint, low: int, high: int) -> Tensor:
    """The codes to which the rule `by` rounds exact sums, clamped to `low` and `high`, float64.

    >>> half = torch.tensor(0.5, dtype=torch.float64)
    >>> fixed_point(torch.tensor([-9, 5, 6, 90]), FixedPoint(2 * half, half, half), -2, 7)
    tensor([-2.,  2.,  2.,  7.], dtype=torch.float64)
    """
    kept = torch.floor((sums + by.constant) * by.down)
    return torch.floor(kept * by.factor + 0.5).clamp(low, high)
