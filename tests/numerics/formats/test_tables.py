import numpy as np
import pytest
import torch

import fakequant as fq
from fakequant.errors import SpecError
from fakequant.numerics.formats.floats import TableFormat
from tests.support import oracle
from tests.support.bits import assert_same_bits

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
def test_errors(values, message):
    with pytest.raises(SpecError, match=message):
        TableFormat("x", values)


@pytest.mark.parametrize("value", [float("inf"), 1e39], ids=["inf", "beyond_float32"])
def test_values_beyond_float32_are_refused(value):
    with pytest.raises(SpecError, match="float32"):
        TableFormat("x", (0.0, value))
