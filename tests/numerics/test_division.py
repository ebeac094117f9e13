"""Quotients with the bits of eager mode under compilers that divide approximately; and that such ones see no others."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config, metrics

import fakequant as fq
from fakequant.nn import Quantizer
from fakequant.numerics import division
from fakequant.numerics.division import divide, divide_as_node, multiply, reciprocal, reciprocal_as_node
from tests.support.bits import assert_same_bits

aten = torch.ops.aten
DIVISIONS = (aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode, aten.true_divide.Tensor, aten.reciprocal.default)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.fixture
def approximate_on_the_cpu(monkeypatch):
    monkeypatch.setattr(division, "approximate_devices", frozenset({"cpu"}))


def random_bits(count, seed):
    patterns = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return torch.from_numpy(patterns.view(np.float32))


def hostile_pairs():
    """Every pair of numbers at the edges, then random patterns, and quotients that are ties of subnormal numbers."""
    powers = 2.0 ** torch.tensor([-149.0, -148, -127, -126, -125, -64, -1, 0, 1, 24, 64, 126, 127], dtype=torch.float64)
    at = powers.float()
    beside = [torch.nextafter(at, torch.full_like(at, end)) for end in (torch.inf, 0.0)]
    odd = torch.tensor([0.0, torch.inf, torch.nan, 3.0, 6.0, 7.0, 127.0, 448.0, 57344.0, 1.1, 1 / 3])
    edges = torch.cat([at, *beside, odd])
    edges = torch.cat([edges, -edges])
    pairs = torch.cartesian_prod(edges, edges)
    ties = torch.arange(1.0, 4001.0, 2.0) * 2.0**-149
    tied = [(ties, torch.full_like(ties, 2.0)), (ties * 3, torch.full_like(ties, 6.0)), (ties * 7, ties * 0 + 448.0)]
    # Quotients of neighbours lie as close to a middle between two numbers as any.
    near = 1.0 + torch.arange(20_000) * 2.0**-23
    a = torch.cat([pairs[:, 0], *(t[0] for t in tied), near, random_bits(100_000, 1)])
    b = torch.cat([pairs[:, 1], *(t[1] for t in tied), near.flip(0), random_bits(100_000, 2)])
    return a, b


def with_gradients(function, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    # Gradients are random patterns, so that what is rounded twice differs.
    return [y.detach(), *torch.autograd.grad(y, leaves, random_bits(y.numel(), 3).view(y.shape))]


def assert_all_same_bits(found, wanted):
    assert len(found) == len(wanted)
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert_same_bits(one, other, place)


def test_quotients_are_those_of_numpy():
    a, b = hostile_pairs()
    with np.errstate(all="ignore"):
        wanted = a.numpy() / b.numpy()
        inverse = np.float32(1) / b.numpy()
    for divided, inverted in ((divide, reciprocal), (divide_as_node, reciprocal_as_node)):
        assert_same_bits(divided(a, b), torch.from_numpy(wanted))
        assert_same_bits(inverted(b), torch.from_numpy(inverse))


def test_gradients_are_those_of_torch():
    a, b = hostile_pairs()
    assert_all_same_bits(with_gradients(divide_as_node, a, b), with_gradients(torch.div, a, b))
    assert_all_same_bits(with_gradients(reciprocal_as_node, b), with_gradients(torch.reciprocal, b))


def test_gradients_are_summed_where_an_operand_was_broadcast():
    a, b = torch.randn(3, 1, 5), torch.randn(4, 1)
    wide = with_gradients(divide_as_node, a, b)
    assert_all_same_bits(wide, with_gradients(torch.div, a, b))


def test_inductor_fuses_quotients_and_products(approximate_on_the_cpu):
    """In the bits of torch, also where a sum follows, in one kernel with what is before and after."""

    def function(divided, inverted, multiplied):
        return lambda a, b: multiplied(inverted(divided(a + 1.0, b)), b) + 0.7

    a, b = hostile_pairs()
    wanted = function(torch.div, torch.reciprocal, torch.mul)(a, b)
    compiled = torch.compile(lambda a, b: multiply(reciprocal(divide(a + 1.0, b)), b) + 0.7, fullgraph=True)
    with config.patch(force_disable_caches=True):
        metrics.reset()
        assert_same_bits(compiled(a, b), wanted)
    assert metrics.generated_kernel_count == 1


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_quotients_of_quotients_are_rounded_each_time(backend):
    def chain(divided, inverted):
        return lambda a, b: divided(inverted(divided(a, b)), b)

    a, b = hostile_pairs()
    compiled = torch.compile(chain(divide_as_node, reciprocal_as_node), fullgraph=True, backend=backend)
    assert_all_same_bits(with_gradients(compiled, a, b), with_gradients(chain(torch.div, torch.reciprocal), a, b))


class Captured:
    """A compiler's backend that keeps the forward and backward graphs and runs them as they are."""

    def __init__(self):
        self.graphs = []
        self.backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, graph, _):
        self.graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    @property
    def nodes(self):
        return [node for graph in self.graphs for node in graph.nodes]

    def divisions(self, dtype):
        """The quotients of tensors of a dtype; a tie of maxima halves its gradient, which is exact."""
        found = [node for node in self.nodes if node.target in DIVISIONS and node.meta["val"].dtype == dtype]
        return [node for node in found if node.args[1:] != (2,)]

    def quotients(self):
        nodes = {torch.ops.fakequant.divide_as_node.default, torch.ops.fakequant.reciprocal_as_node.default}
        return [node for node in self.nodes if node.target in nodes]


