"""Attention in FP4: the backward rule of Attn-QAT, in which dV alone sees the quantized probabilities."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from tests.support.bits import assert_same_bits

GROUPS = {
    "NVFP4": "float4_e2m1fn per_block(-1:16) identity scale=float8_e4m3fn@per_tensor",
    "NVFP4, probabilities by query first": "float4_e2m1fn per_block(-1:16) identity scale=float8_e4m3fn@per_token",
    "MXFP4": "float4_e2m1fn per_block(-1:32) identity scale=float8_e8m0fnu:floor",
    "INT8": "int8 per_token identity",
}


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul((torch.matmul(q, k.mT) * 0.25).softmax(-1), v)


def expected(spec: fq.QuantSpec, dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of q, k, v, by the formulas of the papers, through quantizers straight."""

    def quantized(x: Tensor) -> Tensor:
        return fq.fake_quantize(x.contiguous(), spec)

    with torch.no_grad():
        q, k = map(quantized, inputs[:2])
        v = quantized(inputs[2].mT).mT
        p = (q @ k.mT * 0.25).softmax(-1)
        low = quantized(p)
        dp = dy @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * 0.25
        return low @ v, ds @ k, ds.mT @ q, low.mT @ dy


@pytest.mark.parametrize("text", GROUPS.values(), ids=GROUPS)
def test_gradients_of_the_value_alone_see_quantized_probabilities(text: str) -> None:
    inputs = tuple(torch.randn(2, 3, 64, 64, dtype=torch.float64, requires_grad=True) for _ in range(3))
    rule: Any = fq.Rule("*", ops=("matmul",), input=f"{text} dynamic")
    model = fq.prepare(Attention(), fq.Config(rule), inputs)
    y, dy = model(*inputs), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    right, *gradients = expected(fq.QuantSpec.parse(text), dy, *inputs)
    torch.testing.assert_close(y, right, rtol=0, atol=1e-12)
    found = torch.autograd.grad(y, inputs, dy)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    in_float = (inputs[0] @ inputs[1].mT * 0.25).softmax(-1)
    assert (found[2] - in_float.mT @ dy).abs().max() > 1e-3
    assert_same_bits(model(*inputs), y)
