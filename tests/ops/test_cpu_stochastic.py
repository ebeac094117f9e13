"""Stochastic rounding by every backend: the reference's bits, whatever the layout, the pieces and the threads."""

import pytest
import torch

import fakequant as fq
from fakequant.numerics import reference
from fakequant.numerics.formats import FloatFormat, Specials
from fakequant.numerics.philox import random_words, words_of
from fakequant.ops.dispatch import backends
from tests.support import cases
from tests.support.bits import assert_same_bits
from tests.support.cases import FORMATS, GRANULARITIES, LAYOUTS
from tests.support.dynamic_cases import composed, specs
from tests.support.dynamic_cases import hostile as hostile_groups
from tests.support.kernel_comparisons import SIZES, compare, each_backend, skip_unavailable
from tests.support.matrix import each_format_once
from tests.support.plan_cases import needs_kernels

STOCHASTIC = fq.Rounding.STOCHASTIC


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def drawn(case, where, arithmetic, dtype, seed=0):
    numbers = cases.hostile(case, where, arithmetic, dtype, seed)
    return cases.Numbers(numbers.x, numbers.params._replace(seed=torch.tensor(seed * 2**40 - 3)))


@each_backend
@each_format_once
def test_equals_the_reference(backend, name, dtype):
    skip_unavailable(backend)
    case, served = FORMATS[name], 0
    for turn, (where_name, where) in enumerate(GRANULARITIES.items()):
        # Arithmetics and layouts in turn: over the formats each meets every granularity.
        turn += list(FORMATS).index(name)
        arithmetic = case.arithmetics()[turn % len(case.arithmetics())]
        numbers = drawn(case, where, arithmetic, dtype, turn)
        spec = case.spec(where.granularity, arithmetic, rounding=STOCHASTIC)
        layout_name = list(LAYOUTS)[turn % len(LAYOUTS)]
        laid = cases.Numbers(LAYOUTS[layout_name](numbers.x), numbers.params)
        served += compare(backend, laid, spec, f"{where_name} {arithmetic.value} {layout_name}")
    assert served


@each_backend
@pytest.mark.parametrize("size", SIZES)
def test_chunks_and_remainders(backend, size):
    skip_unavailable(backend)
    torch.set_num_threads(2 if size > 32768 else 1)
    for name in ("int8", "float8_e4m3fn", "nf4"):
        for granularity, shape in ((fq.PerTensor(), (size,)), (fq.PerToken(), (size // 17 + 1, 17))):
            where = cases.GranularityCase(granularity, shape, granularity.block_shape(shape))
            numbers = drawn(FORMATS[name], where, fq.Arithmetic.DIVIDE, torch.float32, size)
            spec = FORMATS[name].spec(granularity, fq.Arithmetic.DIVIDE, rounding=STOCHASTIC)
            compare(backend, numbers, spec, f"{name} {granularity}")


@each_backend
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 32)], ids=str)
def test_empty(backend, shape):
    skip_unavailable(backend)
    spec = fq.QuantSpec("int8", fq.PerChannel(0), rounding=STOCHASTIC)
    params = fq.QParams(torch.ones(spec.granularity.group_shape(shape)), seed=torch.tensor(1))
    assert compare(backend, cases.Numbers(torch.empty(shape), params), spec, shape)
    assert backend.fake_quantize_dynamic(torch.empty(shape), spec, mask=False, seed=params.seed)[0].shape == shape


@each_backend
@pytest.mark.parametrize("name", ["int8", "uint8", "float8_e5m2", "float4_e2m1fn", "nf4"])
def test_ranges_of_the_tensor_itself(backend, name):
    """Short runs are quantized in pieces, each of which must know where in the tensor it begins."""
    skip_unavailable(backend)
    runs = {
        "tokens": ((700, 37), fq.PerToken()),
        "blocks": ((9, 4096), fq.PerBlock({-1: 32})),
        "padded": ((5, 700), fq.PerBlock({-1: 32}, pad=True)),
        "tensor": ((3, 30_000), fq.PerTensor()),
        "channels": ((4, 6, 700), fq.PerChannel(1)),
    }
    for label, (shape, granularity) in runs.items():
        where = cases.GranularityCase(fq.PerTensor(), shape, shape)
        if label != "padded":
            where = cases.GranularityCase(granularity, shape, granularity.block_shape(shape))
        for turn, (dtype, spec) in enumerate(
            (dtype, spec) for dtype in (torch.float32, torch.bfloat16) for spec in specs(name, granularity)
        ):
            x = LAYOUTS[list(LAYOUTS)[turn % len(LAYOUTS)]](hostile_groups(where, dtype, turn))
            stochastic, seed = spec.replace(rounding=STOCHASTIC), torch.tensor(turn)
            params = composed(x, stochastic)._replace(seed=seed)
            y, mask = backend.fake_quantize_dynamic(x, stochastic, mask=True, seed=seed)
            assert_same_bits(y, reference.fake_quantize(x, params, stochastic), f"{label} {stochastic} {dtype}")
            dy = torch.ones_like(x)
            dx = backend.grad_input(dy, mask, stochastic, x.stride())
            right = reference.grad_input(dy, reference.passes(x, params, stochastic))
            assert_same_bits(dx, right, f"{label} {stochastic} {dtype}")


