"""Models whose own `forward` calls functions, and the same with the quantizers of their sites called by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import fakequant as fq
from fakequant.nn.sites import SITES


class Calls(nn.Module):
    """Calls a function of itself, which has modules and parameters by their names, and of its inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


OPS = ("add", "sdpa", "cat", "softmax", "matmul", "mul", "linear")


class Attention(nn.Module):
    """Attention [n, tokens, features] with functions of all kinds, inside of a block with residual additions."""

    def __init__(self, features: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(features, features)
        self.k = nn.Linear(features, features)
        self.v = nn.Linear(features, features)
        self.out = nn.Parameter(torch.randn(features, features) / 3)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.linear(y.transpose(1, 2).flatten(2), self.out)

    def by_hand(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        s = self._modules[SITES]
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        a = s.scaled_dot_product_attention_0
        y = F.scaled_dot_product_attention(a.query(q), a.key(k), a.value(v), attn_mask=mask)
        y = y.transpose(1, 2).flatten(2)
        return F.linear(s.linear_0.input(y), s.linear_0.weight(self.out))


class Block(nn.Module):
    """Residual additions, one of them in place, a concatenation with a repeated tensor, `@`, and a softmax."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features)
        self.attention = Attention(features)
        self.mlp = nn.Sequential(nn.Linear(features, features), nn.ReLU())
        self.mix = nn.Linear(2 * features, features)
        self.positions = nn.Parameter(torch.randn(1, 16, features) / 3)

    def normed(self, x: Tensor) -> Tensor:
        # Contiguous, because torch's compiler expects other strides of this operation than its kernel gives.
        return self.norm(x.transpose(1, 2).contiguous()).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.positions[:, : x.shape[1]]
        h = self.normed(x) + 1
        y = self.attention(h, mask=mask)
        y += x
        z = self.mix(torch.cat([y, y], dim=-1))
        scores = torch.softmax(z @ y.transpose(-2, -1) * 0.5, dim=-1)
        return torch.add(input=scores @ z, other=self.mlp(y))

    def by_hand(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        s = self._modules[SITES]
        x = s.add_0.input(x) + s.add_0.other(self.positions[:, : x.shape[1]])
        h = self.normed(x) + 1
        y = self.attention.by_hand(h, mask)
        # In place, which keeps the dtype under autocast.
        y = (s.add_2.input(y) + s.add_2.other(x)).to(y.dtype)
        z = self.mix(torch.cat([s.cat_0.input_0(y), s.cat_0.input_1(y)], dim=-1))
        products = s.matmul_0.input(z) @ s.matmul_0.other(y.transpose(-2, -1))
        scores = torch.softmax(s.softmax_0.input(products * 0.5), dim=-1)
        product = s.matmul_1.input(scores) @ s.matmul_1.other(z)
        return s.add_3.input(product) + s.add_3.other(self.mlp(y))


class Network(nn.Sequential):
    """Two blocks; with checkpointing, each is computed again in the backward pass."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__(Block(), Block())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            if self.reentrant is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return x

    def by_hand(self, x: Tensor) -> Tensor:
        for block in self:
            x = block.by_hand(x)
        return x


def config(*ops: str, name: str = "INT8") -> fq.Config:
    """A preset with its layers, and functions quantized alike."""
    return getattr(fq.presets, name).with_rule(
        fq.Rule("*", input="int8", weight="int8 per_channel(0)", ops=ops or OPS, optional=True)
    )


def only(*ops: str) -> fq.Config:
    return fq.Config("functions", (fq.Rule("*", input="int8", weight="int8 per_channel(0)", ops=ops),))


def example(seed: int = 1, tokens: int = 5, batch: int = 3) -> Tensor:
    return torch.randn(batch, tokens, 8, generator=torch.Generator().manual_seed(seed))


def float_network(reentrant: bool | None = None) -> Network:
    torch.manual_seed(0)
    return Network(reentrant).eval()


def quantized(model: nn.Module, *inputs: Any, rules: fq.Config | None = None, **options: Any) -> Any:
    made = fq.prepare(copy.deepcopy(model), rules or config(), example=inputs, **options)
    fq.calibrate(made, [inputs])
    return made


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    output = run(x)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    assert x.grad is not None
    return [output.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same_bits(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
