"""Streams of bits: against numpy, for every width, also where a row ends within a byte."""

from __future__ import annotations

import copy
import math
import pickle
import re

import ml_dtypes
import numpy as np
import pytest
import torch

import fakequant as fq
from fakequant.errors import QParamsError, ShapeError, SpecError
from fakequant.numerics.formats import (
    FLOAT8_E4M3FN,
    INT4,
    INT8,
    NF4,
    UINT8,
    FloatFormat,
    IntegerFormat,
    Specials,
    parse_format,
)
from fakequant.numerics.formats.floats import (
    TableFormat,
    as_integers,
    check_codes,
    count_of,
    integers_of,
    lowest_of,
    patterns_of,
)
from fakequant.numerics.formats.packing import pack, unpack
from tests.support import oracle
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


TERNARY = TableFormat("ternary", (-1.0, 0.0, 1.0))
WIDE = TableFormat("all_codes", tuple(float(v) for v in range(-100, 156)))


def test_fields_follow_from_the_values():
    assert (TERNARY.name, TERNARY.bits, TERNARY.quant_min, TERNARY.quant_max) == ("ternary", 2, -1.0, 1.0)
    assert (WIDE.bits, WIDE.storage, WIDE.bound) == (8, torch.uint8, 155.0)
    assert TableFormat("skewed", (-3.0, 0.0, 1.0)).bound == 3.0
    assert not TableFormat("positive", (0.0, 1.0)).signed
    assert fq.parse_format("nf4").bits == 4


def test_nf4_is_the_published_table():
    assert fq.parse_format("nf4").values == oracle.NF4.numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ties_go_to_the_even_code_and_neighbours_to_their_side(dtype):
    fmt = TableFormat("five", (-4.0, -1.0, 0.0, 0.5, 8.0))  # middles -2.5, -0.5, 0.25, 4.25
    middles = torch.tensor([-2.5, -0.5, 0.25, 4.25], dtype=dtype)
    below, above = (torch.nextafter(middles, torch.full_like(middles, end)) for end in (-9.0, 9.0))
    assert fmt.round(middles).tolist() == [-4.0, 0.0, 0.0, 8.0]
    assert fmt.round(below).tolist() == [-4.0, -1.0, 0.0, 0.5]
    assert fmt.round(above).tolist() == [-1.0, 0.0, 0.5, 8.0]


def test_a_middle_that_float32_has_not_is_no_tie():
    """(1 + 2**-23 + 1) / 2 lies between two float32 numbers: each goes to the value it is, in either dtype."""
    one, next_one = 1.0, 1.0 + 2.0**-23
    fmt = TableFormat("close", (0.0, one, next_one))
    middle = torch.tensor([one, (one + next_one) / 2, next_one], dtype=torch.float64)
    assert fmt.round(middle).tolist() == [one, next_one, next_one]
    assert fmt.round(middle.float()).tolist() == [one, one, next_one]


def test_beyond_the_ends_there_is_no_code():
    v = torch.tensor([-1.5, 1.0000001, float("inf"), float("-inf"), float("nan")])
    assert_same_bits(TERNARY.round(v), v)
    assert_same_bits(TERNARY.clamp(TERNARY.round(v)), torch.tensor([-1.0, 1.0, 1.0, -1.0, float("nan")]))
    mask_spec = fq.QuantSpec(TERNARY)
    x = v[:-1].clone().requires_grad_()
    fq.fake_quantize(x, mask_spec, scale=1.0).sum().backward()
    assert not x.grad.any()


def test_zero_has_one_sign():
    assert_same_bits(TERNARY.round(torch.tensor([-0.0, -0.1, 0.0])), torch.tensor([0.0, 0.0, 0.0]))


def test_codes_are_positions():
    codes = torch.arange(256, dtype=torch.uint8)
    values = WIDE.from_storage(codes, torch.float32)
    assert_same_bits(values, torch.arange(-100.0, 156.0))
    assert_same_bits(WIDE.to_storage(values), codes)
    assert WIDE.to_storage(torch.tensor([float("nan")])).tolist() == [0]


def test_user_tables_go_through_the_whole_path():
    spec = fq.QuantSpec(TableFormat("powers", (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)), fq.PerToken())
    x = torch.tensor([[8.0, 3.0, -0.9, 0.5], [0.0, 0.0, -0.0, 0.0]])
    assert fq.fake_quantize(x, spec).tolist() == [[8.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    codes, params = fq.quantize(x, spec)
    assert codes.tolist() == [[6, 4, 3, 3], [3, 3, 3, 3]]
    assert_same_bits(fq.dequantize(codes, params, spec), fq.fake_quantize(x, spec))


def test_rounding_in_any_memory_layout():
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(9, 7)).astype(np.float32))
    fmt = fq.parse_format("nf4")
    assert_same_bits(fmt.round(x.t()), fmt.round(x.t().contiguous()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((), r"TableFormat 'x': needs 2 to 256 rising values from one that.*got \(\)"),
        ((0.0,), r"2 to 256 rising values"),
        ((1.0, 2.0), r"from one that is not positive to one that is not negative; got"),
        ((0.0, 1.0, 1.0), r"rising"),
        ((1.0, 0.0), r"rising"),
        ((0.0, float("nan")), r"finite"),
        (tuple(float(v) for v in range(257)), r"2 to 256"),
        ((0.0, 0.1), r"\[0.1\] are not exact in float32; round them first"),
    ],
    ids=["empty", "one", "one_sign", "equal", "falling", "nan", "too_many", "inexact"],
)
def test_errors_of_tables(values, message):
    with pytest.raises(SpecError, match=message):
        TableFormat("x", values)


