"""The operator as a node of a graph: the bits, gradients and strides of eager execution."""

from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

import fakequant as fq
from fakequant.numerics import division, reference
from fakequant.numerics.qparams import QParams
from fakequant.ops import library
from fakequant.ops.graph_operators import name_of_choice, quantize_as_node
from tests.support.bits import assert_same_bits
from tests.support.matrix import full, in_turn, sweep

SPECS = [
    *("int8", "uint8 per_channel(1)", "int4 per_token", "int8 per_tensor identity", "int8 per_tensor clip"),
    *("int8 per_tensor input_range", "float8_e4m3fn per_block(-1:3,pad)", "float8_e4m3fn per_block(1:2,pad)"),
    "float4_e2m1fn per_block(0:16,pad) scale=float8_e4m3fn@per_tensor",
]
SHAPES = [(2, 3, 4, 5), (2, 1, 4, 5), (1, 1), (7, 1, 3, 3)]


def laid_out(shape):
    x = torch.randn(shape)
    yield "row by row", x
    if len(shape) == 4:
        yield "channels last", x.to(memory_format=torch.channels_last)
    yield "transposed", x.transpose(0, -1).contiguous().transpose(0, -1)
    yield "every second", torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]


QUICK = [*((SHAPES[0], *row) for row in in_turn(SPECS[1::2], [True, False])), *full(SHAPES[1:], ["int8"], [False])]


@sweep("shape, text, dynamic", full(SHAPES, SPECS, [True, False]), QUICK)
def test_compiled_equals_the_library(shape, text, dynamic):
    spec = fq.QuantSpec.parse(text)
    torch._dynamo.reset()
    try:
        spec.granularity.group_shape(shape)
    except fq.FakeQuantError:
        pytest.skip(f"{text} does not fit {shape}")
    compiled = torch.compile(lambda x, p: quantize_as_node(x, spec, *(p or ())), backend="aot_eager", fullgraph=True)
    for where, x in laid_out(shape):
        params = None if dynamic else QParams(*fq.choose_qparams(x * 0.7, spec)[:2])
        results = []
        for function in (compiled, lambda x, p: _library(x, p, spec)):
            leaf = x.detach().requires_grad_()
            y = function(leaf, params)
            dy = torch.arange(1.0, y.numel() + 1).view(y.shape)
            (dx,) = torch.autograd.grad(y, leaf, dy)
            with torch.no_grad():
                assert_same_bits(function(x, params), y, where)
            results.append((y, dx))
        (y, dx), (wanted, dwanted) = results
        assert_same_bits(y, wanted, where)
        assert_same_bits(dx, dwanted, where)
        if where != "every second":
            assert y.stride() == wanted.stride() == x.stride(), where


def _library(x, params, spec):
    return library.fake_quantize_dynamic(x, spec) if params is None else library.fake_quantize(x, params, spec)


@pytest.mark.parametrize("text", SPECS)
def test_the_fake_kernels_say_what_the_real_ones_do(text):
    x, text = torch.randn(3, 4, 5, 6), fq.QuantSpec.parse(text).to_text()
    opcheck = partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    opcheck(torch.ops.fakequant.fake_quantize.default, (x.requires_grad_(), None, None, text))
    x, operators = x.detach(), torch.ops.fakequant
    by = name_of_choice(x.device, x.dtype, text), x.stride()
    for masked in (False, True):
        opcheck(operators.fake_quantize_in_graph.default, (x, *[None] * 5, text, *by, masked))
    _, mask = operators.fake_quantize_in_graph(x, *[None] * 5, text, *by, True)
    scale = fq.choose_qparams(x, text).scale
    opcheck(operators.grad_of_params.default, (x, x, scale, None, None, text, *by))
    if mask.numel():
        opcheck(operators.grad_input.default, (x, mask, text, *by))


VIEWS = {
    "unbound": lambda x: x.permute(1, 0, 3, 2)[1],
    "every second": lambda x: x[..., ::2],
    "sliced": lambda x: x[:, 1:],
    "sliced channels last": lambda x: x.to(memory_format=torch.channels_last)[:, :2],
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "expanded and transposed": lambda x: x[:1].expand(3, -1, -1, -1).transpose(1, 3),
    "one of an axis": lambda x: x.transpose(1, 2)[:, :1],
    "one of each of two axes": lambda x: x[:1, :, 2:3].transpose(0, 3),
    "scalar": lambda x: x[0, 0, 0, 0],
    "empty": lambda x: x[:, :, :0].transpose(1, 3),
}


