"""A small decoder, three of whose channels are large."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module], *, bias: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([norm(WIDTH), norm(WIDTH)])
        self.attention = Attention(bias=bias)
        self.up, self.down = nn.Linear(WIDTH, 48, bias=bias), nn.Linear(48, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(self.up(self.norms[1](x)).relu())


class Decoder(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm, *, bias: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(19, WIDTH), nn.Parameter(torch.randn(8, WIDTH))
        self.blocks = nn.Sequential(Block(norm, bias=bias), Block(norm, bias=bias))
        self.norm, self.head = norm(WIDTH), nn.Linear(WIDTH, 19, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))


def decoder(norm: Callable[[int], nn.Module] = nn.LayerNorm, *, bias: bool = True) -> Decoder:
    """A model whose normalisations have learned something, and three of whose channels are large."""
    torch.manual_seed(0)
    model = Decoder(norm, bias=bias)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for block in model.blocks:
            block.norms[1].weight[:3] *= 30
            block.up.weight[:, :3] /= 30
    return model.eval()
