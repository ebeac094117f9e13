"""Graphs on which passes once changed bits: whatever the grad mode, the memory and the order of inputs."""

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant import ir
from fakequant.errors import GraphError
from fakequant.ir import Graph, IROp, IRType
from tests.support.bits import assert_same_bits

F32 = IRType.Float32


def kinds(graph):
    return [op.op_type for op in graph.ops]


class Turned(nn.Module):
    """A product of a tensor that is not contiguous, for which torch looks at requires_grad."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x.transpose(0, 1))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.linear = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("model", [Turned, Attending])
@pytest.mark.parametrize("preset", ["INT8", "INT8_WEIGHT_ONLY"])
def test_folded_weights_keep_every_bit_in_every_grad_mode(model, preset):
    torch.manual_seed(0)
    x = torch.randn(5, 2, 8)
    module = fq.prepare(model().eval(), preset)
    fq.calibrate(module, [x])
    graph = ir.capture(module, x)
    optimized = ir.optimize(graph)
    assert optimized.statistics.exact
    assert len(optimized.graph.ops) < len(graph.ops)
    compiled = optimized.graph.compile()
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            expected = graph.run(x)
            for function in (optimized.graph.run, optimized.graph.to_torch(), compiled):
                assert_same_bits(function(x), expected)
                assert function(x).requires_grad is expected.requires_grad


def test_frozen_constants_are_not_trained():
    graph = Graph("g")
    x, w = graph.add_input("x", F32, (3, 4)), graph.add_constant("w", nn.Parameter(torch.randn(2, 4)))
    graph.outputs = [graph.add("Linear", x, graph.add("FakeQuantization", w))]
    folded = ir.optimize(graph).graph
    (constant,) = folded.constants.values()
    assert (constant.frozen, constant.trainable, constant.kind) == (True, False, "frozen")
    assert list(folded.compile().parameters()) == []
    assert list(folded.to_torch().parameters()) == []
    assert len(folded.backward().outputs) == 1
    folded.run(torch.ones(3, 4)).sum().backward()
    assert constant.tensor.grad is None
    plain = folded.copy()
    plain.constants = {id: ir.Constant(c.name, c.tensor) for id, c in folded.constants.items()}
    assert str(plain) != str(folded)


def test_what_grad_mode_changes_is_not_folded():
    graph = Graph("g")
    torch.manual_seed(0)
    x = graph.add_constant("x", torch.randn(5, 2, 8).transpose(0, 1))
    w = graph.add("Tanh", graph.add_constant("w", nn.Parameter(torch.randn(8, 8))))
    graph.outputs = [graph.add("Linear", x, w, graph.add_constant("b", torch.randn(8)))]
    folded = ir.optimize(graph).graph
    assert kinds(folded) == ["Linear"]
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert_same_bits(folded.run(), graph.run())


def test_a_folded_view_does_not_move_with_training():
    w = nn.Parameter(torch.randn(3, 4))
    graph = Graph("g")
    x, held = graph.add_input("x", F32, (2, 3)), graph.add_constant("w", w)
    graph.outputs = [graph.add("Linear", x, graph.add("Transpose", held, dim0=0, dim1=1))]
    folded = ir.optimize(graph).graph
    given, (constant,) = torch.randn(2, 3), folded.constants.values()
    assert constant.tensor.stride() == (1, 4)
    before = folded.run(given)
    with torch.no_grad():
        w.add_(1)
    assert_same_bits(folded.run(given), before)


def test_folded_views_keep_strides_and_place_in_memory():
    graph = Graph("g")
    w = graph.add_constant("w", torch.randn(6, 1, 4))
    views = [graph.add("Slice", w, start=1, end=5, step=2), graph.add("Expand", w, size=[6, 3, 4])]
    x = graph.add_input("x", F32, (1,))
    graph.outputs = [graph.add("Mul", x, view) for view in views]
    expected = [graph.constants[w].tensor[1:5:2], graph.constants[w].tensor.expand(6, 3, 4)]
    folded = ir.optimize(graph, [ir.FoldConstants()]).graph
    found = [c.tensor for c in folded.constants.values() if c.name != "w"]
    for made, view in zip(found, expected, strict=True):
        assert_same_bits(made, view)
        assert made.stride() == view.stride()
        assert made.data_ptr() % 64 == view.data_ptr() % 64
        assert made.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()


def test_folding_again_takes_another_name():
    graph = Graph("g")
    taken = graph.add_constant("folded.t2", torch.ones(2))
    x = graph.add_input("x", F32, (2,))
    made = graph.add("Neg", taken)
    graph.outputs = [graph.add("Add", graph.add("Add", x, made), taken)]
    folded = ir.optimize(graph, [ir.FoldConstants()]).graph
    assert [c.name for c in folded.constants.values()] == ["folded.t2", "folded.t2.1"]
    assert_same_bits(folded.run(torch.ones(2)), graph.run(torch.ones(2)))


def test_what_fails_is_not_folded():
    graph = Graph("g")
    indices = graph.add_constant("i", torch.tensor([7]))
    made = graph.add("Embedding", graph.add_constant("w", torch.ones(2, 3)), indices)
    graph.outputs = [graph.add("Add", graph.add_input("x", F32, (3,)), made)]
    assert kinds(ir.optimize(graph).graph) == ["Embedding", "Add"]
    with pytest.raises(GraphError, match=r"t2 = Embedding\(t1, t0\)"):
        graph.run(torch.ones(3))


def conv_norm(x, w, **attributes):
    """A convolution and a batch normalisation of 2 channels; with attributes, the weight is the first input."""
    graph = Graph("g")
    given = graph.add_input("x", F32, x)
    held = graph.add_constant("w", torch.linspace(-1, 1, torch.Size(w).numel()).reshape(w))
    reads = [held, given] if attributes else [given, held]
    made = graph.add("Conv2d", *reads, **attributes)
    norm = [graph.add_constant(f"n{i}", torch.tensor([0.5, 2.0]) + i) for i in range(4)]
    norm = graph.add("BatchNorm", made, *norm, training=False, momentum=0.1, eps=1e-5, cudnn_enabled=True)
    graph.outputs = [norm]
    return graph


def test_a_convolution_without_a_batch_is_not_folded():
    graph = conv_norm((1, 4, 4), (2, 1, 3, 3))
    graph.ops[0].outputs, graph.ops[1].outputs = ([ir.TensorType(F32, ir.TensorShape((2, 2, 2)))] for _ in range(2))
    x = torch.randn(1, 4, 4)
    found = ir.optimize(graph.check(), [ir.FoldConvBatchNorm()]).graph
    assert kinds(found) == ["Conv2d", "BatchNorm"]
    assert_same_bits(found.run(x), graph.run(x))


def test_inputs_in_another_order_are_not_folded():
    graph = conv_norm((2, 1, 3, 3), (2, 1, 3, 3), input=ir.Ref(1), weight=ir.Ref(0))
    graph.inputs, x = {}, next(iter(graph.inputs))
    graph.add_constant("x", torch.randn(2, 1, 3, 3), x)
    found = ir.optimize(graph, [ir.FoldConvBatchNorm()]).graph
    assert kinds(found) == ["Conv2d", "BatchNorm"]
    assert_same_bits(found.run(), graph.run())


def test_a_made_weight_is_not_folded():
    graph = conv_norm((3, 1, 4, 4), (2, 1, 3, 3))
    made = graph.add("aten.ones.default", size=[2, 1, 3, 3], dtype=torch.float32)
    graph.ops[0].input_ids[1] = made
    graph.ops.insert(0, graph.ops.pop())
    assert "BatchNorm" in kinds(ir.optimize(graph, [ir.FoldConvBatchNorm()]).graph)


def test_a_quantized_weight_that_is_an_output_stays():
    graph = conv_norm((3, 1, 4, 4), (2, 1, 3, 3))
    conv = graph.ops[0]
    scale = graph.add_constant("s", torch.full((2, 1, 1, 1), 0.1))
    quantized = graph.add("FakeQuantize", conv.input_ids[1], scale, spec="int8 per_channel(0)")
    graph.ops.insert(0, graph.ops.pop())
    conv.input_ids[1] = quantized
    graph.outputs.append(quantized)
    found = ir.optimize(graph, [ir.FoldConvBatchNorm()]).graph
    x = torch.randn(3, 1, 4, 4)
    assert kinds(found) == ["FakeQuantize", "FakeQuantize", "Conv2d"]
    assert_same_bits(found.run(x)[1], graph.run(x)[1])
    torch.testing.assert_close(found.run(x)[0], graph.run(x)[0])


def quantized_after_reshape(scale):
    graph = Graph("g")
    x = graph.add_input("x", F32, (2, 3))
    graph.add_constant("s.rank_2", torch.full((1, 1), 7.0))
    flat = graph.add("Reshape", x, shape=[6])
    graph.outputs = [graph.add("FakeQuantize", flat, graph.add_constant("s", scale), spec="int8 per_tensor")]
    return graph


def test_a_moved_quantizer_takes_no_constant_by_its_name():
    graph, x = quantized_after_reshape(torch.full((1,), 0.1)), torch.randn(2, 3)
    moved = ir.optimize(graph, [ir.MoveFakeQuantize()]).graph
    assert kinds(moved) == ["FakeQuantize", "Reshape"]
    assert_same_bits(moved.run(x), graph.run(x))


def test_a_trainable_scale_stays_trainable():
    graph = quantized_after_reshape(nn.Parameter(torch.full((1,), 0.1)))
    moved = ir.optimize(graph, [ir.MoveFakeQuantize()]).graph
    assert [c.trainable for c in moved.constants.values()] == [False, True]
    assert kinds(moved) == ["Reshape", "FakeQuantize"]


def test_fused_operations_that_draw_are_two():
    graph = Graph("g")
    x = graph.add_input("x", F32, (64,))
    type = ir.TensorType(F32, ir.TensorShape((64,)))
    parts = [IROp("ReLU", [1], [0], [type]), IROp("Dropout", [2], [1], [type], {"p": 0.5, "train": True})]
    made = [graph.add("Fused", x, name="ReLU+Dropout", body=parts) for _ in range(2)]
    graph.outputs = made
    for one in (ir.MergeCommonSubexpressions(), ir.FoldConstants()):
        assert len(ir.optimize(graph, [one]).graph.ops) == 2
    graph.outputs = made[:1]
    assert len(ir.optimize(graph, [ir.RemoveDeadCode()]).graph.ops) == 2


def test_a_dead_dropout_that_draws_nothing_is_removed():
    graph = Graph("g")
    x = graph.add_input("x", F32, (4,))
    graph.add("Dropout", x, p=0.5, train=False)
    graph.outputs = [graph.add("ReLU", x)]
    assert kinds(ir.optimize(graph, [ir.RemoveDeadCode()]).graph) == ["ReLU"]


@pytest.mark.parametrize("trains", [False, True])
def test_compiled_graphs_draw_for_what_nothing_reads(trains):
    graph = Graph("g")
    x = graph.add_input("x", F32, (64,))
    graph.add("Dropout", x, p=0.5, train=True)
    graph.outputs = [graph.add("Dropout", x, p=0.5, train=True)]
    given = torch.randn(64, requires_grad=trains)
    compiled = graph.compile()
    compiled(given)
    results = []
    for function in (graph.run, compiled):
        torch.manual_seed(1)
        results.append(function(given))
    assert_same_bits(*results)


def test_zeros_of_two_signs_keep_the_second_quantizer():
    graph = Graph("g")
    x = graph.add_input("x", IRType.Half, (2,))
    s = graph.add_constant("s", torch.full((1,), 1e-40))
    once = graph.add("FakeQuantize", x, s, spec="int8 per_tensor")
    graph.outputs = [graph.add("FakeQuantize", once, s, spec="int8 per_tensor")]
    found = ir.optimize(graph).graph
    x = torch.tensor([-1.0, 1.0], dtype=torch.float16)
    assert_same_bits(found.run(x), graph.run(x))
