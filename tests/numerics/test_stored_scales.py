"""Scales as files store them: torch's conversions are the formats' own, and what has no stored form is refused."""

from __future__ import annotations

import math

import pytest
import torch

from fakequant.errors import QParamsError
from fakequant.numerics.formats import parse_format
from fakequant.numerics.granularity import rounded
from fakequant.numerics.scales import ScaleSpec
from tests.support.bits import assert_same_bits


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_torchs_conversion_rounds_as_the_format_says(name: str) -> None:
    fmt = parse_format(name)
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(fmt.storage)
    codes = fmt.from_storage(patterns, torch.float32)
    assert torch.equal(codes.double().nan_to_num(), fmt.from_storage(patterns, torch.float64).nan_to_num())
    numbers = codes.isfinite()
    assert torch.equal(fmt.to_storage(codes[numbers]).view(torch.int16), patterns[numbers].view(torch.int16))
    assert (fmt.to_storage(codes[~numbers]).view(torch.int16) == fmt.nan_pattern).all()
    half = 1 + 2.0 ** -(fmt.fraction_bits + 1)  # ties, and one unit of float32 beside them
    words = torch.randint(-(2**31), 2**31 - 1, (10**5,), generator=torch.Generator().manual_seed(0)).int()
    v = torch.cat([codes * half, torch.nextafter(codes * half, codes), codes * 0.75, words.view(torch.float32)])
    expected = fmt.round(fmt.clamp(v))
    assert_same_bits(rounded(v, fmt)[~v.isnan()], expected[~v.isnan()])
    assert rounded(v, fmt)[v.isnan()].isnan().all()


def test_scales_that_are_inf_have_no_stored_form() -> None:
    for text in ("scale=float16", "scale=bfloat16", "scale=float8_e5m2"):
        with pytest.raises(QParamsError, match="not in the form"):
            ScaleSpec.parse(text).split(torch.tensor([[1.0, math.inf]]))
