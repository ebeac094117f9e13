"""Quantizers with learned ranges, their inputs and gradients."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakequant import Arithmetic, PerBlock, PerChannel, PerTensor, PerToken, QParams, QuantSpec, Range, choose_qparams
from fakequant.errors import ConfigError
from fakequant.nn import Kind, LearnedRange, Quantizer, fixed_ranges, learned_ranges, register_learned_range
from fakequant.nn import ranges as registry
from fakequant.nn.ranges import straight_through
from tests.support.bits import assert_same_bits

GRANULARITIES = [
    PerTensor(),
    PerChannel(0),
    PerChannel(1),
    PerToken(),
    PerBlock({-1: 4}),
    PerBlock({0: 2, 1: 4}, pad=True),
]


SYMMETRIC = [
    "int8",
    "int8_narrow",
    "int4",
    "uint4 per_tensor symmetric",
    "float8_e4m3fn",
    "float4_e2m1fn",
    "nf4",
    "int1",
]


METHODS = ["lsq", "lsq_plus", "pact", "tqt"]


def data(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def calibrated(spec: QuantSpec | str, x: Tensor, share: float = 0.5, kind: Kind = Kind.WEIGHT) -> Quantizer:
    """A quantizer whose range is a share of the range of x, so that some values saturate."""
    quantizer = Quantizer(spec, kind=kind)
    lo, hi = choose_qparams(x * share, spec).range or (x, x)
    quantizer.set_range(Range(lo, hi))
    return quantizer


def learning(method: str, spec: QuantSpec | str, x: Tensor, **options: Any) -> Quantizer:
    quantizer = calibrated(spec, x)
    quantizer.learn(method, **options)
    return quantizer


def of(quantizer: Quantizer, name: str) -> nn.Parameter:
    return getattr(quantizer.learned, name)


def at(spec: str, granularity: Any) -> QuantSpec:
    return QuantSpec.parse(spec).replace(granularity=granularity)


def gradients(quantizer: Quantizer, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    names = [name.split(".")[1] for name, _ in quantizer.named_parameters()]
    return dict(zip(names, torch.autograd.grad(quantizer(x), list(quantizer.parameters()), dy), strict=True))


X = data(6, 8)


DY = data(6, 8, seed=1)


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


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("method", ["lsq", "lsq_plus", "pact"])
@pytest.mark.parametrize("spec", [*SYMMETRIC, "uint8", "uint4", "int8 per_tensor reciprocal"])
def test_learning_begins_with_the_very_bits_of_calibration(spec: str, method: str, granularity: Any) -> None:
    full = at(spec, granularity)
    if method == "pact" and not full.symmetric:
        pytest.skip("pact knows no zero point")
    x = data(6, 8, dtype=torch.float32)
    x[0, 0], x[1, 1], x[2, 2], x[3, 3] = math.inf, -math.inf, math.nan, -0.0
    quantizer = calibrated(full, x.nan_to_num(1.0, 2.0, -2.0))
    before = quantizer(x)
    quantizer.learn(method)
    assert_same_bits(quantizer(x).detach(), before, "with gradients")
    with torch.no_grad():
        assert_same_bits(quantizer(x), before, "without")
    quantizer.stop_learning()
    assert_same_bits(quantizer(x), before, "afterwards")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spec", ["int8", "int16", "float8_e4m3fn"])
def test_16_bit_tensors_and_models(spec: str, method: str, dtype: torch.dtype) -> None:
    x = data(6, 8, dtype=dtype)
    quantizer = learning(method, spec, x.float())
    with fixed_ranges(quantizer):
        expected = quantizer(x)
    halved = quantizer.to(dtype)
    assert all(p.dtype == torch.float32 for p in halved.parameters())
    assert_same_bits(halved(x).detach(), expected)
    halved(x).float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in halved.parameters())


@pytest.mark.parametrize(
    ("kind", "granularity", "elements"),
    [
        (Kind.WEIGHT, PerTensor(), 6 * 8),
        (Kind.INPUT, PerTensor(), 8),
        (Kind.WEIGHT, PerChannel(0), 8),
        (Kind.INPUT, PerChannel(1), 1),
        (Kind.WEIGHT, PerBlock({-1: 4}), 4),
    ],
    ids=str,
)
def test_gradient_factor_counts_what_shares_a_scale_in_one_example(kind: Kind, granularity: Any, elements: int) -> None:
    quantizer = calibrated(QuantSpec("int8", granularity), X, kind=kind)
    quantizer.learn("lsq", gradient_factor=False)
    plain = gradients(quantizer, X, DY)["step"]
    quantizer.learn("lsq")
    factor = 1 / math.sqrt(elements * 127)
    torch.testing.assert_close(gradients(quantizer, X, DY)["step"], plain * factor, rtol=1e-12, atol=0)


@pytest.mark.parametrize("arithmetic", [Arithmetic.DIVIDE, Arithmetic.RECIPROCAL, Arithmetic.MULTIPLIER])
@pytest.mark.parametrize("method", ["lsq", "pact"])
def test_a_parameter_below_zero_quantizes_to_zero_and_comes_back(method: str, arithmetic: Arithmetic) -> None:
    x = data(64, dtype=torch.float32)
    quantizer = learning(method, QuantSpec("int4", arithmetic=arithmetic), x)
    (parameter,) = quantizer.parameters()
    with torch.no_grad():
        parameter.fill_(-0.01)
    y = quantizer(x)
    assert y.abs().max() < 1e-17
    (y - x).square().sum().backward()
    assert parameter.grad.isfinite().all()
    if arithmetic is not Arithmetic.MULTIPLIER:
        assert parameter.grad.item() < 0


@pytest.mark.parametrize("offset", [-7.0, 0.0, 50.0])
@pytest.mark.parametrize("step", [-0.01, 0.0, 1e-30])
def test_an_offset_beside_a_step_below_zero_stays_finite(step: float, offset: float) -> None:
    """An offset over the smallest step is infinite, and its zero point was NaN."""
    x = data(64, dtype=torch.float32)
    quantizer = learning("lsq_plus", "uint4", x)
    with torch.no_grad():
        of(quantizer, "step").fill_(step)
        of(quantizer, "offset").fill_(offset)
    y = quantizer(x)
    (y - x).square().sum().backward()
    assert y.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in quantizer.parameters())


def test_the_offset_beyond_the_codes_keeps_its_gradient() -> None:
    quantizer = learning("lsq_plus", "uint4", X)
    with torch.no_grad():
        of(quantizer, "offset").fill_(100.0)
    assert quantizer.qparams(X).zero_point.item() == 0
    assert gradients(quantizer, X, DY)["offset"].abs() > 0


def test_training_a_range_finds_the_better_one() -> None:
    x = data(4096, dtype=torch.float32)
    for method in METHODS:
        spec = "uint2" if method == "lsq_plus" else "int3"
        quantizer = calibrated(spec, x, share=0.3 if method == "pact" else 1.0)
        first = (quantizer(x) - x).square().mean().item()
        quantizer.learn(method, **({"gradient_factor": False} if "lsq" in method else {}))
        optimizer = torch.optim.Adam(quantizer.parameters(), lr=0.02)
        for _ in range(100):
            optimizer.zero_grad()
            (quantizer(x) - x).square().mean().backward()
            optimizer.step()
        assert (quantizer(x) - x).square().mean().item() < 0.8 * first, method


@pytest.mark.parametrize("exponent", range(-30, 30, 7))
@pytest.mark.parametrize("spec", ["int8", "uint8 per_tensor symmetric", "float8_e4m3fn", "int4 per_tensor multiplier"])
def test_tqt_keeps_a_threshold_that_is_a_power_of_two(spec: str, exponent: int) -> None:
    amax = torch.tensor([2.0**exponent])
    quantizer = Quantizer(spec)
    quantizer.set_range(Range(-amax, amax))
    quantizer.learn("tqt")
    assert of(quantizer, "log2_threshold").item() == exponent
    with torch.no_grad():
        scale = quantizer.qparams(torch.zeros(2)).scale
    assert math.frexp(scale.item())[0] == 0.5


def test_tqt_of_a_zero_range_stays_finite() -> None:
    quantizer = Quantizer("int8")
    quantizer.set_range(Range(torch.zeros(1), torch.zeros(1)))
    quantizer.learn("tqt")
    assert_same_bits(quantizer(torch.zeros(3)).detach(), torch.zeros(3))


@pytest.mark.parametrize("method", METHODS)
def test_state_dict_restores_method_and_parameters(method: str) -> None:
    spec = "uint4" if method == "lsq_plus" else "int4 per_channel(0)"
    quantizer = learning(method, spec, X)
    with torch.no_grad():
        for parameter in quantizer.parameters():
            parameter.mul_(1.3)
    state = quantizer.state_dict()
    assert all(key.startswith(f"{method}.") for key in state)
    for fresh in (
        Quantizer(spec, kind=Kind.WEIGHT),
        calibrated(spec, X),
        learning("lsq", spec, X),
        learning(method, spec, X * 9),
    ):
        fresh.load_state_dict(state)
        assert fresh.learned.method == method
        assert_same_bits(fresh(X).detach(), quantizer(X).detach())
        assert repr(fresh) == repr(quantizer)
    fixed = calibrated(spec, X)
    fresh.load_state_dict(fixed.state_dict())
    assert fresh.learned is None
    assert_same_bits(fresh(X), fixed(X))


def test_a_state_without_the_parameters_is_refused() -> None:
    quantizer = learning("lsq", "int4", X)
    with pytest.raises(RuntimeError, match=r"Missing key.*lsq\.step"):
        quantizer.load_state_dict({})
    assert quantizer.learned is not None


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))], ids=["copy", "pickle"])
@pytest.mark.parametrize("method", METHODS)
def test_copies_are_independent(method: str, copier: Callable[[Quantizer], Quantizer]) -> None:
    quantizer = learning(method, "int4", X)
    twin = copier(quantizer)
    assert_same_bits(twin(X).detach(), quantizer(X).detach())
    with torch.no_grad():
        next(twin.parameters()).add_(1.5)
    assert not torch.equal(twin(X), quantizer(X))


@pytest.mark.parametrize("method", METHODS)
def test_a_new_range_starts_again_with_the_same_parameters(method: str) -> None:
    quantizer = learning(method, "int4", X)
    parameters = list(quantizer.parameters())
    with torch.no_grad():
        parameters[0].mul_(2)
    expected = learning(method, "int4", X * 3)
    quantizer.set_range(Range(-(X * 1.5).abs().amax().reshape(1, 1), (X * 1.5).abs().amax().reshape(1, 1)))
    assert_same_bits(quantizer(X).detach(), expected(X).detach())
    assert all(a is b for a, b in zip(parameters, quantizer.parameters(), strict=True))
    quantizer.reset()
    assert not quantizer.calibrated
    assert list(quantizer.parameters()) == []


def test_learning_twice_and_by_another_method() -> None:
    quantizer = learning("lsq", "int4", X)
    step = of(quantizer, "step")
    quantizer.learn("lsq")
    assert of(quantizer, "step") is step
    before = quantizer(X).detach()
    quantizer.learn("pact")
    assert [name for name, _ in quantizer.named_parameters()] == ["pact.amax"]
    assert_same_bits(quantizer(X).detach(), before)
    quantizer.stop_learning()
    quantizer.stop_learning()
    assert quantizer.learned is None
    assert list(quantizer.state_dict()) == ["scale"]
    assert_same_bits(quantizer(X), before)


def test_fixed_ranges_are_learned_again_afterwards() -> None:
    model = nn.Sequential(learning("lsq", "int4", X), calibrated("int8", X), learning("lsq_plus", "uint4", X))
    expected, state = model(X).detach(), list(model.state_dict())
    with fixed_ranges(model):
        assert list(model.parameters()) == []
        assert model[2].zero_point.dtype == torch.int32
        assert_same_bits(model(X), expected)
    assert list(model.state_dict()) == state
    assert_same_bits(model(X).detach(), expected)


@pytest.mark.parametrize("method", METHODS)
def test_one_scale_fits_tensors_of_any_rank(method: str) -> None:
    quantizer = learning(method, "int4", X)
    assert quantizer(torch.empty(2, 0, 8)).shape == (2, 0, 8)
    assert_same_bits(quantizer(X.flatten()), quantizer(X).flatten())
    assert_same_bits(quantizer(X[0, 0]), quantizer(X)[0, 0])


@pytest.mark.exhaustive
def test_compiled_gives_the_eager_bits() -> None:
    """All methods in one graph, because a compilation takes seconds."""
    torch._dynamo.reset()
    x = data(6, 8, dtype=torch.float32)
    model = nn.ModuleList(
        [
            learning("lsq", "int8 per_channel(1)", x),
            learning("lsq_plus", "uint8", x),
            learning("pact", "float8_e4m3fn", x),
            learning("tqt", "int4 per_channel(1)", x),
        ]
    )

    def run(x: Tensor) -> list[Tensor]:
        return [quantizer(x) for quantizer in model]

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for rows in (6, 9):
        x = data(rows, 8, dtype=torch.float32, seed=rows)
        found: list[list[Tensor]] = []
        for call in (run, compiled):
            outputs = call(x)
            found.append([*outputs, *torch.autograd.grad(sum(y.sum() for y in outputs), list(model.parameters()))])
        for eager, other in zip(found[0][:4], found[1][:4], strict=True):
            assert_same_bits(other.detach(), eager.detach())
        # The sum over a group may run in another order.
        for eager, other in zip(found[0][4:], found[1][4:], strict=True):
            torch.testing.assert_close(other, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "method", "text"),
    [
        (
            "uint8",
            "pact",
            r"x: uint8 per_tensor has a zero point, which 'pact' cannot learn; use 'lsq_plus'",
        ),
        ("uint8", "tqt", "x: uint8 per_tensor has a zero point, which 'tqt' cannot learn"),
        (
            "int8 per_block(-1:4) scale=float8_e8m0fnu:floor",
            "lsq",
            "has scales in float8_e8m0fnu, which cannot be lear",
        ),
        ("float4_e2m1fn per_block(-1:4) scale=float8_e4m3fn@per_tensor", "pact", "has scales in float8_e4m3fn, which"),
        ("int8", "lsqq", "x: unknown method 'lsqq' to learn a range; did you mean lsq"),
    ],
    ids=["pact", "tqt", "e8m0", "nvfp4", "unknown"],
)
def test_what_cannot_be_learned(spec: str, method: str, text: str) -> None:
    quantizer = calibrated(spec, X)
    quantizer.name = "x"
    with pytest.raises(ConfigError, match=text):
        quantizer.learn(method)
    assert quantizer.learned is None


def test_learning_needs_a_range() -> None:
    with pytest.raises(ConfigError, match="no range to learn; calibrate it first"):
        Quantizer("int8").learn()
    with pytest.raises(ConfigError, match="is dynamic"):
        Quantizer("int8", dynamic=True).learn()


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="'lsq' has no option 'gradient_fctor'; did you mean gradient_factor"):
        learning("lsq", "int4", X, gradient_fctor=True)
    with pytest.raises(ConfigError, match="'pact' has no option 'gradient_factor'; it has no options"):
        learning("pact", "int4", X, gradient_factor=True)


def test_a_method_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))

    @register_learned_range("log_step")
    class LogStep(LearnedRange):
        names = ("log",)
        log: Tensor

        def start(self, params: QParams) -> None:
            self._set(log=params.scale.log())

        def qparams(self, elements: int) -> QParams:
            return QParams(self.log.exp())

    assert "log_step" in learned_ranges()
    quantizer = learning("log_step", "int4 per_channel(0)", X)
    fresh = Quantizer("int4 per_channel(0)")
    fresh.load_state_dict(quantizer.state_dict())
    assert_same_bits(fresh(X).detach(), quantizer(X).detach())
    assert gradients(quantizer, X, DY)["log"].shape == (6, 1)
    with pytest.raises(ConfigError, match="already registered as 'lsq'"):
        register_learned_range("lsq")(LogStep)
    with pytest.raises(ConfigError, match=r"'a\.b' of a method must be an identifier"):
        register_learned_range("a.b")(LogStep)


def test_through_is_the_value_to_the_bit() -> None:
    parameter = torch.tensor([-0.0, 1e-45, -3.7, 3e38], requires_grad=True)
    value = torch.tensor([0.1, -1e-45, 1e38, -3e38])
    out = straight_through(value, parameter, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert_same_bits(out.detach(), value)
    out.sum().backward()
    assert_same_bits(parameter.grad, torch.tensor([1.0, 2.0, 3.0, 4.0]))


@pytest.mark.parametrize("method", METHODS)
def test_ranges_that_inference_mode_made_learned_train_outside(method: str) -> None:
    x = data(4, 8, dtype=torch.float32)
    with torch.inference_mode():
        quantizer = learning(method, "int8", x)
    other = learning(method, "int8", x)
    for own in (quantizer, other):
        own(x).square().sum().backward()
        torch.optim.SGD(own.parameters(), lr=0.1).step()
        own.load_state_dict(own.state_dict())
    assert_same_bits(quantizer(x), other(x))
