"""Ranges found and used in one pass: the bits of measuring, choosing parameters and quantizing one after the other.

In triton's interpreter, which test_triton.py starts, by the kernels for GPUs.
"""

import logging

import pytest
import torch

import fakequant as fq
from fakequant.numerics import qparams, reference
from fakequant.numerics.formats import FloatFormat, Specials
from fakequant.numerics.scales import ScaleSpec
from fakequant.ops import library
from fakequant.ops.dispatch import REFERENCE
from fakequant.ops.kernel_params import cannot_choose
from tests.support import cases
from tests.support.backends import Calls
from tests.support.bits import assert_same_bits
from tests.support.cases import DTYPES, LAYOUTS, ON_CPU
from tests.support.dynamic_cases import FORMATS, RUNS, SCALES, WHOLE, composed, hostile, on_lattices, specs
from tests.support.kernel_comparisons import (
    BACKENDS,
    GRADIENTS,
    INTERPRETED,
    each_backend,
    fitted,
    not_interpreted,
    skip_unavailable,
)
from tests.support.matrix import each_dynamic_format, full, in_turn, sweep
from tests.support.plan_cases import needs_kernels
from tests.support.threads import run_in_threads

pytestmark = pytest.mark.usefixtures("poisoned_memory")
MAGNITUDES = [2.0**-149, 1.0, 2.0**-127, 2.0**-126, 3.0, 2.0**126, 3e38]
SIZES = [1, 2, 7, 15, 17, 31, 33, 100]  # of the axis that blocks of 32 divide
OF_ALL = [*BACKENDS, *([] if INTERPRETED else [b for b in ON_CPU if b.name == "reference"])]


def compare(backend, x, spec, label="", *, served=True, turn=None):
    """Values and masks of every gradient, or of one in turn; and whether the fused kernel serves."""
    skip_unavailable(backend)
    params, backend = composed(x, spec), fitted(backend, x, turn or 0)
    right = reference.fake_quantize(x, params, spec)
    dy = torch.arange(1, x.numel() + 1).to(x.dtype).view(x.shape)
    for way in cases.each_way() if turn is None else ():
        assert_same_bits(backend.fake_quantize_dynamic(x, spec, mask=False)[0], right, f"{label} {spec} {way}")
    for gradient in GRADIENTS if turn is None else [GRADIENTS[turn % len(GRADIENTS)]]:
        by_gradient = spec.replace(gradient=gradient)
        passing = reference.grad_input(dy, reference.passes(x, params, by_gradient))
        for way in cases.each_way():
            y, mask = backend.fake_quantize_dynamic(x, by_gradient, mask=True)
            assert_same_bits(y, right, f"{label} {by_gradient} {way} y")
            dx = backend.grad_input(dy, mask, by_gradient, x.stride())
            assert_same_bits(dx, passing, f"{label} {by_gradient} {way} dx")
    if not INTERPRETED and served is not None:
        assert (cannot_choose(spec, x.dtype, spec.granularity.group_shape(x.shape)) is None) is served


def some(found, turn):
    """All; interpreted, one of these in turn."""
    found = list(found)
    return [found[7 * turn % len(found)]] if INTERPRETED else found


