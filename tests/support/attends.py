"""An attention between two layers, whose query, key and value are one tensor or several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16


class Attends(nn.Module):
    """An attention between two layers."""

    def __init__(self, given: str = "aaa", *, call: dict[str, Any] | None = None, **others: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.given, self.call = given, call or {}
        widths = dict(zip(given, (WIDTH, others.get("kdim") or WIDTH, others.get("vdim") or WIDTH), strict=True))
        self.makes = nn.ModuleDict({name: nn.Linear(12, width) for name, width in widths.items()})
        self.attention = nn.MultiheadAttention(WIDTH, 4, **{"batch_first": True, **others})
        self.last = nn.Linear(WIDTH, 8)
        with torch.no_grad():
            for bias in (self.attention.in_proj_bias, self.attention.out_proj.bias):
                if bias is not None:
                    bias.normal_()

    def forward(self, x: Tensor) -> Tensor:
        made = {name: layer(x if name == "a" else x[:, 1:] * 2).tanh() for name, layer in self.makes.items()}
        if not self.attention.batch_first:
            made = {name: value.transpose(0, 1) for name, value in made.items()}
        return self.last(self.attention(*(made[name] for name in self.given), **self.call)[0])
