import pytest
import torch

from fakequant import ir
from fakequant.errors import GraphError
from fakequant.ir import Graph, IRType
from fakequant.ir.graph import to_torch
from tests.support.bits import assert_same_bits


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
        ("ReLU", [(-1, 4)], (2, 4), [(3, 4)], r"declares t1 as Float32 \[2, 4\], but made Float32 \[3, 4\]"),
        ("MatMul", [(-1, 4), (-1, 5)], (-1, 5), [(3, 4), (3, 5)], "cannot be multiplied"),
        ("aten.erfinv.default", [(-1, 4)], (2, 4), [(3, 4)], "made Float32"),
        ("Squeeze", [(-1, 4)], (-1, 4), [(1, 4)], r"made Float32 \[4\]"),
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
