"""A model that calls a layer again and again, and batches for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Loop(nn.Module):
    def __init__(self, times: int = 6, *, in_place: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.times, self.in_place = times, in_place

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            y = self.again(x).relu()
            x = x.add_(y) if self.in_place else x + y
        return self.last(x)


def batches(count: int = 8, width: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, width, generator=generator) for _ in range(count)]
