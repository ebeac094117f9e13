import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakequant import ir
from fakequant.errors import GraphError
from fakequant.ir import Graph, IRType, TensorShape
from tests.support.matrix import full, in_turn, sweep
from tests.support.networks import NETWORKS, PRESETS, quantized

LAYERS = {
    "ReLU": {},
    "Tanh": {},
    "Softmax": {"dim": -1},
    "Transpose": {"dim0": 0, "dim1": 1},
    "FakeQuantization": {"num_bits": 5, "scale": None, "symmetric": False},
    "FakeQuantize": {"spec": "float4_e2m1fn per_block(-1:2,pad) scale=float8_e8m0fnu:floor"},
    "Clamp": {"min": -1.5, "max": float("inf")},
    "Mean": {"dim": [0], "keepdim": True},
    "Flatten": {},
    "Add": {},
    "Mul": {"other": -0.0},
    "Unbind": {},
    "Concat": {"dim": 0},
}
STEPS = st.lists(st.tuples(st.sampled_from(sorted(LAYERS)), st.integers(0, 30), st.integers(0, 30)), max_size=12)
NAMES = st.text(min_size=1, max_size=8)


@st.composite
def graphs(draw):
    """Graphs of random operations on random earlier values; what does not fit is left out."""
    graph = Graph(draw(NAMES))
    dims = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    values = [graph.add_input(draw(NAMES), IRType.Float32, dims)]
    numbers = draw(st.lists(st.floats(width=32), min_size=1, max_size=6))
    values.append(graph.add_constant(draw(NAMES), torch.tensor(numbers)))
    for op_type, a, b in draw(STEPS):
        ids = [values[a % len(values)]]
        if op_type in ("Add", "Concat"):
            ids.append(values[b % len(values)])
        try:
            values += graph.add_all(op_type, *ids, **LAYERS[op_type])
        except GraphError:
            continue
        graph.ops[-1].origin = draw(st.sampled_from(["", "layer.0", 'a "b" # {c}']))
    graph.outputs = values[-2:]
    return graph


def tensors_of(graph):
    return {constant.name: constant.tensor for constant in graph.constants.values()}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(graphs())
def test_made_graphs_are_read_back(graph):
    text = ir.to_text(graph)
    again = ir.parse(text, tensors_of(graph))
    assert ir.to_text(again) == text
    assert again == graph
    assert again.hash() == graph.hash()
    assert again.validate() == graph.validate()


@sweep("network, preset", full(NETWORKS, PRESETS), in_turn(NETWORKS, PRESETS))
def test_captured_graphs_are_read_back(network, preset, tmp_path):
    model, x = quantized(network, preset)
    captured = ir.capture(model, x)
    for graph in (captured, ir.optimize(captured, ir.ALL).graph):
        again = ir.load(ir.save(graph, tmp_path / "graph.txt"))
        assert str(again) == str(graph)
        assert again.hash() == graph.hash()
        assert torch.equal(again.run(x), graph.run(x))


def test_a_trainable_constant_comes_back_as_a_parameter():
    graph = Graph("g")
    graph.outputs = [graph.add("ReLU", graph.add_constant("w", torch.nn.Parameter(torch.tensor([1.0, float("nan")]))))]
    (constant,) = ir.parse(str(graph)).constants.values()
    assert isinstance(constant.tensor, torch.nn.Parameter)


def example():
    graph = Graph("g")
    x = graph.add_input("x", IRType.Float32, (2, -1))
    graph.outputs = [graph.add("Add", x, graph.add_constant("w", torch.arange(20.0).reshape(2, 10)))]
    return graph


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("IR Graph", "Graph", "line 1: cannot read"),
        ("Float32 [2, ?]", "Float33 [2, ?]", "line 3: unknown type 'Float33'"),
        ("[2, ?]", "[2, x]", "line 3: cannot read the shape"),
        ("t2 = Add", "t2 Add", "line 7: cannot read the operation"),
        ("(t0, t1)", "(t0, u1)", "line 7: .* expected the name of a value such as t0, got 'u1'"),
        ("  Outputs: t2", "", "the text ends after 7 lines without its line of outputs"),
        ("  Outputs: t2", "  Outputs: t2\nmore", "line 9: nothing may follow"),
        ('"w"', '"v"', "line 5: the constant 'v' is not in the text"),
        ("sha256:", "sha256:0", "line 5: the constant 'w' is another one"),
        ("    t1", "    t0", "line 5: t0 is there already"),
        ("  Inputs:\n", "", "line 2: expected '  Inputs:'"),
    ],
)
def test_damaged_text(old, new, message):
    text = ir.to_text(example())
    assert old in text
    with pytest.raises(GraphError, match=message):
        ir.parse(text.replace(old, new, 1), tensors_of(example()))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 12), st.text(max_size=3))
def test_text_with_a_piece_exchanged_is_read_or_refused(start, length, piece):
    text = ir.to_text(example())
    start %= len(text)
    damaged = text[:start] + piece + text[start + length :]
    try:
        graph = ir.parse(damaged, tensors_of(example()))
        graph.validate()
    except GraphError:
        return
    assert isinstance(graph, Graph)


def test_files_that_are_not_there_or_damaged(tmp_path):
    with pytest.raises(GraphError, match="cannot read the graph"):
        ir.load(tmp_path / "none.txt")
    path = ir.save(example(), tmp_path / "graph.txt")
    next(tmp_path.glob("graph.txt.*.safetensors")).write_bytes(b"x")
    with pytest.raises(GraphError, match="cannot read the graph"):
        ir.load(path)
    ir.save(example(), path)
    path.write_text(path.read_text().replace("Add(t0, t1)", "Add(t0, t7)"))
    with pytest.raises(GraphError, match="t7, which nothing makes"):
        ir.load(path)


def test_types_in_text():
    assert ir.parse_op("t1, t2 = Unbind(t0) : Float32 scalar, Half [?]").outputs == [
        ir.TensorType(IRType.Float32, TensorShape()),
        ir.TensorType(IRType.Half, TensorShape((-1,))),
    ]
