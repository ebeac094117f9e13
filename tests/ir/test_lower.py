"""Faster kernels for a graph: what is replaced, and that no bit of results and gradients moves, on hostile numbers."""

import pytest
import torch
from torch import nn

import fakequant as fq
from benchmarks.training import convolutions
from fakequant import ir
from fakequant.ir import Graph, IRType
from fakequant.ir.convert import lower
from fakequant.ir.graph import to_torch
from tests.support.bits import assert_same_bits
from tests.support.graphs import assert_same_step, step
from tests.support.matrix import full, in_turn, sweep

WINDOWS = {
    "no maxima": None,
    "disjoint": {"kernel_size": [2, 2], "stride": [2, 2]},
    "overlapping": {"kernel_size": [3, 2], "stride": [1, 1]},
    "padded": {"kernel_size": [2, 2], "stride": [2, 2], "padding": [1, 1], "dilation": [3, 3]},
    "to the end": {"kernel_size": [3, 3], "stride": [2, 2], "dilation": [2, 1], "ceil_mode": True},
}
SPECS = [
    *("int8", "int8 identity", "int8 clip", "uint8 asymmetric input_range", "int8 reciprocal", "int8 multiplier"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "int4 per_channel(1)", "int8 per_block(-1:3,pad)"),
]
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second": lambda x: torch.stack([x, x], -1).flatten(3)[..., ::2],
}


NUMBERS = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, 1.0, -1.0, 1e-45, -1e-45]


def hostile(shape, dtype, seed=0):
    """Mostly ties, with NaN, infinities, both zeros and subnormals."""
    random = torch.Generator().manual_seed(seed)
    return torch.tensor(NUMBERS)[torch.randint(0, len(NUMBERS), shape, generator=random)].to(dtype)


def chain(shape, window, text, flat, also=None):
    """A graph: ReLU, maxima, reshape, quantizer; `also` names what is a second output."""
    spec = fq.QuantSpec.parse(text)
    graph = Graph("chain")
    values = {"x": graph.add_input("x", IRType.Float32, shape)}
    values["relu"] = last = graph.add("ReLU", values["x"])
    if window is not None:
        values["pool"] = last = graph.add("MaxPool2d", last, **window)
    if flat:
        values["flat"] = last = graph.add("Flatten", last, start_dim=2, end_dim=3)
    groups = spec.granularity.group_shape(graph.types()[last].shape)
    params = [graph.add_constant("scale", torch.full(groups, 0.3))]
    if not spec.symmetric:
        params.append(graph.add_constant("zero_point", torch.full(groups, 3, dtype=torch.int32)))
    graph.outputs = [graph.add("FakeQuantize", last, *params, spec=text)]
    if also is not None:
        graph.outputs.append(values[also])
    return graph


def lowered(graph):
    module = to_torch(graph, lifted=True)
    lower(module)
    return module


def kernels(graph):
    """Names of the functions that a lowered graph calls, and whether its quantizer has the ReLU."""
    module = lowered(graph)
    names = [node.target.__name__ for node in module.graph.nodes if node.op == "call_function"]
    quantizers = [m for m in module.modules() if isinstance(m, ir.ops.FakeQuantize)]
    return names, [q.rectified for q in quantizers]


def assert_same_gradients(graph, x):
    results = []
    for function in (graph.compile(), graph.run):
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        (dx,) = torch.autograd.grad(y, leaf, hostile(y.shape, y.dtype, seed=2))
        with torch.no_grad():
            results.append((y, dx, function(leaf)))
    for got, wanted in zip(*results, strict=True):
        assert_same_bits(got, wanted)
        assert got.stride() == wanted.stride()


@sweep(
    "window, text",
    full(WINDOWS, SPECS),
    [*((window, text) for text, window in in_turn(SPECS, list(WINDOWS))), *full(WINDOWS, ["int8"])],
)
def test_chains_keep_every_bit_and_stride(window, text):
    for turn, shape in enumerate([(2, 8, 6, 6), (2, 1, 6, 5), (1, 9, 7, 6), (3, 8, 6, 6)]):
        for layout in LAYOUTS.values():
            graph = chain(shape, WINDOWS[window], text, flat=turn % 2 == 1)
            assert_same_gradients(graph, layout(hostile(shape, torch.float32, seed=turn)))


