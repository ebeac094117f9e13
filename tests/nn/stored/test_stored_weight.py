"""A weight that is stored as codes, as a tensor: views, rows, products, and the memory that these take."""

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.nn import stored as stored_weight
from fakequant.nn.stored import StoredWeight
from tests.support.bits import assert_same_bits

SPECS = [
    *("int8", "int4 per_channel(0)", "int4 per_channel(1)", "int8 per_block(0:3)", "int4 per_block(0:2,1:8)"),
    *("uint4 per_channel(0)", "int3 per_block(-1:5,pad)", "int12 per_channel(0)", "nf4 per_block(-1:8)"),
    *("float6_e2m3fn per_channel(0)", "float8_e5m2 per_block(0:5,pad)", "float16", "int1", "int5 per_channel(0)"),
]


def stored(spec, shape=(12, 16), dtype=torch.float32):
    spec = fq.QuantSpec.parse(spec)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, params = fq.quantize(x, spec)
    return StoredWeight.of(codes, params, spec, dtype), fq.dequantize(codes, params, spec, dtype=dtype)


@pytest.mark.parametrize("chunk", [1, 40, 1 << 19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spec", SPECS)
def test_values(spec, dtype, chunk, monkeypatch):
    monkeypatch.setattr(stored_weight, "_CHUNK", chunk)
    weight, expected = stored(spec, dtype=dtype)
    assert_same_bits(weight.values(), expected)
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    again = StoredWeight.quantized(x, fq.QParams(weight.scale, weight.zero_point), weight.spec)
    assert torch.equal(again.packed, weight.packed)
    indices = torch.tensor([[3, 0], [11, 3]])
    assert_same_bits(nn.functional.embedding(indices, weight), expected[indices])
    assert_same_bits(nn.functional.embedding(indices, weight.T), expected.T[indices])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 1), (2, 3, 4), (5, 2, 3, 3)])
def test_shapes(shape):
    weight, expected = stored("int4", shape)
    assert_same_bits(weight.values(), expected)
    assert (weight.shape, weight.stride()) == (expected.shape, expected.stride())


def test_views_are_no_values():
    weight, expected = stored("int4 per_channel(0)", (4, 6, 8))
    for view in (
        lambda x: x.transpose(1, 2),
        lambda x: x.mT,
        lambda x: x[1],
        lambda x: x[1:3].permute(2, 0, 1),
        lambda x: x.view(24, 8).t(),
        lambda x: x.unsqueeze(0).detach(),
    ):
        one, other = view(weight), view(expected)
        assert type(one) is StoredWeight
        assert (one.shape, one.stride(), one.storage_offset()) == (other.shape, other.stride(), other.storage_offset())
        assert_same_bits(one.values(), other)
        assert_same_bits(one + 0.0, other + 0.0)


def test_products_take_one_memory_and_results_none_of_it():
    (one, first), (other, second) = stored("int4", (12, 16)), stored("int8", (64, 16))
    x = torch.randn(3, 16)
    products = [x @ weight.T for weight in (one, other, one)]
    for product, expected in zip(products, (first, second, first), strict=True):
        assert_same_bits(product, x @ expected.T)
    assert_same_bits(one @ other.T, first @ second.T)
    assert_same_bits(one.bfloat16() @ x.bfloat16().T, first.bfloat16() @ x.bfloat16().T)
    kept = one.values()
    x @ other.T  # what is asked for stays
    assert_same_bits(kept, first)


def test_writing_is_refused_in_every_place():
    weight, dense = stored("int4")
    for write in (lambda: weight.mul_(2), lambda: torch.add(dense, 1.0, out=weight), lambda: weight[0].zero_()):
        with pytest.raises(ConfigError, match="a weight that is stored as codes cannot be changed"):
            write()
    dense.zero_().copy_(weight)
    assert_same_bits(dense, weight.values())
    with pytest.raises(ConfigError, match="does not fit StoredWeight"):
        weight.copy_(stored("int8")[0])
    with pytest.raises(ConfigError, match=r"uint8 \[12, 4\] cannot replace one of torch.uint8 \[12, 8\]"):
        weight.with_parts(weight.packed[:, :4], None, None)
