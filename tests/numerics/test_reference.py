"""The definition against the oracle, which shares no code with it."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

import fakequant as fq
from fakequant.numerics import reference
from fakequant.ops.dispatch import backends
from tests.support import cases, oracle
from tests.support.backends import Calls
from tests.support.bits import assert_same_bits
from tests.support.by_oracle import decoded, to_dtype, to_numpy, wanted_codes
from tests.support.cases import DTYPES, FORMATS, GRANULARITIES, SMALL_FORMATS
from tests.support.matrix import each_format, each_format_once


def expected(numbers, case, where, arithmetic):
    x, params = to_numpy(numbers.x), numbers.params
    scale = oracle.spread(params.scale.numpy(), where.blocks)
    zero_point = None if params.zero_point is None else oracle.spread(params.zero_point.numpy(), where.blocks)
    return oracle.fake_quantize(x, scale, zero_point, case.oracle, arithmetic.value)


@each_format
def test_values_codes_and_range_are_the_oracles(name, dtype):
    case = FORMATS[name]
    for seed, (where_name, where) in enumerate(GRANULARITIES.items()):
        for arithmetic in case.arithmetics():
            label = f"{where_name} {arithmetic.value}"
            numbers = cases.hostile(case, where, arithmetic, dtype, seed)
            spec = case.spec(where.granularity, arithmetic)
            right = expected(numbers, case, where, arithmetic)
            actual = reference.fake_quantize(numbers.x, numbers.params, spec)
            assert_same_bits(actual, to_dtype(right.value, dtype), label)
            inside = reference.passes(numbers.x, numbers.params, spec)
            assert_same_bits(inside, torch.from_numpy(np.asarray(right.inside)), f"{label} mask")
            codes = reference.quantize(numbers.x, numbers.params, spec)
            assert_same_bits(decoded(codes, case.oracle), wanted_codes(right, case.oracle), f"{label} codes")


def check_every_16_bit_pattern(case, dtype, scale):
    """All inputs of a 16-bit dtype through values and stored codes, in every arithmetic, by every backend."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    params = fq.QParams(torch.tensor([scale]))
    for arithmetic in case.arithmetics():
        spec = case.spec(fq.PerTensor(), arithmetic)
        right = oracle.fake_quantize(
            to_numpy(x), np.full(x.shape, scale, np.float32), None, case.oracle, arithmetic.value
        )
        values, codes = to_dtype(right.value, x.dtype), wanted_codes(right, case.oracle)
        for backend in map(Calls, backends()):
            if backend.unavailable():
                continue
            label = f"{backend.name} {arithmetic.value} {scale}"
            if not backend.unsupported(x, spec, codes=False):
                assert_same_bits(backend.fake_quantize(x, params, spec, mask=False)[0], values, label)
            if not backend.unsupported(x, spec, codes=True):
                stored = backend.quantize(x, params, spec)
                assert_same_bits(decoded(stored, case.oracle), codes, f"{label} codes")
                y = backend.dequantize(stored, params, spec, x.dtype)
                # What has no code for NaN, or for -0.0, gives a number, or +0.0, back.
                lost = values.isnan() & (not math.isnan(oracle.stored_nan(case.oracle)))
                # A negative code whose value is rounded to zero in half precision keeps its sign.
                unsigned_zero = (codes == 0) & isinstance(case.oracle, oracle.Integers)
                wanted = torch.where(unsigned_zero, values + 0.0, values)
                assert_same_bits(y[~lost], wanted[~lost], f"{label} decoded")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SMALL_FORMATS)
def test_every_16_bit_pattern_through_every_small_format(name, dtype):
    check_every_16_bit_pattern(SMALL_FORMATS[name], DTYPES[dtype], 0.37)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scale", [1.0, 0.0625, 3.1, 1e-30], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SMALL_FORMATS)
def test_every_16_bit_pattern_at_other_scales(name, dtype, scale):
    check_every_16_bit_pattern(SMALL_FORMATS[name], DTYPES[dtype], scale)


