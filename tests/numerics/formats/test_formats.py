import copy
import pickle
import re

import ml_dtypes
import numpy as np
import pytest
import torch

import fakequant as fq
from fakequant.errors import SpecError
from fakequant.numerics.formats import FLOAT8_E4M3FN, INT8, FloatFormat, IntegerFormat, Specials, parse_format
from tests.support.bits import assert_same_bits


@pytest.mark.parametrize("name", fq.formats())
def test_registered_formats_know_their_name(name):
    fmt = fq.formats()[name]
    assert fmt.name == str(fmt) == name
    assert parse_format(name) == fmt == pickle.loads(pickle.dumps(fmt)) == copy.deepcopy(fmt)
    assert hash(parse_format(name)) == hash(fmt)
    assert fmt.bound > 0
    assert fmt.quant_min <= 0 or not fmt.has_zero
    assert fmt.signed == (fmt.quant_min < 0)


@pytest.mark.parametrize("name", [name for name, fmt in fq.formats().items() if fmt.bits <= 8 and fmt.quant_max > 0])
def test_the_smallest_positive_code(name):
    fmt = fq.formats()[name]
    table = fmt.grid.table
    codes = torch.arange(2**fmt.bits if table is None else len(table.values)).to(torch.uint8)
    values = fmt.from_storage(codes.view(fmt.storage), torch.float64)
    assert fmt.smallest == values[values > 0].min().item()


@pytest.mark.parametrize("bits", range(1, 17))
def test_integer_ranges(bits):
    signed, unsigned = parse_format(f"int{bits}"), parse_format(f"uint{bits}")
    assert (signed.quant_min, signed.quant_max, signed.bits) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, bits)
    assert (unsigned.quant_min, unsigned.quant_max, unsigned.bits) == (0, 2**bits - 1, bits)
    if bits > 1:
        narrow = parse_format(f"int{bits}_narrow")
        assert (narrow.quant_min, narrow.quant_max, narrow.bits) == (-signed.quant_max, signed.quant_max, bits)
        assert narrow.name == f"int{bits}_narrow"


@pytest.mark.parametrize("bits", range(1, 25))
@pytest.mark.parametrize("options", [{}, {"signed": False}, {"narrow": True}], ids=str)
def test_every_integer_format_parses_back_from_its_name(bits, options):
    if bits == 1 and options.get("narrow"):
        pytest.skip("one bit without its lowest code holds nothing but 0")
    fmt = IntegerFormat.of(bits, **options)
    assert parse_format(fmt.name) == fmt


@pytest.mark.parametrize(
    ("low", "high", "name", "bits", "storage"),
    [
        (-128, 127, "int8", 8, torch.int8),
        (-127, 127, "int8_narrow", 8, torch.int8),
        (0, 255, "uint8", 8, torch.uint8),
        (-100, 37, "int[-100,37]", 8, torch.int8),
        (-5, 0, "int[-5,0]", 4, torch.int8),
        (0, 128, "int[0,128]", 8, torch.uint8),
        (-1, 255, "int[-1,255]", 9, torch.int16),
        (-1, 0, "int1", 1, torch.int8),
        (0, 1, "uint1", 1, torch.uint8),
        (0, 65535, "uint16", 16, torch.uint16),
        (-1, 65535, "int[-1,65535]", 17, torch.int32),
    ],
)
def test_names_bits_and_storage(low, high, name, bits, storage):
    fmt = IntegerFormat(low, high)
    assert (fmt.name, fmt.bits, fmt.storage) == (name, bits, storage)
    assert parse_format(name) == fmt


SHARED = [name for name, fmt in fq.formats().items() if isinstance(fmt, FloatFormat) and hasattr(ml_dtypes, name)]


@pytest.mark.parametrize("name", SHARED)
def test_float_bounds_are_those_of_ml_dtypes(name):
    fmt, info = parse_format(name), ml_dtypes.finfo(getattr(ml_dtypes, name))
    assert (fmt.quant_min, fmt.quant_max) == (float(info.min), float(info.max))
    assert 2.0**fmt.grid.min_exponent == float(info.tiny)
    assert 2.0 ** (fmt.grid.min_exponent - fmt.mantissa_bits) == float(info.smallest_subnormal)
    assert (fmt.bits, fmt.storage) == (info.bits, getattr(torch, name, torch.uint8))


