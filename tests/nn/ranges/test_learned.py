"""Gradients of learned scales and zero points against their closed form; numbers chosen so that every step is exact."""

import itertools

import numpy as np
import pytest
import torch

import fakequant as fq
from fakequant.numerics import reference
from fakequant.ops import library
from tests.support import cases, oracle
from tests.support.bits import assert_same_bits
from tests.support.cases import FORMATS, GRANULARITIES
from tests.support.matrix import full, in_turn, sweep

NAMES = ["int8", "uint8_affine", "int4", "odd_range_affine", "float8_e4m3fn", "float4_e2m1fn"]
DTYPES = [torch.float32, torch.float64]


def exact_case(name, where, arithmetic):
    """Few-bit inputs, power-of-two scales, small integer output gradients: all products and sums are exact."""
    random = np.random.default_rng(3)
    case = FORMATS[name]
    scale = 2.0 ** random.integers(-2, 2, where.groups)
    x = random.integers(-600, 600, where.shape) / 8
    dy = random.integers(-4, 5, where.shape).astype(np.float64)
    zero_point = None
    if not case.symmetric:
        zero_point = random.integers(case.oracle.low, case.oracle.high + 1, where.groups).astype(np.float64)
    return case, np.asarray(scale), zero_point, np.asarray(x), np.asarray(dy)


def closed_form(case, where, spec, scale, zero_point, x, dy):
    """dL/dscale and dL/dzero_point per group, from the definitions of LSQ and LSQ+, or of PACT for `Gradient.CLIP`."""
    arithmetic = spec.arithmetic
    s = oracle.spread(scale, where.blocks)
    z = np.zeros(x.shape) if zero_point is None else oracle.spread(zero_point, where.blocks)
    result = oracle.fake_quantize(x, s, z, case.oracle, arithmetic.value)
    in_codes = x * s if arithmetic is fq.Arithmetic.MULTIPLIER else x / s
    decoded = result.code - z
    inside = result.inside
    slope = np.where(inside, decoded - in_codes, decoded)
    if spec.gradient is fq.Gradient.CLIP:
        inside = (in_codes > spec.format.quant_min - z) & (in_codes < spec.format.quant_max - z)
        slope = np.where(inside, 0.0, decoded)
    if arithmetic is fq.Arithmetic.MULTIPLIER:
        slope = -slope / s**2
    by_zero_point = np.where(inside, 0.0, -s)
    split = [n for g, b in zip(where.groups, where.blocks, strict=True) for n in (g, b)]
    within = tuple(range(1, len(split), 2))
    return [(dy * d).reshape(split).sum(within) for d in (slope, by_zero_point)]


@sweep(
    "where_name, name, dtype",
    full(GRANULARITIES, NAMES, DTYPES),
    in_turn(itertools.product(GRANULARITIES, NAMES), DTYPES),
)
def test_closed_form(where_name, name, dtype):
    where = GRANULARITIES[where_name]
    for arithmetic, gradient in itertools.product(
        FORMATS[name].arithmetics(), (fq.Gradient.CODE_RANGE, fq.Gradient.CLIP)
    ):
        case, scale, zero_point, x, dy = exact_case(name, where, arithmetic)
        spec = case.spec(where.granularity, arithmetic, gradient=gradient)
        wanted = closed_form(case, where, spec, scale, zero_point, x, dy)
        to_torch = [None if a is None else torch.from_numpy(a).to(dtype) for a in (x, scale, zero_point, dy)]
        x_t, scale_t, zero_point_t, dy_t = to_torch
        leaves = [t.requires_grad_() for t in (x_t, scale_t, zero_point_t) if t is not None]
        params = fq.QParams(scale_t, zero_point_t)
        y = library.fake_quantize(x_t, params, spec)
        gradients = torch.autograd.grad(y, leaves, dy_t)
        for actual, right, label in zip(gradients[1:], wanted, ("scale", "zero point"), strict=False):
            # Adding 0.0: numpy's sum of zeros has no fixed sign, ours is positive.
            assert_same_bits(actual, torch.from_numpy(np.asarray(right)).to(dtype) + 0.0, f"{label} {spec}")
        with torch.no_grad():
            defined = reference.grad_params(dy_t, x_t, params, spec, (True, True))
        for actual, right in zip(gradients[1:], defined, strict=False):
            assert_same_bits(actual, right, f"defined {spec}")
        exported = torch.ops.fakequant.fake_quantize if case.format in fq.formats() else None
        if exported is not None:
            again = torch.autograd.grad(exported(x_t, scale_t, zero_point_t, str(spec)), leaves, dy_t)
            for first, second in zip(gradients, again, strict=True):
                assert_same_bits(second, first, f"exported {spec}")