@each_backend
@each_dynamic_format
def test_equals_the_definition(backend, name, dtype):
    first = FORMATS.index(name) + list(DTYPES.values()).index(dtype) if INTERPRETED else 0
    for turn, (label, where) in enumerate(RUNS.items(), first):
        if not where.shape or (where.shape[0] > 1000 and name not in ("int8", "uint8", "float4_e2m1fn")):
            continue
        if INTERPRETED and (turn % 16 or where.shape[0] > 1000):
            continue
        for spec in some(specs(name, where.granularity), turn // 4):
            x = hostile(where, dtype, turn)
            x = LAYOUTS[list(LAYOUTS)[turn % len(LAYOUTS)]](x) if INTERPRETED else x
            compare(backend, x, spec, label, turn=turn if INTERPRETED else None)


@each_backend
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_definition_in_layouts_in_turn(backend, name, dtype):
    turn = FORMATS.index(name) + list(DTYPES.values()).index(dtype)
    for label, where in RUNS.items():
        if where.shape and where.shape[0] <= 1000:
            for spec in specs(name, where.granularity):
                turn += 1
                x = LAYOUTS[list(LAYOUTS)[turn % len(LAYOUTS)]](hostile(where, dtype, turn))
                compare(backend, x, spec, label, turn=turn)


@not_interpreted
@each_backend
@each_dynamic_format
def test_exact_scales_and_offsets_equal_the_definition(backend, name, dtype):
    for seed, label in enumerate(("tensor", "channel_1", "block_32", "block_16", "tiles", "many_tokens")):
        x = hostile(RUNS[label], dtype, seed)
        for spec in on_lattices(name, RUNS[label].granularity):
            compare(backend, x, spec, label)


@not_interpreted
@each_backend
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(backend, layout):
    for label in ("tensor", "channel_1", "token", "block_32", "tiles", "channels_alternating"):
        where = RUNS[label]
        for dtype in (torch.float32, torch.bfloat16):
            x = LAYOUTS[layout](hostile(where, dtype))
            for spec in specs("int4", where.granularity):
                compare(backend, x, spec, label, served=None)


@each_backend
@sweep("size, dtype", full(SIZES, DTYPES), in_turn(SIZES, list(DTYPES)), dtype=DTYPES)
def test_a_last_block_that_is_not_full(backend, size, dtype):
    where = cases.GranularityCase(fq.PerBlock({-1: 32}, pad=True), (5, size), (1, 1))
    for name in ("int4", "float4_e2m1fn", "uint4"):
        for spec in some(specs(name, where.granularity), size):
            compare(backend, hostile(where, dtype, size), spec)


@each_backend
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (0, 32)], ids=str)
def test_smallest_shapes(backend, shape):
    skip_unavailable(backend)
    for granularity in (fq.PerTensor(), fq.PerToken(), fq.PerBlock({-1: 32}, pad=True)):
        if not shape and not isinstance(granularity, fq.PerTensor):
            continue
        for spec in some(specs("int8", granularity), 1):
            for value in (0.0, 1.5, float("inf"), float("nan")) if 0 not in shape else ():
                compare(backend, torch.full(shape, value), spec, shape)
            y, mask = backend.fake_quantize_dynamic(torch.ones(shape), spec, mask=True)
            assert (y.shape, mask.numel() > 0) == (shape, 0 not in shape)
        assert_measures(backend, torch.ones(shape), granularity)


@each_backend
@pytest.mark.parametrize("amax", MAGNITUDES, ids="{:g}".format)
def test_one_ulp_around_every_code_boundary_of_amax(backend, amax):
    """amax one number below, at and above each multiple of the format's bound and each power of two near it."""
    starts = torch.tensor([amax * f for f in (1, 1.5, 1.75, 1.875, 0.75, 6, 7, 448, 2688)], dtype=torch.float32)
    steps = (-1, 0, 1) if INTERPRETED else range(-3, 4)
    tops = torch.cat([cases.neighbour(starts, torch.full((), step)) for step in steps])
    x = torch.where(tops.isfinite(), tops, 1.0)[:, None] * torch.linspace(-1, 1, 32)
    for turn, name in enumerate(("int4", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "uint8", "int8")):
        for spec in some(specs(name, fq.PerBlock({-1: 32})), turn):
            compare(backend, x, spec, turn=turn if INTERPRETED else None)


@not_interpreted
@each_backend
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
def test_threads_give_equal_bits(backend, granularity, shape, dtype):
    """Runs that several threads share: on one thread, then on two from several Python threads at once."""
    x = hostile(cases.GranularityCase(granularity, shape, granularity.block_shape(shape)), dtype)
    chosen = [
        fq.QuantSpec("uint8", granularity),
        fq.QuantSpec("float4_e2m1fn", granularity, scale=SCALES["e4m3 under float32"]),
    ]
    for spec in chosen:
        compare(backend, x, spec)
    right = [backend.fake_quantize_dynamic(x, spec, mask=True) for spec in chosen]

    def work():
        torch.set_num_threads(2)
        for spec, expected in zip(chosen, right, strict=True):
            for one, other in zip(backend.fake_quantize_dynamic(x, spec, mask=True), expected, strict=True):
                assert_same_bits(one, other)

    run_in_threads(work)


@each_backend
@pytest.mark.parametrize("name", ["int8", "uint8", "float8_e5m2", "float4_e2m1fn", "nf4"])
def test_stochastic_rounding(backend, name):
    """Short runs are quantized in pieces, each of which must know where in the tensor it begins."""
    skip_unavailable(backend)
    runs = [
        ((700, 37), fq.PerToken()),
        ((9, 4096), fq.PerBlock({-1: 32})),
        ((5, 700), fq.PerBlock({-1: 32}, pad=True)),
        ((3, 30_000), fq.PerTensor()),
        ((4, 6, 700), fq.PerChannel(1)),
    ]
    if INTERPRETED:
        runs = [((5, 40), granularity) for granularity in (fq.PerToken(), fq.PerBlock({-1: 8}), fq.PerChannel(-1))]
    for shape, granularity in runs:
        blocks = shape if getattr(granularity, "pad", False) else granularity.block_shape(shape)
        where = cases.GranularityCase(granularity, shape, blocks)
        for dtype in (torch.float32, torch.bfloat16):
            for turn, spec in enumerate(some(specs(name, granularity), 1)):
                x = LAYOUTS[list(LAYOUTS)[turn % len(LAYOUTS)]](hostile(where, dtype, turn))
                spec, seed = spec.replace(rounding=fq.Rounding.STOCHASTIC), torch.tensor(2**40 + turn)
                params = composed(x, spec)._replace(seed=seed)
                y, mask = fitted(backend, x, turn).fake_quantize_dynamic(x, spec, mask=True, seed=seed)
                assert_same_bits(y, reference.fake_quantize(x, params, spec), f"{shape} {spec} {dtype}")
                dx = backend.grad_input(torch.ones_like(x), mask, spec, x.stride())
                right = reference.grad_input(torch.ones_like(x), reference.passes(x, params, spec))
                assert_same_bits(dx, right, f"{shape} {spec} {dtype}")


