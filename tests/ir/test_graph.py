"""Graphs: what is invalid is rejected with a message that names the operation and the reason."""

import copy

import pytest
import torch

from fakequant import ir
from fakequant.errors import GraphError
from fakequant.ir import Graph, IROp, IRType, TensorShape, TensorType
from tests.support.graphs import F32, variants
from tests.support.matrix import full, sweep
from tests.support.networks import quantized


def typed(*dims, type=F32):
    return TensorType(type, TensorShape(dims))


def graph_of(op, *inputs, constants=()):
    """A graph of one operation whose inputs are t0, t1, ..."""
    graph = Graph("one")
    for id, type in enumerate(inputs):
        graph.inputs[id] = ir.Input(f"x{id}", type)
    for tensor in constants:
        graph.add_constant(f"c{graph.new_id()}", tensor)
    graph.ops = [op]
    graph.outputs = list(op.output_ids)
    return graph


def one(op_type, inputs, output, **attributes):
    """A graph of one operation with a declared result."""
    count = len(inputs)
    return graph_of(IROp(op_type, [count], range(count), [output], attributes), *inputs)


X = typed(4, 8)
IMAGE, KERNEL = typed(2, 3, 8, 8), typed(6, 3, 3, 3)
SPEC = "int8 per_tensor"
# name: graph, what the message must say of the operation, what it must say of the reason
BY_HAND = {
    "matmul_inner": (one("MatMul", [X, typed(7, 3)], typed(4, 3)), "MatMul", "[4, 8] X [7, 3]"),
    "matmul_types": (one("MatMul", [X, typed(8, 3, type=IRType.Half)], typed(4, 3)), "MatMul", "tensors of one type"),
    "linear_weight": (one("Linear", [X, typed(8)], typed(4)), "Linear", "weight [out, in]"),
    "linear_of_dynamic": (one("Linear", [typed(-1, -1, 8), typed(5, 9)], typed(-1, -1, 5)), "Linear",
                          "X [9, 5]. (with the length 840 for dynamic dimensions)"),
    "reshape_of_dynamic": (one("Reshape", [typed(-1, 8)], typed(-1, 7), shape=[-1, 7, 0]), "Reshape", "torch refuses"),
    "slice_of_nothing": (one("Slice", [typed(-1, 8)], typed(-1, -1), dim=1, start=9), "Slice", "it Float32 [?, 0]"),
    "unbind_of_dynamic": (one("Unbind", [typed(-1, 8)], typed(8)), "Unbind", "cannot tell into how many parts"),
    "conv_dilation": (one("Conv2d", [IMAGE, KERNEL], typed(2, 6, 8, 6), dilation=[0, 1]), "Conv2d", "dilation >= 1"),
    "gather_type": (one("Gather", [X, typed(2)], typed(2, 8), dim=0), "Gather", "index [n] of Int64"),
    "select_dim": (one("Select", [X], typed(4), dim=-3, index=0), "Select", "dim -3 is out of range"),
    "sub_bool": (one("Sub", [X, typed(4, 8, type=IRType.Boolean)], X), "Sub", "takes numbers"),
    "gru_types": (one("GRUCell", [typed(4, 6), typed(4, 5), typed(15, 6, type=IRType.Half), typed(15, 5)],
                      typed(4, 5)), "GRUCell", "tensors of one type"),
    "softmax_of_integers": (one("Softmax", [typed(4, type=IRType.Int64)], typed(4, type=IRType.Int64), dim=0),
                            "Softmax", "floating-point"),
    "conv_shape": (one("Conv2d", [IMAGE, KERNEL], typed(2, 6, 8, 8)), "Conv2d", "make it Float32 [2, 6, 6, 6]"),
    "batch_norm_training": (one("BatchNorm", [IMAGE, *[typed(3)] * 4], IMAGE, training=True, momentum=0.1, eps=1e-5,
                                cudnn_enabled=False), "BatchNorm", "model.eval()"),
    "batch_norm_types": (one("BatchNorm", [IMAGE, *[typed(3, type=IRType.Half)] * 4], IMAGE, training=False,
                             momentum=0.1, eps=1e-5, cudnn_enabled=False), "BatchNorm", "weight is Half"),
    "layer_norm_types": (one("LayerNorm", [X, typed(8, type=IRType.Half)], X, normalized_shape=[8]), "LayerNorm",
                         "weight is Half"),
    "group_norm_types": (one("GroupNorm", [IMAGE, typed(3, type=IRType.Float64)], IMAGE, num_groups=3), "GroupNorm",
                         "weight is Float64"),
    "output_padding": (one("ConvTranspose1d", [typed(2, 3, 5), typed(3, 2, 3)], typed(2, 2, 8), output_padding=[1]),
                       "ConvTranspose1d", "output_padding below the stride 1"),
    "round_bool": (one("Round", [typed(2, type=IRType.Boolean)], typed(2, type=IRType.Boolean)), "Round", "numbers"),
    "operator_of_dynamic": (one("aten.erfinv.default", [typed(-1, 3)], typed(9, type=IRType.Int64)), "aten.erfinv",
                            "make it Float32 [?, 3]"),
    "concat_types": (one("Concat", [X, typed(4, 8, type=IRType.Half)], typed(8, 8)), "Concat", "one type"),
    "add_broadcast": (one("Add", [X, typed(4, 7)], X), "Add", "broadcast a dimension of length 7"),
    "add_lacks": (one("Add", [X], X), "Add", "lacks the tensor 'other'"),
    "add_attribute": (one("Add", [X, X], X, alfa=2), "Add", "no attribute 'alfa'"),
    "softmax_text": (one("Softmax", [X], X, dim="a"), "Softmax", "takes int as 'dim'"),
    "unknown_operation": (one("Convolve", [X], X), "Convolve", "unknown operation"),
    "unknown_operator": (one("aten.nothing.default", [X], X), "aten.nothing", "torch has no operator"),
    "in_place": (one("aten.relu_.default", [X], X), "aten.relu_", "in place"),
    "no_such_overload": (one("Add", [X, X], X, overload="aten.add.Nothing"), "Add", "no overload"),
    "ref_beyond": (one("Reshape", [X], X, shape=[ir.Ref(3), 8]), "Reshape", "names the input %3"),
    "tensor_as_size": (one("Reshape", [X, X], X, shape=[ir.Ref(1), 8]), "Reshape", "takes a value as 'shape'"),
    "operator_of_torch": (one("aten.logcumsumexp.default", [X], X, dim=7), "aten.logcumsumexp", "torch refuses it"),
    "bits_0": (one("FakeQuantization", [X], X, num_bits=0), "FakeQuantization", "from 1 to 32, got 0"),
    "scale_nan": (one("FakeQuantization", [X], X, scale=float("nan")), "FakeQuantization", "scale must be a positive"),
    "quantized_integers": (one("FakeQuantize", [typed(4, type=IRType.Int64)], typed(4, type=IRType.Int64), spec=SPEC),
                           "FakeQuantize", "quantizes floating-point numbers"),
    "unknown_spec": (one("FakeQuantize", [X], X, spec="int9x"), "FakeQuantize", "int9x"),
    "no_spec": (one("FakeQuantize", [X], X), "FakeQuantize", "lacks the value 'spec'"),
    "scale_shape": (one("FakeQuantize", [X, typed(8)], X, spec=SPEC), "FakeQuantize", "a scale of Float32 [1, 1]"),
    "zero_point": (one("FakeQuantize", [X, typed(1, 1), typed(1, 1)], X, spec=SPEC), "FakeQuantize", "zero point"),
    "granularity": (one("FakeQuantize", [X], X, spec="int8 per_channel(4)"), "FakeQuantize", "axis 4 is out of range"),
    "blocks": (one("FakeQuantize", [X], X, spec="int8 per_block(-1:5)"), "FakeQuantize", "no multiple of 5"),
    "no_seed": (one("FakeQuantize", [X], X, spec="int8 per_tensor stochastic"), "FakeQuantize", "takes a seed"),
    "zero_size": (one("ReLU", [typed(0, 8)], typed(0, 8)), "x0", "has the dimension 0"),
    "zero_size_result": (one("ReLU", [X], typed(0, 8)), "ReLU", "has the dimension 0"),
    "no_outputs_of_op": (graph_of(IROp("ReLU", [], [0], []), X), "ReLU", "output_ids is empty"),
    "two_outputs": (graph_of(IROp("ReLU", [1, 2], [0], [X, X]), X), "ReLU", "makes 1 values, but 2"),
    "types_missing": (graph_of(IROp("ReLU", [1], [0], []), X), "ReLU", "0 types of outputs"),
    "strange_attribute": (graph_of(IROp("ReLU", [1], [0], [X], {"a": object()}), X), "ReLU", "attribute cannot be"),
    "cycle_of_one": (graph_of(IROp("Add", [1], [0, 1], [X]), X), "Add", "a cycle"),
    "decimal": (graph_of(IROp("ReLU", [1], [0], [X]), typed(4, type=IRType.Decimal)), "x0", "no torch dtype"),
    "fused_body": (one("Fused", [X], X, name="A", body=[IROp("ReLU", [1], [5], [X])]), "Fused", "reads t5 before"),
    "fused_no_body": (one("Fused", [X], X, name="A", body=[]), "Fused", "list of operations"),
    "fused_text": (one("Fused", [X], X, name="A", body=["nonsense"]), "Fused", "takes List[Operation] as 'body'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_invalid_by_hand(name):
    graph, what, why = BY_HAND[name]
    assert not graph.validate()
    faults = "\n".join(graph.faults())
    assert what in faults
    assert why in faults
    with pytest.raises(GraphError, match="is not valid"):
        graph.to_torch()


@pytest.fixture(scope="module")
def captured():
    return {name: ir.capture(*quantized(name, "INT8")) for name in GRAPHS}


# What is changed in an operation, to what, and what a fault must say.
DAMAGE = {
    "missing input": ("input_ids", lambda op, graph: [9999, *op.input_ids[1:]], "t9999, which nothing makes"),
    "later input": ("input_ids", lambda op, graph: [graph.ops[-1].output_id, *op.input_ids[1:]], "cycle"),
    "no inputs": ("input_ids", lambda op, graph: [], ""),
    "repeated output": ("output_ids", lambda op, graph: [next(iter(graph.inputs)), *op.output_ids[1:]], "already"),
    "negative output": ("output_ids", lambda op, graph: [-5, *op.output_ids[1:]], "-5 is not an integer >= 0"),
    "wrong shape": ("output_shape", lambda op, graph: [*op.output_shape, 3], "declares"),
    "zero size": ("output_shape", lambda op, graph: [0, *op.output_shape[1:]], "dimension 0"),
    "wrong type": ("output_type", lambda op, graph: IRType.Int16, "declares"),
    "wrong attribute": ("attributes", lambda op, graph: op.attributes | {"no_such_thing": 1}, "no_such_thing"),
}
GRAPHS = ["CNN", "transformer"]


@sweep("damage, name", full(DAMAGE, GRAPHS), full(DAMAGE, GRAPHS[:1]), damage=DAMAGE)
def test_invalid_by_machine(name, damage, captured):
    """Every operation of a captured graph, damaged in every way, is rejected, named, and with the reason."""
    graph, (attribute, value, why) = captured[name], damage
    assert graph.validate()
    count = 0
    for place, op in enumerate(graph.ops):
        is_last = place == len(graph.ops) - 1
        if attribute == "input_ids" and (not op.input_ids or (why == "cycle" and is_last)):
            continue
        damaged = graph.copy()
        setattr(damaged.ops[place], attribute, value(damaged.ops[place], damaged))
        faults = damaged.faults()
        assert any(op.op_type in fault and why in fault for fault in faults), (str(op), faults)
        count += 1
    assert count >= len(graph.ops) - 5


def test_exchanged_operations_are_found(captured):
    graph = captured["CNN"]
    producers = graph.producers()
    pairs = [(producers[id], op) for op in graph.ops for id in op.input_ids if id in producers]
    assert len(pairs) > 10
    for before, after in pairs:
        swapped = [after if op is before else before if op is after else op for op in graph.ops]
        assert any("made only later" in fault and after.op_type in fault for fault in graph.replaced(swapped).faults())


def test_faults_of_the_graph_itself():
    graph = Graph("g")
    assert graph.faults() == ["the graph has no outputs"]
    x = graph.add_input("x", F32, (2,))
    graph.outputs = [7]
    assert graph.faults() == ["the output t7 is made by nothing"]
    graph.outputs = [x]
    assert graph.validate()
    graph.add_input("x", F32, (2,))
    assert graph.faults() == ["2 inputs have the name 'x'"]
    graph = Graph("g")
    graph.outputs = [graph.add_constant("w", torch.zeros(2, 0))]
    assert "the constant 'w': shape [2, 0] has the dimension 0" in graph.faults()[0]
    graph.constants = {0: ir.Constant("w", torch.zeros(2, dtype=torch.float8_e5m2))}
    assert "cannot be in a graph" in graph.faults()[0]
    graph = Graph("g")
    graph.outputs = [graph.add("Size", graph.add_input("x", F32, (-1,)), dim=0)]
    assert graph.faults() == ["the output t1 is Index, which is not a tensor"]


def test_adding_refuses_what_does_not_fit():
    graph = Graph("g")
    x = graph.add_input("x", F32, (2, 3))
    with pytest.raises(GraphError, match=r"MatMul\(t0, t0\): torch refuses it: .*\[2, 3\] X \[2, 3\]"):
        graph.add("MatMul", x, x)
    with pytest.raises(GraphError, match="reads t9, which nothing makes yet"):
        graph.add("ReLU", 9)
    with pytest.raises(GraphError, match="makes 2 values; use add_all"):
        graph.add("Unbind", x)
    assert graph.ops == []
    assert graph.add_all("Unbind", x) == [1, 2]


def test_a_copy_is_a_graph_of_its_own():
    graph = variants()["base"]
    other = graph.copy()
    assert other == graph
    other.ops[1].attributes["num_bits"] = 3
    assert graph.ops[1].attributes["num_bits"] == 8
    assert other != graph
    assert copy.copy(graph.ops[0]) == graph.ops[0]


def test_adding_many_operations_reads_each_type_once(monkeypatch):
    monkeypatch.setattr(Graph, "types", None)
    graph = Graph("g")
    value = graph.add_input("x", F32, (2,))
    for _ in range(20):
        value = graph.add("Add", graph.add("Neg", value), value)
    assert len(graph.ops) == 40
