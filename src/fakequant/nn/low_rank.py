"""Two thin matrices beside a quantized weight, in float: they hold what quantizing the weight loses most."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LowRank(nn.Module):
    """up (down x), a submodule of a quantized linear layer, which adds it to its output.

    Args:
        features: of the input.
        outputs: of the layer.
        rank: rows of `down` and columns of `up`.
        dtype: in which both are kept; products are in that of the input.

    >>> branch = LowRank(4, 3, rank=1)
    >>> branch(torch.ones(2, 4)).shape
    torch.Size([2, 3])
    """

    def __init__(self, features: int, outputs: int, rank: int, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.zeros(rank, features, dtype=dtype))
        self.up = nn.Parameter(torch.zeros(outputs, rank, dtype=dtype))

    @classmethod
    def of(cls, layer: Any, rank: int) -> LowRank:
        """A branch that fits a linear layer and adds 0."""
        outputs, features = layer.weight.shape
        return cls(features, outputs, rank).to(layer.weight.device)

    @property
    def rank(self) -> int:
        """The rank of the product of both matrices."""
        return self.down.shape[0]

    @property
    def bits(self) -> int:
        """The bits of both matrices."""
        return 8 * sum(matrix.numel() * matrix.element_size() for matrix in (self.down, self.up))

    def product(self) -> Tensor:
        """Both matrices as one, float32 [outputs, features]."""
        return self.up.detach().float() @ self.down.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))

    def extra_repr(self) -> str:
        return f"rank {self.rank}, {str(self.down.dtype).removeprefix('torch.')}"
