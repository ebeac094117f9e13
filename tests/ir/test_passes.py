"""Passes: what each changes, and that exact ones keep every bit in every grad mode, memory and order of inputs."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant import ir
from fakequant.errors import GraphError
from fakequant.ir import Graph, IROp, IRType
from tests.support.bits import assert_same_bits
from tests.support.matrix import full, in_turn, sweep
from tests.support.networks import NETWORKS, PRESETS, quantized

F32 = IRType.Float32
INT8 = "int8 per_tensor"


def kinds(graph):
    return [op.op_type for op in graph.ops]


def start(*dims):
    graph = Graph("g")
    return graph, graph.add_input("x", F32, dims)


def scale(graph, rank=2, value=0.1):
    return graph.add_constant(f"scale.{graph.new_id()}", torch.full([1] * rank, value))


def only(graph, one):
    """The graph after one pass, which leaves the graph as it was and does nothing the second time."""
    before = str(graph)
    found = ir.optimize(graph, [one])
    assert str(graph) == before
    assert not ir.optimize(found.graph, [one]).statistics.steps[0].changed
    return found.graph


@sweep("network, preset", full(NETWORKS, PRESETS), in_turn(NETWORKS, PRESETS)[::2])
def test_exact_passes_keep_every_bit(network, preset):
    model, x = quantized(network, preset)
    graph = ir.capture(model, x)
    expected = graph.run(x)
    for one in ir.EXACT:
        assert one.exact
        assert_same_bits(only(graph, one).run(x), expected)
    optimized = ir.optimize(graph)
    assert_same_bits(optimized.graph.run(x), expected)
    assert optimized.statistics.exact
    assert len(optimized.graph.ops) < len(graph.ops)


def test_dead_code():
    graph, x = start(2, 3)
    graph.add("ReLU", x)
    unused = graph.add_constant("w", torch.ones(2))
    graph.add("ReLU", unused)
    random = graph.add("Dropout", x, p=0.5, train=True)
    graph.outputs = [graph.add("Tanh", x)]
    found = only(graph, ir.RemoveDeadCode())
    assert kinds(found) == ["Dropout", "Tanh"]
    assert found.constants == {}
    assert list(found.inputs) == [x]
    assert random in found.types()


def test_common_subexpressions():
    graph, x = start(2, 3)
    a, b = (graph.add("Add", x, graph.add_constant(name, torch.ones(3))) for name in "ab")
    p, q = (graph.add("Add", x, graph.add_constant(n, nn.Parameter(torch.ones(3)))) for n in "pq")
    first, second = graph.add("Mul", a, b), graph.add("Mul", b, a)
    random = [graph.add("Dropout", x, p=0.5, train=True) for _ in range(2)]
    other = graph.add("Sum", x, dim=[0]), graph.add("Sum", x, dim=[1])
    graph.outputs = [first, second, p, q, *random, *other]
    found = only(graph, ir.MergeCommonSubexpressions())
    assert kinds(found) == ["Add", "Add", "Add", "Mul", "Dropout", "Dropout", "Sum", "Sum"]
    assert found.outputs[:2] == [first, first]
    assert len(found.constants) == 3
    x = torch.randn(2, 3)
    torch.manual_seed(0)
    expected = graph.run(x)
    torch.manual_seed(0)
    for got, wanted in zip(found.run(x), expected, strict=True):
        assert_same_bits(got, wanted)


def test_zeros_of_two_signs_are_two_constants():
    graph, x = start(2)
    graph.outputs = [graph.add("Div", x, graph.add_constant(n, torch.tensor(v))) for n, v in (("a", 0.0), ("b", -0.0))]
    assert len(only(graph, ir.MergeCommonSubexpressions()).constants) == 2


def test_constants_are_folded():
    graph, x = start(4, 3)
    w = graph.add_constant("w", nn.Parameter(torch.randn(5, 3)))
    quantized_weight = graph.add(
        "FakeQuantize", w, spec="float4_e2m1fn per_block(-1:16,pad) scale=float8_e8m0fnu:floor"
    )
    mask = graph.add("aten.ones.default", size=[4, 5])
    a, b = graph.add_all("Unbind", graph.add_constant("v", torch.randn(2, 5)))
    y = graph.add("Mul", graph.add("Linear", x, quantized_weight), mask)
    graph.outputs = [graph.add("Add", graph.add("Add", y, a), b), a]
    found = only(graph, ir.FoldConstants())
    assert kinds(found) == ["Linear", "Mul", "Add", "Add"]
    x = torch.randn(4, 3)
    for got, wanted in zip(found.run(x), graph.run(x), strict=True):
        assert_same_bits(got, wanted)
    assert "FakeQuantize" in kinds(only(graph, ir.FoldConstants(parameters=False)))
    assert kinds(only(graph, ir.FoldConstants(limit=10))) == [
        *("FakeQuantize", "aten.ones.default", "Linear", "Mul", "Add", "Add")
    ]


def test_random_numbers_are_not_folded():
    graph, x = start(3)
    drawn = graph.add("Dropout", graph.add_constant("w", torch.ones(3)), p=0.5, train=True)
    graph.outputs = [graph.add("Add", x, drawn)]
    assert "Dropout" in kinds(only(graph, ir.FoldConstants()))


def twice(spec, params, dtype=F32, dims=(2, 3), same=True):
    graph = Graph("g")
    x = graph.add_input("x", dtype, dims)
    given = [graph.add_constant(f"p{i}", p) for i, p in enumerate(params)]
    others = given if same else [graph.add_constant(f"q{i}", p.clone()) for i, p in enumerate(params)]
    graph.outputs = [graph.add("FakeQuantize", graph.add("FakeQuantize", x, *given, spec=spec), *others, spec=spec)]
    return graph


ROWS = torch.tensor([[0.1], [3.0]])


@pytest.mark.parametrize(
    ("graph", "removed"),
    [
        (twice(INT8, [torch.full((1, 1), 0.1)]), True),
        (twice("float8_e4m3fn per_channel(0)", [ROWS]), True),
        (twice("uint4 per_channel(0)", [ROWS, torch.tensor([[3], [9]], dtype=torch.int32)]), True),
        (twice("int8 per_tensor multiplier", [torch.full((1, 1), 127 / 3)]), True),
        (twice("nf4 per_channel(0)", [ROWS]), True),
        (twice("int8 per_tensor", [torch.full((1, 1), 0.1)], IRType.Half), True),
        (twice("int16 per_tensor", [torch.full((1, 1), 0.01)], IRType.Half), True),
        (twice("float8_e4m3fn per_tensor", [torch.full((1, 1), 3e-45)]), True),
        # Too many codes to try.
        (twice("int24 per_tensor", [torch.full((1, 1), 0.01)]), False),
        (twice(INT8, [torch.full((1, 1), 0.1)], same=False), False),
        (twice("int8 per_token", []), False),
    ],
)
def test_duplicate_quantizers(graph, removed):
    found = only(graph, ir.RemoveDuplicateFakeQuantize())
    assert len(found.ops) == 1 + (not removed)
    x = torch.tensor([[0.0, -0.0, 1.26], [float("nan"), float("inf"), -4.0]]).to(graph.inputs[0].type.type.dtype)
    assert_same_bits(found.run(x), graph.run(x))


def test_a_value_that_would_move_keeps_the_second_quantizer(monkeypatch):
    graph = twice(INT8, [torch.full((1, 1), 0.1)])
    called = []

    def halved(x, params, spec):
        called.append(x)
        return x * 0.5

    monkeypatch.setattr("fakequant.ir.passes.library.fake_quantize", halved)
    assert kinds(ir.RemoveDuplicateFakeQuantize().run(graph)) == ["FakeQuantize"] * 2
    assert called


def test_three_in_a_row_become_one():
    graph, x = start(2, 3)
    s = scale(graph)
    for _ in range(3):
        x = graph.add("FakeQuantize", x, s, spec=INT8)
    graph.outputs = [x, graph.add("ReLU", x)]
    assert kinds(only(graph, ir.RemoveDuplicateFakeQuantize())) == ["FakeQuantize", "ReLU"]


def test_quantizers_move_before_reshapes():
    graph, x = start(2, 3, 4)
    y = graph.add("Transpose", graph.add("Flatten", graph.add("ReLU", x), start_dim=1), dim0=0, dim1=1)
    graph.outputs = [graph.add("FakeQuantize", y, scale(graph), spec=INT8)]
    found = only(graph, ir.MoveFakeQuantize())
    assert kinds(found) == ["ReLU", "FakeQuantize", "Flatten", "Transpose"]
    x = torch.randn(2, 3, 4)
    assert_same_bits(found.run(x), graph.run(x))


@pytest.mark.parametrize(
    ("spec", "moves"),
    [
        (INT8, True),
        ("uint8 per_tensor", True),
        ("int8 per_channel(0)", False),
        ("int8 per_token", False),
        ("int8 per_block(-1:2)", False),
    ],
)
def test_only_one_scale_per_tensor_moves(spec, moves):
    graph, x = start(2, 6)
    graph.outputs = [graph.add("FakeQuantize", graph.add("Reshape", x, shape=[3, 4]), spec=spec)]
    found = only(graph, ir.MoveFakeQuantize())
    assert (kinds(found)[0] == "FakeQuantize") == moves
    x = torch.randn(2, 6)
    assert_same_bits(found.run(x), graph.run(x))


def test_what_others_read_too_does_not_move():
    graph, x = start(2, 6)
    y = graph.add("Reshape", x, shape=[3, 4])
    graph.outputs = [graph.add("FakeQuantize", y, spec=INT8), y]
    assert kinds(only(graph, ir.MoveFakeQuantize())) == ["Reshape", "FakeQuantize"]


def conv_net(config, *, bias=True, groups=1):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=bias, groups=groups), nn.BatchNorm2d(8), nn.ReLU()).eval()
    norm = model[1]
    for tensor in (norm.weight.data, norm.bias.data, norm.running_mean):
        tensor.normal_()
    norm.running_var.uniform_(0.5, 2)
    if config is not None:
        fq.prepare(model, config)
        fq.calibrate(model, [torch.randn(8, 4, 6, 6)])
    return model


@pytest.mark.parametrize("config", [None, "INT8", "FP8", "INT4_WEIGHT_ONLY"])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"groups": 2}], ids=str)
def test_batch_normalisation_is_folded_before_the_weight_is_quantized(config, options):
    model = conv_net(config, **options)
    x = torch.randn(8, 4, 6, 6)
    graph = ir.capture(model, x)
    found = ir.optimize(graph, [ir.FoldConvBatchNorm(), ir.RemoveDeadCode()])
    assert "BatchNorm" not in kinds(found.graph)
    assert not found.statistics.exact
    with torch.no_grad():
        torch.testing.assert_close(found.graph.run(x), model(x), rtol=1e-5, atol=1e-5)
    weights = [
        op for op in found.graph.ops if op.op_type == "FakeQuantize" and op.input_ids[0] in found.graph.constants
    ]
    assert len(weights) == (config is not None)


def test_codes_of_a_folded_weight_are_those_before():
    model = conv_net("INT8")
    graph = ir.capture(model, torch.randn(2, 4, 6, 6))
    folded = ir.optimize(graph, [ir.FoldConvBatchNorm()]).graph
    codes = []
    for g in (graph, folded):
        quantizer = next(op for op in g.ops if op.op_type == "FakeQuantize" and op.input_ids[0] in g.constants)
        w, s = (g.constants[id].tensor.detach() for id in quantizer.input_ids)
        codes.append((fq.fake_quantize(w, "int8 per_channel(0)", scale=s) / s).round())
    sign = torch.where(model[1].weight < 0, -1.0, 1.0).reshape(-1, 1, 1, 1)
    assert torch.equal(codes[0], codes[1] * sign)


@pytest.mark.parametrize("preset", ["NVFP4", "MXFP8"])
def test_scales_in_a_format_of_their_own_stay(preset):
    graph = ir.capture(conv_net(preset), torch.randn(2, 4, 6, 6))
    found = ir.optimize(graph, ir.ALL)
    assert found.statistics.exact
    assert any("BatchNorm" in str(op.attributes) for op in found.graph.ops)


def test_a_convolution_that_others_read_is_not_folded():
    graph = ir.capture(conv_net(None), torch.randn(2, 4, 6, 6))
    conv = next(op for op in graph.ops if op.op_type == "Conv2d")
    graph.outputs.append(conv.output_id)
    assert "BatchNorm" in kinds(only(graph, ir.FoldConvBatchNorm()))


def test_a_channel_that_is_switched_off_is_not_folded():
    model = conv_net("INT8")
    with torch.no_grad():
        model[1].weight[3] = 0.0
    assert "BatchNorm" in kinds(only(ir.capture(model, torch.randn(2, 4, 6, 6)), ir.FoldConvBatchNorm()))


def test_products_are_fused_with_what_follows():
    graph, x = start(4, 3)
    w, b = graph.add_constant("w", torch.randn(5, 3)), graph.add_constant("b", torch.randn(5))
    y = graph.add("GELU", graph.add("Add", graph.add("Linear", x, w), b))
    y = graph.add("FakeQuantize", y, scale(graph), spec=INT8)
    shared = graph.add("MatMul", y, graph.add_constant("v", torch.randn(5, 5)))
    graph.outputs = [graph.add("ReLU", shared), graph.add("Tanh", shared)]
    found = only(graph, ir.FuseOperations())
    assert kinds(found) == ["Fused", "MatMul", "ReLU", "Tanh"]
    assert found.ops[0].attributes["name"] == "Linear+Add+GELU+FakeQuantize"
    x = torch.randn(4, 3)
    for got, wanted in zip(found.run(x), graph.run(x), strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize(("op_type", "fused"), [("Sigmoid", True), ("Softmax", False), ("Exp", False)])
def test_what_is_fused(op_type, fused):
    graph, x = start(4, 3)
    attributes = {"dim": 1} if op_type == "Softmax" else {}
    graph.outputs = [
        graph.add(op_type, graph.add("MatMul", x, graph.add_constant("w", torch.randn(3, 5))), **attributes)
    ]
    assert ("Fused" in kinds(only(graph, ir.FuseOperations()))) == fused


def test_fused_graphs_compile_and_have_gradients():
    model, x = quantized("CNN", "INT8")
    graph = ir.capture(model, x)
    fused = ir.optimize(graph, [ir.FuseOperations()]).graph
    assert "Fused" in kinds(fused)
    assert_same_bits(fused.compile()(x), graph.run(x))
    dy = torch.ones(4, 10)
    for got, wanted in zip(fused.backward().run(x, dy), graph.backward().run(x, dy), strict=True):
        assert_same_bits(got, wanted)


class Breaks:
    name, exact = "breaks", True

    def run(self, graph):
        broken = graph.copy()
        broken.outputs = [999]
        return broken


def test_a_pass_that_breaks_a_graph_is_found():
    graph, x = start(2)
    graph.outputs = [graph.add("ReLU", x)]
    with pytest.raises(GraphError, match="the output t999 is made by nothing"):
        ir.optimize(graph, [Breaks()])
    with pytest.raises(GraphError, match="is not valid"):
        ir.optimize(Breaks().run(graph))


def test_statistics():
    model, x = quantized("CNN", "INT8")
    found = ir.optimize(ir.capture(model, x), ir.ALL).statistics
    assert [step.name for step in found.steps] == [one.name for one in ir.ALL]
    assert not found.exact
    assert "convolution and batch normalisation: 16 -> 14 operations, not exact" in str(found)
    assert all(step.seconds >= 0 for step in found.steps)


def test_the_page_has_a_row_for_every_pass():
    page = (Path(__file__).parents[2] / "docs" / "notes" / "ir.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| (yes|no) \|$", page, re.MULTILINE)
    assert rows == [(type(one).__name__, "yes" if one.exact else "no") for one in ir.ALL]


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
    graph, x = start(2, 3)
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
    graph, x = start(64)
    type = ir.TensorType(F32, ir.TensorShape((64,)))
    parts = [IROp("ReLU", [1], [0], [type]), IROp("Dropout", [2], [1], [type], {"p": 0.5, "train": True})]
    made = [graph.add("Fused", x, name="ReLU+Dropout", body=parts) for _ in range(2)]
    graph.outputs = made
    for one in (ir.MergeCommonSubexpressions(), ir.FoldConstants()):
        assert len(ir.optimize(graph, [one]).graph.ops) == 2
    graph.outputs = made[:1]
    assert len(ir.optimize(graph, [ir.RemoveDeadCode()]).graph.ops) == 2


def test_a_dead_dropout_that_draws_nothing_is_removed():
    graph, x = start(4)
    graph.add("Dropout", x, p=0.5, train=False)
    graph.outputs = [graph.add("ReLU", x)]
    assert kinds(ir.optimize(graph, [ir.RemoveDeadCode()]).graph) == ["ReLU"]


@pytest.mark.parametrize("trains", [False, True])
def test_compiled_graphs_draw_for_what_nothing_reads(trains):
    graph, x = start(64)
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
