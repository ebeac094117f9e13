"""Every backend returns the reference's bits: values, masks, gradients, codes. A listed backend is a tested one."""

import shutil

import pytest
import torch

import fakequant as fq
from fakequant.numerics import reference
from fakequant.numerics.formats import FloatFormat, Specials
from fakequant.numerics.qparams import compute_dtype
from fakequant.ops.cpu.backend import load_kernels
from fakequant.ops.dispatch import REFERENCE, unpack_bits
from tests.support import cases
from tests.support.bits import assert_same_bits
from tests.support.cases import DTYPES, FORMATS, GRANULARITIES, LAYOUTS
from tests.support.kernel_comparisons import (
    SIZES,
    compare,
    compare_grad_params,
    compare_tiny_multipliers,
    compare_wanted_grad_params,
    each_backend,
    skip_unavailable,
)
from tests.support.matrix import each_format_once, full, in_turn, sweep
from tests.support.threads import run_in_threads

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_cpu_kernels_are_there_where_a_compiler_is():
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl")):
        pytest.skip("no C++ compiler here")
    assert load_kernels() is None


def test_poison_works():
    assert torch.empty(3).isnan().all()
    assert (torch.empty_like(torch.ones(3, dtype=torch.uint8)) == 255).all()


@each_backend
@each_format_once
def test_equals_the_reference(backend, name, dtype):
    skip_unavailable(backend)
    case = FORMATS[name]
    served = 0
    for where_index, (where_name, where) in enumerate(GRANULARITIES.items()):
        for arithmetic_index, arithmetic in enumerate(case.arithmetics()):
            numbers = cases.hostile(case, where, arithmetic, dtype, seed=where_index)
            spec = case.spec(where.granularity, arithmetic)
            # A layout each, in turn: over the formats every layout meets every granularity and arithmetic.
            turn = where_index + 2 * arithmetic_index + list(FORMATS).index(name)
            layout_name = list(LAYOUTS)[turn % len(LAYOUTS)]
            laid = cases.Numbers(LAYOUTS[layout_name](numbers.x), numbers.params)
            served += compare(backend, laid, spec, f"{where_name} {arithmetic.value} {layout_name}")
    assert served or any(backend.unsupported(numbers.x, spec, codes=codes) for codes in (False, True))


@each_backend
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_reference_in_every_layout(backend, name, dtype):
    skip_unavailable(backend)
    case = FORMATS[name]
    for seed in range(3):
        for where_name, where in GRANULARITIES.items():
            for arithmetic in case.arithmetics():
                numbers = cases.hostile(case, where, arithmetic, dtype, seed=1000 + seed)
                spec = case.spec(where.granularity, arithmetic)
                for layout_name, layout in LAYOUTS.items():
                    laid = cases.Numbers(layout(numbers.x), numbers.params)
                    compare(backend, laid, spec, f"{where_name} {arithmetic.value} {layout_name} {seed}")


FAMILIES = ["int8", "uint8_affine", "float8_e4m3fn", "nf4"]


