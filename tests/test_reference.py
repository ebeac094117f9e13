"""The definition against the oracle, which shares no code with it."""

import cases
import numpy as np
import oracle
import pytest
import torch
from bits import assert_same_bits
from cases import DTYPES, FORMATS, GRANULARITIES

import fakequant as fq
from fakequant.numerics import reference
from fakequant.ops.dispatch import backends


def to_numpy(x):
    return x.numpy() if x.dtype in (torch.float32, torch.float64) else x.float().numpy()


def to_dtype(value, dtype):
    """The oracle's value in the dtype of the input, rounded by the oracle."""
    if dtype in (torch.float16, torch.bfloat16):
        rounded = oracle.round_to(value, oracle.FLOAT16 if dtype == torch.float16 else oracle.BFLOAT16)
        return torch.from_numpy(rounded).to(dtype)
    return torch.from_numpy(np.asarray(value))


def expected(numbers, case, where, arithmetic):
    x, params = to_numpy(numbers.x), numbers.params
    scale = oracle.spread(params.scale.numpy(), where.blocks)
    zero_point = None if params.zero_point is None else oracle.spread(params.zero_point.numpy(), where.blocks)
    return oracle.fake_quantize(x, scale, zero_point, case.oracle, arithmetic.value)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", FORMATS)
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
            if case.oracle is not oracle.FLOAT16 and not isinstance(case.format, fq.Format):
                codes = reference.quantize(numbers.x, numbers.params, spec).to(torch.float64)
                wanted = torch.from_numpy(np.asarray(right.code, np.float64))
                if spec.format.has_zero_point:
                    # Integers have neither NaN, which becomes the lowest code, nor a negative zero.
                    wanted = torch.where(wanted.isnan(), spec.format.quant_min, wanted) + 0.0
                assert_same_bits(codes, wanted, f"{label} codes")


@pytest.mark.parametrize("scale", [1.0, 0.0625, 0.37, 3.1], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_every_16_bit_pattern_through_float8(name, dtype, scale):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(DTYPES[dtype])
    for arithmetic in fq.Arithmetic:
        spec = fq.QuantSpec(name, arithmetic=arithmetic)
        scales = np.full(x.shape, scale, np.float32)
        right = oracle.fake_quantize(to_numpy(x), scales, None, FORMATS[name].oracle, arithmetic.value)
        params = fq.QParams(torch.tensor([scale]))
        for backend in backends():
            if backend.unavailable():
                continue
            y, _ = backend.fake_quantize(x, params, spec, mask=False)
            assert_same_bits(y, to_dtype(right.value, x.dtype), f"{backend.name} {arithmetic.value}")


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4", "float6"])
def test_every_code_is_its_own_nearest_value(name):
    fmt = FORMATS[name].oracle
    values = [fmt.value(code) for code in range(2 ** (1 + fmt.exponent_bits + fmt.mantissa_bits))]
    finite = torch.tensor([v for v in values if np.isfinite(v)])
    spec = fq.QuantSpec(FORMATS[name].format)
    assert_same_bits(fq.fake_quantize(finite, spec, scale=1.0), finite)
    assert (spec.format.quant_min, spec.format.quant_max) == (finite.min().item(), finite.max().item())


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
    """The input range that a scale implies, by the oracle's bounds."""
    fmt, scale = case.oracle, params.scale.numpy()
    if isinstance(fmt, oracle.Integers):
        low, high = fmt.low, fmt.high
    else:
        low = high = float(fmt.decode(fmt.finite_codes - 1))
    with np.errstate(all="ignore"):
        if case.symmetric:
            bound = scale.dtype.type(high or -low)
            amax = bound / scale if arithmetic is fq.Arithmetic.MULTIPLIER else bound * scale
            return -amax, amax
        zero_point = params.zero_point.numpy().astype(scale.dtype)
        return (low - zero_point) * scale, (high - zero_point) * scale


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", FORMATS)
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


def test_identity_passes_everything():
    x = torch.tensor([float("nan"), float("inf"), -1e30, 0.0])
    spec = fq.QuantSpec("int8", gradient=fq.Gradient.IDENTITY)
    assert reference.passes(x, fq.QParams(torch.tensor([1.0])), spec).all()


def test_masked_gradient_is_exactly_zero_whatever_dy_is():
    dy = torch.tensor([float("nan"), float("inf"), -0.0, 3.0, float("nan")])
    mask = torch.tensor([False, False, False, True, True])
    assert_same_bits(reference.grad_input(dy, mask), torch.tensor([0.0, 0.0, 0.0, 3.0, float("nan")]))
