"""Gradients of layers that multiply codes: those of the simulated layer, and what is kept for them."""

import pytest
import torch
import torch.utils.checkpoint
from bits import assert_same_bits
from test_integer import assert_integer, hostile, prepared
from torch import nn

import fakequant as fq
from fakequant.errors import ConfigError


def step(model, x, *, learn=""):
    if learn:
        for quantizer in (model[0]._input_quantizer, model[0]._weight_quantizer):
            quantizer.freeze(model[0].weight) if not quantizer.calibrated else None
            quantizer.learn(learn)
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    return {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


LAYERS = {
    "linear": (lambda: nn.Linear(24, 9), (7, 24)),
    "tokens": (lambda: nn.Linear(24, 9, bias=False), (2, 3, 24)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 5)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False), (2, 4, 7, 5)),
    "channels_last": (lambda: nn.Conv2d(8, 8, 3, stride=2, padding=1, dilation=2, groups=2), (4, 8, 17, 15)),
    "three_axes": (lambda: nn.Conv3d(4, 6, 3, padding=1), (2, 4, 5, 4, 6)),
    "one_axis": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 11)),
}


def input_of(kind):
    x = hostile(*LAYERS[kind][1]).clamp(-100, 100)
    return x.contiguous(memory_format=torch.channels_last) if kind == "channels_last" else x


@pytest.mark.parametrize("learn", ["", "lsq"])
@pytest.mark.parametrize("input", ["int8", "uint8", "int4 per_tensor input_range", "int8 per_tensor clip"])
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_those_of_the_simulated_layer(kind, input, learn):
    if learn and input != "int8":
        learn = "lsq_plus" if input == "uint8" else learn
    torch.manual_seed(0)
    model, simulated = prepared(LAYERS[kind][0](), input)
    x = input_of(kind)
    found, wanted = step(model, x, learn=learn), step(simulated, x, learn=learn)
    assert_integer(model)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_same_bits(found[name], gradient, name)


@pytest.mark.parametrize("learn", fq.nn.learned_ranges())
def test_learned_ranges_get_the_gradients_of_the_simulated_layer(learn):
    torch.manual_seed(0)
    x = hostile(7, 24).clamp(-100, 100)
    found, wanted = (step(m, x, learn=learn) for m in prepared(nn.Linear(24, 9)))
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_same_bits(found[name], gradient, name)


@pytest.mark.parametrize("name", ["_input_quantizer", "_weight_quantizer"])
def test_a_fixed_scale_may_get_a_gradient(name):
    torch.manual_seed(0)
    x, gradients = hostile(7, 24).clamp(-100, 100), []
    for model in prepared(nn.Linear(24, 9)):
        quantizer = getattr(model[0], name)
        if quantizer.scale is None:
            quantizer.set_qparams(quantizer.qparams(model[0].weight.detach()))
        quantizer.scale.requires_grad_()
        y = model(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        gradients.append(quantizer.scale.grad)
    assert_same_bits(*gradients)


@pytest.mark.parametrize("kind", LAYERS)
def test_the_gradient_from_above_is_not_written_to(kind):
    model, _ = prepared(LAYERS[kind][0]())
    x = input_of(kind).requires_grad_()
    y = model(x)
    dy = torch.randn_like(y)
    before = dy.clone()
    y.backward(dy)
    assert_same_bits(dy, before)


@pytest.mark.parametrize("wants", [{"x"}, {"weight"}, {"bias"}, {"x", "weight"}, {"x", "bias"}, {"weight", "bias"}])
@pytest.mark.parametrize("kind", LAYERS)
def test_of_some_gradients_only_their_factors_are_kept(kind, wants):
    dy, gradients = None, []
    for model in prepared(LAYERS[kind][0]()):
        for name, parameter in model[0].named_parameters():
            parameter.requires_grad_(name in wants)
        x = input_of(kind).requires_grad_("x" in wants)
        y = model(x)
        if not y.requires_grad:  # of a bias, which this layer has not
            assert model[0].bias is None
            return
        if not gradients:
            codes = [t for t in y.grad_fn.saved_tensors if t is not None and t.dtype == torch.int8]
            # The gradient of x is a product with the weight, and that of the weight one with x.
            assert {t.shape for t in codes} == {
                t.shape for name, t in (("x", model[0].weight), ("weight", x)) if name in wants
            }
        dy = torch.randn_like(y) if dy is None else dy
        y.backward(dy)
        gradients.append({"x": x.grad, **{name: p.grad for name, p in model[0].named_parameters()}})
    found, wanted = gradients
    for name, gradient in wanted.items():
        assert (gradient is not None) == (name in wants), name
        if gradient is not None:
            assert_same_bits(found[name], gradient, name)


def test_twice_differentiated_is_refused():
    model, _ = prepared(nn.Linear(8, 4))
    x = hostile(3, 8).clamp(-9, 9).requires_grad_()
    with pytest.raises(ConfigError, match="through simulated layers only"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


def test_saved_bytes_per_element():
    model, _ = prepared(nn.Linear(1024, 8, bias=False))
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel() * t.element_size()) or t, lambda t: t
    )
    x = torch.randn(512, 1024)
    with hooks:
        y = model(x)
    assert y.grad_fn.saved_tensors[0].dtype == torch.int8
    assert x.numel() < sum(kept) < 1.25 * x.numel()


def test_what_is_saved_is_freed_by_the_backward_pass():
    model, _ = prepared(nn.Linear(16, 8))
    x = torch.randn(4, 16).requires_grad_()
    y = model(x)
    node = y.grad_fn
    assert node.saved_tensors[0].dtype == torch.int8
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert_same_bits(torch.autograd.grad(y.sum(), x)[0], first[0])
    with pytest.raises(RuntimeError, match="already been freed"):
        _ = node.saved_tensors
    y = model(x)
    with torch.no_grad():
        model[0]._input_quantizer.scale *= 2  # a moving average, or a checkpoint
    assert_same_bits(torch.autograd.grad(y.sum(), x)[0], first[0])
    model[0]._input_quantizer.scale /= 2
    checkpointed = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    assert_same_bits(torch.autograd.grad(checkpointed.sum(), x)[0], first[0])


def test_a_model_calibrated_in_inference_mode_learns():
    model, _ = prepared(nn.Linear(16, 8))
    x = torch.randn(4, 16)
    with torch.inference_mode():
        fq.calibrate(model, [x])
    model(x).sum().backward()
    assert model[0].weight.grad is not None
