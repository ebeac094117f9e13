"""Codes by one operator, and the backward pass by two more: the reference's bits, or the general way."""

import pytest
import torch
from bits import assert_same_bits
from cases import DTYPES, FORMATS, GRANULARITIES, LAYOUTS, hostile, hostile_gradient

import fakequant as fq
from fakequant.numerics import reference
from fakequant.ops import direct, dispatch
from fakequant.ops.cpu.backend import load_kernels
from fakequant.ops.direct import encode_directly, mask_directly, values_directly

pytestmark = pytest.mark.skipif(load_kernels() is not None, reason=f"no backend offers it: {load_kernels()}")


@pytest.fixture(autouse=True)
def _nothing_found_before(monkeypatch):
    monkeypatch.setattr(direct, "_found", {})


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_the_reference(name, dtype):
    case, served, turn = FORMATS[name], 0, list(FORMATS).index(name)
    layouts = ("channels_last", "transposed", "contiguous")
    for granularity in GRANULARITIES.values():
        for arithmetic in case.arithmetics():
            turn += 1
            spec = case.spec(granularity.granularity, arithmetic)
            numbers = hostile(case, granularity, arithmetic, dtype)
            scale, zero_point, *_ = numbers.params
            given = LAYOUTS[layouts[turn % len(layouts)]](numbers.x)
            x = given.where(~given.isnan(), torch.ones((), dtype=dtype))
            found = encode_directly(x, spec, scale, zero_point)
            if found is None:
                continue
            codes, mask, *_ = found
            params = fq.QParams(scale, zero_point)
            assert_same_bits(codes, reference.quantize(x, params, spec), f"{spec} {dtype}")
            assert codes.stride() == x.stride()
            assert mask is None
            kept = encode_directly(x, spec, scale, zero_point, mask=True)
            assert_same_bits(kept.values, codes, f"{spec} {dtype} with a mask")
            passing = reference.passes(x, params, spec)
            assert (kept.mask is None) == bool(passing.all())
            dy = hostile_gradient(x).as_strided(x.shape, x.stride())
            right = reference.grad_input(dy, passing)
            with torch.no_grad():
                if kept.mask is not None:
                    assert_same_bits(kept.call[0].unpack_mask(kept.mask, x, spec), passing, f"{spec} {dtype} mask")
                    assert mask_directly(dy, kept.mask, kept.direct)
                    assert_same_bits(dy, right, f"{spec} {dtype} masked")
                values = values_directly(codes, scale, zero_point, kept.direct, dy)
            assert_same_bits(values, reference.dequantize(codes, params, spec, dtype), f"{spec} {dtype} values")
            assert values.stride() == codes.stride()
            assert encode_directly(x, spec.replace(gradient=fq.Gradient.CLIP), scale, zero_point, mask=True) is None
            if x.numel():
                x[(-1,) * x.dim()] = torch.nan
                assert encode_directly(x, spec, scale, zero_point) is None
            served += 1
    cpu = next(backend for backend in dispatch.backends() if backend.name == "cpu")
    unsupported = cpu.unsupported(torch.ones(1, dtype=dtype), fq.QuantSpec(case.format), codes=True)
    assert (served > 0) == (unsupported is None), unsupported


@pytest.mark.parametrize("elements", [1, 7, 8, 9, 1027])
def test_a_mask_that_passes_everything_is_left_out(elements):
    x, scale = torch.zeros(elements), torch.tensor(0.1)
    assert encode_directly(x, fq.QuantSpec("int8"), scale, None, mask=True).mask is None
    for place in {0, elements // 2, elements - 1}:
        x.zero_()[place] = 100.0
        assert encode_directly(x, fq.QuantSpec("int8"), scale, None, mask=True).mask is not None, place


@torch.no_grad()
def test_what_lies_otherwise_than_x_goes_the_general_way():
    x, scale, spec = torch.randn(4, 6) * 9, torch.tensor(0.1), fq.QuantSpec("int8")
    kept = encode_directly(x, spec, scale, None, mask=True)
    transposed = torch.randn(6, 4).t()
    before = transposed.clone()
    assert not mask_directly(transposed, kept.mask, kept.direct)
    assert not mask_directly(transposed.contiguous().half(), kept.mask, kept.direct)
    assert not mask_directly(transposed.contiguous().as_subclass(Subclass), kept.mask, kept.direct)
    assert_same_bits(transposed, before)
    assert values_directly(kept.values, scale, None, kept.direct, x.half()) is None
    assert values_directly(kept.values.t().contiguous().t(), scale, None, kept.direct, x) is None
    with torch.enable_grad():
        assert not mask_directly(x, kept.mask, kept.direct)
        assert values_directly(kept.values, scale, None, kept.direct, x) is None
