"""Models with fixed codes that quantizing the values of the weight again does not give."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError, CheckpointError, ConfigError, QParamsError, ShapeError, StaleScaleWarning
from fakequant.model.weights import mark_ranges_current, quantized_weights
from fakequant.nn.quantizer import Kind, Quantizer
from fakequant.numerics import formats
from fakequant.numerics.formats.floats import TableFormat, as_integers
from fakequant.numerics.qparams import QParams, Range
from tests.support.bits import assert_same_bits
from tests.support.copies import pickled, saved
from tests.support.threads import run_in_threads

INT16 = "int16 per_channel(0)"
"""In float16, hundreds of its codes have one value."""
NF4 = "nf4 per_block(-1:3)"
FLOAT8 = "float8_e4m3fn per_channel(0)"
"""By a scale of 2**-148, many codes of these have one value of float32."""
NEAR = "near per_channel(0) reciprocal"
"""Values an ulp apart, which a product with 1 / 1.5 mixes up: quantizing gives other values, too."""
ZEROS = "int4 per_block(-1:3) scale=float16:signed"
"""With a scale of 0, as K-quants have, so that all codes have one value."""
KINDS = [INT16, NF4, FLOAT8, NEAR, ZEROS]
KEY = "0._weight_quantizer"


@pytest.fixture(scope="module")
def near_values() -> Iterator[None]:
    fq.register_format(TableFormat("near", (-1.0, 0.0, *(1.0 + n * 2.0**-23 for n in range(8)))))
    yield
    del formats._registry["near"]


def fresh(spec: str = NEAR) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 4)).to(torch.float16 if spec == INT16 else torch.float32)


def model_of(spec: str = NEAR) -> nn.Sequential:
    model = fq.prepare(fresh().float(), fq.Config(fq.Rule(weight=spec))).eval()
    model.to(torch.float16 if spec == INT16 else torch.float32)
    fq.calibrate(model)
    return model


def inputs(model: nn.Module, *shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 6)), dtype=next(model.parameters()).dtype)


def drawn(weight: Tensor, spec: fq.QuantSpec) -> tuple[Tensor, QParams]:
    """Codes that quantizing their values does not give, except for formats of 4 and 8 bits of integers."""
    torch.manual_seed(0)
    groups = spec.granularity.group_shape(weight.shape)
    if spec.format.has_zero_point:
        lowest, highest = int(spec.format.quant_min), int(spec.format.quant_max)
        codes = torch.randint(lowest, highest + 1, weight.shape).to(spec.format.storage)
        scale = torch.full(groups, 1e-4 if spec.scale.format is None else 2.0**-10)
        scale[0, 0] *= spec.scale.format is None
        return codes, QParams(scale)
    if str(spec.format) == "near":
        return torch.randint(10, weight.shape, dtype=torch.uint8), QParams(torch.full(groups, 1.5))
    codes, _ = fq.quantize(torch.randn(weight.shape), spec, scale=torch.ones(groups))
    return codes, QParams(torch.full(groups, 2.0**-148))


def fixed(model: nn.Module) -> tuple[Tensor, Quantizer, nn.Parameter]:
    product = next(iter(quantized_weights(model).values()))
    codes, params = drawn(product.parameter, product.quantizer.spec)
    product.fix_codes(codes, params)
    return codes, product.quantizer, product.parameter


def values(codes: Tensor, quantizer: Quantizer, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or (torch.float16 if codes.dtype is torch.int16 else torch.float32)
    return fq.dequantize(codes, quantizer.qparams(codes), quantizer.spec, dtype=dtype)


def assert_fixed(model: nn.Module, codes: Tensor) -> None:
    """Assert that all ways to read the codes give these."""
    product = next(iter(quantized_weights(model).values()))
    quantizer, weight = product.quantizer, product.parameter
    assert quantizer.holds(weight)
    found = quantizer.codes(weight)
    assert_same_bits(found[0], codes)
    assert_same_bits(next(iter(fq.snapshot(model).weights.values())).codes, codes)
    assert_same_bits(quantizer(weight).detach(), values(codes, quantizer, weight.dtype))


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
FLOAT8_NAN = torch.full((2, 3), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)


def learning() -> Quantizer:
    quantizer = quantizer_with()
    quantizer.learn("lsq")
    return quantizer


@pytest.mark.parametrize(
    ("quantizer", "codes", "weight", "error", "text"),
    [
        (quantizer_with, CODES, torch.zeros(3, 2), ShapeError, r"\[2, 3\], but the weight of shape \[3, 2\]"),
        (quantizer_with, CODES.long(), None, QParamsError, "are torch.int64, but int8 has torch.int8"),
        (lambda: quantizer_with(spec="int4 per_channel(0)"), CODES * 5, None, QParamsError, "hold -30, but the codes"),
        (lambda: quantizer_with(spec=FLOAT8), FLOAT8_NAN, None, QParamsError, "times its scale give inf or NaN"),
        (lambda: quantizer_with(float("nan")), CODES, None, QParamsError, "scale must be a positive, finite number"),
        (lambda: quantizer_with(1e38), CODES, None, QParamsError, "times its scale give inf or NaN"),
        (lambda: quantizer_with(None), CODES, None, CalibrationError, "no fixed scale for codes; call calibrate"),
        (lambda: quantizer_with(None, dynamic=True), CODES, None, CalibrationError, "a static range"),
        (lambda: quantizer_with(kind=Kind.INPUT), CODES, None, ConfigError, "quantizes an input; only codes of"),
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


def like(model: nn.Sequential) -> nn.Sequential:
    return model_of(str(model[0].weight_quantizer.spec))


def by_state_dict(model: nn.Sequential, **options: bool) -> nn.Module:
    again = like(model)
    again.load_state_dict(model.state_dict(), **options)
    return again


def on_meta_and_back(model: nn.Sequential) -> nn.Module:
    state = model.state_dict()
    again = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    again.load_state_dict(state)
    return again


def learned_and_back(model: nn.Sequential) -> nn.Module:
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    fq.qat.set_scales(model, fq.qat.Scales.FIXED)
    return model


WAYS: dict[str, Callable[[nn.Sequential], nn.Module | None]] = {
    "copied": copy.deepcopy,
    "by a state dict": by_state_dict,
    "assigned": lambda model: by_state_dict(model, assign=True),
    "pickled": pickled,
    "saved": saved,
    "on meta and back": on_meta_and_back,
    "applied": lambda model: fq.apply(fresh(str(model[0].weight_quantizer.spec)), fq.snapshot(model)),
    "moved": lambda model: model.to("cpu").train().eval().requires_grad_(False).requires_grad_(),
    "learned and back": learned_and_back,
    "calibrated": fq.calibrate,
    "noted": mark_ranges_current,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spec", [INT16, NEAR])
def test_codes_survive(way: str, spec: str) -> None:
    model = model_of(spec)
    codes, *_ = fixed(model)
    again = WAYS[way](model)
    assert_fixed(again if isinstance(again, nn.Module) else model, codes)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("spec", [*KINDS, "int4 per_block(-1:2)"])
def test_codes_survive_files(spec: str, packed: bool, tmp_path: Path) -> None:
    model = model_of(spec)
    codes, *_ = fixed(model)
    fq.save(model, tmp_path, packed=packed)
    again = fq.load(fresh(spec), tmp_path)
    assert_fixed(again, codes)
    fq.save(again, tmp_path, packed=not packed)
    assert_fixed(fq.load(fresh(spec), tmp_path), codes)


def test_a_file_with_other_codes_than_its_weight_is_refused(tmp_path: Path) -> None:
    model = model_of()
    fixed(model)
    state = fq.snapshot(model)
    for key, value, text in [
        (f"{KEY}.fixed_codes", torch.zeros(4, 6, dtype=torch.uint8), "give other values than the stored weight"),
        (f"{KEY}.fixed_codes", torch.zeros(4, 6), "are torch.float32, but codes of near are stored as torch.uint8"),
        (f"{KEY}.fixed_codes", torch.zeros(6, 4, dtype=torch.uint8), r"\[6, 4\], but the weight of shape \[4, 6\]"),
    ]:
        changed = fq.QuantizedState(**{**state.fields(), "tensors": {**state.tensors, key: value}})
        float_model = fresh()
        with pytest.raises(CheckpointError, match=text):
            fq.apply(float_model, changed)
        assert type(float_model[0]) is nn.Linear


class OwnWeight(nn.Module):
    """A parameter that the forward multiplies with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w)


