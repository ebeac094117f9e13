"""Codes as tensors: the patterns of their bits, and whether they are codes of a format."""

import pytest
import torch

import fakequant as fq
from fakequant.errors import QParamsError, ShapeError
from fakequant.numerics.formats import FLOAT8_E4M3FN, INT4, NF4, UINT8
from fakequant.numerics.formats.floats import as_integers, check_codes, count_of, integers_of, lowest_of, patterns_of


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
        (codes - 1, INT4, QParamsError, "hold -1, but int4 has 16 codes"),
        (codes + 1, INT4, QParamsError, "hold 16, but int4 has 16 codes"),
        (codes[None], INT4, ShapeError, r"are of shape \[1, 2\], but the weight of shape \[2\]"),
        (codes.view(torch.uint8), NF4, QParamsError, "hold 248, but nf4 has 16 codes"),
        (codes, FLOAT8_E4M3FN, QParamsError, "are torch.int8, but float8_e4m3fn has torch.float8_e4m3fn"),
    ]:
        with pytest.raises(error, match=text):
            check_codes(wrong, (2,), format)
