"""Linear layers that multiply float8 codes: exact for whole numbers, else within the bound of the page, and when."""

import copy

import pytest
import torch
from bits import assert_same_bits
from test_integer import factor, hostile, prepared
from test_integer_gradients import step
from torch import nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.model.config import Config, Rule
from fakequant.numerics import products as definition
from fakequant.numerics.products import Factor
from fakequant.ops import float8_products

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))
INPUTS = ("float8_e4m3fn", "float8_e4m3fn per_token reciprocal", "float8_e5m2 per_tensor input_range")
WEIGHTS = ("float8_e4m3fn per_channel(0)", "float8_e4m3fn")


@pytest.fixture(autouse=True)
def used_on_the_cpu(monkeypatch):
    """The CPU's operator as if it were that of CUDA, with what that demands (ScaledBlas.cpp of torch 2.13)."""
    monkeypatch.delitem(float8_products.NO_FASTER, "cpu")
    right = torch._scaled_mm

    def demanding(a, b, scale_a, scale_b, *, bias=None, out_dtype=None, use_fast_accum=False):
        if a.dtype == b.dtype == E5M2:
            raise ValueError("Multiplication of two Float8_e5m2 matrices is not supported")
        assert a.shape[1] % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        assert scale_a.numel() == scale_b.numel() == 1
        assert scale_a.dtype == scale_b.dtype == out_dtype == torch.float32
        assert bias is None
        assert not use_fast_accum
        return right(a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=False)

    monkeypatch.setattr(torch, "_scaled_mm", demanding)
    float8_products._refused.cache_clear()


def twins(layer, input="float8_e4m3fn", weight="float8_e4m3fn per_channel(0)", **options):
    model, simulated = prepared(layer, input, weight, **options)
    fq.set_execution(model, "integer")
    assert "is simulated" not in str(fq.summary(model))
    return model, simulated


def whole(*shape, dtype=torch.float32, seed=0):
    return torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(layer, x):
    """By the definition, from whole codes."""
    given, weight = factor(layer._input_quantizer, x), factor(layer._weight_quantizer, layer.weight)
    sums = given.codes.double() @ weight.codes.double().t()
    assert torch.equal(sums, sums.round())
    return definition.scaled(sums, given.scale.float() * weight.scale.float().reshape(-1), layer.bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(17, 33), (2, 3, 48), (40,), (1, 16)], ids=str)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("input", INPUTS)
def test_sums_of_whole_numbers_are_exact(input, weight, shape, dtype, bias):
    torch.manual_seed(0)
    layer = nn.Linear(shape[-1], 21 if shape[-1] % 16 else 32, bias=bias)
    layer.weight.data = whole(*layer.weight.shape, seed=1)
    model, _ = twins(layer.to(dtype), input, weight)
    x = whole(*shape, dtype=dtype)
    scales = torch.ones(1) if "tensor" in input or " " not in input else torch.full((*shape[:-1], 1), 0.75)
    model[0]._input_quantizer.set_qparams(fq.QParams(scales, None))
    channels = 0.5 * torch.arange(1, 3).repeat(99)[: layer.out_features].reshape(-1, 1)
    model[0]._weight_quantizer.set_qparams(fq.QParams(channels if "channel" in weight else torch.ones(1), None))
    x = x * scales.to(dtype)
    layer = model[0]
    with torch.no_grad():
        layer.weight.mul_(channels.to(dtype) if "channel" in weight else 1.0)
        y = model(x)
        assert_same_bits(y, exact(layer, x).to(dtype))
    assert_same_bits(model(x).detach(), y)


