"""ReLU and quantizer in one pass: the bits, gradients and strides of one after the other, on hostile numbers."""

import pytest
import torch

import fakequant as fq
from fakequant.numerics.qparams import QParams
from fakequant.ops import dispatch, library
from fakequant.ops.cpu.backend import load_kernels
from fakequant.ops.layout import relu_later
from fakequant.ops.library import fake_quantize_relu
from tests.support import cases
from tests.support.bits import assert_same_bits
from tests.support.cases import FORMATS, GRANULARITIES, LAYOUTS, hostile_gradient
from tests.support.matrix import each_format_once

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def apart(x, params, spec):
    return library.fake_quantize(torch.relu(x), params, spec)


def assert_same(x, params, spec, label):
    """Values, values without a gradient, and gradients; with the strides of each."""
    dy = hostile_gradient(x)
    results = []
    for function in (fake_quantize_relu, apart):
        leaf = x.detach().requires_grad_()
        y = function(leaf, params, spec)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        with torch.no_grad():
            results.append((y, dx, function(leaf, params, spec)))
    for got, wanted in zip(*results, strict=True):
        assert_same_bits(got, wanted, label)
        assert got.stride() == wanted.stride(), label


@each_format_once
def test_equals_one_after_the_other(name, dtype):
    case, gradients = FORMATS[name], list(fq.Gradient)
    for turn, (where_name, where) in enumerate(GRANULARITIES.items(), start=list(FORMATS).index(name)):
        for arithmetic_turn, arithmetic in enumerate(case.arithmetics()):
            numbers = cases.hostile(case, where, arithmetic, dtype, seed=turn)
            gradient = gradients[(turn + arithmetic_turn) % len(gradients)]
            spec = case.spec(where.granularity, arithmetic, gradient=gradient)
            layout = list(LAYOUTS)[turn % len(LAYOUTS)]
            label = f"{where_name} {spec} {layout}"
            for way in cases.each_way():
                assert_same(LAYOUTS[layout](numbers.x), numbers.params, spec, f"{label} {way}")


@pytest.mark.parametrize("gradient", fq.Gradient, ids=lambda g: g.value)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 1023, 1024, 1025, 200_003])
def test_sizes_around_those_of_chunks_and_threads(count, gradient):
    case = FORMATS["int8"]
    where = cases.GranularityCase(fq.PerTensor(), (count,), (count,))
    spec = case.spec(where.granularity, fq.Arithmetic.DIVIDE, gradient=gradient)
    x = torch.randn(count)
    if count:
        x = cases.hostile(case, where, fq.Arithmetic.DIVIDE, torch.float32).x
    params = QParams(torch.tensor([0.25]))
    assert_same(x, params, spec, count)
    assert_same(torch.stack([x, x], 1)[:, 0], params, spec, f"{count}, every second")


def test_every_bfloat16():
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for text in ("int8", "float8_e4m3fn", "int8 clip", "int8 identity", "int8 multiplier input_range"):
        spec = fq.QuantSpec.parse(text)
        for way in cases.each_way():
            assert_same(x, QParams(torch.tensor([0.5])), spec, f"{text} {way}")


def test_one_pass_and_one_bit():
    if reason := load_kernels():
        pytest.skip(reason)
    params, spec = QParams(torch.ones(1)), fq.QuantSpec("int8")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fake_quantize_relu(torch.randn(800, requires_grad=True), params, spec)
    assert [t.numel() * t.element_size() for t in saved] == [100]


@pytest.mark.parametrize("format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("shape", [(2, 8, 3, 3), (2, 1, 3, 3), (2, 8, 1, 1), (1, 1, 1, 1), (1, 8, 3, 1)])
def test_axes_of_one_element_get_the_strides_that_torch_gives(shape, format):
    x = torch.randn(shape).to(memory_format=format)
    assert_same(x, QParams(torch.full((1, 1, 1, 1), 0.5)), fq.QuantSpec("int8"), x.stride())
    later = relu_later(x)
    assert (later is x) == (torch.relu(x).stride() == x.stride())
    assert later.stride() == torch.relu(x).stride()


def test_relu_later_does_what_must_be_done_now():
    x = torch.randn(4, 8)[:, ::2]
    assert_same_bits(relu_later(x), torch.relu(x))
    dense = torch.randn(4, 8)
    assert relu_later(dense) is dense


def test_what_one_pass_cannot_do():
    x, spec = torch.randn(6, requires_grad=True), fq.QuantSpec("int4")
    scale = torch.tensor([0.25], requires_grad=True)
    for got, wanted in zip(
        *(torch.autograd.grad(f(x, QParams(scale), spec).sum(), (x, scale)) for f in (fake_quantize_relu, apart)),
        strict=True,
    ):
        assert_same_bits(got, wanted)
    fixed = QParams(scale.detach())
    stochastic = spec.replace(rounding=fq.Rounding.STOCHASTIC)
    seeded = fixed._replace(seed=torch.tensor(3))
    assert_same_bits(fake_quantize_relu(x, seeded, stochastic), apart(x, seeded, stochastic))
    mapped = torch.func.vmap(lambda row: fake_quantize_relu(row, fixed, spec))(x.detach().view(2, 3))
    assert_same_bits(mapped.view(-1), apart(x, fixed, spec).detach())

    def square(function):
        (dx,) = torch.autograd.grad(function(x, fixed, spec).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.sum(), x, allow_unused=True)[0]

    assert_same_bits(square(fake_quantize_relu), square(apart))


def test_a_processor_without_negative_zero_in_maxima_takes_two_steps(monkeypatch):
    x = torch.tensor([-0.0, -1.0, 1.0])
    monkeypatch.setattr("fakequant.ops.cpu.backend.keeps_negative_zero", lambda dtype: False)
    monkeypatch.setattr(dispatch, "_known", {})
    monkeypatch.setattr(torch, "relu", lambda x: x.clamp(min=0.0) + 0.0)
    y = fake_quantize_relu(x, QParams(torch.ones(1)), fq.QuantSpec("float8_e4m3fn"))
    assert_same_bits(y, torch.tensor([0.0, 0.0, 1.0]))