def codes_of(case):
    """Every stored code of a small format, in its storage dtype, and its value by the oracle."""
    fmt = case.spec(fq.PerTensor(), fq.Arithmetic.DIVIDE).format
    if isinstance(case.oracle, oracle.Integers):
        stored = torch.arange(case.oracle.low, case.oracle.high + 1).to(fmt.storage)
    else:
        count = len(case.oracle.numbers) if isinstance(case.oracle, oracle.Values) else 2**case.oracle.bits
        stored = torch.arange(count).to(torch.uint8).view(fmt.storage)
    return fmt, stored, decoded(stored, case.oracle)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SMALL_FORMATS)
def test_every_stored_code_decodes_and_comes_back(name, dtype):
    fmt, stored, values = codes_of(SMALL_FORMATS[name])
    assert_same_bits(fmt.from_storage(stored, dtype), values.to(dtype))
    finite = values.isfinite()
    assert_same_bits(fmt.to_storage(values[finite].to(dtype)), stored[finite])


@pytest.mark.parametrize("name", SMALL_FORMATS)
def test_every_code_is_its_own_nearest_value(name):
    fmt, _, values = codes_of(SMALL_FORMATS[name])
    finite = values[values.isfinite()].float()
    spec = fq.QuantSpec(fmt, symmetric=True)
    assert_same_bits(fq.fake_quantize(finite, spec, scale=1.0), finite)
    assert_same_bits(fmt.round(finite), finite)
    assert (fmt.quant_min, fmt.quant_max) == (finite.min().item(), finite.max().item())
    assert fmt.bits == math.ceil(math.log2(len(values)))


@pytest.mark.parametrize("name", [name for name in SMALL_FORMATS if hasattr(ml_dtypes, name) and "float" in name])
def test_agrees_with_ml_dtypes_on_finite_values_in_range(name):
    """All float32 numbers that a bfloat16 or a float16 is, and those around a bfloat16 and its middles."""
    dtype = getattr(ml_dtypes, name)
    patterns = np.arange(2**16, dtype=np.uint32) << 16
    wide = [(patterns | low).view(np.float32) for low in (0, 1, 0x8000, 0xFFFF)]
    x = np.concatenate([*wide, np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)])
    fmt = fq.parse_format(name)
    x = x[np.isfinite(x) & (np.abs(x) <= np.float32(fmt.quant_max))]
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(x.astype(dtype).astype(np.float32))
    assert_same_bits(fq.fake_quantize(torch.from_numpy(x), fq.QuantSpec(fmt, symmetric=True), scale=1.0), wanted)


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_every_integer_code_is_its_own_nearest_value(bits, signed):
    fmt = fq.IntegerFormat.of(bits, signed=signed)
    codes = torch.arange(-(2 ** (bits - 1)) if signed else 0, 2 ** (bits - 1) if signed else 2**bits)
    spec = fq.QuantSpec(fmt, symmetric=True)
    params = fq.QParams(torch.tensor([0.25]))
    assert (fmt.quant_min, fmt.quant_max, fmt.bits) == (codes[0], codes[-1], bits)
    assert_same_bits(reference.quantize(codes * 0.25, params, spec), codes.to(fmt.storage))
    assert_same_bits(reference.dequantize(codes.to(fmt.storage), params, spec, torch.float32), codes * 0.25)
    assert_same_bits(fq.fake_quantize(codes * 0.25, spec, scale=0.25), codes * 0.25)


def _range_of(case, arithmetic, params):
    fmt, scale = case.oracle, params.scale.numpy()
    if isinstance(fmt, oracle.Integers):
        low, high = fmt.low, fmt.high
    elif isinstance(fmt, oracle.Values):
        low = high = max(-fmt.numbers[0], fmt.numbers[-1])
    else:
        low = high = float(fmt.decode(fmt.finite_codes - 1))
    with np.errstate(all="ignore"):
        if case.symmetric:
            bound = scale.dtype.type(high or -low)
            amax = bound / scale if arithmetic is fq.Arithmetic.MULTIPLIER else bound * scale
            return -amax, amax
        zero_point = params.zero_point.numpy().astype(scale.dtype)
        return (low - zero_point) * scale, (high - zero_point) * scale


