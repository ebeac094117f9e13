"""Compares every operation of a backend with the reference, bit by bit.

With TRITON_INTERPRET=1 the backend is triton's in its interpreter, on fewer and smaller cases.
"""

import os

import pytest
import torch

import fakequant as fq
from fakequant.numerics import reference
from tests.support import cases
from tests.support.backends import Calls
from tests.support.bits import assert_same_bits
from tests.support.cases import FORMATS, GRANULARITIES, LAYOUTS, ON_CPU, hostile_gradient

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GRADIENTS = [g for g in fq.Gradient if g is not fq.Gradient.IDENTITY]  # which needs no mask: see test_library.py
# A chunk of the C++ kernels has 1024 elements, a thread's share at least 32,768, a short run of a scale less than 16.
SIZES = [1, 7, 8, 9, 15, 16, 17, 1023, 1024, 1025, 2047, 4099, 32768, 32769, 70001]


def interpreted(block=512):
    """The backend for GPUs, each of whose programs computes that number of elements."""
    from fakequant.ops.triton.backend import TritonBackend

    return Calls(TritonBackend("cpu", block))


if INTERPRETED:
    SIZES = [1, 7, 8, 9, 63, 64, 65, 200]
    BACKENDS = [interpreted()]
else:
    BACKENDS = [backend for backend in ON_CPU if backend.name != "reference"]

each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in triton's interpreter, see test_triton.py")
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="takes the interpreter too long")


def skip_unavailable(backend):
    if reason := backend.unavailable():
        pytest.skip(reason)


def fitted(backend, x, turn=0):
    """The backend; interpreted, with programs of more elements than x has, or of few, so that runs are cut.

    A program takes the interpreter 10 ms, however few its elements are: there are at most eight.
    """
    if not INTERPRETED:
        return backend
    block = (512, 64, 512, 16)[turn % 4]
    while block * 8 < x.numel():
        block *= 2
    return type(backend)(interpreted(block).backend)


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


def compare(backend, numbers, spec, label, *, briefly=False):
    """All operations of a backend on one input; the number of comparisons that the backend could serve.

    Briefly: with the gradient of the specification alone, and without the gradients of parameters.
    """
    x, params = numbers.x, numbers.params
    served = 0
    if backend.unsupported(x, spec, codes=False) is None:
        right = reference.fake_quantize(x, params, spec)
        dy = torch.arange(1, x.numel() + 1).to(x.dtype).view(x.shape)
        for way in cases.each_way():
            plain, nothing = backend.fake_quantize(x, params, spec, mask=False)
            assert nothing is None
            assert_same_bits(plain, right, f"{label} {way}")
        for gradient in [spec.gradient] if briefly else GRADIENTS:
            spec_of_gradient = spec.replace(gradient=gradient)
            passing = reference.grad_input(dy, reference.passes(x, params, spec_of_gradient))
            for way in cases.each_way():
                y, mask = backend.fake_quantize(x, params, spec_of_gradient, mask=True)
                assert_same_bits(y, right, f"{label} {gradient.value} {way} y")
                dx = backend.grad_input(dy, mask, spec_of_gradient, x.stride())
                assert_same_bits(dx, passing, f"{label} {gradient.value} {way} dx")
            served += 1
        # The parameters get the same from every gradient but CLIP.
        for gradient in () if briefly else (fq.Gradient.CODE_RANGE, fq.Gradient.CLIP):
            compare_grad_params(backend, numbers, spec.replace(gradient=gradient), f"{label} {gradient.value}")
    if backend.unsupported(x, spec, codes=True) is None:
        compare_codes(backend, numbers, spec, label)
        served += 1
    return served


def compare_format(backend, name, dtype, rounding, *, thoroughly=False):
    """A format on every granularity with every arithmetic, to nearest; stochastically with one of these in turn.

    Layouts come in turn: over the formats each meets every granularity. Thoroughly: all layouts with three seeds.
    Interpreted: every 16th granularity, and thoroughly every one.
    """
    case, first, served = FORMATS[name], list(FORMATS).index(name), 0
    for turn, (where_name, where) in enumerate(GRANULARITIES.items(), first):
        if INTERPRETED and not thoroughly and turn % 16:
            continue
        arithmetics = case.arithmetics()
        if rounding is fq.Rounding.STOCHASTIC:
            arithmetics = [arithmetics[turn % len(arithmetics)]]
        for number, arithmetic in enumerate(arithmetics):
            chosen = list(LAYOUTS)
            if INTERPRETED or not thoroughly:
                chosen = [chosen[(turn + 2 * number) % len(LAYOUTS)]]
            for seed in (turn, 1000, 1001) if thoroughly and not INTERPRETED else (turn,):
                numbers = cases.hostile(case, where, arithmetic, dtype, seed)
                spec, params = case.spec(where.granularity, arithmetic, rounding=rounding), numbers.params
                if rounding is fq.Rounding.STOCHASTIC:
                    params = params._replace(seed=torch.tensor(seed * 2**40 - 3))
                for layout in chosen:
                    laid = cases.Numbers(LAYOUTS[layout](numbers.x), params)
                    label = f"{where_name} {arithmetic.value} {layout} {seed}"
                    served += compare(fitted(backend, laid.x, turn), laid, spec, label)
    return served
