"""Training steps and small graphs for the tests of the IR."""

import torch

from fakequant.ir import Graph, IRType
from tests.support.bits import assert_same_bits


def step(function, model, x):
    model.zero_grad()
    y = function(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same_step(actual, expected):
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected, strict=True):
        assert_same_bits(got, wanted)


F32 = IRType.Float32


def variants():
    weight = torch.linspace(-1, 1, 6).reshape(2, 3)

    def build(*, constant=weight, trainable=False, shape=(4, 3), type=F32, op="FakeQuantization", **attributes):
        graph = Graph("g")
        x = graph.add_input("x", type, shape)
        given = torch.nn.Parameter(constant) if trainable else constant
        y = graph.add("Linear", x, graph.add_constant("w", given))
        graph.outputs = [graph.add(op, y, **attributes)]
        return graph

    moved = weight.clone()
    moved[0, 0] = -0.99999994
    negative_zero = weight.clone()
    negative_zero[1, 0] = 0.0
    other_zero = negative_zero.clone()
    other_zero[1, 0] = -0.0
    return {
        "base": build(num_bits=8, scale=0.1, zero_point=0.0, symmetric=True),
        "bits": build(num_bits=7, scale=0.1, zero_point=0.0, symmetric=True),
        "scale": build(num_bits=8, scale=0.2, zero_point=0.0, symmetric=True),
        "next scale": build(num_bits=8, scale=0.10000000000000002, zero_point=0.0, symmetric=True),
        "no scale": build(num_bits=8, scale=None, zero_point=0.0, symmetric=True),
        "asymmetric": build(num_bits=8, scale=0.1, zero_point=0.0, symmetric=False),
        "zero point": build(num_bits=8, scale=0.1, zero_point=3.0, symmetric=False),
        "constant": build(constant=moved, num_bits=8, scale=0.1, zero_point=0.0, symmetric=True),
        "zero": build(constant=negative_zero, num_bits=8, scale=0.1, zero_point=0.0, symmetric=True),
        "negative zero": build(constant=other_zero, num_bits=8, scale=0.1, zero_point=0.0, symmetric=True),
        "trainable": build(trainable=True, num_bits=8, scale=0.1, zero_point=0.0, symmetric=True),
        "shape": build(shape=(5, 3), num_bits=8, scale=0.1, zero_point=0.0, symmetric=True),
        "spec": build(op="FakeQuantize", spec="int8 per_tensor"),
        "other spec": build(op="FakeQuantize", spec="int8 per_token"),
    }
