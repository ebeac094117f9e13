"""Layers in integer execution are simulated where a gradient is wanted: the same outputs and gradients."""

import pytest
import torch
from torch import nn

import fakequant as fq
from tests.support.bits import assert_same_bits
from tests.support.integer_models import assert_integer, hostile, prepared

LAYERS = {
    "linear": (lambda: nn.Linear(24, 9), (7, 24)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 5)),
}


def step(model, x):
    """The output and all gradients of one step."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("learn", ["", *fq.nn.learned_ranges()])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_training_step_is_that_of_the_simulated_layer(kind, learn):
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    models, x = [model.requires_grad_() for model in prepared(make())], hostile(*shape).clamp(-100, 100)
    for model in models:
        for quantizer in (model[0]._input_quantizer, model[0]._weight_quantizer) if learn else ():
            quantizer.freeze(model[0].weight) if not quantizer.calibrated else None
            quantizer.learn(learn)
    found, wanted = (step(model, x) for model in models)
    assert_integer(models[0])
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_same_bits(found[name], value, name)


@pytest.mark.parametrize("wants", ["x", "weight", "bias", "scale", None])
def test_codes_are_multiplied_only_where_no_gradient_is_wanted(wants):
    torch.manual_seed(0)
    model, simulated = prepared(nn.Linear(24, 9))
    x = hostile(7, 24).clamp(-100, 100)
    with torch.no_grad():
        by_codes, in_float = model(x), simulated(x)
    assert not torch.equal(by_codes, in_float)  # otherwise the comparison below says nothing
    for layer in (model[0], simulated[0]):
        tensors = {"x": x, "weight": layer.weight, "bias": layer.bias, "scale": layer._input_quantizer.scale}
        if wants:
            tensors[wants].requires_grad_()
    assert_same_bits(model(x).detach(), in_float if wants else by_codes)


def test_a_model_calibrated_in_inference_mode_learns():
    model = prepared(nn.Linear(16, 8))[0].requires_grad_()
    x = torch.randn(4, 16)
    with torch.inference_mode():
        fq.calibrate(model, [x])
    model(x).sum().backward()
    assert model[0].weight.grad is not None