def test_functional_weights(tmp_path: Path) -> None:
    x = torch.randn(2, 6)
    config = fq.Config(fq.Rule(weight=NEAR, ops=("linear",)))
    model = fq.prepare(OwnWeight(), config, example=x).eval()
    fq.calibrate(model, [x])
    codes, quantizer, _ = fixed(model)
    assert_same_bits(model(x), F.linear(x, values(codes, quantizer)))
    again = fq.load(OwnWeight(), fq.save(model, tmp_path, packed=True))
    assert_same_bits(again(x), model(x))
    assert_same_bits(next(iter(fq.snapshot(again).weights.values())).codes, codes)


def test_codes_without_their_weight_set_that_of_the_next_call() -> None:
    for read in (lambda model: model(inputs(model)), fq.snapshot, copy.deepcopy, by_state_dict, learned_and_back):
        model = model_of()
        quantizer: Quantizer = model[0].weight_quantizer
        codes, params = drawn(model[0].weight, quantizer.spec)
        quantizer.set_qparams(params)
        quantizer.fix_codes(codes)
        again = read(model)
        model = again if isinstance(again, nn.Module) else model
        assert_same_bits(model[0].weight_quantizer(model[0].weight).detach(), values(codes, quantizer))
        assert_same_bits(model[0].weight.detach(), values(codes, quantizer))
        assert_fixed(model, codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("spec", [INT16, NEAR])
def test_conversions_keep_codes(spec: str, dtype: torch.dtype) -> None:
    model = model_of(spec)
    codes, *_ = fixed(model)
    model.to(dtype)
    assert_fixed(model, codes)
    if spec == NEAR or dtype is not torch.bfloat16:  # INT16 is rounded to float16 before, and remembers one dtype
        assert_fixed(model.float(), codes)


def test_float8_codes_stay_bytes_in_another_dtype() -> None:
    model = model_of("float8_e4m3fn per_channel(0)")
    codes, params = fq.quantize(torch.randn(4, 6), "float8_e4m3fn per_channel(0)")
    quantized_weights(model)[KEY].fix_codes(codes, params)
    model.bfloat16()
    assert model[0].weight_quantizer.fixed_codes.dtype is torch.uint8
    assert_fixed(model, codes)


def test_a_state_dict_without_codes_loads_and_one_with_a_wrong_dtype_is_refused() -> None:
    model = model_of()
    codes, *_ = fixed(model)
    old = {key: value for key, value in model.state_dict().items() if not key.endswith("fixed_codes")}
    fresh = model_of()
    fresh.load_state_dict(old)
    assert fresh[0].weight_quantizer.fixed_codes is None
    model.load_state_dict(old)  # whose weight has the values of the codes
    assert_fixed(model, codes)
    wrong = {**old, f"{KEY}.fixed_codes": codes.float()}
    with pytest.raises(
        RuntimeError, match=r"fixed_codes is torch.float32, but the codes of near are stored as torch.uint8"
    ):
        model_of().load_state_dict(wrong)


def test_tied_weights(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model[1].weight = model[0].weight
        return model

    model = fq.prepare(tied(), fq.Config(fq.Rule(weight=NEAR))).eval()
    one, other = quantized_weights(model).values()
    codes, params = drawn(one.parameter, one.quantizer.spec)
    one.fix_codes(codes, params)
    other.quantizer.set_qparams(params)
    assert "in different ways" in next(iter(fq.snapshot(model).in_float.values()))
    with pytest.raises(ConfigError, match="with different scales"):
        fq.bake_weights(copy.deepcopy(model))
    other.fix_codes(codes)
    assert not fq.snapshot(model).in_float
    again = fq.load(tied(), fq.save(model, tmp_path, packed=True))
    x = inputs(model)
    assert_same_bits(again(x), model(x))
    assert all(own.has_fixed_codes for own in quantized_weights(again).values())


def test_baked_weights_are_the_values() -> None:
    model = model_of()
    codes, quantizer, _ = fixed(model)
    x = inputs(model)
    before = model(x)
    fq.bake_weights(model)
    assert_same_bits(model[0].weight.detach(), values(codes, quantizer))
    assert_same_bits(model(x), before)


@pytest.mark.parametrize("spec", [INT16, NEAR])
def test_exported_codes(spec: str, tmp_path: Path) -> None:
    model = model_of(spec)
    fixed(model)
    product = quantized_weights(model)[KEY]
    codes = fq.snapshot(model).weights["0.weight"].codes.clone()
    x = inputs(model)
    report = fq.export_onnx(model, x, tmp_path / "model.onnx")
    assert report.left_out == []
    assert fq.verify_onnx(tmp_path / "model.onnx", model, [x]).exact
    import onnx
    from onnx import numpy_helper

    held = [numpy_helper.to_array(own) for own in onnx.load(tmp_path / "model.onnx").graph.initializer]
    wanted = codes.view(torch.uint8).numpy().tobytes()
    assert any(own.tobytes() == wanted for own in held)
    assert_fixed(model, codes)
    assert product.has_fixed_codes


def test_stochastic_rounding_keeps_fixed_codes(tmp_path: Path) -> None:
    model = model_of("int8 per_tensor stochastic")
    fq.calibrate(model)
    product = quantized_weights(model)[KEY]
    assert "stochastically" in next(iter(fq.snapshot(model).in_float.values()))
    codes = torch.randint(-128, 127, (4, 6), dtype=torch.int8)
    product.fix_codes(codes)
    assert_fixed(model, codes)
    assert_fixed(fq.load(nn.Sequential(nn.Linear(6, 4)), fq.save(model, tmp_path, packed=True)), codes)


@pytest.mark.parametrize("weight", [INT16, "int8 per_channel(0) stochastic"])
def test_a_raised_scale_changes_the_codes_of_its_channel_alone(weight: str) -> None:
    dtype = torch.float16 if weight == INT16 else torch.float32
    float_model = nn.Sequential(nn.Linear(6, 4)).to(torch.float32)
    model = fq.prepare(float_model, fq.Config(fq.Rule(weight=weight, input="int8"))).to(dtype).eval()
    data = [torch.randn(8, 6, dtype=dtype)]
    fq.calibrate(model, data)
    product = quantized_weights(model)[KEY]
    codes, params = drawn(product.tensor, product.quantizer.spec)
    params.scale[0] = 1e-9
    product.fix_codes(codes, params)
    model[0].bias.data.fill_(100.0)
    fq.calibrate(model, data)
    assert float(product.quantizer.scale[0]) > 1e-9
    assert product.has_fixed_codes
    found = product.quantizer.codes(product.tensor)[0]
    assert_same_bits(found[1:], codes[1:])
    assert not torch.equal(found[0], codes[0])


def test_improve_fixes_codes_which_calibrate_leaves() -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)), "int4_weight_only").eval()
    fq.calibrate(model)
    fq.ptq.improve(model, [torch.randn(64, 32) for _ in range(3)])
    product = quantized_weights(model)[KEY]
    assert product.has_fixed_codes
    scale = product.quantizer.scale.clone()
    fq.calibrate(model)
    assert_same_bits(product.quantizer.scale, scale)
    assert product.has_fixed_codes