LEARNED = [
    ("pact", "int8"),
    ("pact", "float8_e4m3fn per_channel(1) multiplier"),
    ("lsq", "int8 per_channel(0) multiplier"),
    ("lsq_plus", "uint8 per_channel(1)"),
    ("lsq_plus", "int4 per_tensor asymmetric reciprocal"),
    ("tqt", "int8 per_tensor multiplier"),
]


@pytest.mark.parametrize(("method", "text"), LEARNED)
def test_learned_ranges_show_such_compilers_no_division_of_float32(approximate_on_the_cpu, method, text):
    x, dy = torch.randn(6, 8) * torch.logspace(-2, 2, 8), torch.randn(6, 8)
    quantizer = Quantizer(fq.QuantSpec.parse(text))
    quantizer.set_range(fq.choose_qparams(x * 0.7, quantizer.spec).range)
    quantizer.learn(method)

    def step(call):
        y = call(x)
        return [y.detach(), *torch.autograd.grad(y, list(quantizer.parameters()), dy)]

    captured = Captured()
    compiled = torch.compile(quantizer, fullgraph=True, backend=captured.backend)
    found, wanted = step(compiled), step(quantizer)
    assert len(captured.graphs) == 2
    assert not captured.divisions(torch.float32)
    assert captured.quotients()
    assert_all_same_bits(found, wanted)


CHOSEN = [
    "int8",
    "uint8 per_token",
    "int8 per_channel(1) multiplier",
    "float8_e4m3fn per_block(-1:4) scale=float8_e8m0fnu:ceil",
    "float4_e2m1fn per_block(-1:4) scale=float8_e4m3fn@per_tensor",
    "int4 per_block(-1:4) scale=uint6@per_channel(0)",
]


@pytest.mark.parametrize("text", CHOSEN)
def test_chosen_parameters_show_such_compilers_no_division_of_float32(approximate_on_the_cpu, text):
    spec = fq.QuantSpec.parse(text)
    x = random_bits(4096, 5).view(512, 8)
    x[:8] *= 0.0
    captured = Captured()
    found = torch.compile(lambda x: fq.choose_qparams(x, spec)[:2], fullgraph=True, backend=captured.backend)(x)
    assert not captured.divisions(torch.float32)
    assert captured.quotients()
    wanted = fq.choose_qparams(x, spec)[:2]
    for one, other in zip(found, wanted, strict=True):
        if other is not None:
            assert_same_bits(one, other)


@pytest.mark.parametrize("text", ["int8 per_channel(0)", "int8 per_channel(0) multiplier"])
def test_a_given_amax_gets_its_gradient(approximate_on_the_cpu, text):
    spec, x = fq.QuantSpec.parse(text), torch.randn(1000, 8)
    amax = torch.rand(1000) + 0.1
    captured = Captured()

    def quantize(amax):
        return fq.fake_quantize(x, spec, amax=amax)

    compiled = torch.compile(quantize, fullgraph=True, backend=captured.backend)
    assert_all_same_bits(with_gradients(compiled, amax), with_gradients(quantize, amax))
    assert not captured.divisions(torch.float32)


def test_torch_is_not_asked_whether_it_exports():
    """Before torch 2.13 Dynamo answers True within every torch.compile; `division.is_exporting` reads what it is."""
    source = Path(fq.__file__).parent
    asking = [
        str(file)
        for file in source.rglob("*.py")
        if re.search(r"(?<!`)torch\.compiler\.is_exporting\(", file.read_text())
    ]
    assert not asking


def test_other_compilers_divide_as_ever():
    """On the CPU, where a compiler may divide anew for each element of a group."""
    captured = Captured()
    compiled = torch.compile(lambda x: fq.choose_qparams(x, "uint8 per_token")[:2], backend=captured.backend)
    compiled(torch.randn(6, 8))
    assert captured.divisions(torch.float32)
    assert not captured.divisions(torch.float64)


def test_function_transforms_within_a_compiled_graph_divide_as_ever(approximate_on_the_cpu):
    """They differentiate what the autograd function does in place of it."""
    a, b = hostile_pairs()

    def gradients(a, b, dy):
        y, vjp = torch.func.vjp(lambda a, b: divide(a, b), a, b)
        return y, *vjp(dy)

    dy = random_bits(len(a), 3)
    compiled = torch.compile(gradients, fullgraph=True, backend="aot_eager")
    assert_all_same_bits(compiled(a, b, dy), gradients(a, b, dy))


def test_exported_graphs_divide_as_ever(approximate_on_the_cpu):
    quantizer = Quantizer("int8")
    quantizer.set_range(fq.Range(torch.tensor([-1.0]), torch.tensor([1.0])))
    quantizer.learn("pact")
    for strict in (True, False):
        graph = torch.export.export(quantizer, (torch.randn(6),), strict=strict).graph
        assert [n for n in graph.nodes if n.target is aten.div.Tensor]
        assert not [n for n in graph.nodes if "float64" in str(n.args) + str(n.kwargs)]
