"""Products of two coded activations: bits against int64, and simulated where a gradient is wanted."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.model.config import Config, Rule, TensorConfig
from fakequant.nn import MatMul
from fakequant.numerics import products as reference
from fakequant.ops import products
from tests.support.bits import assert_same_bits
from tests.support.integer_models import assert_integer, factor, hostile
from tests.support.integer_models import expected as expected_of_layer
from tests.support.integer_models import prepared as prepared_layer
from tests.support.matrix import full, in_turn, sweep

SPECS = (
    "int8",
    "int8_narrow",
    "int4 per_tensor reciprocal",
    "int8 per_tensor asymmetric",
    "uint8 per_tensor symmetric",
)
SPECS += ("uint8", "uint4 per_tensor input_range", "int[-3,100] per_tensor asymmetric identity")
SHAPES = {
    "matrices": ((17, 33), (33, 21)),
    "heads": ((2, 3, 17, 33), (2, 3, 33, 21)),
    "one_other": ((2, 3, 7, 33), (33, 5)),
    "one_input": ((7, 33), (2, 33, 5)),
    "broadcast": ((3, 1, 7, 12), (2, 12, 5)),
    "row": ((4, 1, 33), (4, 33, 21)),
}


class Attention(nn.Sequential):
    def forward(self, x, other):
        return self[0](x, other)


def prepared(input="int8", other="int8", dynamic=False):
    """A model of one product with given scales in integer execution, and its simulated twin."""
    rule = Rule("*", input=TensorConfig(input, dynamic=dynamic), execution="auto")
    model = fq.prepare(Attention(MatMul()), Config("test", (rule,)))
    quantizers = model[0]._input_quantizer, model[0]._other_quantizer
    quantizers[1].spec, quantizers[1].dynamic = fq.QuantSpec.parse(other), False
    for quantizer, scale, zero_point in zip(quantizers, (1 / 64, 1 / 128), (3, 7), strict=True):
        if not quantizer.dynamic:
            given = None if quantizer.spec.symmetric else torch.tensor([zero_point], dtype=torch.int32)
            quantizer.set_qparams(fq.QParams(torch.tensor([scale]), given))
    simulated = copy.deepcopy(model)
    return model, fq.set_execution(simulated, "simulate")


def factors(shapes):
    return hostile(*shapes[0]), hostile(*shapes[1]).flip(-1)


def expected(layer, x, other):
    return reference.matmul(factor(layer._input_quantizer, x), factor(layer._other_quantizer, other))


@pytest.fixture(params=["integers", "float", "parts"])
def way(request, monkeypatch):
    """Matrices one by one as integers or in parts in float, or all at once in float where the sums are exact there."""
    monkeypatch.setattr(products, "_SMALL", 2**19 if request.param == "float" else 0)
    monkeypatch.setattr(products, "_multiplies_slowly", lambda device_type: request.param == "parts")


@pytest.mark.parametrize("inner", [0, 1, 511, 512, 513, 1537])
@pytest.mark.parametrize("slow", [True, False], ids=["parts", "integers"])
@pytest.mark.parametrize("autocast", [False, True])
def test_largest_codes_sum_exactly(inner, slow, autocast, monkeypatch):
    monkeypatch.setattr(products, "_multiplies_slowly", lambda device_type: slow)
    a = torch.randint(240, 256, (17, inner)).to(torch.uint8)
    b = torch.randint(112, 128, (9, inner)).to(torch.int8)
    a[0], b[0], b[1] = 255, 127, -128
    with torch.autocast("cpu", enabled=autocast):
        assert torch.equal(products._int_mm(a, b.t()), (a.long() @ b.t().long()).int())


@pytest.mark.usefixtures("way")
@sweep("shape, input, other", full(SHAPES, SPECS, SPECS), in_turn(product(SHAPES, SPECS), SPECS))
def test_a_product_is_the_definition(shape, input, other):
    model, _ = prepared(input, other)
    assert_integer(model)
    x, y = factors(SHAPES[shape])
    with torch.no_grad():
        assert_same_bits(model(x, y), expected(model[0], x, y))
        transposed = x.mT.contiguous().mT, y.mT.contiguous().mT
        assert_same_bits(model(*transposed), expected(model[0], x, y))


@pytest.mark.parametrize("other", SPECS)
@pytest.mark.parametrize("input", SPECS)
def test_where_only_whole_blocks_of_signed_codes_are_multiplied(input, other, monkeypatch):
    """As on CUDA, whose `torch._int_mm` refuses other sizes and dtypes."""
    multiply = torch._int_mm

    def particular(a, b):
        assert a.dtype == b.dtype == torch.int8
        assert a.shape[0] > 16
        assert not [size for size in (a.shape[1], *b.shape) if size % 8]
        return multiply(a, b)

    monkeypatch.setattr(torch, "_int_mm", particular)
    monkeypatch.setattr(products, "_has_cuda_limits", lambda device: True)
    monkeypatch.setattr(products, "_SMALL", 0)
    assert products.linear_unavailable.__wrapped__("cpu") is None
    model, _ = prepared(input, other)
    for shape in SHAPES.values():
        x, y = factors(shape)
        with torch.no_grad():
            assert_same_bits(model(x, y), expected(model[0], x, y))
    linear, _ = prepared_layer(nn.Linear(33, 21), input)
    with torch.no_grad():
        for shape in ((17, 33), (2, 3, 33), (33,)):
            assert_same_bits(linear(hostile(*shape)), expected_of_layer(linear[0], hostile(*shape)))


def test_whole_blocks_of_codes_are_multiplied_where_they_lie(monkeypatch):
    """Copied are only those of other sizes, those that begin between multiples of 16 bytes, and those with gaps."""
    multiply, given = torch._int_mm, []
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (given.append((a.data_ptr(), b.data_ptr())), multiply(a, b))[1])
    monkeypatch.setattr(products, "_has_cuda_limits", lambda device: True)
    codes = torch.randint(-128, 128, (64 * 64 + 8,), dtype=torch.int8)
    a, b = codes[: 24 * 16].view(24, 16), codes[: 40 * 16].view(40, 16).t()
    cases = {
        "whole": (a, b, True, True),
        "by rows": (a, codes[: 16 * 40].view(16, 40), True, True),
        "few rows": (a[:5], b, False, True),
        "odd columns": (a, b[:, :39], True, False),
        "between multiples": (a, codes[8 : 8 + 40 * 16].view(40, 16).t(), True, False),
        "with gaps": (a, codes[: 64 * 64].view(64, 64)[:16, :40], True, False),
        "by columns": (codes[: 24 * 16].view(16, 24).t(), b, False, True),
    }
    for name, (left, right, *stay) in cases.items():
        assert torch.equal(products._int_mm(left, right).long(), left.long() @ right.long()), name
        assert [left.data_ptr() == given[-1][0], right.data_ptr() == given[-1][1]] == stay, name


@pytest.mark.usefixtures("way")
def test_sums_that_float32_does_not_hold():
    model, _ = prepared("uint8 per_tensor symmetric", "uint8 per_tensor symmetric")
    for inner in (258, 259, 1031):
        x, other = torch.full((3, 2, inner), 255 / 64), torch.full((3, inner, 2), 255 / 128)
        x[:, 1, 0], other[:, 0, 1] = 254 / 64, 253 / 128
        with torch.no_grad():
            assert_same_bits(model(x, other), expected(model[0], x, other))


def test_scales_of_every_token():
    model, _ = prepared("int8 per_token", dynamic=True)
    assert_integer(model)
    for shape in SHAPES.values():
        x, other = factors(shape)
        x = x.clamp(-1e30, 1e30)
        with torch.no_grad():
            assert_same_bits(model(x, other), expected(model[0], x, other))


@pytest.mark.parametrize("wanted", [0, 1])
def test_a_product_is_simulated_where_a_gradient_is_wanted(wanted):
    given = [one.clamp(-100, 100).requires_grad_(i == wanted) for i, one in enumerate(factors(SHAPES["matrices"]))]
    results = []
    for model in prepared():
        y = model(*given)
        results.append((y.detach(), *torch.autograd.grad(y, given[wanted], torch.ones_like(y))))
    for found, simulated in zip(*results, strict=True):
        assert_same_bits(found, simulated)


@pytest.mark.parametrize("place", [0, 1])
def test_nan_is_not_hidden(place):
    model, simulated = prepared()
    given = [one.clamp(-9, 9) for one in factors(SHAPES["heads"])]
    given[place][0, 0, 0, 1] = torch.nan
    assert model(*given).isnan().any()
    assert_same_bits(model(*given), simulated(*given))


def test_what_is_simulated(monkeypatch):
    model, simulated = prepared()
    for shapes in (((33,), (33, 5)), ((7, 33), (33,)), ((0, 33), (33, 5)), ((3, 0), (0, 5))):
        x, other = torch.rand(shapes[0]), torch.rand(shapes[1])
        assert_same_bits(model(x, other), simulated(x, other))
    x, other = (one.double() for one in factors(SHAPES["heads"]))
    assert_same_bits(model(x, other), simulated(x, other))
    monkeypatch.setattr(products, "matmul", lambda *_: pytest.fail("a sum that int32 may not hold"))
    inner = products.largest_inner_size(128, 128) + 1
    x, other = torch.ones(1, inner), torch.ones(inner, 1)
    assert_same_bits(model(x, other), simulated(x, other))


REASONS = {
    "float": (None, "its input is in float"),
    "float8": ("float8_e4m3fn", "its input: codes of float8_e4m3fn are not integers"),
    "tokens": ("int8 per_token", "its other input: a sum of products has one scale, not per_token"),
}


@pytest.mark.parametrize("name", REASONS)
def test_why_a_product_is_simulated(name):
    input, reason = REASONS[name]
    config = Config("test", (Rule("*", input=input, execution="integer"),))
    if input is not None:
        with pytest.raises(ConfigError, match=reason):
            fq.prepare(nn.Sequential(MatMul()), config)
    model = fq.prepare(nn.Sequential(MatMul()), Config("test", (Rule("*", input=input or "int8", execution="auto"),)))
    if input is None:
        model[0]._modules["_input_quantizer"] = None
    assert reason in str(fq.summary(model))
    with pytest.raises(ConfigError, match=reason):
        fq.set_execution(model, "integer")


def test_the_summary_says_which_way_it_goes():
    model, _ = prepared()
    assert "integer" in str(fq.summary(model)).splitlines()[2]


def test_half_precision_and_autocast():
    model, simulated = prepared()
    x, other = factors(SHAPES["heads"])
    for dtype in (torch.float16, torch.bfloat16):
        given = x.to(dtype), other.to(dtype)
        assert model(*given).dtype == simulated(*given).dtype == dtype
        assert_same_bits(model(*given), expected(model[0], *given).to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(model(x, other), expected(model[0], x, other).bfloat16())
