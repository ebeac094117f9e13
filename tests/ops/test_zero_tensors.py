"""Zeros without memory, which autograd passes on for gradients that are zero everywhere, as of `torch.sgn`."""

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import QParamsError
from tests.support.bits import assert_same_bits
from tests.support.integer_models import prepared


def zeros(*shape):
    x = torch.ones(shape, requires_grad=True)
    torch.sgn(x).sum().backward()
    assert x.grad._is_zerotensor()
    return x.grad


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("spec", ["int8", "int8 per_channel(0) clip", "int8 per_tensor stochastic", "float4_e2m1fn"])
def test_as_a_gradient(spec, learned):
    spec = fq.QuantSpec.parse(spec)
    x = torch.randn(256, 256, requires_grad=True)
    scale = torch.full(spec.granularity.scale_shapes(x.shape)[0], 0.01).requires_grad_(learned)
    torch.sgn(fq.fake_quantize(x, spec, scale=scale)).sum().backward()
    assert_same_bits(x.grad.clone(), torch.zeros(256, 256))
    if learned:
        assert not scale.grad.any()


@pytest.mark.parametrize(
    ("spec", "scale"),
    [
        ("int8", None),
        ("int8", 0.5),
        ("float8_e4m3fn", None),
        ("float8_e4m3fn", 0.5),
        ("int8 per_token", None),
        ("int8 per_block(-1:32) stochastic", None),
    ],
)
def test_as_an_input(spec, scale):
    assert_same_bits(fq.fake_quantize(zeros(256, 256), spec, scale=scale), torch.zeros(256, 256))
    codes, _ = fq.quantize(zeros(256, 256), spec, scale=scale)
    assert not codes.float().any()


@pytest.mark.parametrize("execution", ["simulate", "auto"])
@pytest.mark.parametrize("layer", [lambda: nn.Linear(64, 64), lambda: nn.Conv2d(64, 64, 1)])
def test_as_the_gradient_of_a_layer(layer, execution):
    model, _ = prepared(layer())
    fq.set_execution(model.requires_grad_(), execution)
    shape = (64, 64) if isinstance(model[0], nn.Linear) else (2, 64, 16, 16)
    x = torch.randn(shape, requires_grad=True)
    torch.sgn(model(x)).sum().backward()
    for gradient in (x.grad, model[0].weight.grad, model[0].bias.grad):
        assert_same_bits(gradient.clone(), torch.zeros(gradient.shape))
    given = zeros(*shape)
    with torch.no_grad():
        assert_same_bits(model(given), model(torch.zeros(shape)))


def test_as_parameters():
    x, scale = torch.ones(4096, 8), torch.full((4096,), 0.02)
    zero_point, spec = torch._efficientzerotensor((4096,)), fq.QuantSpec.parse("uint8 per_channel(0) asymmetric")
    assert_same_bits(fq.fake_quantize(x, spec, scale=scale, zero_point=zero_point), torch.ones(4096, 8))
    codes, params = fq.quantize(x, spec, scale=scale, zero_point=zero_point)
    assert (codes == 50).all()
    given = fq.QParams(params.scale, torch._efficientzerotensor((4096, 1)))
    assert_same_bits(fq.dequantize(codes, given, spec), torch.ones(4096, 8))
    fq.fake_quantize_(x, spec, scale=scale, zero_point=zero_point)
    assert_same_bits(x, torch.ones(4096, 8))
    for call in (fq.fake_quantize, fq.fake_quantize_, fq.quantize):
        with pytest.raises(QParamsError, match="scale must be a positive, finite number in every group, got 0"):
            call(x, "int8", scale=torch._efficientzerotensor(()))
