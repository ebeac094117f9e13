"""Operations of two activations as float modules, so that they can be quantized."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MatMul(nn.Module):
    """The product of two activations as a module, so that `prepare` can quantize it (attention).

    >>> MatMul()(torch.eye(2), torch.ones(2, 2))
    tensor([[1., 1.],
            [1., 1.]])
    """

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """input [..., n, k] times other [..., k, m]."""
        return torch.matmul(input, other)


class Add(nn.Module):
    """The sum of two activations as a module, so that `prepare` can quantize it (residual connections)."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """Input plus other, broadcast."""
        return input + other
