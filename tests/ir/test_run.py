"""Graphs that run, compiled and as ONNX files: the same numbers, inputs by their names and types, refusals."""

import itertools

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant import ir
from fakequant.errors import ExportError, GraphError
from fakequant.ir import Graph, IRType
from fakequant.ir.graph import to_torch
from tests.support.bits import assert_same_bits
from tests.support.graphs import assert_same_step, step, variants
from tests.support.matrix import full, in_turn, sweep
from tests.support.networks import NETWORKS, quantized


def example():
    graph = Graph("g")
    x = graph.add_input("x", IRType.Float32, (2, -1))
    y = graph.add("Add", x, graph.add_constant("w.b", torch.nn.Parameter(torch.ones(3))))
    a, b = graph.add_all("Split", graph.add("FakeQuantization", y, num_bits=4), split_sizes=[1, 1])
    graph.outputs = [b, a, x]
    return graph


def test_outputs_come_in_their_order():
    x = torch.randn(2, 3)
    y = ir.FakeQuantizationOp(4)
    results = example().run(x)
    assert [tuple(r.shape) for r in results] == [(1, 3), (1, 3), (2, 3)]
    assert_same_bits(results[2], x)
    assert y.validate() is False


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "takes 1 inputs, got 0"),
        ([torch.ones(2, 3)] * 2, "takes 1 inputs, got 2"),
        ([torch.ones(3, 3)], r"'x' must be Float32 \[2, \?\], got Float32 \[3, 3\]"),
        ([torch.ones(2, 3).half()], "got Half"),
        ([[1.0]], "must be a tensor, got list"),
    ],
)
def test_other_inputs_are_refused(inputs, message):
    for run in (example().run, example().compile()):
        with pytest.raises(GraphError, match=message):
            run(*inputs)


def test_a_part_of_a_list_of_one():
    graph = Graph("g")
    graph.outputs = graph.add_all("Unbind", graph.add_input("x", IRType.Float32, (1, 3)))
    assert_same_bits(graph.run(torch.ones(1, 3)), torch.ones(3))


def test_names_that_are_no_paths_or_twice():
    graph = Graph("g")
    a, b, c = (graph.add_constant(name, torch.full((2,), float(i))) for i, name in enumerate(("a b", "a", "a.b")))
    graph.outputs = [graph.add("Concat", a, b, c)]
    assert_same_bits(graph.run(), torch.tensor([0.0, 0, 1, 1, 2, 2]))
    assert len(graph.to_torch().state_dict()) == 3


def test_lifted_constants_are_inputs():
    module = to_torch(example(), lifted=True)
    assert not list(module.parameters())
    given = torch.full((3,), 5.0)
    assert_same_bits(module(torch.zeros(2, 3), given)[0], example().run(torch.full((2, 3), 4.0))[0])


@pytest.mark.parametrize(
    ("op_type", "inputs", "declared", "given", "message"),
    [
        ("ReLU", [(-1, 4)], (2, 4), [(3, 4)], r"declares t1 as Float32 \[2, 4\], but computes Float32 \[3, 4\]"),
        ("MatMul", [(-1, 4), (-1, 5)], (-1, 5), [(3, 4), (3, 5)], "cannot be multiplied"),
        ("aten.erfinv.default", [(-1, 4)], (2, 4), [(3, 4)], "computes Float32"),
        ("Squeeze", [(-1, 4)], (-1, 4), [(1, 4)], r"computes Float32 \[4\]"),
    ],
)
def test_what_only_a_run_can_tell_names_the_operation(op_type, inputs, declared, given, message):
    graph = Graph("g")
    for place, shape in enumerate(inputs):
        graph.add_input(f"x{place}", IRType.Float32, shape)
    made = ir.TensorType(IRType.Float32, ir.TensorShape(declared))
    graph.ops = [ir.IROp(op_type, [len(inputs)], range(len(inputs)), [made])]
    graph.outputs = [len(inputs)]
    assert graph.validate()
    with pytest.raises(GraphError, match=f"= {op_type}.*: .*{message}") as raised:
        graph.run(*(torch.ones(shape) for shape in given))
    assert "\n" not in str(raised.value)


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


@sweep("network, preset", full(["CNN", "transformer"], ["INT8", "FP8"]), [("CNN", "INT8"), ("transformer", "FP8")])
def test_the_file_computes_the_graph(network, preset, tmp_path):
    model, x = quantized(network, preset)
    graph = ir.optimize(ir.capture(model, x)).graph
    report = ir.export_onnx(graph, tmp_path / "graph.onnx", example=(x,))
    verdict = fq.verify_onnx(tmp_path / "graph.onnx", graph.to_torch(), [x])
    assert verdict.exact
    assert sum(row.elements for row in verdict.rows) > 1000
    assert len(report.quantizers) >= 2


def test_inputs_keep_their_names_and_dynamic_dimensions(tmp_path):
    graph = ir.Graph("two inputs")
    image = graph.add_input("image", ir.IRType.Float32, (-1, 4))
    mask = graph.add_input("mask", ir.IRType.Int64, (4,))
    quantized = graph.add("FakeQuantization", image, num_bits=4, scale=0.25)
    graph.outputs = [graph.add("Mul", quantized, mask)]
    ir.export_onnx(graph, tmp_path / "graph.onnx")
    import onnx

    written = onnx.load(tmp_path / "graph.onnx").graph.input
    assert [value.name for value in written] == ["image", "mask"]
    first, second = (value.type.tensor_type.shape.dim for value in written)
    assert first[0].dim_param
    assert [first[1].dim_value, second[0].dim_value] == [4, 4]
    inputs = torch.linspace(-2, 2, 28).reshape(7, 4), torch.arange(4)
    assert fq.verify_onnx(tmp_path / "graph.onnx", graph.to_torch(), [inputs]).exact


def test_refused_before_anything_is_written(tmp_path):
    graph = ir.Graph("broken")
    x = graph.add_input("x", ir.IRType.Float32, (2, 4))
    with pytest.raises(GraphError, match="no outputs"):
        ir.export_onnx(graph, tmp_path / "graph.onnx")
    graph.outputs = [graph.add("ReLU", x)]
    with pytest.raises(ExportError, match="nothing in the model quantizes"):
        ir.export_onnx(graph, tmp_path / "graph.onnx")
    assert not list(tmp_path.iterdir())
