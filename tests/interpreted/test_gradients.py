"""The gradients of scale and zero point equal the definition in every bit."""

import pytest
import torch

import fakequant as fq
from fakequant.numerics import reference
from fakequant.ops import dispatch
from fakequant.ops.triton.backend import TritonBackend
from tests.support import cases
from tests.support.backends import Calls
from tests.support.bits import assert_same_bits
from tests.support.cases import DTYPES, FORMATS, GRANULARITIES, LAYOUTS
from tests.support.kernel_comparisons import compare_grad_params, compare_tiny_multipliers, compare_wanted_grad_params
from tests.support.matrix import full, sweep

GRADIENTS = (fq.Gradient.CODE_RANGE, fq.Gradient.CLIP)
TURNS = ["int8", "uint8_affine", "float8_e4m3fn", "int16", "nf4", "odd_range_affine", "float8_e5m2fnuz"]


def compare(name, where_name, dtype, arithmetic, gradient, block=2048):
    case, where = FORMATS[name], GRANULARITIES[where_name]
    numbers = cases.hostile(case, where, arithmetic, dtype)
    laid = cases.Numbers(LAYOUTS[list(LAYOUTS)[len(where_name) % len(LAYOUTS)]](numbers.x), numbers.params)
    spec = case.spec(where.granularity, arithmetic, gradient=gradient)
    compare_grad_params(Calls(TritonBackend("cpu", block)), laid, spec, f"{where_name} {spec}")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_granularity(dtype):
    for turn, where_name in enumerate(GRANULARITIES):
        turn += list(DTYPES.values()).index(dtype)
        if turn % 4:
            continue  # of every four dtypes, one
        turn //= 4
        name = TURNS[turn % len(TURNS)]
        arithmetics = FORMATS[name].arithmetics()
        compare(name, where_name, dtype, arithmetics[turn % len(arithmetics)], GRADIENTS[turn % 2])


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name):
    """The arithmetics of a format and the gradients come in turn."""
    turn, arithmetics = list(FORMATS).index(name), FORMATS[name].arithmetics()
    compare(name, "channel_1", torch.float32, arithmetics[turn % len(arithmetics)], GRADIENTS[turn % 2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_combination(name, dtype):
    for where_name in GRANULARITIES:
        for arithmetic in FORMATS[name].arithmetics():
            for gradient in GRADIENTS:
                compare(name, where_name, dtype, arithmetic, gradient)


@sweep("where_name", full(["tensor", "channel_1", "channel_last", "tiles"]), full(["tensor", "tiles"]))
def test_several_programs_share_a_group(where_name):
    compare("uint8_affine", where_name, torch.float32, fq.Arithmetic.DIVIDE, fq.Gradient.CODE_RANGE, block=128)


def test_stochastic_rounding():
    for where_name, layout in (("channel_1", "contiguous"), ("tensor", "transposed")):
        where = GRANULARITIES[where_name]
        numbers = cases.hostile(FORMATS["int8"], where, fq.Arithmetic.DIVIDE, torch.float32)
        spec = fq.QuantSpec("int8", where.granularity, rounding=fq.Rounding.STOCHASTIC)
        params = numbers.params._replace(seed=torch.tensor(2**40 + 3))
        laid = cases.Numbers(LAYOUTS[layout](numbers.x), params)
        compare_grad_params(Calls(TritonBackend("cpu", 2048)), laid, spec, where_name)


def test_what_is_wanted():
    compare_wanted_grad_params(Calls(TritonBackend("cpu", 2048)))


def test_multipliers_whose_square_is_zero():
    compare_tiny_multipliers(Calls(TritonBackend("cpu", 2048)))


def test_sums_of_every_magnitude():
    """Products of all exponents, of which the lowest digits are cut off; and large ones that leave the lowest alone."""
    x = torch.full((7, 300), 1e4, dtype=torch.float64)
    spec, params = fq.QuantSpec("int8", fq.PerChannel(0)), fq.QParams(torch.ones(7, 1, dtype=torch.float64))
    exponents = torch.linspace(-1074, 1000, 300, dtype=torch.float64)
    dy = torch.ldexp(torch.randn(7, 300, dtype=torch.float64), exponents)
    dy[1:] *= torch.tensor([1e-300, 0.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)[:, None]
    # The slope is 127: the first two are in the first digit, the others in the fourth.
    dy[6, :4] = torch.tensor([2.0**100, -(2.0**100), 8.0, 5.0])
    dy[3, 7], dy[4, 7], dy[5, 7], dy[5, 8] = float("inf"), -float("inf"), float("inf"), -float("inf")
    right = reference.grad_params(dy, x, params, spec, (True, False))[0]
    found = Calls(TritonBackend("cpu", 2048)).grad_params(dy, x, params, spec, (True, False))[0]
    assert_same_bits(found, right)
    assert found[3].isposinf()
    assert found[4].isneginf()
    assert found[5].isnan()
    assert found[6] == 127 * 13


def test_empty():
    spec, params = fq.QuantSpec("int8"), fq.QParams(torch.ones(1))
    found = Calls(TritonBackend("cpu")).grad_params(torch.empty(0), torch.empty(0), params, spec, (True, False))
    assert_same_bits(found[0], torch.zeros(1))


def test_the_checker_can_fail():
    class Off(Calls):
        def grad_params(self, *given):
            scale, zero_point = super().grad_params(*given)
            return scale.nextafter(torch.full_like(scale, 1e300)), zero_point

    numbers = cases.hostile(FORMATS["int8"], GRANULARITIES["channel_0"], fq.Arithmetic.DIVIDE, torch.float32)
    with pytest.raises(AssertionError, match="gradient of the scale"):
        compare_grad_params(Off(TritonBackend("cpu", 2048)), numbers, fq.QuantSpec("int8", fq.PerChannel(0)), "")


@pytest.mark.parametrize("learned", [False, True])
def test_batched_gradients(monkeypatch, learned):
    """Kernels cannot read the batches that torch makes of gradients."""
    monkeypatch.setattr(dispatch, "_backends", (Calls(TritonBackend("cpu", 128)), dispatch.REFERENCE))
    x, scale = torch.randn(4, 6, requires_grad=True), torch.tensor(0.01, requires_grad=learned)
    y, leaves = fq.fake_quantize(x, "int8", scale=scale), (x, scale) if learned else (x,)
    dys = torch.randn(3, 4, 6)
    single = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in dys]
    batched = torch.autograd.grad(y, leaves, dys, retain_graph=True, is_grads_batched=True)
    mapped = torch.vmap(lambda dy: torch.autograd.grad(y, leaves, dy, retain_graph=True))(dys)
    for found in (batched, mapped):
        for got, wanted in zip(found, zip(*single, strict=True), strict=True):
            assert_same_bits(got, torch.stack(wanted))
