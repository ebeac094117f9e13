"""Every backend returns the reference's bits: values, masks, gradients, codes. A listed backend is a tested one.

Here the C++ kernels; in triton's interpreter, which test_triton.py starts, those for GPUs.
"""

import shutil
from itertools import product

import pytest
import torch

import fakequant as fq
from fakequant.numerics import qparams, reference
from fakequant.numerics.formats import FloatFormat, Specials
from fakequant.numerics.philox import random_words, words_of
from fakequant.numerics.qparams import compute_dtype
from fakequant.ops import dispatch
from fakequant.ops.cpu.backend import load_kernels
from fakequant.ops.dispatch import REFERENCE
from tests.support import cases
from tests.support.backends import Calls
from tests.support.bits import assert_same_bits
from tests.support.cases import DTYPES, FORMATS, GRANULARITIES, LAYOUTS, hostile_gradient
from tests.support.kernel_comparisons import (
    GRADIENTS,
    INTERPRETED,
    SIZES,
    compare,
    compare_format,
    compare_grad_params,
    compare_tiny_multipliers,
    each_backend,
    fitted,
    interpreted,
    not_interpreted,
    only_interpreted,
    skip_unavailable,
)
from tests.support.matrix import each_format_once, full, in_turn, sweep
from tests.support.plan_cases import needs_kernels
from tests.support.threads import run_in_threads

pytestmark = pytest.mark.usefixtures("poisoned_memory")
STOCHASTIC = fq.Rounding.STOCHASTIC
each_rounding = pytest.mark.parametrize("rounding", fq.Rounding, ids=lambda rounding: rounding.value)


def test_cpu_kernels_are_there_where_a_compiler_is():
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl")):
        pytest.skip("no C++ compiler here")
    assert load_kernels() is None


def test_poison_works():
    assert torch.empty(3).isnan().all()
    assert (torch.empty_like(torch.ones(3, dtype=torch.uint8)) == 255).all()


@each_backend
@each_rounding
@each_format_once
def test_equals_the_reference(backend, rounding, name, dtype):
    skip_unavailable(backend)
    served = compare_format(backend, name, dtype, rounding)
    spec = FORMATS[name].spec(fq.PerTensor(), fq.Arithmetic.DIVIDE)
    unsupported = [backend.unsupported(torch.ones(1, dtype=dtype), spec, codes=codes) for codes in (False, True)]
    assert served or INTERPRETED or any(unsupported)


@each_backend
@each_rounding
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_reference_in_every_layout(backend, rounding, name, dtype):
    skip_unavailable(backend)
    compare_format(backend, name, dtype, rounding, thoroughly=True)


FAMILIES = ["int8", "uint8_affine", "float8_e4m3fn", "nf4"]