def assert_measures(backend, x, granularity, label=""):
    for got, wanted in zip(backend.measure(x, granularity), qparams.measure(x, granularity), strict=True):
        # + 0.0: the sign of a bound of zero is not defined.
        assert_same_bits(got + 0.0, wanted + 0.0, label)


@pytest.mark.parametrize("backend", OF_ALL, ids=lambda b: b.name)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_measure_equals_the_definition(backend, dtype):
    skip_unavailable(backend)
    for turn, (label, where) in enumerate(RUNS.items()):
        if where.shape and not (INTERPRETED and max(where.shape) > 1000):
            for name in some(LAYOUTS, turn):
                x = LAYOUTS[name](hostile(where, dtype))
                assert_measures(fitted(backend, x, turn), x, where.granularity, f"{label} {name}")


PLACES = [(WHOLE, (70_001,)), (fq.PerToken(), (2, 70_001)), (fq.PerChannel(-1), (2001, 50)), (fq.PerToken(), (70, 37))]
if INTERPRETED:
    PLACES = [(WHOLE, (700,)), (fq.PerToken(), (2, 701)), (fq.PerChannel(-1), (61, 20)), (fq.PerChannel(1), (9, 5, 3))]


@each_backend
@pytest.mark.parametrize(("granularity", "shape"), PLACES, ids=["tensor", "long tokens", "columns", "short runs"])
def test_every_element_is_measured(backend, granularity, shape):
    """The largest and the lowest value at the ends of the parts that threads and programs measure."""
    skip_unavailable(backend)
    size = torch.Size(shape).numel()
    ends = [0, 63, 64, 512, size - 1]
    if not INTERPRETED:
        ends += [1, 15, 31, 32_767, 32_768, 65_535, 65_536, 70_000, 70_001, size - 2]
    for end in {end for end in ends if end < size}:
        x = torch.full((size,), 0.1)
        x[end], x[max(end - 1, 0)] = 5.0, -7.0
        assert_measures(fitted(backend, x, 1), x.view(shape), granularity, end)


NESTED, LARGE = ScaleSpec("uint8", granularity=fq.PerBlock({-1: 2})), FloatFormat("e7m3", 7, 3, Specials.NONE)
COMPOSED = [({"scale": NESTED}, "its scales share scales per_block(-1:2)")]
if INTERPRETED:
    COMPOSED += [({"gradient": fq.Gradient.CLIP}, "its gradient ends at the values of codes")]
else:
    COMPOSED += [({"scale": ScaleSpec(LARGE, granularity=WHOLE)}, "the kernels round scales up to 2**64")]


@each_backend
@pytest.mark.parametrize(("options", "reason"), COMPOSED)
def test_what_the_kernels_do_not_serve_is_composed(backend, options, reason, caplog):
    caplog.set_level(logging.DEBUG, "fakequant.backend")
    where = RUNS["block_32"]
    spec = fq.QuantSpec("int8", where.granularity, **options)
    compare(backend, hostile(where, torch.float32), spec, served=False)
    assert reason in caplog.text


@pytest.mark.parametrize("gradient", fq.Gradient, ids=lambda g: g.value)
@pytest.mark.parametrize("backend", OF_ALL, ids=lambda b: b.name)
def test_operator_and_gradient(monkeypatch, backend, gradient):
    skip_unavailable(backend)
    monkeypatch.setattr("fakequant.ops.dispatch._backends", (backend, REFERENCE))
    where = RUNS["block_32"]
    x = hostile(where, torch.float32).requires_grad_()
    for spec in some(specs("int4", where.granularity), 1):
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


@each_backend
def test_the_comparison_can_fail(backend):
    class Off(Calls):
        def fake_quantize_dynamic(self, x, spec, **options):
            return super().fake_quantize_dynamic(x.nextafter(torch.zeros(())), spec, **options)

    skip_unavailable(backend)
    with pytest.raises(AssertionError, match="elements differ"):
        compare(Off(backend.backend), hostile(RUNS["block_16"], torch.float32), fq.QuantSpec("int8", fq.PerToken()))
