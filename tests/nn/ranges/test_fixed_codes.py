"""Fixed codes of weights: quantizers give their values, whatever quantizing the weight would give."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError, ConfigError, QParamsError, ShapeError, StaleScaleWarning
from fakequant.model.weights import quantized_weights
from fakequant.nn.quantizer import Kind, Quantizer
from fakequant.numerics.formats.floats import as_integers
from fakequant.numerics.qparams import QParams, Range
from tests.support.bits import assert_same_bits
from tests.support.fixed_codes import (  # noqa: F401
    FLOAT8,
    KEY,
    KINDS,
    NEAR,
    assert_fixed,
    drawn,
    fixed,
    inputs,
    model_of,
    near_values,
    values,
)
from tests.support.threads import run_in_threads

pytestmark = pytest.mark.usefixtures("near_values")


@pytest.mark.parametrize("spec", KINDS)
def test_these_codes_are_not_those_that_quantizing_gives(spec: str) -> None:
    model = model_of(spec)
    codes, quantizer, weight = fixed(model)
    again = fq.quantize(weight.detach(), quantizer.spec, scale=quantizer.scale)[0]
    assert not torch.equal(as_integers(again), as_integers(codes))
    nearest = fq.fake_quantize(weight.detach(), quantizer.spec, scale=quantizer.scale)
    assert torch.equal(nearest, weight.detach()) != (spec == NEAR)
    assert_fixed(model, codes)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (lambda: nn.Conv2d(4, 6, 3, groups=2), (1, 4, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 3, 3), (1, 4, 5)),
    "lstm cell": (lambda: nn.LSTMCell(3, 4), (2, 3)),
    "linear": (lambda: nn.Linear(6, 4), (2, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_computes_with_fixed_codes(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make()
    model = fq.prepare(nn.Sequential(layer), fq.Config(fq.Rule(weight=FLOAT8))).eval()
    twin = copy.deepcopy(layer)
    for product in quantized_weights(model).values():
        assert product.parameter is not None
        codes, params = drawn(product.parameter, product.quantizer.spec)
        product.fix_codes(codes, params)
        twin.get_parameter(product.name).data.copy_(values(codes, product.quantizer))
    for own, name_of in zip(twin.parameters(), dict(twin.named_parameters()), strict=True):
        if own.dim() == 1:
            own.data.copy_(layer.get_parameter(name_of))
    x = torch.randn(shape)
    expected, found = twin(x), model(x)
    assert_same_bits(*[y[0] if isinstance(y, tuple) else y for y in (found, expected)])


@pytest.mark.parametrize("gradient", list(fq.Gradient))
def test_the_first_gradient_is_that_of_codes_in_range(gradient: fq.Gradient) -> None:
    spec = fq.QuantSpec.parse(NEAR).replace(gradient=gradient)
    quantizer, weight = Quantizer(spec, kind=Kind.WEIGHT), nn.Parameter(torch.zeros(4, 6))
    codes, params = drawn(weight, spec)
    quantizer.set_qparams(params)
    quantizer.fix_codes(codes.clamp(1, 8), weight)  # INPUT_RANGE and CLIP pass none at the ends
    y = quantizer(weight)
    assert_same_bits(y.detach(), weight.detach())
    grad = torch.randn_like(y)
    y.backward(grad)
    assert_same_bits(weight.grad, grad)


def test_training_starts_at_the_codes_and_releases_them_once_the_weight_changed() -> None:
    model = model_of().train()
    codes, quantizer, weight = fixed(model)
    x = inputs(model)
    still, moving = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.0, 1.0))
    for optimizer in (still, still, moving):
        y = model(x)
        assert_same_bits(y.detach(), F.linear(x, values(codes, quantizer), model[0].bias).detach())
        optimizer.zero_grad()
        y.sum().backward()
        optimizer.step()
    assert quantizer.fixed_codes is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = model(x)
    expected = fq.fake_quantize(weight.detach(), quantizer.spec, scale=quantizer.scale)
    assert_same_bits(y.detach(), F.linear(x, expected, model[0].bias).detach())
    assert quantizer.fixed_codes is None


@pytest.mark.parametrize("scales", list(fq.qat.Scales))
def test_training_of_every_kind_of_scales_starts_at_the_codes(scales: fq.qat.Scales) -> None:
    model = model_of().train()
    codes, quantizer, weight = fixed(model)
    wanted = values(codes, quantizer)
    fq.qat.set_scales(model, scales)
    y = quantizer(weight)
    assert_same_bits(y.detach(), wanted)
    y.sum().backward()
    assert (weight.grad is None) is (scales is fq.qat.Scales.ONLY)  # whose weights are their codes
    assert all(own.grad is not None for own in quantizer.parameters())


def test_training_by_learned_scales_ends_without_a_warning() -> None:
    model = model_of().train()
    _, quantizer, weight = fixed(model)
    quantizer.learn("lsq")
    quantizer(weight).sum().backward()
    torch.optim.SGD([weight], lr=1.0).step()
    quantizer.stop_learning()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning: training changes codes on purpose
        found = quantizer.eval()(weight).detach()
    assert_same_bits(found, fq.fake_quantize(weight.detach(), quantizer.spec, scale=quantizer.scale))


def in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[0, 0] += 1


def through_data(weight: nn.Parameter) -> None:
    weight.data[3, 5] = 1.0  # which torch does not count, and whose first element stays


@pytest.mark.parametrize("change", [in_place, through_data])
def test_changed_weights_are_quantized_again_and_the_user_is_told(change: Callable[[nn.Parameter], None]) -> None:
    model = model_of()
    codes, quantizer, weight = fixed(model)
    assert_same_bits(quantizer(weight).detach(), values(codes, quantizer))
    before = weight.detach().clone()
    change(weight)
    expected = fq.fake_quantize(weight.detach(), quantizer.spec, scale=quantizer.scale)
    with pytest.warns(StaleScaleWarning, match="since their codes were fixed"):
        found = quantizer(weight).detach()
    assert_same_bits(found, expected)
    assert not quantizer.holds(weight)
    weight.data.copy_(before)  # as one who swaps averaged weights in and out
    with torch.no_grad():
        weight.add_(0)
    assert_fixed(model, codes)


def test_another_parameter_is_quantized() -> None:
    model = model_of()
    _, quantizer, _ = fixed(model)
    model[0].weight = nn.Parameter(torch.full((4, 6), 0.5))
    with pytest.warns(StaleScaleWarning, match="since their codes were fixed"):
        found = quantizer(model[0].weight).detach()
    assert_same_bits(found, fq.fake_quantize(model[0].weight.detach(), quantizer.spec, scale=quantizer.scale))
    keys = fq.snapshot(model).tensors
    assert f"{KEY}.fixed_codes" not in keys


def test_meta_tensors_have_no_codes() -> None:
    model = model_of()
    fixed(model)
    model.to("meta")
    assert model(torch.ones(1, 6, device="meta")).shape == (1, 4)
    assert not model[0].weight_quantizer.holds(model[0].weight)


def quantizer_with(scale: Any = 0.5, spec: str = "int8 per_channel(0)", **options: Any) -> Quantizer:
    quantizer = Quantizer(spec, **{"kind": Kind.WEIGHT, **options})
    if scale is not None:
        quantizer.set_qparams(QParams(torch.full((2, 1), scale)))
    return quantizer


CODES = torch.tensor([[1, -2, 3], [4, 5, -6]], dtype=torch.int8)


def learning() -> Quantizer:
    quantizer = quantizer_with()
    quantizer.learn("lsq")
    return quantizer


@pytest.mark.parametrize(
    ("quantizer", "codes", "weight", "error", "text"),
    [
        (
            quantizer_with,
            CODES,
            torch.zeros(3, 2),
            ShapeError,
            r"of shape \[2, 3\], but the weight of shape \[3, 2\]",
        ),
        (quantizer_with, CODES.long(), None, QParamsError, "are torch.int64, but int8 has torch.int8"),
        (
            lambda: quantizer_with(spec="int4 per_channel(0)"),
            CODES * 5,
            None,
            QParamsError,
            "hold -22, but int4 has 16",
        ),
        (lambda: quantizer_with(float("nan")), CODES, None, QParamsError, "scale must be a positive, finite number"),
        (lambda: quantizer_with(1e38), CODES, None, QParamsError, "not finite"),
        (
            lambda: quantizer_with(None),
            CODES,
            None,
            CalibrationError,
            "has no fixed scale for codes; call calibrate",
        ),
        (lambda: quantizer_with(None, dynamic=True), CODES, None, CalibrationError, "a static range"),
        (lambda: quantizer_with(kind=Kind.INPUT), CODES, None, ConfigError, "is that of an input"),
        (learning, CODES, None, ConfigError, "learns its range, and codes need a fixed scale"),
        (quantizer_with, CODES, torch.zeros(2, 3, device="meta"), ConfigError, "on the meta device"),
        (quantizer_with, CODES[:1], None, ShapeError, "does not fit"),
    ],
)
def test_refused(
    quantizer: Callable[[], Quantizer], codes: Tensor, weight: Tensor | None, error: type[Exception], text: str
) -> None:
    own = quantizer()
    with pytest.raises(error, match=text):
        own.fix_codes(codes, weight)
    assert own.fixed_codes is None


def test_nan_codes_are_refused() -> None:
    quantizer = quantizer_with(spec="float8_e4m3fn per_channel(0)")
    codes = torch.full((2, 3), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(QParamsError, match="not finite"):
        quantizer.fix_codes(codes)


def test_computed_weights_are_refused() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
    model = fq.prepare(nn.Sequential(layer), "INT8_WEIGHT_ONLY")
    fq.calibrate(model)
    product = quantized_weights(model)[KEY]
    codes = torch.ones(4, 6, dtype=torch.int8)
    with pytest.raises(ConfigError, match="it is computed"):
        product.fix_codes(codes)
    product.quantizer.fix_codes(codes)
    with pytest.raises(ConfigError, match="its weight is computed"):
        model(torch.ones(1, 6))


def test_compiled_and_exported_graphs_compare_at_each_call() -> None:
    model = model_of()
    codes, quantizer, weight = fixed(model)
    x = inputs(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert_same_bits(compiled(x), model(x))
        exported = torch.export.export(model, (x,)).module()
        assert_same_bits(exported(x), model(x))
        weight.fill_(0.5)
        with pytest.warns(StaleScaleWarning, match="since their codes were fixed"):
            expected = model(x)
        assert_same_bits(compiled(x), expected)
        weight.copy_(values(codes, quantizer))
        assert_same_bits(compiled(x), model(x))


def test_functional_calls() -> None:
    model = model_of()
    fixed(model)
    x = inputs(model)
    same = {name: own.detach().clone() for name, own in model.named_parameters()}
    assert_same_bits(torch.func.functional_call(model, same, (x,)), model(x))
    _, grads = torch.func.grad_and_value(lambda p: torch.func.functional_call(model, p, (x,)).sum())(same)
    assert_same_bits(grads, model(x).sum().detach())


def test_threads_read_the_same_codes() -> None:
    model = model_of()
    fixed(model)
    x, found = inputs(model), []
    expected = model(x)

    run_in_threads(lambda: found.extend(model(x) for _ in range(20)))
    assert len(found) == 80
    assert all(torch.equal(y, expected) for y in found)


def test_integer_execution_multiplies_the_codes() -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(6, 4)), "INT8").eval()
    x = torch.randn(8, 6)
    fq.calibrate(model, [x])
    codes, quantizer, _ = fixed(model)
    quantizer.set_qparams(QParams(torch.full((4, 1), 2.0**-140)))
    quantized_weights(model)[KEY].fix_codes(codes)
    fq.set_execution(model, "integer")
    found = model[0].weight_quantizer.codes(model[0].weight)
    assert_same_bits(found[0], codes)
    with fq.nn.cached_weights(model), torch.no_grad():
        assert_same_bits(model[0].weight_quantizer.codes(model[0].weight)[0], codes)
        assert_same_bits(model[0].weight_quantizer(model[0].weight), values(codes, quantizer))


def test_other_scales_release_codes() -> None:
    for change in (
        lambda quantizer: quantizer.set_range(Range(torch.full((4, 1), -1.0), torch.full((4, 1), 1.0))),
        lambda quantizer: quantizer.reset(),
        lambda quantizer: quantizer.release_codes(),
    ):
        model = model_of()
        _, quantizer, weight = fixed(model)
        change(quantizer)
        assert quantizer.fixed_codes is None
        assert not quantizer.holds(weight)


def test_a_pickle_of_an_earlier_version_has_no_codes() -> None:
    quantizer = quantizer_with()
    state = dict(vars(quantizer), _buffers={k: v for k, v in quantizer._buffers.items() if k != "fixed_codes"})
    old = Quantizer.__new__(Quantizer)
    old.__setstate__(state)
    weight = torch.ones(2, 3)
    assert_same_bits(old(weight), quantizer(weight))