@each_backend
@sweep(
    "size, rounding, name",
    full(SIZES, fq.Rounding, FAMILIES),
    in_turn(product(SIZES, fq.Rounding), FAMILIES),
)
def test_chunks_and_remainders(backend, size, rounding, name):
    skip_unavailable(backend)
    torch.set_num_threads(2 if size > 32768 else 1)
    shapes = [(fq.PerTensor(), (size,)), (fq.PerToken(), (size // 17 + 1, 17))]
    if rounding is not STOCHASTIC:
        shapes += [
            (fq.PerChannel(0), (size // 3 + 1, 3)),
            (fq.PerChannel(-1), (5, size // 5 + 1)),
            (fq.PerChannel(1), (2, 3, size // 6 + 1)),
            (fq.PerBlock({0: 2, 1: 1}), (4, size // 4 + 1)),
        ]
    for (granularity, shape), dtype in product(shapes, (torch.float32, torch.bfloat16)):
        where = cases.GranularityCase(granularity, shape, granularity.block_shape(shape))
        numbers = cases.hostile(FORMATS[name], where, fq.Arithmetic.DIVIDE, dtype, seed=size)
        if rounding is STOCHASTIC:
            numbers = cases.Numbers(numbers.x, numbers.params._replace(seed=torch.tensor(size * 2**40 - 3)))
        spec = FORMATS[name].spec(granularity, fq.Arithmetic.DIVIDE, rounding=rounding)
        compare(fitted(backend, numbers.x, size), numbers, spec, f"{granularity} {shape}", briefly=INTERPRETED)


# Runs shorter and longer than a program, which divide it and do not, on several planes.
RUNS = [
    (fq.PerChannel(1), (7, 5, 3)),
    (fq.PerChannel(0), (3, 129)),
    (fq.PerChannel(0), (5, 64)),
    (fq.PerChannel(0), (5, 128)),
    (fq.PerChannel(1), (2, 3, 72)),
    (fq.PerChannel(1), (2, 3, 64)),
    (fq.PerChannel(1), (3, 5, 24)),
    (fq.PerChannel(1), (3, 5, 8)),
    (fq.PerChannel(-1), (37, 4)),
    (fq.PerChannel(-1), (3, 100)),
    (fq.PerBlock({0: 4, 1: 8}), (12, 32)),
    (fq.PerBlock({0: 4, 1: 96}), (8, 192)),
    (fq.PerBlock({0: 2, 1: 1}), (8, 16)),
    (fq.PerBlock({-1: 16}), (5, 48)),
    (fq.PerBlock({-1: 24}), (5, 48)),
    (fq.PerBlock({-1: 32}, pad=True), (5, 50)),
    (fq.PerBlock({0: 8, 1: 8}, pad=True), (9, 30)),
]


@each_backend
@sweep("granularity, shape, block", [(*run, block) for run in RUNS for block in (8, 64)], in_turn(RUNS, [8, 64]))
def test_runs_and_programs(backend, granularity, shape, block):
    skip_unavailable(backend)
    groups = granularity.group_shape(shape)
    params = fq.QParams(torch.rand(groups) + 0.1, torch.randint(-128, 128, groups))
    spec = fq.QuantSpec("int8", granularity, symmetric=False, gradient=fq.Gradient.CLIP)
    backend = interpreted(block) if INTERPRETED else backend
    assert compare(backend, cases.Numbers(torch.randn(shape) * 100, params), spec, block, briefly=True)


@each_backend
@sweep("name, gradient, rounding", full(FAMILIES, GRADIENTS, fq.Rounding), in_turn(FAMILIES, GRADIENTS, [*fq.Rounding]))
def test_measured_ranges_and_scales_of_several_dtypes(backend, name, gradient, rounding):
    skip_unavailable(backend)
    case, where, turn = FORMATS[name], GRANULARITIES["channel_1"], FAMILIES.index(name)
    for arithmetic in case.arithmetics():
        numbers = cases.hostile(case, where, arithmetic, torch.float32, turn)
        spec = case.spec(where.granularity, arithmetic, gradient=gradient, rounding=rounding)
        params = numbers.params._replace(seed=torch.tensor(turn * 2**40 - 3))
        measured = fq.Range(-torch.rand(where.groups), torch.rand(where.groups, dtype=torch.float64))
        scales = params.scale.double(), params.scale.bfloat16()
        for given in (params._replace(range=measured), *(params._replace(scale=scale) for scale in scales)):
            compare(backend, cases.Numbers(numbers.x, given), spec, f"{given.scale.dtype}", briefly=True)


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_one_nan_is_found_wherever_it_is(backend, dtype):
    skip_unavailable(backend)
    params, spec = fq.QParams(torch.tensor([0.5], dtype=compute_dtype(dtype))), fq.QuantSpec("int8")
    for size in (1, 7, 16, 33, 1025):
        for way in cases.each_way():
            x = torch.ones(size, dtype=dtype)
            assert not backend.encode(x, params, spec).has_nan, way
            for place in {0, size // 2, size - 1}:
                x = torch.ones(size, dtype=dtype)
                x[place] = torch.nan
                assert backend.encode(x, params, spec).has_nan, f"{way} {place} of {size}"


@each_backend
@each_rounding
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 32), (0, 2, 3, 4)], ids=str)
def test_empty(backend, shape, rounding):
    skip_unavailable(backend)
    seed = torch.tensor(1) if rounding is STOCHASTIC else None
    for granularity in (fq.PerTensor(), fq.PerChannel(0), fq.PerChannel(-1), fq.PerToken(), fq.PerBlock({-1: 1})):
        x, spec = torch.empty(shape), fq.QuantSpec("int8", granularity, rounding=rounding)
        params = fq.QParams(torch.ones(granularity.group_shape(shape)), seed=seed)
        assert compare(backend, cases.Numbers(x, params), spec, str(granularity))
        assert backend.fake_quantize_dynamic(x, spec, mask=False, seed=seed)[0].shape == shape


@each_backend
@pytest.mark.parametrize("name", ["int8", "uint8_affine", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1fn", "nf4"])
def test_every_float16_and_bfloat16_pattern(backend, name):
    skip_unavailable(backend)
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    case = FORMATS[name]
    for dtype, scale in product((torch.float16, torch.bfloat16), (1e-30, 0.013, 1.0)[: 1 + 2 * (not INTERPRETED)]):
        for arithmetic in case.arithmetics():
            zero_point = None if case.symmetric else torch.tensor([37], dtype=torch.int32)
            numbers = cases.Numbers(patterns.view(dtype), fq.QParams(torch.tensor([scale]), zero_point))
            spec, label = case.spec(fq.PerTensor(), arithmetic), f"{dtype} {scale}"
            compare(fitted(backend, numbers.x), numbers, spec, label, briefly=INTERPRETED)


@each_backend
@pytest.mark.parametrize("name", [name for name, case in FORMATS.items() if case.symmetric])
def test_every_code(backend, name):
    skip_unavailable(backend)
    fmt = fq.QuantSpec(FORMATS[name].format).format
    if fmt.has_zero_point or backend.unsupported(torch.ones(1), fq.QuantSpec(fmt), codes=True):
        pytest.skip("its codes are integers, or the reference serves them")
    backend = interpreted(2**16) if INTERPRETED else backend
    number = len(fmt.grid.table.values) if fmt.grid.table else 2**fmt.bits
    stored = torch.arange(number).to(torch.int16 if fmt.bits > 8 else torch.uint8).view(fmt.storage)
    for dtype, (turn, arithmetic) in product((torch.float32, torch.float64), enumerate(FORMATS[name].arithmetics())):
        spec, params = fq.QuantSpec(fmt, arithmetic=arithmetic), fq.QParams(torch.tensor([0.37 if turn else 1.0]))
        right = reference.dequantize(stored, params, spec, dtype)
        assert_same_bits(backend.dequantize(stored, params, spec, dtype), right, f"{spec} {dtype}")
        assert_same_bits(backend.quantize(right, params, spec), reference.quantize(right, params, spec), spec)


@not_interpreted
@each_backend
@pytest.mark.parametrize("name", ["int8", "int8_affine_of_5", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_results_around_the_smallest_normal_number(backend, name):
    """A conversion to bfloat16 by the processor would make zeros of subnormal numbers."""
    skip_unavailable(backend)
    affine = name == "int8_affine_of_5"
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    exponents = (-149, -135, -128, -127, -126, -125, -120, -112, -110, 119, 124, 125, 126, 127)
    for exponent, mantissa in product(exponents, (1.0, 1.25, 1.9921875)):
        scale = torch.tensor([mantissa * 2.0**exponent], dtype=torch.float64).float()
        x = torch.cat([patterns, (torch.arange(-160, 161) * 0.5 * scale).to(torch.bfloat16)])
        for arithmetic in fq.Arithmetic:
            if arithmetic.has_two_scales or (affine and not arithmetic.is_linear):
                continue
            numbers = cases.Numbers(x, fq.QParams(scale, torch.tensor([5], dtype=torch.int32) if affine else None))
            spec = fq.QuantSpec("int8" if affine else name, symmetric=not affine, arithmetic=arithmetic)
            compare(backend, numbers, spec, f"{scale.item()} {arithmetic.value}", briefly=True)


@not_interpreted
@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("exponent_bits", [6, 7, 8])
def test_formats_nearly_as_wide_as_float32(backend, exponent_bits, dtype):
    """The rounding must not overflow where the format itself does not."""
    skip_unavailable(backend)
    spec = fq.QuantSpec(FloatFormat("wide", exponent_bits, 7, Specials.IEEE))
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    x = torch.cat([powers * factor for factor in (1.0, 1.001, 1.00390625, 1.99)]).to(dtype)
    numbers = cases.Numbers(torch.cat([x, -x]), fq.QParams(torch.ones(1, dtype=dtype)))
    if exponent_bits == 8 and dtype == torch.float32:
        assert backend.name == REFERENCE.name or "2**64" in backend.unsupported(numbers.x, spec, codes=False)
    else:
        assert compare(backend, numbers, spec, str(exponent_bits))


@each_backend
@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.bool], ids=str)
def test_a_mask_has_one_bit_per_element_and_its_gradient_keeps_bits_in_any_layout(backend, dtype):
    skip_unavailable(backend)
    where = GRANULARITIES["channel_1"]
    numbers, given = (
        cases.hostile(FORMATS["int8"], where, fq.Arithmetic.DIVIDE, torch.float32, seed) for seed in (0, 1)
    )
    spec = fq.QuantSpec("int8", where.granularity)
    right = reference.passes(numbers.x, numbers.params, spec)
    for x_layout in (name for name in LAYOUTS if name != "expanded"):
        x = LAYOUTS[x_layout](numbers.x)
        _, mask = backend.fake_quantize(x, numbers.params, spec, mask=True)
        assert (mask.dtype, mask.numel()) == (torch.uint8, -(-x.numel() // 8))
        assert_same_bits(backend.unpack_mask(mask, x, spec), right, x_layout)
        for dy_layout in ("contiguous", "transposed", "expanded") if INTERPRETED else LAYOUTS:
            dy = LAYOUTS[dy_layout](given.x.to(dtype))  # NaN, inf, -0.0
            dx = backend.grad_input(dy, mask, spec, x.stride())
            assert_same_bits(dx, torch.where(right, dy, torch.zeros((), dtype=dtype)), f"x {x_layout}, dy {dy_layout}")


# A part of the C++ kernel's sums has 131,072 elements, of several rows 4096 of each: groups within parts and across.
LARGE = [
    (fq.PerTensor(), (300_001,)),
    (fq.PerChannel(0), (3, 140_001)),
    (fq.PerChannel(1), (2, 3, 140_001)),
    (fq.PerChannel(1), (70, 5, 1001)),
    (fq.PerChannel(-1), (40, 9001)),
    (fq.PerChannel(-1), (60_001, 5)),
    (fq.PerBlock({-1: 16}), (9, 32_000)),
    (fq.PerBlock({0: 2, 1: 4}), (1000, 300)),
    (fq.PerBlock({0: 128, 1: 128}, pad=True), (300, 700)),
]
if INTERPRETED:
    LARGE = [(GRANULARITIES[name].granularity, GRANULARITIES[name].shape) for name in ("tensor", "tiles", "channel_1")]


@each_backend
@pytest.mark.parametrize(("granularity", "shape"), LARGE, ids=str)
def test_gradients_of_parameters_of_large_tensors(backend, granularity, shape):
    skip_unavailable(backend)
    torch.set_num_threads(2)
    groups = granularity.group_shape(shape)
    params = fq.QParams(torch.rand(groups) + 0.5, torch.randint(-128, 128, groups))
    numbers, spec = cases.Numbers(torch.randn(shape) * 200, params), fq.QuantSpec("int8", granularity, symmetric=False)
    compare_grad_params(interpreted(128) if INTERPRETED else backend, numbers, spec, shape)


@each_backend
def test_gradients_of_parameters_that_are_wanted(backend):
    """Those of either parameter, and of both; learned parameters may have another dtype than the input."""
    skip_unavailable(backend)
    where = GRANULARITIES["channel_1"]
    numbers = cases.hostile(FORMATS["uint8_affine"], where, fq.Arithmetic.DIVIDE, torch.float32)
    x, given = numbers.x, numbers.params
    spec, dy = fq.QuantSpec("uint8", where.granularity), hostile_gradient(x)
    for scale in (given.scale, given.scale.double()):
        params = fq.QParams(scale, given.zero_point.half())
        both = reference.grad_params(dy, x, params, spec, (True, True))
        for wants in ((True, True), (True, False), (False, True)):
            actual = backend.grad_params(dy, x, params, spec, wants)
            assert tuple(one is not None for one in actual) == wants
            for one, other in zip(actual, both, strict=True):
                if one is not None:
                    assert_same_bits(one, other)


@each_backend
def test_gradients_of_multipliers_whose_square_is_zero(backend):
    skip_unavailable(backend)
    compare_tiny_multipliers(backend)


def test_gradients_of_multipliers_whose_square_is_zero_in_the_definition():
    compare_tiny_multipliers(reference)


@each_backend
def test_sums_of_every_magnitude(backend):
    skip_unavailable(backend)
    x = torch.full((7, 300), 1e4, dtype=torch.float64)
    spec, params = fq.QuantSpec("int8", fq.PerChannel(0)), fq.QParams(torch.ones(7, 1, dtype=torch.float64))
    # Products of all exponents, of which the lowest digits are cut off; and large ones that leave the lowest alone.
    exponents = torch.linspace(-1074, 1000, 300, dtype=torch.float64)
    dy = torch.ldexp(torch.randn(7, 300, dtype=torch.float64), exponents)
    dy[1:] *= torch.tensor([1e-300, 0.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)[:, None]
    # The slope is 127: the first two are in the first digit, the others in the fourth.
    dy[6, :4] = torch.tensor([2.0**100, -(2.0**100), 8.0, 5.0])
    dy[3, 7], dy[4, 7], dy[5, 7], dy[5, 8] = float("inf"), -float("inf"), float("inf"), -float("inf")
    found = fitted(backend, x).grad_params(dy, x, params, spec, (True, False))[0]
    assert_same_bits(found, reference.grad_params(dy, x, params, spec, (True, False))[0])
    assert_same_bits(found[3:].flatten(), torch.tensor([torch.inf, -torch.inf, torch.nan, 127 * 13]).double())


@not_interpreted
@each_backend
def test_gradients_of_parameters_refuse_another_dtype(backend):
    skip_unavailable(backend)
    x, params = torch.ones(4), fq.QParams(torch.ones(1))
    with pytest.raises(RuntimeError, match="another dtype or shape than the input"):
        backend.grad_params(torch.ones(4).half(), x, params, fq.QuantSpec("int8"), (True, False))


@each_backend
def test_input_is_not_written(backend):
    skip_unavailable(backend)
    for layout_name, layout in LAYOUTS.items():
        x = layout(torch.randn(4, 5, 6))
        before = x.clone()
        for spec in (fq.QuantSpec("int8"), fq.QuantSpec("int8", fq.PerChannel(1))):
            params = fq.choose_qparams(x, spec)
            backend.fake_quantize(x, params, spec, mask=True)
            backend.quantize(x, params, spec)
            assert_same_bits(x, before, layout_name)


@not_interpreted
@each_backend
def test_threads_give_equal_bits(backend):
    """Several Python threads at once, each with several threads of torch's pool, on tensors of many chunks."""
    skip_unavailable(backend)
    torch.set_num_threads(2)
    where = cases.GranularityCase(fq.PerChannel(0), (7, 23_001), (1, 23_001))
    numbers = cases.hostile(FORMATS["uint8_affine"], where, fq.Arithmetic.DIVIDE, torch.float32)
    spec = fq.QuantSpec("uint8", where.granularity)
    right = reference.fake_quantize(numbers.x, numbers.params, spec)
    inside = reference.passes(numbers.x, numbers.params, spec)

    def work():
        for _ in range(10):
            y, mask = backend.fake_quantize(numbers.x, numbers.params, spec, mask=True)
            assert_same_bits(y, right)
            assert_same_bits(backend.unpack_mask(mask, numbers.x, spec), inside)

    run_in_threads(work)


@not_interpreted
@each_backend
def test_the_number_of_threads_changes_no_drawn_code(backend):
    skip_unavailable(backend)
    x = torch.randn(3, 5, 70_001)
    texts = ("int4 per_channel(1)", "float4_e2m1fn per_token", "float8_e4m3fn per_tensor")
    for layout, text in product(("contiguous", "transposed"), texts):
        laid, spec = LAYOUTS[layout](x), fq.QuantSpec.parse(text).replace(rounding=STOCHASTIC)
        params = fq.choose_qparams(x, spec)._replace(seed=torch.tensor(77))
        right = reference.fake_quantize(x, params, spec)
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            assert_same_bits(backend.fake_quantize(laid, params, spec, mask=False)[0], right, f"{text} {threads}")
            dynamic = backend.fake_quantize_dynamic(laid, spec, mask=False, seed=params.seed)[0]
            assert_same_bits(dynamic, right, f"{text} {threads} dynamic")


@not_interpreted
@each_backend
def test_formats_with_steps_that_float32_has_no_normal_number_for(backend):
    """Step 2**-135: refused in float32 by name, served in float64."""
    skip_unavailable(backend)
    fmt = FloatFormat("tiny", 6, 9, Specials.IEEE, bias=127)
    spec = fq.QuantSpec(fmt, rounding=STOCHASTIC)
    powers = 2.0 ** torch.arange(-149, -60, dtype=torch.float64)
    x = torch.cat([powers * factor for factor in (1.0, -1.001, 1.7)])
    assert "steps from 2**-126 on, tiny has one of 2.29589e-41" in str(
        backend.unsupported(x.float(), spec, codes=False)
    )
    assert backend.unsupported(x.float(), spec.replace(rounding=fq.Rounding.NEAREST_EVEN), codes=False) is None
    params = fq.QParams(torch.ones(1, dtype=torch.float64), seed=torch.tensor(4))
    assert compare(backend, cases.Numbers(x, params), spec, "float64")
    right = reference.fake_quantize(x.float(), params, spec)
    assert_same_bits(fq.fake_quantize(x.float(), spec, scale=1.0, seed=4), right)


@each_backend
def test_a_missing_seed_is_no_rounding_to_nearest(backend):
    skip_unavailable(backend)
    spec, x, params = fq.QuantSpec("int8", rounding=STOCHASTIC), torch.ones(3), fq.QParams(torch.ones(1))
    for call in (
        lambda: backend.fake_quantize(x, params, spec, mask=False),
        lambda: backend.fake_quantize_dynamic(x, spec, mask=False),
        lambda: backend.quantize(x, params, spec),
    ):
        with pytest.raises(fq.FakeQuantError, match="there is no seed"):
            call()


@needs_kernels
@pytest.mark.parametrize("size", SIZES)
def test_words_are_those_of_the_definition(size):
    for seed in (torch.tensor(0), torch.tensor(-(2**63)), torch.tensor(0x299F31D0A4093822)):
        words = torch.empty(size, dtype=torch.int32)
        torch.ops.fakequant_cpu.draw_words(seed, words)
        assert_same_bits(words.to(torch.int64) & 0xFFFFFFFF, random_words(seed, words), seed)
        torch.ops.fakequant_cpu.draw_words(seed, words, 2**34 - 64)  # of which the counter has 32 bits
        counter = torch.arange(2**32 - 16, 2**32 - 16 + (size + 3) // 4)
        expected = words_of(seed, counter).flatten()[:size]
        assert_same_bits(words.to(torch.int64) & 0xFFFFFFFF, expected, seed)


@only_interpreted
@each_backend
def test_positions_beyond_32_bits(backend, monkeypatch):
    """The kernels for 2**31 elements on a small tensor."""
    monkeypatch.setattr("fakequant.ops.triton.call.LARGEST_INT32", 7)
    backend = interpreted(128)  # which nothing else uses: the plans of others are kept
    for where_name in ("tensor", "channel_1", "channel_last", "tiles", "block_32"):
        where = GRANULARITIES[where_name]
        numbers = cases.hostile(FORMATS["int8"], where, fq.Arithmetic.DIVIDE, torch.float32)
        spec = fq.QuantSpec("int8", where.granularity)
        compare(backend, numbers, spec, where_name, briefly=True)
        given = numbers.x, numbers.x, numbers.params, spec, (True, False)
        assert_same_bits(backend.grad_params(*given)[0], reference.grad_params(*given)[0], where_name)
        found, right = backend.measure(numbers.x, where.granularity), qparams.measure(numbers.x, where.granularity)
        for got, wanted in zip(found, right, strict=True):
            assert_same_bits(got + 0.0, wanted + 0.0, where_name)


@only_interpreted
@each_backend
@pytest.mark.parametrize("learned", [False, True])
def test_batched_gradients(backend, monkeypatch, learned):
    """Kernels cannot read the batches that torch makes of gradients."""
    monkeypatch.setattr(dispatch, "_backends", (backend, dispatch.REFERENCE))
    x, scale = torch.randn(4, 6, requires_grad=True), torch.tensor(0.01, requires_grad=learned)
    y, leaves = fq.fake_quantize(x, "int8", scale=scale), (x, scale) if learned else (x,)
    dys = torch.randn(3, 4, 6)
    single = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in dys]
    batched = torch.autograd.grad(y, leaves, dys, retain_graph=True, is_grads_batched=True)
    mapped = torch.vmap(lambda dy: torch.autograd.grad(y, leaves, dy, retain_graph=True))(dys)
    for found in (batched, mapped):
        for got, wanted in zip(found, zip(*single, strict=True), strict=True):
            assert_same_bits(got, torch.stack(wanted))


class Off(Calls):
    """One bit of a mask, one code and one gradient beside the right ones, by turns."""

    what = ""

    def fake_quantize(self, x, params, spec, *, mask):
        y, bits = super().fake_quantize(x, params, spec, mask=mask)
        return y, bits ^ torch.tensor(
            [0] * 5 + [4] + [0] * 7, dtype=torch.uint8
        ) if self.what == "dx" and mask else bits

    def quantize(self, x, params, spec):
        codes = super().quantize(x, params, spec)
        codes[17] += self.what == "codes"
        return codes

    def grad_params(self, *given):
        scale, zero_point = super().grad_params(*given)
        return scale.nextafter(torch.full_like(scale, 1e300)) if self.what == "scale" else scale, zero_point


@each_backend
@pytest.mark.parametrize("what", ["dx", "codes", "scale"])
def test_the_comparison_can_fail(backend, what):
    skip_unavailable(backend)
    wrong, numbers = Off(backend.backend), cases.Numbers(torch.randn(100), fq.QParams(torch.tensor([0.1])))
    wrong.what = what
    with pytest.raises(AssertionError, match=rf"{what}: (dtype|1 of)"):
        compare(wrong, numbers, fq.QuantSpec("int8"), "")
