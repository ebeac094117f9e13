"""Codes that the reference gives a large tensor part by part are those that it gives the whole."""

from __future__ import annotations

import pytest
import torch

import fakequant as fq
from fakequant.numerics import reference
from fakequant.numerics.spec import Arithmetic
from fakequant.ops import dispatch, library

SPECS = [
    "float8_e4m3fn",
    "float8_e5m2 per_channel(0)",
    "float8_e4m3fn per_channel(1)",
    "float8_e4m3fn per_token",
    "float8_e4m3fn per_block(0:24,-1:40,pad)",
    "float6_e2m3fn per_block(-1:32,pad) scale=float8_e8m0fnu:floor",
    "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor",
    "float4_e2m1fn per_block(0:300)",
    "nf4 per_block(-1:64,pad)",
    "float8_e4m3fn per_block(-2:16,pad)",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 90), (1, 300, 90), (3, 100, 90), (27000,), (1, 1)])
@pytest.mark.parametrize("text", SPECS)
def test_parts_give_the_codes_of_the_whole(
    text: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, x = fq.QuantSpec.parse(text), torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    try:
        params = fq.choose_qparams(x, spec)
    except fq.FakeQuantError:
        pytest.skip("the granularity does not fit the shape")
    seen, of_part = list[int](), dispatch._encoded
    expected = reference.quantize(x, library._fitted(params, x, spec), spec)
    monkeypatch.setattr(reference, "PART", 1 << 10)
    monkeypatch.setattr(dispatch, "_encoded", lambda x, *more: seen.append(x.numel()) or of_part(x, *more))  # type: ignore
    found = library.encode(x, params, spec)
    assert found is not None
    assert found.dtype is expected.dtype
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    is_one_block = "0:24" in text and shape[0] == 3
    assert seen
    if text in SPECS[:5] and not is_one_block:
        assert max(seen) <= max(1 << 10, 24 * 90)


FLOATS = [name for name in fq.formats() if isinstance(fq.parse_format(name), fq.FloatFormat)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FLOATS)
def test_codes_of_all_numbers_of_16_bits_and_their_neighbours(name: str, dtype: torch.dtype) -> None:
    bits = torch.arange(1 << 16).to(torch.int16)
    x = torch.cat([bits.view(own).to(torch.float64) for own in (torch.float16, torch.bfloat16)]).to(dtype)
    x = torch.cat([x, x.nextafter(torch.tensor(torch.inf).to(dtype)), x.nextafter(torch.tensor(0.0).to(dtype))])
    for arithmetic, scale in (("divide", 0.37), ("reciprocal", 2.0**-20), ("multiplier", 1.0)):
        spec = fq.QuantSpec(name, arithmetic=Arithmetic(arithmetic))
        params = fq.QParams(torch.full((1,), scale, dtype=torch.promote_types(dtype, torch.float32)))
        expected = reference.quantize(x, params, spec)
        found = library.quantize(x, params, spec)
        assert found.dtype is expected.dtype
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        assert library.encode(x, params, spec) is None  # there are NaN
        assert library.encode(x[x.isfinite()], params, spec) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 90), (1, 300, 90), (3, 100, 90), (27000,), (0, 90)])
@pytest.mark.parametrize(
    "blocks", ["per_block(-1:16,pad)", "per_block(0:24,-1:40,pad)", "per_channel(0)", "per_tensor"]
)
@pytest.mark.parametrize("rule", ["four_over_six", "searched"])
def test_parts_give_the_scales_of_the_whole(
    rule: str, blocks: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = fq.QuantSpec.parse(f"float4_e2m1fn {blocks} scale=float8_e4m3fn:{rule}@per_tensor")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    try:
        expected = reference.choose(x, spec).scale
    except fq.FakeQuantError:
        pytest.skip("the granularity does not fit the shape")
    seen, whole = list[int](), reference.fake_quantize
    monkeypatch.setattr(reference, "PART", 1 << 10)
    monkeypatch.setattr(reference, "fake_quantize", lambda x, *more: seen.append(x.numel()) or whole(x, *more))  # type: ignore
    assert torch.equal(library.choose(x, spec).scale, expected)
    if blocks == "per_block(-1:16,pad)" and seen:
        assert max(seen) <= 1 << 10
