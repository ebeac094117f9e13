"""The oracle against its own plain definition, and against ml_dtypes, which is another independent one."""

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.support import oracle

NAMES = [name for name in dir(ml_dtypes) if oracle.small_float(name) is not None]
SMALL_FLOATS = {name: (oracle.small_float(name), getattr(ml_dtypes, name), np.uint8) for name in NAMES}
FLOATS = SMALL_FLOATS | {
    "float16": (oracle.FLOAT16, np.float16, np.uint16),
    "bfloat16": (oracle.BFLOAT16, ml_dtypes.bfloat16, np.uint16),
}


def test_floats_are_known_by_their_names():
    assert len(NAMES) == len([name for name in dir(ml_dtypes) if "float" in name]) - 2  # bfloat16 and float8_e8m0fnu
    assert [oracle.small_float(name) for name in ("float8_e4m2", "float8_e8m0fnu", "float8", "nf4")] == [None] * 4


@pytest.mark.parametrize("name", FLOATS)
def test_every_code_decodes_as_in_ml_dtypes(name):
    fmt, dtype, unsigned = FLOATS[name]
    codes = np.arange(2**fmt.bits).astype(unsigned)
    with np.errstate(invalid="ignore"):
        expected = codes.view(dtype).astype(np.float64)
    actual = np.array([fmt.value(int(code)) for code in codes])
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual[~np.isnan(actual)]), np.signbit(expected[~np.isnan(expected)]))


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_table_rounds_as_fractions_do(name):
    fmt = FLOATS[name][0]
    entries = oracle.table(fmt)
    middles = entries.middles[1:]
    numbers = np.concatenate([entries.values[1:-1], middles, np.nextafter(middles, 0), np.nextafter(middles, np.inf)])
    actual = entries.values[entries.nearest(numbers)]
    expected = [float(oracle.round_fraction(Fraction(v), fmt)) for v in numbers]
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_agrees_with_ml_dtypes_on_finite_values_in_range(name):
    fmt, dtype, _ = FLOATS[name]
    patterns = np.arange(2**16, dtype=np.uint32) << 16 | 0x8000
    x = np.concatenate([patterns.view(np.float32), np.arange(2**16, dtype=np.uint16).view(np.float16).astype("f4")])
    decoded, inside = oracle.encode(x, fmt, np.zeros(x.shape, np.int64))
    assert inside.sum() > 5_000
    np.testing.assert_array_equal(decoded[inside], x[inside].astype(dtype).astype(np.float64))


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_stored_nan_is_that_of_ml_dtypes_where_there_is_one(name):
    fmt, dtype, _ = SMALL_FLOATS[name]
    nan = np.float32("nan").astype(dtype).astype(np.float64)
    assert np.isnan(oracle.stored_nan(fmt)) == np.isnan(nan)
    if not np.isnan(nan):
        assert oracle.stored_nan(fmt) == float(ml_dtypes.finfo(dtype).min)


def test_values_round_as_fractions_do():
    numbers = [Fraction(number) for number in oracle.NF4.numbers]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(numbers)]
    around = [float(m) for m in middles]
    v = np.concatenate([around, np.nextafter(around, -9), np.nextafter(around, 9), oracle.NF4.numbers, [-0.0, 1e-30]])
    wanted = [numbers[min(range(16), key=lambda code: (abs(numbers[code] - Fraction(x)), code % 2))] for x in v]
    decoded, inside = oracle.encode(v, oracle.NF4, np.zeros(v.shape, np.int64))
    np.testing.assert_array_equal(decoded, [float(number) for number in wanted])
    assert inside.all()
    beyond, inside = oracle.encode(np.array([-1.0001, 1.0001, np.inf, np.nan]), oracle.NF4, np.zeros(4, np.int64))
    np.testing.assert_array_equal(beyond, [-1.0, 1.0, 1.0, np.nan])
    assert not inside.any()


def test_values_of_nf4_are_float32():
    assert np.array_equal(np.float32(oracle.NF4.numbers).astype(np.float64), oracle.NF4.numbers)


def test_integers_round_as_python_rounds_fractions():
    fmt = oracle.Integers(-5, 6)
    v = np.arange(-80, 81) / np.float64(8)
    zero_point = np.full(v.shape, 2)
    decoded, inside = oracle.encode(v, fmt, zero_point)
    for number, code, in_range in zip(v, decoded, inside, strict=True):
        unclamped = round(Fraction(number)) + 2
        assert code == min(max(unclamped, -5), 6) - 2
        assert in_range == (-5 <= unclamped <= 6)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_rounding_to_16_bits_agrees_with_ml_dtypes(name):
    fmt, dtype, _ = FLOATS[name]
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 50_000, dtype=np.uint32).view(np.float32)
    middles = np.float32(oracle.table(fmt).middles[1:-1:97])
    x = np.concatenate([x, middles, -middles, np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 65520, 65519.99])])
    with np.errstate(all="ignore"):
        expected = x.astype(dtype).astype(np.float32)
    actual = oracle.round_to(x, fmt)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual[~np.isnan(x)]), np.signbit(expected[~np.isnan(x)]))


def test_oracle_imports_nothing_of_the_package():
    with open(oracle.__file__) as file:
        assert "fakequant" not in file.read().replace("fake_quantize", "")
