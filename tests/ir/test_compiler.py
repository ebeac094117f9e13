import itertools

import pytest
import torch
from torch import nn

from fakequant import ir
from fakequant.errors import GraphError
from fakequant.ir import Graph, IRType
from tests.support.bits import assert_same_bits
from tests.support.graphs import assert_same_step, step, variants
from tests.support.matrix import full, in_turn, sweep
from tests.support.networks import NETWORKS, quantized


@sweep("network, preset", full(NETWORKS, ["INT8", "NVFP4"]), in_turn(NETWORKS, ["INT8", "NVFP4"]))
def test_compiled_steps_keep_every_bit(network, preset):
    model, x = quantized(network, preset)
    graph = ir.capture(model, x)
    compiled = graph.compile()
    expected = step(model, model, x)
    assert_same_step(step(compiled, model, x), expected)
    with torch.no_grad():
        assert_same_bits(compiled(x), expected[0])
        assert_same_bits(ir.optimize(graph).graph.compile()(x), expected[0])
    assert {id(p) for p in compiled.parameters()} <= {id(p) for p in model.parameters()}


def test_inductor_is_close():
    graph = Graph("g")
    x = graph.add_input("x", IRType.Float32, (4, 8))
    y = graph.add("FakeQuantize", graph.add("ReLU", x), spec="int8 per_tensor")
    graph.outputs = [graph.add("Linear", y, graph.add_constant("w", torch.randn(3, 8)))]
    given = torch.randn(4, 8)
    torch.testing.assert_close(graph.compile(exact=False)(given), graph.run(given))


def test_no_wrong_hit():
    """Graphs that differ in one thing each, compiled one after the other, each give their own result."""
    for graph in variants().values():
        x = torch.randn(next(iter(graph.inputs.values())).type.shape)
        assert_same_bits(graph.compile()(x), graph.run(x))


def test_parameters_are_read_at_every_call():
    model, x = quantized("CNN", "INT8")
    compiled = ir.capture(model, x).compile()
    before = compiled(x)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    before.sum().backward()
    optimizer.step()
    assert not torch.equal(compiled(x), before)
    assert_same_bits(compiled(x), model(x))


def test_a_change_of_the_graph_does_not_change_what_was_compiled():
    graph = variants()["base"]
    x = torch.randn(4, 3)
    compiled, expected = graph.compile(), graph.run(x)
    graph.ops[1].attributes["num_bits"] = 2
    assert_same_bits(compiled(x), expected)
    assert_same_bits(graph.compile()(x), graph.run(x))


def test_more_variants_than_torch_counts():
    graph = Graph("g")
    x, y = (graph.add_input(name, IRType.Float32, (2, 2, 2)) for name in "xy")
    graph.outputs = [graph.add("Add", x, y)]
    compiled = graph.compile()
    for order in itertools.permutations(range(3)):
        for trains in (False, True):
            given = torch.randn(2, 2, 2).permute(order).requires_grad_(trains)
            assert_same_bits(compiled(given, torch.ones(2, 2, 2)), given + 1)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_whole_recurrent_layer_is_compiled_exactly_alone(layer):
    model, x = layer(4, 3), torch.randn(5, 2, 4)
    graph = ir.capture(model, x)
    compiled = graph.compile()
    for function in (graph.run, graph.to_torch(), compiled):
        assert_same_bits(function(x)[0], model(x)[0])
    assert_same_step(*(step(lambda x, f=f: f(x)[0], model, x) for f in (compiled, model)))
    for function in (lambda: graph.compile(exact=False), graph.backward):
        with pytest.raises(GraphError, match="write the layer as a loop of nn"):
            function()