@pytest.mark.parametrize("exporting", [False, True])
@pytest.mark.parametrize("operator", ["values", "values_chosen", "masked", "masked_chosen"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_the_strides_of_views_are_known_before_they_are_computed(view, operator, exporting, monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", exporting)
    assert division.is_exporting() == exporting
    scale = None if operator.endswith("chosen") else torch.tensor(0.1)
    spec = fq.QuantSpec.parse("int8")
    by, text = name_of_choice(torch.device("cpu"), torch.float32, "int8"), spec.to_text()

    def call(x):
        if operator.startswith("values"):
            return torch.ops.fakequant.fake_quantize(x, scale, None, text, None)
        return torch.ops.fakequant.fake_quantize_in_graph(x, scale, *[None] * 4, text, by, x.stride(), True)[0]

    x = torch.randn(2, 3, 4, 6)
    real = call(view(x))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = call(view(mode.from_tensor(x)))
    assert fake.stride() == real.stride()
    assert not x.numel() or library.fake_quantize_dynamic(view(x), spec).stride() == real.stride()


class Watching(torch.Tensor):
    """A subclass, which the reference serves."""


@pytest.mark.parametrize("spec", ["int8", "int8 per_channel(1)"])
@pytest.mark.parametrize(("kind_of_x", "kind_of_dy"), [(Watching, torch.Tensor), (torch.Tensor, Watching)])
def test_a_mask_is_read_by_what_packed_it(spec, kind_of_x, kind_of_dy):
    x = (torch.arange(96.0) - 40).view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    spec = fq.QuantSpec.parse(spec)
    params = QParams(torch.full(spec.granularity.group_shape(x.shape), 0.25))
    right = reference.passes(x, params, spec)
    leaf = x.as_subclass(kind_of_x).detach().requires_grad_()
    quantize_as_node(leaf, spec, *params).backward(torch.ones_like(x).as_subclass(kind_of_dy))
    assert torch.equal(leaf.grad.as_subclass(torch.Tensor), right.float())


def _with_gradients(function, x, params, spec):
    leaf = x.detach().requires_grad_()
    scale = params.scale.detach().requires_grad_()
    zero_point = None if params.zero_point is None else params.zero_point.float().requires_grad_()
    y = function(leaf, scale, zero_point, params.range)
    y.square().sum().backward()
    return y, leaf.grad, scale.grad, None if zero_point is None else zero_point.grad


@pytest.mark.parametrize("text", [*SPECS[:6], "float8_e4m3fn per_channel(0) multiplier"])
def test_compiled_as_a_node_where_a_backend_asks_for_it(monkeypatch, text):
    """As on devices whose compilers divide approximately: the graph has one node, and the eager bits and gradients."""
    torch._dynamo.reset()
    spec, x, graphs = fq.QuantSpec.parse(text), torch.randn(2, 3, 4, 5) * 3, []

    def given(x, scale, zero_point, measured):
        return library.fake_quantize(x, QParams(scale, zero_point, measured), spec)

    def dynamic(x):
        return library.fake_quantize_dynamic(x, spec)

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    params = fq.choose_qparams(x * 0.5, spec)
    eager = _with_gradients(given, x, params, spec)
    monkeypatch.setattr(division, "approximate_devices", frozenset({"cpu"}))
    compiled = _with_gradients(torch.compile(given, backend="aot_eager", fullgraph=True), x, params, spec)
    for one, other in zip(compiled, eager, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_same_bits(one, other)
    for leaf in (x, x.clone().requires_grad_()):
        assert_same_bits(torch.compile(dynamic, backend=backend, fullgraph=True)(leaf), dynamic(leaf))
    assert "fakequant.fake_quantize" in str(graphs[0])
    assert not any("aten" in target or "round" in target for graph in graphs for target in graph)


def test_specifications_are_read_after_a_change_of_numbers(monkeypatch):
    """A compiler takes a number that was another one the last time for one that varies."""
    torch._dynamo.reset()
    monkeypatch.setattr(division, "approximate_devices", frozenset({"cpu"}))

    class Layer(torch.nn.Module):
        def forward(self, x):
            return library.fake_quantize_dynamic(x, self.spec)

    layer, x = Layer(), torch.randn(64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for text in ("int8", "int4", "uint4", "float8_e4m3fn", "float8_e5m2", "int8"):
        layer.spec = fq.QuantSpec.parse(text)
        assert_same_bits(compiled(x), library.fake_quantize_dynamic(x, layer.spec), text)


def test_the_node_computes_as_it_was_compiled():
    """By the strides that x had for the compiler, if a compiler lays it otherwise."""
    spec, scale = fq.QuantSpec.parse("int8 per_channel(1)"), torch.full((1, 3, 1, 1), 0.25)
    text, x = spec.to_text(), (torch.arange(96.0) - 40).view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    by, right = name_of_choice(x.device, x.dtype, text), reference.passes(x, QParams(scale), spec)
    for given in (x, x.contiguous(), x.contiguous().transpose(0, 1).contiguous().transpose(0, 1)):
        call = scale, *[None] * 4, text, by, x.stride()
        y, mask = torch.ops.fakequant.fake_quantize_in_graph(given, *call, True)
        dx = torch.ops.fakequant.grad_input(torch.ones_like(given), mask, text, by, x.stride())
        assert y.stride() == dx.stride() == x.stride()
        assert_same_bits(y, reference.fake_quantize(x, QParams(scale), spec))
        assert_same_bits(dx, right.float())


@pytest.mark.parametrize("text", ["int8", "int8 per_channel(0)", "uint8 per_token asymmetric"])
def test_the_nodes_of_a_training_step_save_nothing_on_the_cpu(monkeypatch, text):
    """A CUDA graph cannot hold tensors of the CPU."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph, _):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(division, "approximate_devices", frozenset({"cpu"}))
    x = torch.randn(6, 8, requires_grad=True)
    compiled = torch.compile(
        lambda x: library.fake_quantize_dynamic(x, fq.QuantSpec.parse(text)),
        backend=aot_autograd(fw_compiler=keep, bw_compiler=keep),
        fullgraph=True,
    )
    compiled(x).sum().backward()
    forward, backward = graphs
    for graph in (forward, backward):
        nodes = [node for node in graph.nodes if "fakequant" in str(node.target)]
        assert len(nodes) == 1
    outputs = [node.meta["val"].dtype for node in forward.output_node().args[0]]
    assert outputs == [torch.float32, torch.uint8], "the values and a bit for each, and no integers of the host"
