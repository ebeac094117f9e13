"""Ranges found and used in one pass: the bits of measuring, choosing parameters and quantizing one after the other."""

import logging

import pytest
import torch

import fakequant as fq
from fakequant.numerics import qparams, reference
from fakequant.numerics.formats import FloatFormat, Specials
from fakequant.numerics.scales import ScaleSpec
from fakequant.ops import library
from fakequant.ops.dispatch import REFERENCE, backends
from fakequant.ops.kernel_params import cannot_choose
from tests.support import cases
from tests.support.backends import Calls
from tests.support.bits import assert_same_bits
from tests.support.cases import DTYPES, LAYOUTS, ON_CPU
from tests.support.dynamic_cases import RUNS, SCALES, WHOLE, composed, hostile, on_lattices, specs
from tests.support.matrix import each_dynamic_format, full, in_turn, sweep
from tests.support.plan_cases import needs_kernels
from tests.support.threads import run_in_threads

CPU = next(Calls(backend) for backend in backends() if backend.name == "cpu")
GRADIENTS = list(fq.Gradient)
MASKED = [gradient for gradient in GRADIENTS if gradient is not fq.Gradient.IDENTITY]
BEYOND_2_64 = FloatFormat("e7m3", 7, 3, Specials.NONE)


def assert_dynamic_is_the_definition(x, spec, label=""):
    """Values and masks of every gradient; whether the fused kernel served."""
    params = composed(x, spec)
    right = reference.fake_quantize(x, params, spec)
    dy = torch.arange(1, x.numel() + 1).to(x.dtype).view(x.shape)
    for way in cases.each_way():
        assert_same_bits(CPU.fake_quantize_dynamic(x, spec, mask=False)[0], right, f"{label} {spec} {way}")
    for gradient in MASKED:
        by_gradient = spec.replace(gradient=gradient)
        passing = reference.grad_input(dy, reference.passes(x, params, by_gradient))
        for way in cases.each_way():
            y, mask = CPU.fake_quantize_dynamic(x, by_gradient, mask=True)
            assert_same_bits(y, right, f"{label} {by_gradient} {way} y")
            dx = CPU.grad_input(dy, mask, by_gradient, x.stride())
            assert_same_bits(dx, passing, f"{label} {by_gradient} {way} dx")
    return cannot_choose(spec, x.dtype, spec.granularity.group_shape(x.shape)) is None


SIZES = [1, 2, 7, 15, 17, 31, 33, 100]  # of the axis that blocks of 32 divide


pytestmark = pytest.mark.usefixtures("poisoned_memory")


@needs_kernels
@each_dynamic_format
def test_equals_the_definition(name, dtype):
    for seed, (label, where) in enumerate(RUNS.items()):
        if not where.shape or (where.shape[0] > 1000 and name not in ("int8", "uint8", "float4_e2m1fn")):
            continue
        x = hostile(where, dtype, seed)
        for spec in specs(name, where.granularity):
            assert assert_dynamic_is_the_definition(x, spec, label)


@needs_kernels
@each_dynamic_format
def test_exact_scales_and_offsets_equal_the_definition(name, dtype):
    for seed, label in enumerate(("tensor", "channel_1", "block_32", "block_16", "tiles", "many_tokens")):
        x = hostile(RUNS[label], dtype, seed)
        for spec in on_lattices(name, RUNS[label].granularity):
            assert assert_dynamic_is_the_definition(x, spec, label)


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    for label in ("tensor", "channel_1", "token", "block_32", "tiles", "channels_alternating"):
        where = RUNS[label]
        for dtype in (torch.float32, torch.bfloat16):
            x = LAYOUTS[layout](hostile(where, dtype))
            for spec in specs("int4", where.granularity):
                assert_dynamic_is_the_definition(x, spec, label)


@needs_kernels
@sweep("size, dtype", full(SIZES, DTYPES), in_turn(SIZES, list(DTYPES)), dtype=DTYPES)
def test_a_last_block_that_is_not_full(size, dtype):
    where = cases.GranularityCase(fq.PerBlock({-1: 32}, pad=True), (5, size), (1, size))
    for name in ("int4", "float4_e2m1fn", "uint4"):
        for spec in specs(name, where.granularity):
            x = hostile(cases.GranularityCase(where.granularity, (5, size), (1, 1)), dtype, size)
            assert assert_dynamic_is_the_definition(x, spec)