@each_backend
@sweep("size, name", full(SIZES, FAMILIES), in_turn(SIZES, FAMILIES))
def test_chunks_and_remainders(backend, name, size):
    skip_unavailable(backend)
    torch.set_num_threads(2 if size > 32768 else 1)
    case = FORMATS[name]
    arithmetic = fq.Arithmetic.DIVIDE
    shapes = {
        "tensor": cases.GranularityCase(fq.PerTensor(), (size,), (size,)),
        "runs_of_3": cases.GranularityCase(fq.PerChannel(0), (size // 3 + 1, 3), (1, 3)),
        "runs_of_17": cases.GranularityCase(fq.PerToken(), (size // 17 + 1, 17), (1, 17)),
        "rows": cases.GranularityCase(fq.PerChannel(-1), (5, size // 5 + 1), (5, 1)),
        "long_runs": cases.GranularityCase(fq.PerChannel(1), (2, 3, size // 6 + 1), (2, 1, size // 6 + 1)),
        "two_rows": cases.GranularityCase(fq.PerBlock({0: 2, 1: 1}), (4, size // 4 + 1), (2, 1)),
    }
    for where_name, where in shapes.items():
        for dtype in (torch.float32, torch.bfloat16):
            numbers = cases.hostile(case, where, arithmetic, dtype, seed=size)
            compare(backend, numbers, case.spec(where.granularity, arithmetic), where_name)


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
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 32), (0, 2, 3, 4)], ids=str)
def test_empty(backend, shape):
    skip_unavailable(backend)
    granularities = [fq.PerTensor(), fq.PerChannel(0), fq.PerChannel(-1), fq.PerToken(), fq.PerBlock({-1: 1})]
    for granularity in granularities:
        x = torch.empty(shape)
        spec = fq.QuantSpec("int8", granularity)
        params = fq.QParams(torch.ones(granularity.group_shape(shape)))
        assert compare(backend, cases.Numbers(x, params), spec, str(granularity))


@each_backend
@pytest.mark.parametrize("name", ["int8", "uint8_affine", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1fn", "nf4"])
def test_every_float16_and_bfloat16_pattern(backend, name):
    skip_unavailable(backend)
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    case = FORMATS[name]
    for dtype in (torch.float16, torch.bfloat16):
        for scale in (1.0, 0.013, 1e-30):
            for arithmetic in case.arithmetics():
                zero_point = None if case.symmetric else torch.tensor([37], dtype=torch.int32)
                numbers = cases.Numbers(patterns.view(dtype), fq.QParams(torch.tensor([scale]), zero_point))
                compare(backend, numbers, case.spec(fq.PerTensor(), arithmetic), f"{dtype} {scale}")


@each_backend
@pytest.mark.parametrize("name", ["int8", "int8_affine_of_5", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_results_around_the_smallest_normal_number(backend, name):
    """A conversion to bfloat16 by the processor would make zeros of subnormal numbers."""
    skip_unavailable(backend)
    affine = name == "int8_affine_of_5"
    fmt = fq.parse_format("int8" if affine else name)
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    for exponent in (-149, -135, -128, -127, -126, -125, -120, -112, -110, 119, 124, 125, 126, 127):
        for mantissa in (1.0, 1.25, 1.9921875):
            scale = torch.tensor([mantissa * 2.0**exponent], dtype=torch.float64).float()
            x = torch.cat([patterns, (torch.arange(-160, 161) * 0.5 * scale).to(torch.bfloat16)])
            for arithmetic in fq.Arithmetic:
                if arithmetic.has_two_scales or (affine and not arithmetic.is_linear):
                    continue
                params = fq.QParams(scale, torch.tensor([5], dtype=torch.int32) if affine else None)
                spec = fq.QuantSpec(fmt, symmetric=not affine, arithmetic=arithmetic)
                right = reference.fake_quantize(x, params, spec)
                passes = reference.passes(x, params, spec)
                for way in cases.each_way():
                    y, mask = backend.fake_quantize(x, params, spec, mask=True)
                    label = f"{scale.item()} {arithmetic.value} {way}"
                    assert_same_bits(y, right, label)
                    assert_same_bits(unpack_bits(mask, passes.shape), passes, f"{label} mask")


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("exponent_bits", [6, 7, 8])
def test_formats_nearly_as_wide_as_float32(backend, exponent_bits, dtype):
    """The rounding must not overflow where the format itself does not."""
    skip_unavailable(backend)
    fmt = FloatFormat("wide", exponent_bits, 7, Specials.IEEE)
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    x = torch.cat([powers * factor for factor in (1.0, 1.001, 1.00390625, 1.99)]).to(dtype)
    numbers = cases.Numbers(torch.cat([x, -x]), fq.QParams(torch.ones(1, dtype=dtype)))
    if exponent_bits == 8 and dtype == torch.float32:
        assert backend.name == REFERENCE.name or "2**64" in backend.unsupported(
            numbers.x, fq.QuantSpec(fmt), codes=False
        )
    else:
        assert compare(backend, numbers, fq.QuantSpec(fmt), str(exponent_bits))


@each_backend
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_mask_has_one_bit_per_element_and_its_gradient_keeps_bits(backend, dtype):
    skip_unavailable(backend)
    x = cases.hostile(FORMATS["int8"], GRANULARITIES["tensor"], fq.Arithmetic.DIVIDE, dtype).x
    spec, params = fq.QuantSpec("int8"), fq.QParams(torch.ones(1, 1, 1))
    _, mask = backend.fake_quantize(x, params, spec, mask=True)
    assert mask.dtype == torch.uint8
    assert mask.numel() == -(-x.numel() // 8)
    # The input itself is as hostile a gradient as any: NaN, inf, -0.0.
    dx = backend.grad_input(x, mask, spec, x.stride())
    assert_same_bits(dx, reference.grad_input(x, unpack_bits(mask, x.shape)))


@each_backend
def test_gradient_in_another_layout_than_the_input(backend):
    skip_unavailable(backend)
    where = GRANULARITIES["channel_1"]
    numbers = cases.hostile(FORMATS["int8"], where, fq.Arithmetic.DIVIDE, torch.float32)
    spec = fq.QuantSpec("int8", where.granularity)
    right = reference.passes(numbers.x, numbers.params, spec)
    for x_layout in LAYOUTS:
        if x_layout == "expanded":
            continue
        x = LAYOUTS[x_layout](numbers.x)
        _, mask = backend.fake_quantize(x, numbers.params, spec, mask=True)
        for dy_layout in LAYOUTS:
            dy = LAYOUTS[dy_layout](torch.randn(where.shape))
            dx = backend.grad_input(dy, mask, spec, x.stride())
            assert_same_bits(dx, reference.grad_input(dy, right), f"x {x_layout}, dy {dy_layout}")


# A part of the kernel's sums has 131,072 elements, of several rows 4096 of each: groups within parts and across them.
@each_backend
@pytest.mark.parametrize(
    ("granularity", "shape"),
    [
        (fq.PerTensor(), (300_001,)),
        (fq.PerChannel(0), (3, 140_001)),
        (fq.PerChannel(1), (2, 3, 140_001)),
        (fq.PerChannel(1), (70, 5, 1001)),
        (fq.PerChannel(-1), (40, 9001)),
        (fq.PerChannel(-1), (60_001, 5)),
        (fq.PerBlock({-1: 16}), (9, 32_000)),
        (fq.PerBlock({0: 2, 1: 4}), (1000, 300)),
        (fq.PerBlock({0: 128, 1: 128}, pad=True), (300, 700)),
    ],
    ids=str,
)
def test_gradients_of_parameters_of_large_tensors(backend, granularity, shape):
    skip_unavailable(backend)
    torch.set_num_threads(2)
    x = torch.randn(shape) * 200
    groups = granularity.group_shape(shape)
    params = fq.QParams(torch.rand(groups) + 0.5, torch.randint(-128, 128, groups))
    compare_grad_params(backend, cases.Numbers(x, params), fq.QuantSpec("int8", granularity, symmetric=False), shape)


@each_backend
def test_gradients_of_parameters_that_are_wanted(backend):
    skip_unavailable(backend)
    compare_wanted_grad_params(backend)


@each_backend
def test_gradients_of_multipliers_whose_square_is_zero(backend):
    skip_unavailable(backend)
    compare_tiny_multipliers(backend)


def test_gradients_of_multipliers_whose_square_is_zero_in_the_definition():
    compare_tiny_multipliers(reference)


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
            assert_same_bits(unpack_bits(mask, inside.shape), inside)

    run_in_threads(work)
