"""The four functions of the original's compiled extension, on any device; none has a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from . import tensor_quant
from .tensor_quant import float_format

__all__ = ["fake_e4m3fy", "fake_tensor_quant", "fake_tensor_quant_", "fake_tensor_quant_with_axis"]


@torch.no_grad()
def fake_tensor_quant(
    inputs: Tensor, amax: Tensor, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> Tensor:
    """Inputs fake-quantized by one amax; see `tensor_quant.fake_tensor_quant`.

    Raises:
        ValueError: amax has more than one element.
    """
    if amax.numel() != 1:
        raise ValueError(f"amax must have one element, got shape {list(amax.shape)}; use fake_tensor_quant_with_axis")
    return tensor_quant.fake_tensor_quant(inputs, amax, num_bits, unsigned, narrow_range)


@torch.no_grad()
def fake_tensor_quant_(
    inputs: Tensor, amax: Tensor, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> Tensor:
    """Inputs fake-quantized by one amax, in place."""
    return inputs.copy_(fake_tensor_quant(inputs, amax, num_bits, unsigned, narrow_range))


@torch.no_grad()
def fake_tensor_quant_with_axis(
    inputs: Tensor, amax: Tensor, axis: int, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> Tensor:
    """Inputs fake-quantized by one amax [n] for each of the n indices of an axis.

    Raises:
        ValueError: the number of elements of amax differs from the length of the axis.

    >>> x = torch.tensor([[0.3, 9.0], [0.3, 9.0]])
    >>> fake_tensor_quant_with_axis(x, torch.tensor([1.27, 127.0]), 0)
    tensor([[0.3000, 1.2700],
            [0.0000, 9.0000]])
    """
    if amax.numel() != inputs.shape[axis]:
        raise ValueError(f"amax has {amax.numel()} elements, but axis {axis} of inputs has {inputs.shape[axis]}")
    shape = [1] * inputs.dim()
    shape[axis] = -1
    return tensor_quant.fake_tensor_quant(inputs, amax.reshape(shape), num_bits, unsigned, narrow_range)


@torch.no_grad()
def fake_e4m3fy(inputs: Tensor) -> Tensor:
    """Inputs rounded to an 8-bit float with 4 exponent and 3 mantissa bits, at most 448.

    >>> fake_e4m3fy(torch.tensor([17.0, -1000.0]))
    tensor([  16., -448.])
    """
    return tensor_quant.fake_quantize(inputs, None, float_format((4, 3)))