def every_code(dtype, *shape, seed):
    """Random codes of all finite ones."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = codes[codes.float().isfinite()].view(torch.uint8)
    chosen = torch.randint(len(finite), shape, generator=torch.Generator().manual_seed(seed))
    return finite[chosen].view(dtype)


@pytest.mark.parametrize("inner", [1, 16, 100, 1000])
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_other_sums_are_within_the_bound(dtypes, inner):
    """Codes are multiples of 2**-9 (e4m3) and 2**-16 (e5m2): sums are exact as int64."""
    codes, others = every_code(dtypes[0], 37, inner, seed=1), every_code(dtypes[1], 19, inner, seed=2)
    found = float8_products.linear(Factor(codes, torch.ones(1)), Factor(others, torch.ones(1)), None).double()
    units = [2.0**9 if dtype == E4M3 else 2.0**16 for dtype in dtypes]
    a, b = ((code.double() * unit).long() for code, unit in zip((codes, others), units, strict=True))
    sums, magnitudes = a @ b.t(), a.abs() @ b.abs().t()
    error = (found * (units[0] * units[1]) - sums.double()).abs()
    assert (error <= inner * 2.0**-24 * magnitudes).all()
    assert inner < 100 or error.max() > 0


@pytest.mark.parametrize("learn", ["", "lsq"])
@pytest.mark.parametrize("input", INPUTS)
@pytest.mark.parametrize("shape", [(7, 24), (2, 3, 24)], ids=str)
def test_gradients_are_those_of_the_simulated_layer(input, shape, learn):
    torch.manual_seed(0)
    dynamic = "token" in input
    model, simulated = twins(nn.Linear(24, 9), input, dynamic=dynamic)
    x = hostile(*shape).clamp(-100, 100)
    learn = "" if dynamic else learn
    found, wanted = step(model, x, learn=learn), step(simulated, x, learn=learn)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_same_bits(found[name], gradient, name)
    assert model(x).grad_fn.name() == "_ProductBackward"


def test_nan_and_empty_tensors_are_simulated_and_infinities_saturate():
    model, simulated = twins(nn.Linear(8, 4))
    assert_same_bits(model(torch.zeros(0, 8)), simulated(torch.zeros(0, 8)))
    x = hostile(3, 8).clamp(-9, 9)
    x[0, 0], x[1, 1] = torch.inf, -torch.inf
    saturated = x.clamp(-448 / 64, 448 / 64)
    assert_same_bits(model(x).detach(), model(saturated).detach())
    assert model(x).isfinite().all()
    x[1, 2] = torch.nan
    assert model(x)[1].isnan().all()
    assert_same_bits(model(x).detach(), simulated(x).detach())
    model[0].weight.data[0, 0] = simulated[0].weight.data[0, 0] = torch.nan
    assert_same_bits(model(torch.ones(2, 8)).detach(), simulated(torch.ones(2, 8)).detach())


def test_kept_weights_and_relus_before_a_layer():
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5)), fq.presets.FP8)
    x = torch.randn(6, 24)
    fq.calibrate(model, [x], progress=False)
    fq.set_execution(model, "integer")
    with torch.no_grad():
        y = model[2](torch.relu(model[0](x)))
        assert_same_bits(model(x), y)
        with fq.nn.cached_weights(model):
            assert_same_bits(model(x), y)
            assert_same_bits(model(x), y)


def test_compiled_as_eager_and_again_when_the_execution_changes():
    torch._dynamo.reset()
    model, simulated = twins(nn.Linear(24, 9))
    x = hostile(7, 24).clamp(-3, 3)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        product = model(x)
        assert not torch.equal(product, simulated(x))
        assert_same_bits(compiled(x), product)
        fq.set_execution(model, "auto")
        assert_same_bits(compiled(x), simulated(x))
        fq.set_execution(model, "integer")
        assert_same_bits(compiled(x), product)
    leaf = x.clone().requires_grad_()
    found, wanted = (torch.autograd.grad(run(leaf).sum(), leaf)[0] for run in (compiled, simulated))
    assert_same_bits(found, wanted)


def float8_model(execution, input="float8_e4m3fn", weight="float8_e4m3fn", layer=None):
    rule = Rule("*", input, weight, execution=execution)
    return fq.prepare(nn.Sequential(layer or nn.Linear(16, 16)), Config("test", (rule,)))


def test_auto_simulates_because_sums_are_rounded():
    model = float8_model("auto")
    assert "float8 products are rounded" in str(fq.summary(model))
    model[0]._input_quantizer.set_qparams(fq.QParams(torch.ones(1), None))
    simulated = fq.set_execution(copy.deepcopy(model), "simulate")
    assert_same_bits(model(hostile(3, 16)), simulated(hostile(3, 16)))
    fq.set_execution(model, "integer")
    assert model[0].why_simulated() is None
    assert "rounded" in model[0].why_simulated(fq.nn.Execution.AUTO)
    assert "not for meta" in str(fq.summary(model.to("meta")))


REFUSED = {
    "integer_input": ("int8", "float8_e4m3fn", "weight: codes of float8_e4m3fn are no integers"),
    "integer_weight": ("float8_e4m3fn", "int8", "input: codes of float8_e4m3fn are no integers"),
    "no_dtype": ("float6_e3m2fn", "float8_e4m3fn", "input: codes of float6_e3m2fn are no integers"),
    "two_e5m2": ("float8_e5m2", "float8_e5m2", "does not run here: Multiplication of two Float8_e5m2"),
    "blocks": ("float8_e4m3fn per_block(-1:8)", "float8_e4m3fn", "input: a sum of products has one scale"),
    "weight_blocks": ("float8_e4m3fn", "float8_e4m3fn per_channel(1)", "weight: a sum of products has one scale"),
    "multiplier": ("float8_e4m3fn per_tensor multiplier", "float8_e4m3fn", "MULTIPLIER"),
    "stochastic": ("float8_e4m3fn", "float8_e4m3fn per_tensor stochastic", "weight: stochastic"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_never_can_are_refused(name):
    input, weight, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=reason):
        float8_model("integer", input, weight)
    model = float8_model("auto", input, weight)
    with pytest.raises(ConfigError, match=reason):
        fq.set_execution(model, "integer")
    assert reason in str(fq.summary(model))
    with pytest.raises(ConfigError, match="no integers"):
        float8_model("integer", layer=nn.Conv2d(2, 2, 1))


def test_an_operator_that_rounds_more_is_found_out(monkeypatch):
    def rounding(a, b, *_, **__):
        return (a.float() @ b.float()).bfloat16().float()

    monkeypatch.setattr(torch, "_scaled_mm", rounding)
    asked = torch.device("cpu"), E4M3, E4M3
    assert "sums codes of torch.float8_e4m3fn wrongly" in str(float8_products._refused.__wrapped__(*asked))

    def missing(*_, **__):
        raise RuntimeError("only supported on CUDA devices with compute capability >= 9.0 or 8.9\nmore")

    monkeypatch.setattr(torch, "_scaled_mm", missing)
    reason = float8_products._refused.__wrapped__(*asked)
    assert reason.endswith("does not run here: only supported on CUDA devices with compute capability >= 9.0 or 8.9")
