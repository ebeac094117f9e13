import pytest
import torch

from fakequant import ir
from fakequant.errors import GraphError
from fakequant.ir import Graph, IRType
from tests.support.bits import assert_same_bits
from tests.support.matrix import full, in_turn, sweep
from tests.support.networks import NETWORKS, PRESETS, quantized


@sweep("network, preset", full(NETWORKS, PRESETS), in_turn(NETWORKS, PRESETS)[::2])
def test_the_graph_of_the_gradients_gives_those_of_the_model(network, preset):
    model, x = quantized(network, preset)
    graph = ir.capture(model, x)
    y = model(x)
    dy = torch.linspace(-1, 1, y.numel()).view_as(y)
    trained = [c.tensor for c in graph.constants.values() if c.trainable]
    leaf = x.clone().requires_grad_() if x.is_floating_point() else x
    expected = torch.autograd.grad(model(leaf), [*([leaf] if leaf.requires_grad else []), *trained], dy)
    back = graph.backward()
    assert back.validate()
    results = back.run(x, dy)
    assert len(results) == len(expected)
    for got, wanted in zip(results, expected, strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("gradient", ["code_range", "input_range", "identity", "clip"])
@pytest.mark.parametrize("given", [True, False], ids=["static", "dynamic"])
def test_each_gradient_of_quantizers(gradient, given):
    graph = Graph("g")
    x = graph.add_input("x", IRType.Float32, (9,))
    inputs = [x, graph.add_constant("s", torch.tensor([0.5]))] if given else [x]
    graph.outputs = [graph.add("FakeQuantize", *inputs, spec=f"int4 per_tensor {gradient}".replace(" code_range", ""))]
    values = torch.tensor([-9.0, -4.0, -3.75, -0.1, 0.0, 3.5, 3.74, 3.76, float("inf")])
    leaf = values.clone().requires_grad_()
    dy = torch.arange(1.0, 10.0)
    graph.run(leaf).backward(dy)
    assert leaf.grad is not None
    assert_same_bits(graph.backward().run(values, dy), leaf.grad)


def test_what_nothing_depends_on_has_zeros():
    graph = Graph("g")
    x, y = (graph.add_input(name, IRType.Float32, (2,)) for name in "xy")
    graph.outputs = [graph.add("ReLU", x)]
    dx, dy = graph.backward().run(torch.tensor([1.0, -1.0]), torch.ones(2), torch.tensor([3.0, 4.0]))
    assert (dx.tolist(), dy.tolist()) == ([3.0, 0.0], [0.0, 0.0])
    graph.outputs = [graph.add("Detach", y)]
    assert [g.tolist() for g in graph.backward().run(torch.ones(2), torch.ones(2), torch.ones(2))] == [[0.0, 0.0]] * 2


def dynamic(graph):
    graph.outputs = [graph.add("ReLU", graph.add_input("x", IRType.Float32, (-1,)))]


def whole(graph):
    graph.outputs = [graph.add("Equal", graph.add_input("x", IRType.Float32, (2,)), other=0)]


def constant(graph):
    graph.outputs = [graph.add("ReLU", graph.add_constant("w", torch.ones(2)))]


@pytest.mark.parametrize(
    ("build", "message"),
    [(dynamic, "has a dynamic dimension"), (whole, "which has no gradient"), (constant, "there is no gradient")],
)
def test_what_has_no_gradient_says_so(build, message):
    graph = Graph("g")
    build(graph)
    with pytest.raises(GraphError, match=message):
        graph.backward()


def test_gradients_of_gradients_are_refused():
    graph = Graph("g")
    graph.outputs = [graph.add("Exp", graph.add_input("x", IRType.Float32, (3,)))]
    with pytest.raises(GraphError, match="gradients of gradients are not recorded"):
        graph.backward().backward()


def test_an_input_may_have_the_name_of_a_gradient():
    graph = Graph("g")
    graph.outputs = [graph.add("Exp", graph.add_input("gradient_0", IRType.Float32, (3,)))]
    back = graph.backward()
    assert [value.name for value in back.inputs.values()] == ["gradient_0", "gradient_0_"]
    assert_same_bits(back.run(torch.zeros(3), torch.ones(3)), torch.ones(3))