@pytest.mark.parametrize("value", [float("inf"), 1e39], ids=["inf", "beyond_float32"])
def test_values_beyond_float32_are_refused(value):
    with pytest.raises(SpecError, match="float32"):
        TableFormat("x", (0.0, value))


SHAPES = [(3, 5), (2, 64), (4, 33), (1, 1), (7,), (2, 3, 40), (0, 8), (3, 0), (5, 60001), (300, 1001)]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("shape", SHAPES)
def test_bits(bits: int, shape: tuple[int, ...]) -> None:
    numbers = torch.randint(0, 1 << bits, shape, dtype=torch.uint8)
    before = numbers.clone()
    packed = pack(numbers, bits)
    assert torch.equal(numbers, before)
    spread = (numbers.numpy()[..., None] >> np.arange(bits)) & 1
    expected = np.packbits(spread.astype(np.uint8).reshape(*shape[:-1], shape[-1] * bits), axis=-1, bitorder="little")
    assert np.array_equal(packed.numpy(), expected)
    assert torch.equal(unpack(packed, bits, shape[-1]), numbers.int())
    assert torch.equal(pack(numbers.long(), bits), packed)


@pytest.mark.parametrize("bits", range(1, 9))
def test_signed_numbers_are_shifted_while_they_are_packed(bits: int) -> None:
    half = 1 << bits - 1
    numbers = torch.arange(-half, half, dtype=torch.int8).repeat(3, 5)
    expected = pack(numbers.int() + half, bits)
    assert torch.equal(pack(numbers, bits, half), expected)
    assert torch.equal(pack(numbers.int(), bits, half - 256), expected)


@pytest.mark.parametrize("shape", [(1, 8), (1, 5), (8, 1), (2, 0), (0, 8), (3, 1, 16)])
@pytest.mark.parametrize("bits", [1, 3, 4, 7, 8])
def test_odd_shapes_and_slices_are_packed(shape, bits):
    """Sizes of 1 have any stride, and a slice starts at any byte."""
    whole = torch.randint(0, 1 << bits, (math.prod(shape) + 3,), dtype=torch.uint8)
    numbers = whole[3:].view(shape)
    for own in (numbers, numbers.transpose(0, -1).contiguous().transpose(0, -1)):
        assert torch.equal(unpack(pack(own, bits), bits, shape[-1]), numbers.to(torch.int32))
    assert torch.equal(whole[3:].view(shape), numbers)


@pytest.mark.parametrize("name", sorted(name for name, own in fq.formats().items() if own.has_zero))
def test_patterns_count_from_zero_and_codes_are_integers(name):
    format = fq.formats()[name]
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    codes, _ = fq.quantize(values, fq.QuantSpec(format))
    patterns = patterns_of(codes, format)
    assert 0 <= int(patterns.min()) <= int(patterns.max()) < count_of(format)
    assert as_integers(codes).dtype is integers_of(format)
    assert not integers_of(format).is_floating_point
    check_codes(codes, (4, 64), format)


def test_codes_of_another_kind_are_refused():
    assert (lowest_of(INT4), lowest_of(UINT8), lowest_of(NF4)) == (-8, 0, 0)
    codes = torch.tensor([-8, 7], dtype=torch.int8)
    check_codes(codes, (2,), INT4)
    check_codes(codes[:0], (0,), INT4)
    for wrong, format, error, text in [
        (codes, UINT8, QParamsError, "are torch.int8, but uint8 has torch.uint8"),
        (codes - 1, INT4, QParamsError, "hold -9, but the codes of int4 are -8 to 7"),
        (codes + 1, INT4, QParamsError, "hold 8, but the codes of int4 are -8 to 7"),
        (codes[None], INT4, ShapeError, r"are of shape \[1, 2\], but the weight of shape \[2\]"),
        (codes.view(torch.uint8), NF4, QParamsError, "hold 248, but the codes of nf4 are 0 to 15"),
        (codes, FLOAT8_E4M3FN, QParamsError, "are torch.int8, but float8_e4m3fn has torch.float8_e4m3fn"),
    ]:
        with pytest.raises(error, match=text):
            check_codes(wrong, (2,), format)
