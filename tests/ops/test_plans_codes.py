"""Codes by plans: the bits of the reference."""

import itertools

import pytest
import torch

import fakequant as fq
from fakequant.numerics import reference
from fakequant.ops import dispatch, library
from fakequant.ops.backend import CODES, KernelPlan
from tests.support.bits import assert_same_bits
from tests.support.cases import FORMATS, GRANULARITIES
from tests.support.matrix import each_format_once
from tests.support.plan_cases import assert_served_if_supported, hostile, needs_kernels

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def _nothing_found_before(monkeypatch):
    monkeypatch.setattr(dispatch, "_known", {})


class Subclass(torch.Tensor):
    pass


def compare_codes(x, spec, params):
    """Codes against the reference; the backend that wrote them."""
    label = f"{spec} {x.dtype}"
    codes = library.encode(x, params, spec)
    assert_same_bits(codes, reference.quantize(x, params, spec), label)
    values = library.dequantize(codes, params, spec, x.dtype)
    assert_same_bits(values, reference.dequantize(codes, params, spec, x.dtype), label)
    if x.numel():
        x[(-1,) * x.dim()] = torch.nan
        assert library.encode(x, params, spec) is None
        assert_same_bits(library.quantize(x, params, spec), reference.quantize(x, params, spec), label)
    return dispatch.find_plan(x, spec, *params[:2], CODES).backend


@each_format_once
def test_codes_are_those_of_the_reference(name, dtype):
    case, served = FORMATS[name], set()
    layouts = itertools.cycle(["channels_last", "transposed", "contiguous"])
    # Another layout first for every format, so that each meets each granularity.
    layouts = itertools.islice(layouts, list(FORMATS).index(name) + 1, None)
    for granularity, arithmetic in itertools.product(GRANULARITIES.values(), case.arithmetics()):
        given, spec, params = hostile(case, granularity, arithmetic, dtype, next(layouts))
        served.add(compare_codes(given.where(~given.isnan(), torch.ones((), dtype=dtype)), spec, params))
    assert_served_if_supported(served, case, dtype, codes=True)


def test_a_subclass_of_a_gradient_is_not_given_to_kernels():
    def gradient(dy):
        return torch.autograd.grad(fq.fake_quantize(x, "int8", scale=0.1), x, dy)[0]

    def no_numbers(dy, mask):
        if dy.is_floating_point():
            pytest.fail("by a kernel")
        return found.grad_input(dy, mask)  # which unpacks the mask

    x = (9 * torch.randn(4, 6)).requires_grad_()
    right = gradient(torch.ones(4, 6))
    ((key, found),) = ((k, v) for k, v in dispatch._known.items() if isinstance(v, KernelPlan))
    dispatch._known[key] = found._replace(grad_input=no_numbers)
    assert_same_bits(torch.Tensor(gradient(torch.ones(4, 6).as_subclass(Subclass))), right)
    with pytest.raises(pytest.fail.Exception, match="by a kernel"):
        gradient(torch.ones(4, 6))