@needs_kernels
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (0, 32)], ids=str)
def test_smallest_shapes(shape):
    for granularity in (fq.PerTensor(), fq.PerToken(), fq.PerBlock({-1: 32}, pad=True)):
        if not shape and not isinstance(granularity, fq.PerTensor):
            continue
        for spec in specs("int8", granularity):
            for value in (0.0, 1.5, float("inf"), float("nan")) if 0 not in shape else ():
                assert assert_dynamic_is_the_definition(torch.full(shape, value), spec, shape)
            y, mask = CPU.fake_quantize_dynamic(torch.ones(shape), spec, mask=True)
            assert (y.shape, mask.numel() > 0) == (shape, 0 not in shape)


@needs_kernels
@pytest.mark.parametrize("amax", [2.0**-149, 2.0**-127, 2.0**-126, 1.0, 3.0, 2.0**126, 3e38], ids="{:g}".format)
def test_one_ulp_around_every_code_boundary_of_amax(amax):
    """amax one number below, at and above each multiple of the format's bound and each power of two near it."""
    starts = torch.tensor([amax * f for f in (1, 1.5, 1.75, 1.875, 0.75, 6, 7, 448, 2688)], dtype=torch.float32)
    tops = torch.cat([cases.neighbour(starts, torch.full((), step)) for step in range(-3, 4)])
    x = torch.where(tops.isfinite(), tops, 1.0)[:, None] * torch.linspace(-1, 1, 32)
    for name in ("int4", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "uint8", "int8"):
        for spec in specs(name, fq.PerBlock({-1: 32})):
            assert assert_dynamic_is_the_definition(x, spec)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("granularity", "shape"),
    [
        (WHOLE, (3, 33_001)),
        (fq.PerToken(), (3, 40_001)),
        (fq.PerBlock({-1: 16}), (5, 40_000)),
        (fq.PerChannel(-1), (4001, 50)),
        (fq.PerChannel(1), (3, 5, 20_001)),
        (fq.PerBlock({0: 64, 1: 64}), (192, 1024)),
    ],
    ids=["tensor", "long tokens", "blocks", "columns", "channels", "tiles"],
)
def test_threads_give_equal_bits(granularity, shape, dtype):
    """Runs that several threads share: on one thread, then on two from several Python threads at once."""
    where = cases.GranularityCase(granularity, shape, granularity.block_shape(shape))
    x = hostile(where, dtype)
    chosen = [
        fq.QuantSpec("uint8", granularity),
        fq.QuantSpec("float4_e2m1fn", granularity, scale=SCALES["e4m3 under float32"]),
    ]
    for spec in chosen:
        assert assert_dynamic_is_the_definition(x, spec)
    right = [CPU.fake_quantize_dynamic(x, spec, mask=True) for spec in chosen]

    def work():
        torch.set_num_threads(2)
        for spec, (y, mask) in zip(chosen, right, strict=True):
            again, bits = CPU.fake_quantize_dynamic(x, spec, mask=True)
            assert_same_bits(again, y)
            assert_same_bits(bits, mask)

    run_in_threads(work)


@pytest.mark.parametrize("backend", ON_CPU, ids=lambda b: b.name)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_measure_equals_the_definition(backend, dtype):
    if reason := backend.unavailable():
        pytest.skip(reason)
    for label, where in RUNS.items():
        if not where.shape:
            continue
        for name, layout in LAYOUTS.items():
            x = layout(hostile(where, dtype))
            found, right = backend.measure(x, where.granularity), qparams.measure(x, where.granularity)
            for got, wanted in zip(found, right, strict=True):
                # + 0.0: the sign of a bound of zero is not defined.
                assert_same_bits(got + 0.0, wanted + 0.0, f"{label} {name}")


@needs_kernels
@pytest.mark.parametrize(
    ("granularity", "shape"),
    [(WHOLE, (70_001,)), (fq.PerToken(), (2, 70_001)), (fq.PerChannel(-1), (2001, 50)), (fq.PerToken(), (70, 37))],
    ids=["tensor", "long tokens", "columns", "tokens"],
)
def test_every_element_is_measured(granularity, shape):
    """The largest and the lowest value at the ends of the parts that threads measure."""
    size = torch.Size(shape).numel()
    ends = [0, 1, 15, 31, 32_767, 32_768, 65_535, 65_536, 70_000, 70_001, size - 2, size - 1]
    for end in {end for end in ends if end < size}:
        for value in (5.0, -7.0):
            x = torch.full((size,), 0.1)
            x[end] = value
            x = x.view(shape)
            for got, wanted in zip(CPU.measure(x, granularity), qparams.measure(x, granularity), strict=True):
                assert_same_bits(got + 0.0, wanted + 0.0, end)


