"""Compares every operation of a backend with the reference, bit by bit."""

import pytest
import torch

import fakequant as fq
from fakequant.numerics import reference
from tests.support import cases
from tests.support.bits import assert_same_bits
from tests.support.cases import FORMATS, GRANULARITIES, ON_CPU, hostile_gradient

BACKENDS = [backend for backend in ON_CPU if backend.name != "reference"]


GRADIENTS = [g for g in fq.Gradient if g is not fq.Gradient.IDENTITY]  # which needs no mask: see test_library.py


each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)


def skip_unavailable(backend):
    if reason := backend.unavailable():
        pytest.skip(reason)


def compare_grad_params(backend, numbers, spec, label):
    """Gradients of scale and zero point, of hostile inputs and of finite ones; in float64, which hides no bit."""
    x = numbers.x
    scale, zero_point = (None if p is None else p.double() for p in numbers.params[:2])
    params = fq.QParams(scale, zero_point, seed=numbers.params.seed)
    for inputs in (x, x.nan_to_num(0.0, 3.0, -3.0).clamp(-1e4, 1e4)):
        dy = hostile_gradient(x)
        actual = backend.grad_params(dy, inputs, params, spec, (True, True))
        right = reference.grad_params(dy, inputs, params, spec, (True, True))
        assert_same_bits(actual[0], right[0], f"{label} gradient of the scale")
        assert (actual[1] is None) == (params.zero_point is None)
        if actual[1] is not None:
            assert_same_bits(actual[1], right[1], f"{label} gradient of the zero point")


def compare_wanted_grad_params(backend):
    """Those of either parameter, and of both; learned parameters may have another dtype than the input."""
    where = GRANULARITIES["channel_1"]
    numbers = cases.hostile(FORMATS["uint8_affine"], where, fq.Arithmetic.DIVIDE, torch.float32)
    x, given = numbers.x, numbers.params
    spec, dy = fq.QuantSpec("uint8", where.granularity), hostile_gradient(x)
    for scale in (given.scale, given.scale.double()):
        params = fq.QParams(scale, given.zero_point.half())
        both = reference.grad_params(dy, x, params, spec, (True, True))
        for wants in ((True, True), (True, False), (False, True)):
            actual = backend.grad_params(dy, x, params, spec, wants)
            for one, other, wanted in zip(actual, both, wants, strict=True):
                assert (one is not None) == wanted
                if wanted:
                    assert_same_bits(one, other)


def compare_tiny_multipliers(backend):
    """Scales whose square is zero: what is zero has no gradient, and what has one never spoils it."""
    for dtype, powers in ((torch.float32, (-19, -23, -30, -37)), (torch.float64, (-155, -170, -300))):
        for gradient in GRADIENTS:
            scale = torch.tensor([[10.0**power] for power in powers], dtype=dtype)
            spec = fq.QuantSpec("int8", fq.PerChannel(0), arithmetic=fq.Arithmetic.MULTIPLIER, gradient=gradient)
            x = torch.tensor([0.0, -0.0, 3.3, 1e3, -1e3], dtype=dtype) / scale
            x = torch.where(x.isfinite(), x, torch.finfo(dtype).max)
            params = fq.QParams(scale)
            for dy in (torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0]), torch.tensor([1.0, -1.0, 1e-30, 1e-30, -1e-32])):
                dy = dy.to(dtype).expand_as(x)
                found = backend.grad_params(dy, x, params, spec, (True, False))[0]
                assert_same_bits(found, reference.grad_params(dy, x, params, spec, (True, False))[0])
                assert not found.isnan().any(), (dtype, gradient)
                assert bool((found == 0).all()) == (not dy[0, 2:].any()), (dtype, gradient, dy)


def compare_codes(backend, numbers, spec, label):
    """Codes, what they do not tell, and their values."""
    x, params = numbers.x, numbers.params
    codes = reference.quantize(x, params, spec)
    for way in cases.each_way():
        assert_same_bits(backend.quantize(x, params, spec), codes, f"{label} {way} codes")
        for dtype in {torch.float32, x.dtype}:
            decoded = backend.dequantize(codes, params, spec, dtype)
            assert_same_bits(decoded, reference.dequantize(codes, params, spec, dtype), f"{label} {way} decoded")
    if spec.format.has_zero_point:
        assert backend.encode(x, params, spec).has_nan == bool(x.isnan().any()), label


def compare(backend, numbers, spec, label):
    """All operations of a backend on one input; the number of comparisons that the backend could serve."""
    x, params = numbers.x, numbers.params
    served = 0
    if backend.unsupported(x, spec, codes=False) is None:
        right = reference.fake_quantize(x, params, spec)
        dy = torch.arange(1, x.numel() + 1).to(x.dtype).view(x.shape)
        for way in cases.each_way():
            plain, nothing = backend.fake_quantize(x, params, spec, mask=False)
            assert nothing is None
            assert_same_bits(plain, right, f"{label} {way}")
        for gradient in GRADIENTS:
            spec_of_gradient = spec.replace(gradient=gradient)
            passing = reference.grad_input(dy, reference.passes(x, params, spec_of_gradient))
            for way in cases.each_way():
                y, mask = backend.fake_quantize(x, params, spec_of_gradient, mask=True)
                assert_same_bits(y, right, f"{label} {gradient.value} {way} y")
                assert mask.numel() <= (x.numel() + 7) // 8
                dx = backend.grad_input(dy, mask, spec_of_gradient, x.stride())
                assert_same_bits(dx, passing, f"{label} {gradient.value} {way} dx")
            served += 1
        # The parameters get the same from every gradient but CLIP.
        for gradient in (fq.Gradient.CODE_RANGE, fq.Gradient.CLIP):
            compare_grad_params(backend, numbers, spec.replace(gradient=gradient), f"{label} {gradient.value}")
    if backend.unsupported(x, spec, codes=True) is None:
        compare_codes(backend, numbers, spec, label)
        served += 1
    return served


# A chunk of the kernels has 1024 elements, a thread's share at least 32,768, a short run of one scale less than 16.
SIZES = [1, 7, 8, 9, 15, 16, 17, 1023, 1024, 1025, 2047, 4099, 32768, 32769, 70001]