@each_backend
def test_the_number_of_threads_changes_nothing(backend):
    skip_unavailable(backend)
    x = torch.randn(3, 5, 70_001)
    for layout in ("contiguous", "transposed"):
        laid = LAYOUTS[layout](x)
        for text in ("int4 per_channel(1)", "float4_e2m1fn per_token", "float8_e4m3fn per_tensor"):
            spec = fq.QuantSpec.parse(text).replace(rounding=STOCHASTIC)
            params = fq.choose_qparams(x, spec)._replace(seed=torch.tensor(77))
            right = reference.fake_quantize(x, params, spec)
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                label = f"{layout} {text} {threads} threads"
                assert_same_bits(backend.fake_quantize(laid, params, spec, mask=False)[0], right, label)
                dynamic = backend.fake_quantize_dynamic(laid, spec, mask=False, seed=params.seed)[0]
                assert_same_bits(dynamic, right, f"{label} dynamic")


@each_backend
def test_formats_with_steps_that_float32_has_no_normal_number_for(backend):
    """Step 2**-135: refused in float32 by name, served in float64."""
    skip_unavailable(backend)
    fmt = FloatFormat("tiny", 6, 9, Specials.IEEE, bias=127)
    spec = fq.QuantSpec(fmt, rounding=STOCHASTIC)
    powers = 2.0 ** torch.arange(-149, -60, dtype=torch.float64)
    x = torch.cat([powers * factor for factor in (1.0, -1.001, 1.7)])
    reason = backend.unsupported(x.float(), spec, codes=False)
    assert "steps from 2**-126 on, tiny has one of 2.29589e-41" in str(reason)
    assert backend.unsupported(x.float(), spec.replace(rounding=fq.Rounding.NEAREST_EVEN), codes=False) is None
    params = fq.QParams(torch.ones(1, dtype=torch.float64), seed=torch.tensor(4))
    assert compare(backend, cases.Numbers(x, params), spec, "float64")
    right = reference.fake_quantize(x.float(), params, spec)
    assert_same_bits(fq.fake_quantize(x.float(), spec, scale=1.0, seed=4), right)


@each_backend
def test_a_missing_seed_is_no_rounding_to_nearest(backend):
    skip_unavailable(backend)
    spec, x = fq.QuantSpec("int8", rounding=STOCHASTIC), torch.ones(3)
    for call in (
        lambda: backend.fake_quantize(x, fq.QParams(torch.ones(1)), spec, mask=False),
        lambda: backend.fake_quantize_dynamic(x, spec, mask=False),
        lambda: backend.quantize(x, fq.QParams(torch.ones(1)), spec),
    ):
        with pytest.raises(fq.FakeQuantError, match="there is no seed"):
            call()


@each_backend
def test_a_seed_changes_nothing_where_rounding_is_to_nearest(backend):
    skip_unavailable(backend)
    x, params, spec = torch.randn(100), fq.QParams(torch.tensor([0.1])), fq.QuantSpec("int8")
    y, _ = backend.fake_quantize(x, params._replace(seed=torch.tensor(1)), spec, mask=False)
    assert_same_bits(y, reference.fake_quantize(x, params, spec))


@needs_kernels
@pytest.mark.parametrize("size", SIZES)
def test_words_are_those_of_the_definition(size):
    assert next(backend for backend in backends() if backend.name == "cpu").unavailable() is None
    for seed in (torch.tensor(0), torch.tensor(-(2**63)), torch.tensor(0x299F31D0A4093822)):
        words = torch.empty(size, dtype=torch.int32)
        torch.ops.fakequant_cpu.draw_words(seed, words)
        assert_same_bits(words.to(torch.int64) & 0xFFFFFFFF, random_words(seed, words), seed)
        torch.ops.fakequant_cpu.draw_words(seed, words, 2**34 - 64)  # of which the counter has 32 bits
        counter = torch.arange(2**32 - 16, 2**32 - 16 + (size + 3) // 4)
        expected = words_of(seed, counter).flatten()[:size]
        assert_same_bits(words.to(torch.int64) & 0xFFFFFFFF, expected, seed)
