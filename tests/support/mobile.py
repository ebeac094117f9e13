"""Small networks of the kinds that phones run, and configurations in the arithmetic of their engines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fakequant as fq


def rules_of(**specs: Any) -> fq.Config:
    return fq.Config("own", (fq.Rule("*", **specs),))


class Block(nn.Module):
    """A convolution, a depthwise one, one of 1x1, and the sum with the input."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1)
        self.d = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.p = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.p(torch.relu(self.d(torch.relu(self.a(x))))) + x)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(Block(), Block())
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(torch.relu(self.stem(x)))).flatten(1))


class Pooled(nn.Module):
    """A convolution, max pooling, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.pool, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.pool(torch.relu(self.a(x))))


class PooledFork(Pooled):
    """One pooled tensor that a convolution and a sum read."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(torch.relu(self.a(x)))
        return torch.relu(self.b(y) + y)


class FlatFork(Pooled):
    """One tensor that a convolution reads, and, in another shape, a sum."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x))
        return torch.relu(self.b(y).flatten(1) + y.flatten(1))


class InPlace(nn.Module):
    """A sum in place behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        y = self.b(x)
        y += x
        return torch.relu(y)


class Attention(nn.Module):
    """Three projections that read one tensor, attention, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (one(y).unflatten(-1, (4, 16)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 32), nn.Linear(32, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x)))


MODELS: dict[str, tuple[Any, Tensor]] = {
    "cnn": (Cnn, torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)),
        torch.randn(9, 64, generator=torch.Generator().manual_seed(1)),
    ),
    "attention": (Attention, torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(2))),
    "tables": (Tables, torch.arange(20)[None]),
}
ASYMMETRIC = rules_of(weight="int8 per_channel(0)", input="int8 asymmetric reciprocal")
"""What `target="executorch"` makes of INT8_AFFINE."""
EXACT: dict[str, Any] = {
    "symmetric": rules_of(weight="int8 per_channel(0)", input="int8 reciprocal"),
    "narrow": rules_of(weight="int8_narrow", input="int8_narrow reciprocal"),
    "unsigned": rules_of(weight="int8 per_channel(0)", input="uint8 reciprocal"),
    "sixteen": rules_of(weight="int4 per_channel(0)", input="uint16 reciprocal"),
    "odd": rules_of(weight="int[-100,90] per_channel(0)", input="int[0,100] reciprocal"),
    "asymmetric weights": rules_of(weight="uint8 per_channel(0)", input="int8 reciprocal"),
    "executorch": ASYMMETRIC,
}


def calibrated(name: str, config: Any, **options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, x = MODELS[name]
    model = fq.prepare(make().eval(), config, x, **options)
    fq.calibrate(model, [x], progress=False)
    return model.eval(), x