@each_format_once
def test_input_range_mask(name, dtype):
    case = FORMATS[name]
    for seed, (where_name, where) in enumerate(GRANULARITIES.items()):
        for arithmetic in case.arithmetics():
            numbers = cases.hostile(case, where, arithmetic, dtype, seed)
            spec = case.spec(where.granularity, arithmetic, gradient=fq.Gradient.INPUT_RANGE)
            lo, hi = (oracle.spread(r, where.blocks) for r in _range_of(case, arithmetic, numbers.params))
            x = to_numpy(numbers.x)
            assert_same_bits(
                reference.passes(numbers.x, numbers.params, spec),
                torch.from_numpy(np.asarray((x >= lo) & (x <= hi))),
                f"{where_name} {arithmetic.value}",
            )


def test_a_given_range_decides_the_input_range_mask():
    spec = fq.QuantSpec("int8", gradient=fq.Gradient.INPUT_RANGE)
    given = fq.Range(torch.tensor([-0.5]), torch.tensor([0.25]))
    x = torch.tensor([-0.5, -0.50001, 0.25, 0.25001, 0.0, float("nan"), float("inf")])
    mask = reference.passes(x, fq.QParams(torch.tensor([1.0]), None, given), spec)
    assert mask.tolist() == [True, False, True, False, True, False, False]


def _values_of_the_ends(case, arithmetic, params):
    fmt, scale = case.oracle, params.scale.numpy()
    if isinstance(fmt, oracle.Integers):
        low, high = fmt.low, fmt.high
    elif isinstance(fmt, oracle.Values):
        low, high = fmt.numbers[0], fmt.numbers[-1]
    else:
        high = float(fmt.decode(fmt.finite_codes - 1))
        low = -high
    if params.zero_point is not None:
        zero_point = params.zero_point.numpy().astype(scale.dtype)
        low, high = low - zero_point, high - zero_point
    with np.errstate(all="ignore"):
        ends = [np.asarray(end, scale.dtype) for end in (low, high)]
        return [end / scale if arithmetic is fq.Arithmetic.MULTIPLIER else end * scale for end in ends]


@each_format_once
def test_clip_passes_between_the_values_of_the_ends(name, dtype):
    case = FORMATS[name]
    for seed, (where_name, where) in enumerate(GRANULARITIES.items()):
        for arithmetic in case.arithmetics():
            numbers = cases.hostile(case, where, arithmetic, dtype, seed)
            lo, hi = (oracle.spread(end, where.blocks) for end in _values_of_the_ends(case, arithmetic, numbers.params))
            # A third of the numbers are the ends themselves.
            pick = np.random.default_rng(seed).integers(0, 6, where.shape)
            values = np.where(pick == 0, lo, np.where(pick == 1, hi, to_numpy(numbers.x)))
            x = torch.from_numpy(np.asarray(values)).to(dtype)
            spec = case.spec(where.granularity, arithmetic, gradient=fq.Gradient.CLIP)
            inside = (to_numpy(x) > lo) & (to_numpy(x) < hi)
            label = f"{where_name} {arithmetic.value}"
            assert_same_bits(reference.passes(x, numbers.params, spec), torch.from_numpy(np.asarray(inside)), label)


def test_parameters_get_nothing_from_elements_that_do_not_move_them():
    """Whatever dy is: NaN times a slope of zero would be NaN."""
    x = torch.tensor([0.5, 0.25, 90.0])
    dy = torch.tensor([float("nan"), float("inf"), 2.0])
    params = fq.QParams(torch.tensor([0.25]), torch.tensor([0.0]))
    for gradient in (fq.Gradient.CODE_RANGE, fq.Gradient.CLIP):
        spec = fq.QuantSpec("int8", symmetric=False, gradient=gradient)
        actual = reference.grad_params(dy, x, params, spec, (True, True))
        assert_same_bits(actual[0], torch.tensor([254.0]))
        assert_same_bits(actual[1], torch.tensor([-0.5]))


def test_identity_passes_everything():
    x = torch.tensor([float("nan"), float("inf"), -1e30, 0.0])
    spec = fq.QuantSpec("int8", gradient=fq.Gradient.IDENTITY)
    assert reference.passes(x, fq.QParams(torch.tensor([1.0])), spec).all()


def test_masked_gradient_is_exactly_zero_whatever_dy_is():
    dy = torch.tensor([float("nan"), float("inf"), -0.0, 3.0, float("nan")])
    mask = torch.tensor([False, False, False, True, True])
    assert_same_bits(reference.grad_input(dy, mask), torch.tensor([0.0, 0.0, 0.0, 3.0, float("nan")]))