@pytest.mark.parametrize("arithmetic", ["divide", "reciprocal", "multiplier", "q8_k"])
def test_equals_autograd_of_a_smooth_surrogate(arithmetic):
    """With the rounding error held fixed, the operator is smooth, and autograd differentiates it by itself."""
    x = torch.randn(200, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor([50.0 if arithmetic == "multiplier" else 0.02], dtype=torch.float64)
    scale.requires_grad_()
    step = {"multiplier": 1 / scale, "q8_k": scale * 128 / 127}.get(arithmetic, scale)
    in_codes = x / step
    code = (in_codes + (in_codes.round() - in_codes).detach()).clamp(-128, 127)
    surrogate = code * step
    assert 0 < (in_codes.abs() > 128).sum() < 200
    dy = torch.randn(200, dtype=torch.float64)
    wanted = torch.autograd.grad(surrogate, (x, scale), dy)
    y = fq.fake_quantize(x, fq.QuantSpec("int8", arithmetic=arithmetic), scale=scale)
    actual = torch.autograd.grad(y, (x, scale), dy)
    torch.testing.assert_close(y, surrogate.detach(), rtol=1e-12, atol=1e-12)
    # The surrogate multiplies and divides by the scale, which costs it the last bit.
    torch.testing.assert_close(actual[0], wanted[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(actual[1], wanted[1], rtol=1e-12, atol=0)


def test_gradcheck_where_everything_saturates():
    x = torch.tensor([-9.0, 7.0, 30.0], dtype=torch.float64, requires_grad=True)
    scale = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    zero_point = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    spec = fq.QuantSpec("uint2", symmetric=False)
    assert torch.autograd.gradcheck(
        lambda *inputs: library.fake_quantize(inputs[0], fq.QParams(*inputs[1:]), spec), (x, scale, zero_point)
    )


def test_only_what_is_asked_for_gets_a_gradient():
    x = torch.randn(3, 8)
    scale = torch.full((3,), 0.01, requires_grad=True)
    fq.fake_quantize(x, fq.QuantSpec("int8", fq.PerChannel(0)), scale=scale).sum().backward()
    assert scale.grad.shape == (3,)
    leaf = x.clone().requires_grad_()
    fq.fake_quantize(leaf, "int8", scale=0.01).sum().backward()
    assert leaf.grad is not None


def test_a_range_from_x_gets_no_gradient_and_a_learned_amax_does():
    x = torch.randn(64)
    amax = torch.tensor(1.0, requires_grad=True)
    fq.fake_quantize(x, "int8", amax=amax).sum().backward()
    scale = torch.tensor(1.0 / 127, requires_grad=True)
    fq.fake_quantize(x, "int8", scale=scale).sum().backward()
    assert amax.grad is not None
    torch.testing.assert_close(amax.grad, scale.grad / 127, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_learned_scale_of_a_16_bit_input_is_float32(dtype):
    numbers = cases.hostile(FORMATS["int8"], GRANULARITIES["tensor"], fq.Arithmetic.DIVIDE, dtype)
    x = numbers.x.nan_to_num(0.0, 1.0, -1.0)
    scale = torch.tensor(0.5, requires_grad=True)
    fq.fake_quantize(x, "int8", scale=scale).float().sum().backward()
    assert scale.grad.dtype == torch.float32
    assert scale.grad.isfinite()