def test_what_is_replaced():
    shape, window = (2, 8, 6, 6), WINDOWS["disjoint"]
    assert kernels(chain(shape, None, "int8", flat=False)) == ([], [True])
    assert kernels(chain(shape, None, "float8_e4m3fn", flat=True)) == (["relu_later", "flatten.using_ints"], [True])
    assert kernels(chain(shape, window, "int8", flat=False)) == (["relu_later", "max_pool2d.default"], [True])


@pytest.mark.parametrize("text", ["float8_e4m3fn", "int8 multiplier"])
def test_maxima_stay_where_a_zero_keeps_its_sign(text):
    """The largest of -1.0 and -0.0 is +0.0 after a ReLU, and -0.0 before it."""
    graph = chain((1, 8, 2, 2), WINDOWS["disjoint"], text, flat=False)
    assert kernels(graph) == (["relu.default", "max_pool2d.default"], [False])
    x = torch.tensor([-1.0, -0.0, -0.0, -0.0]).expand(1, 8, 4).reshape(1, 8, 2, 2)
    assert_same_bits(graph.compile()(x), torch.zeros(1, 8, 1, 1))


def test_windows_in_padding_alone_stay():
    graph = chain((1, 8, 2, 2), WINDOWS["padded"], "int8", flat=False)
    assert kernels(graph) == (["relu.default", "max_pool2d.default"], [False])
    x = torch.ones(1, 8, 2, 2)
    assert graph.run(x).amin() < 0  # -inf, saturated
    assert_same_bits(graph.compile()(x), graph.run(x))


@pytest.mark.parametrize("also", ["relu", "pool", "flat"])
def test_what_something_else_reads_stays(also):
    graph = chain((2, 8, 6, 6), WINDOWS["disjoint"], "int8", flat=True, also=also)
    assert kernels(graph)[1] == [False]
    x = hostile((2, 8, 6, 6), torch.float32)
    for got, wanted in zip(graph.compile()(x), graph.run(x), strict=True):
        assert_same_bits(got, wanted)


def test_scales_that_learn_or_are_found_keep_the_relu():
    for scale in (None, nn.Parameter(torch.ones(1))):
        graph = Graph("g")
        relu = graph.add("ReLU", graph.add_input("x", IRType.Float32, (4,)))
        scales = [] if scale is None else [graph.add_constant("scale", scale)]
        graph.outputs = [graph.add("FakeQuantize", relu, *scales, spec="int8")]
        assert kernels(graph) == (["relu.default"], [False])
        assert_same_gradients(graph, torch.tensor([-1.0, -0.0, 0.4, 2.0]))


def hostile_model():
    """Two convolutions, the first of which gives ties; the second has results that are NaN where an input is."""
    layers = [nn.Conv2d(3, 16, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 14 * 14, 4)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.randint(-1, 2, (16, 3, 1, 1)).float())
    return model


@pytest.mark.parametrize("preset", ["INT8", "FP8"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_models_keep_every_bit_on_hostile_inputs(last, preset):
    torch.manual_seed(0)
    model = hostile_model()
    fq.prepare(model, getattr(fq.presets, preset))
    fq.calibrate(model, [torch.randn(4, 3, 32, 32)], progress=False)
    x = hostile((4, 3, 32, 32), torch.float32)
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    compiled = ir.capture(model, x).compile()
    assert_same_step(step(compiled, model, x), step(model, model, x))


def test_the_network_that_is_timed_keeps_every_bit():
    torch.manual_seed(0)
    model, x = convolutions().eval(), torch.randn(4, 3, 16, 16)
    fq.prepare(model, fq.presets.INT8)
    fq.calibrate(model, [x], progress=False)
    graph = ir.capture(model, x)
    assert kernels(graph)[1].count(True) == 6
    assert_same_step(step(graph.compile(), model, x), step(model, model, x))