@needs_kernels
def test_what_the_kernels_do_not_serve_is_composed(caplog):
    caplog.set_level(logging.DEBUG, "fakequant.backend")
    nested = ScaleSpec("uint8", granularity=fq.PerBlock({-1: 2}))
    large = ScaleSpec(BEYOND_2_64, granularity=WHOLE)
    where = RUNS["block_32"]
    for scale, reason in (
        (nested, "its scales share scales per_block(-1:2)"),
        (large, "the kernels round scales up to 2**64"),
    ):
        caplog.clear()
        spec = fq.QuantSpec("int8", where.granularity, scale=scale)
        assert not assert_dynamic_is_the_definition(hostile(where, torch.float32), spec)
        assert reason in caplog.text


@pytest.mark.parametrize("gradient", GRADIENTS, ids=lambda g: g.value)
@pytest.mark.parametrize("backend", ON_CPU, ids=lambda b: b.name)
def test_operator_and_gradient(monkeypatch, backend, gradient):
    if reason := backend.unavailable():
        pytest.skip(reason)
    monkeypatch.setattr("fakequant.ops.dispatch._backends", (backend, REFERENCE))
    where = RUNS["block_32"]
    x = hostile(where, torch.float32).requires_grad_()
    for spec in specs("int4", where.granularity):
        by_gradient = spec.replace(gradient=gradient)
        y = library.fake_quantize_dynamic(x, by_gradient)
        (dx,) = torch.autograd.grad(y.sum(), x)
        params = composed(x, by_gradient)
        assert_same_bits(y, reference.fake_quantize(x, params, by_gradient))
        assert_same_bits(dx, reference.passes(x, params, by_gradient).float())
        with torch.no_grad():
            assert_same_bits(library.fake_quantize_dynamic(x, by_gradient), y)


def test_one_bit_per_element_is_saved():
    x = torch.randn(4, 96, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        library.fake_quantize_dynamic(x, fq.QuantSpec("int4", fq.PerBlock({-1: 32})))
    assert sum(t.numel() * t.element_size() for t in kept) == x.numel() // 8


def test_double_backward():
    x = torch.linspace(-2, 2, 64, requires_grad=True)
    y = library.fake_quantize_dynamic(x, fq.QuantSpec("int8"))
    (dx,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    assert_same_bits(ddx, torch.full((64,), 2.0))


def test_traced_where_something_watches():
    spec = fq.QuantSpec("float4_e2m1fn", fq.PerBlock({-1: 16}), scale=SCALES["e4m3 under float32"])
    x = torch.randn(4, 32)
    right = reference.fake_quantize(x, composed(x, spec), spec)
    y, tangent = torch.func.jvp(lambda t: library.fake_quantize_dynamic(t, spec), (x,), (torch.ones_like(x),))
    assert_same_bits(y, right)
    assert_same_bits(tangent, reference.passes(x, composed(x, spec), spec).float())
    compiled = torch.compile(lambda t: library.fake_quantize_dynamic(t, spec), backend="eager", fullgraph=True)
    assert_same_bits(compiled(x), right)
    batched = torch.func.vmap(lambda t: library.fake_quantize_dynamic(t, fq.QuantSpec("int8")))(x)
    assert_same_bits(batched, library.fake_quantize_dynamic(x, fq.QuantSpec("int8", fq.PerToken())))
    assert library.fake_quantize_dynamic(x.to("meta"), spec).shape == x.shape
    assert library.measure(x.to("meta"), spec.granularity).lo.shape == (4, 2)
    assert_same_bits(library.measure(x, spec.granularity).hi, qparams.measure(x, spec.granularity).hi)


def test_errors_are_those_of_the_definition():
    with pytest.raises(fq.errors.DTypeError, match=r"cannot quantize a tensor of dtype torch\.int64"):
        library.fake_quantize_dynamic(torch.arange(3), fq.QuantSpec("int8"))
    with pytest.raises(fq.errors.ShapeError, match="no multiple of 32"):
        library.fake_quantize_dynamic(torch.ones(3, 50), fq.QuantSpec("int8", fq.PerBlock({-1: 32})))


@needs_kernels
def test_kernels_refuse_tiles_that_do_not_fill_the_tensor():
    x, lo = torch.ones(8), torch.empty(2)
    with pytest.raises(RuntimeError, match=r"the tiles \[2, 5, 1, 1\] do not fill a tensor of 8 elements"):
        torch.ops.fakequant_cpu.measure(x, lo, lo.clone(), 2, 5, 1, 1)
