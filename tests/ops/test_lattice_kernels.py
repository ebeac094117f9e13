"""Kernels under negative scales and offsets against the definition, in every bit."""

import pytest
import torch

import fakequant as fq
from fakequant.numerics import reference
from fakequant.ops.dispatch import choose, find_plan
from tests.support.bits import assert_same_bits
from tests.support.lattices import ALL, hostile, weights

MORE = {
    "signed_float": "float4_e2m1fn per_block(-1:32) scale=float16:signed",
    "channels": "int4 per_channel(1) scale=float16:signed",
    "padded": "int4 per_block(-1:24,pad) scale=int6@per_block(-1:5,pad)/float16",
    "stochastic": "int4 per_block(-1:32) stochastic scale=float16:signed",
    "identity": ALL["Q4_K"].replace("scale", "identity scale", 1),
    "clip": "uint4 per_block(-1:32) clip scale=float16 offset=float16",
}
TENSORS = {
    "plain": lambda: weights(16, 512),
    "hostile": hostile,
    "transposed": lambda: hostile().t().contiguous().t(),
    "with_gaps": lambda: weights(16, 1024)[:, ::2],
    "shared_memory": lambda: weights(1, 512).expand(4, 512),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*ALL, *MORE])
def test_bits_codes_and_gradients_are_those_of_the_definition(name: str, dtype: torch.dtype) -> None:
    spec = fq.QuantSpec.parse((ALL | MORE)[name])
    seed = torch.tensor(3) if name == "stochastic" else None
    given = {} if seed is None else {"seed": seed}
    for make in TENSORS.values():
        x = make().to(dtype)
        params = reference.choose(x, spec)._replace(seed=seed)
        both = {"scale": params.scale, "zero_point": params.zero_point}
        expected = reference.fake_quantize(x, params, spec)
        assert_same_bits(fq.fake_quantize(x, spec, **given), expected)
        assert_same_bits(fq.fake_quantize(x, spec, **both, **given), expected)
        codes = fq.quantize(x, spec, **both, **given)[0]
        assert torch.equal(codes.view(torch.uint8), reference.quantize(x, params, spec).view(torch.uint8))
        assert_same_bits(
            fq.dequantize(codes, params, spec, dtype=dtype), reference.dequantize(codes, params, spec, dtype)
        )
        narrow = params._replace(scale=params.scale * 0.7)
        leaf = x.detach().requires_grad_()
        dy = torch.ones_like(x)
        fq.fake_quantize(leaf, spec, scale=narrow.scale, zero_point=narrow.zero_point, **given).backward(dy)
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, reference.grad_input(dy, reference.passes(x, narrow, spec)))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "IQ4_NL", "Q8_0"])
def test_kernels_serve_them(name: str) -> None:
    x, spec = weights(8, 512), fq.QuantSpec.parse(ALL[name])
    assert choose(x, spec).name == "cpu"
    plan = find_plan(x, spec)
    assert plan is not None
    assert plan.backend == "cpu"
    assert plan.otherwise is not None
    assert plan.otherwise.backend == "reference"
