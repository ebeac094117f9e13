"""The shared checker must be able to fail, for each thing that it is there to see."""

import pytest
import torch

from tests.support.bits import assert_same_bits

NAN = float("nan")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2], ids=str
)
def test_equal_tensors_pass(dtype):
    x = torch.tensor([1.0, -0.0, NAN, float("inf")]).to(dtype)
    assert_same_bits(x, x.clone())


def test_any_nan_equals_any_nan():
    patterns = torch.tensor([0x7FC00000, 0x7F800001, -1], dtype=torch.int32)
    assert_same_bits(patterns.view(torch.float32), torch.full((3,), NAN))


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (
            [1.0, 2.0],
            [1.0, 2.0000002],
            r"1 of 2 elements differ, first at \(1,\): got 2.0 \(0x40000000\), .*0x40000001",
        ),
        ([0.0], [-0.0], r"got 0.0 \(0x00000000\), expected -0.0 \(0x80000000\)"),
        ([NAN], [1.0], r"got nan \(0x7fc00000\)"),
        ([1.0], [NAN], r"expected nan"),
        ([1.0, 2.0, 3.0], [2.0, 2.0, 4.0], r"2 of 3 elements differ, first at \(0,\)"),
    ],
    ids=["value", "sign of zero", "NaN for number", "number for NaN", "count"],
)
def test_fails_for_values(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(torch.tensor(actual), torch.tensor(expected))


def test_fails_for_dtype():
    with pytest.raises(AssertionError, match=r"dtype torch.float16, expected torch.float32"):
        assert_same_bits(torch.ones(1).half(), torch.ones(1))


def test_fails_for_shape():
    with pytest.raises(AssertionError, match=r"shape \(1, 2\), expected \(2,\)"):
        assert_same_bits(torch.ones(1, 2), torch.ones(2))


def test_names_what_was_compared_and_finds_a_0d_difference():
    with pytest.raises(AssertionError, match=r"^dx: 1 of 1 elements differ, first at \(\)"):
        assert_same_bits(torch.tensor(1.0), torch.tensor(2.0), "dx")


def test_fails_for_integers_and_bools():
    with pytest.raises(AssertionError, match="0x80"):
        assert_same_bits(torch.tensor([-128], dtype=torch.int8), torch.tensor([127], dtype=torch.int8))
    with pytest.raises(AssertionError, match="1 of 1"):
        assert_same_bits(torch.tensor([True]), torch.tensor([False]))
