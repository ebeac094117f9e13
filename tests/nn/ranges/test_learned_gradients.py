"""Gradients of learned ranges against the papers' closed forms, finite differences and gradcheck."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fakequant import Arithmetic, QuantSpec, Range
from fakequant.nn import Quantizer
from tests.support.bits import assert_same_bits
from tests.support.learned_ranges import (
    DY,
    GRANULARITIES,
    METHODS,
    SYMMETRIC,
    X,
    at,
    calibrated,
    gradients,
    learning,
    of,
)


def summed(values: Tensor, granularity: Any, like: Tensor) -> Tensor:
    """Sums over groups, by the definition: one group after the other."""
    blocks = granularity.block_shape(values.shape)
    total = torch.zeros_like(like)
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            total[i // blocks[0], j // blocks[1]] += values[i, j]
    return total


def spread(values: Tensor, granularity: Any, shape: tuple[int, int]) -> Tensor:
    blocks = granularity.block_shape(shape)
    rows, columns = torch.arange(shape[0]) // blocks[0], torch.arange(shape[1]) // blocks[1]
    return values[rows][:, columns]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("spec", SYMMETRIC)
def test_lsq_is_equation_3(spec: str, granularity: Any) -> None:
    quantizer = learning("lsq", at(spec, granularity), X, gradient_factor=False)
    s, fmt = spread(of(quantizer, "step").detach(), granularity, (6, 8)), quantizer.spec.format
    v = X / s
    rounded = fmt.round(v)
    slope = torch.where(
        rounded < fmt.quant_min, fmt.quant_min, torch.where(rounded > fmt.quant_max, fmt.quant_max, rounded - v)
    )
    wanted = summed(DY * slope, granularity, of(quantizer, "step").detach())
    torch.testing.assert_close(gradients(quantizer, X, DY)["step"], wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("spec", ["uint8", "uint4", "int4 per_tensor asymmetric"])
def test_lsq_plus_is_the_papers(spec: str, granularity: Any) -> None:
    """With beta = offset, n and p the codes from 0: d/ds is round(v) - v, n or p; d/dbeta is 0, 1 or 1."""
    quantizer = learning("lsq_plus", at(spec, granularity), X + 0.3, gradient_factor=False)
    fmt, params = quantizer.spec.format, quantizer.qparams(X)
    assert params.zero_point is not None
    s, z = (spread(p.detach(), granularity, (6, 8)) for p in params[:2])
    # The offset is on the grid right after calibration, where the paper's form and one with a zero point agree.
    code = (X / s).round() + z
    outside = (code < fmt.quant_min) | (code > fmt.quant_max)
    assert 0 < outside.sum() < 48
    slope = torch.where(outside, code.clamp(fmt.quant_min, fmt.quant_max), code - (X / s + z))
    found = gradients(quantizer, X, DY)
    step = of(quantizer, "step").detach()
    torch.testing.assert_close(found["step"], summed(DY * slope, granularity, step), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["offset"], summed(DY * outside, granularity, step), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("spec", SYMMETRIC)
def test_pact_gets_gradient_from_what_is_clipped_alone(spec: str, granularity: Any) -> None:
    quantizer = learning("pact", at(spec, granularity), X)
    fmt, amax = quantizer.spec.format, of(quantizer, "amax").detach()
    lowest, highest = (spread(amax, granularity, (6, 8)) * end / fmt.bound for end in (fmt.quant_min, fmt.quant_max))
    x = X.clone().requires_grad_()
    slope = (x > highest).double() * fmt.quant_max / fmt.bound + (x < lowest).double() * fmt.quant_min / fmt.bound
    wanted = summed(DY * slope, granularity, amax)
    torch.testing.assert_close(gradients(quantizer, X, DY)["amax"], wanted, rtol=1e-12, atol=1e-13)
    quantizer(x).backward(DY)
    assert_same_bits(x.grad + 0.0, torch.where((x < highest) & (x > lowest), DY, 0.0) + 0.0)


def test_pact_passes_the_gradient_to_the_clip_value_where_x_equals_it() -> None:
    quantizer = Quantizer("int8_narrow")
    quantizer.set_range(Range(torch.tensor([-1.27]), torch.tensor([1.27])))
    quantizer.learn("pact")
    x = quantizer(torch.tensor([9.0])).detach().requires_grad_()
    quantizer(x).sum().backward()
    assert_same_bits(x.grad, torch.zeros(1))
    torch.testing.assert_close(of(quantizer, "amax").grad, torch.ones(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("spec", [spec for spec in SYMMETRIC if spec != "int1"])
def test_tqt_is_equation_7(spec: str, granularity: Any) -> None:
    quantizer = learning("tqt", at(spec, granularity), X)
    log2_t, fmt = of(quantizer, "log2_threshold").detach(), quantizer.spec.format
    # The next power of two from the largest code: 2**(b - 1) signed, 2**b unsigned.
    largest = 2.0 ** math.ceil(math.log2(fmt.bound))
    s = 2.0 ** log2_t.ceil() / largest
    assert_same_bits(quantizer.qparams(X).scale.detach(), s)
    v = X / spread(s, granularity, (6, 8))
    code = fmt.round(v)
    slope = torch.where(code < fmt.quant_min, fmt.quant_min, torch.where(code > fmt.quant_max, fmt.quant_max, code - v))
    wanted = s * math.log(2) * summed(DY * slope, granularity, s)
    torch.testing.assert_close(gradients(quantizer, X, DY)["log2_threshold"], wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("arithmetic", [Arithmetic.DIVIDE, Arithmetic.RECIPROCAL, Arithmetic.MULTIPLIER])
@pytest.mark.parametrize("method", METHODS)
def test_gradient_is_that_of_a_smooth_surrogate_by_finite_differences(method: str, arithmetic: Arithmetic) -> None:
    """The surrogate holds rounding errors, and which values saturate, as they are; it shares no code with the rest."""
    asymmetric = method == "lsq_plus" and arithmetic is not Arithmetic.MULTIPLIER
    spec = QuantSpec("uint4" if asymmetric else "int4", symmetric=not asymmetric, arithmetic=arithmetic)
    options = {"gradient_factor": False} if method.startswith("lsq") else {}
    quantizer = learning(method, spec, X, **options)
    low, high = (0, 15) if asymmetric else (-8, 7)
    values = {name: of(quantizer, name).item() for name in quantizer.learned.names if of(quantizer, name) is not None}

    def step_and_zero(step: float = 1.0, offset: float = 0.0, amax: float = 0.0, log2_threshold: float = 0.0) -> Any:
        if method == "tqt":
            held = math.ceil(values["log2_threshold"]) - values["log2_threshold"]
            return 2.0 ** (log2_threshold + held - 3), 0.0
        if method == "pact":
            return amax / 7, 0.0
        if not asymmetric:
            return step, 0.0
        return step, round(-values["offset"] / values["step"]) + values["offset"] / values["step"] - offset / step

    step, zero = step_and_zero(**values)
    # PACT clips x itself, before rounding.
    code = X / step if method == "pact" else (X / step).round() + zero
    inside = (code >= low) & (code <= high)
    error = (X / step).round() - X / step if method != "pact" else torch.zeros_like(X)

    def loss(**changed: float) -> float:
        s, z = step_and_zero(**changed)
        # Inside, y = x + error * s: the zero point drops out.
        y = torch.where(inside, X + error * s, (code.clamp(low, high) - 0.0 - z) * s)
        return (y * DY).sum().item()

    found = gradients(quantizer, X, DY)
    assert set(found) == set(values)
    for name, value in values.items():
        h = 1e-6
        difference = (loss(**values | {name: value + h}) - loss(**values | {name: value - h})) / (2 * h)
        assert found[name].item() == pytest.approx(difference, rel=1e-6, abs=1e-7), name


@pytest.mark.parametrize("method", ["lsq", "lsq_plus", "pact"])
def test_gradcheck_where_everything_saturates(method: str) -> None:
    x = torch.tensor([-90.0, 70.0, 300.0], dtype=torch.float64, requires_grad=True)
    quantizer = calibrated("int4", torch.tensor([1.0], dtype=torch.float64))
    quantizer.learn(method)
    if method != "pact":
        quantizer.learn(method, gradient_factor=False)
    (parameter,) = quantizer.parameters()

    def replaced(x: Tensor, value: Tensor) -> Tensor:
        return torch.func.functional_call(quantizer, {next(n for n, _ in quantizer.named_parameters()): value}, (x,))

    assert torch.autograd.gradcheck(replaced, (x, parameter.detach().clone().requires_grad_()))