def test_every_code_of_e8m0():
    fmt = parse_format("float8_e8m0fnu")
    codes = torch.arange(256, dtype=torch.uint8)
    stored = codes.view(torch.float8_e8m0fnu)
    wanted = codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert wanted[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    for dtype in (torch.float32, torch.float64):
        values = fmt.from_storage(stored, dtype)
        assert_same_bits(values, torch.from_numpy(wanted).to(dtype))
        assert_same_bits(fmt.to_storage(values).view(torch.uint8), codes)
        assert_same_bits(fmt.round(values[1:255]), values[1:255])  # 2**-127 is subnormal in float32
    assert (fmt.quant_min, fmt.quant_max, fmt.has_zero) == (2.0**-127, 2.0**127, False)


def test_all_formats_of_ml_dtypes_up_to_8_bits_are_registered():
    names = {name for name in dir(ml_dtypes) if re.fullmatch(r"float[468]_\w+", name)}
    assert len(names) >= 11
    assert names <= set(fq.formats())


@pytest.mark.parametrize(
    ("fmt", "largest", "smallest_normal"),
    [
        (FloatFormat("e2m1", 2, 1, Specials.NONE), 6.0, 1.0),
        (FloatFormat("e3m2", 3, 2, Specials.NONE), 28.0, 0.25),
        (FloatFormat("e2m3", 2, 3, Specials.NONE), 7.5, 1.0),
        (FloatFormat("e4m3fnuz", 4, 3, Specials.NEGATIVE_ZERO_IS_NAN, bias=8), 240.0, 2.0**-7),
        (FloatFormat("e5m2fnuz", 5, 2, Specials.NEGATIVE_ZERO_IS_NAN, bias=16), 57344.0, 2.0**-15),
        (FloatFormat("e5m10", 5, 10, Specials.IEEE), 65504.0, 2.0**-14),
        (FloatFormat("e4m0fn", 4, 0, Specials.NAN_ONLY), 128.0, 2.0**-6),
    ],
    ids=str,
)
def test_bounds_follow_from_the_fields(fmt, largest, smallest_normal):
    assert (fmt.quant_max, fmt.quant_min) == (largest, -largest)
    assert 2.0**fmt.grid.min_exponent == smallest_normal


@pytest.mark.parametrize("name", [name for name, fmt in fq.formats().items() if isinstance(fmt, FloatFormat)])
def test_a_stored_negative_zero_is_a_zero(name):
    fmt = fq.formats()[name]
    stored = fmt.to_storage(torch.tensor([-0.0, 0.0]))
    zeros = fmt.from_storage(stored, torch.float64)
    assert zeros.eq(0).all(), "the pattern of a negative zero is NaN where the format has none"
    assert zeros.signbit().tolist() == [fmt.specials is not Specials.NEGATIVE_ZERO_IS_NAN, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_float_rounding_without_bounds(dtype):
    numbers = torch.tensor([0.0, -0.0, 2.0**-10, 1.5 * 2.0**-9, 17.0, 19.0, -18.0, 464.0, 465.0, 1e30], dtype=dtype)
    wanted = torch.tensor([0.0, -0.0, 0.0, 2.0**-8, 16.0, 20.0, -18.0, 448.0, 480.0, 1e30], dtype=dtype)
    spacing = 2.0 ** (99 - 3)  # of a 3-bit mantissa at 1e30
    wanted[-1] = round(1e30 / spacing) * spacing
    torch.testing.assert_close(FLOAT8_E4M3FN.round(numbers), wanted, rtol=0, atol=0)
    special = FLOAT8_E4M3FN.round(torch.tensor([float("inf"), float("-inf"), float("nan")], dtype=dtype))
    assert special[:2].tolist() == [float("inf"), float("-inf")]
    assert special[2].isnan()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IntegerFormat(1, 5), r"IntegerFormat\(1, 5\): the range must contain 0 and one other code"),
        (lambda: IntegerFormat(0, 0), r"must contain 0 and one other code"),
        (lambda: IntegerFormat(5, -5), r"must contain 0"),
        (lambda: IntegerFormat(0, 1 << 24), r"needs 25 bits; codes are computed in float32, which is exact up to 24"),
        (lambda: IntegerFormat.of(0), r"at least 1 bit"),
        (lambda: IntegerFormat.of(8, signed=False, narrow=True), r"must contain 0"),
        (lambda: FloatFormat("x", 0, 3, Specials.NONE), r"'x': needs at least 1 exponent bit.*got E=0, M=3"),
        (lambda: FloatFormat("x", 9, 7, Specials.IEEE), r"at most 16 bits"),
        (lambda: FloatFormat("x", 3, 0, Specials.IEEE), r"'x': IEEE tells NaN from infinity by the mantissa"),
        (lambda: FloatFormat("x", 1, 0, Specials.NAN_ONLY), r"'x' has no number but 0 with E=1, M=0"),
        (lambda: parse_format("int99"), r"unknown format 'int99'; did you mean int9"),
        (lambda: parse_format("float8_e4m3f"), r"did you mean float8_e4m3fn"),
        (lambda: parse_format("int0"), r"unknown format 'int0'"),
        (lambda: parse_format("fp8"), r"unknown format 'fp8'"),
        (lambda: parse_format("int[3,5]"), r"must contain 0"),
        (lambda: parse_format(""), r"unknown format ''; known names are int1, int2"),
        (
            lambda: fq.register_format(FloatFormat("int8", 4, 3, Specials.NONE)),
            r"different format.*registered as 'int8'",
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_formats_wider_than_float32_are_refused():
    """A top exponent of 128 is beyond float32, in which codes are computed."""
    with pytest.raises(SpecError, match="float32"):
        FloatFormat("too_wide", 8, 3, Specials.NAN_ONLY)


def test_codes_without_a_torch_dtype():
    fmt = FloatFormat("e3m2", 3, 2, Specials.NONE)
    codes, params = fq.quantize(torch.tensor([28.0, -0.0625, 0.0, -1.0]), fq.QuantSpec(fmt))
    assert codes.dtype == torch.uint8
    assert codes.tolist() == [0b011111, 0b100001, 0b000000, 0b101100]
    assert fq.dequantize(codes, params, fq.QuantSpec(fmt)).tolist() == [28.0, -0.0625, 0.0, -1.0]


def test_registering_again_is_harmless_and_the_registry_is_a_copy():
    assert fq.register_format(INT8) is INT8
    fq.formats().clear()
    assert "int8" in fq.formats()
