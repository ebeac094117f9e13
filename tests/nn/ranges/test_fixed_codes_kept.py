"""Copies, files, exports and functions that change a model keep fixed codes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CheckpointError, ConfigError
from fakequant.model.weights import mark_ranges_current, quantized_weights
from fakequant.nn.quantizer import Quantizer
from tests.support.bits import assert_same_bits
from tests.support.copies import pickled, saved
from tests.support.fixed_codes import (  # noqa: F401
    INT16,
    KEY,
    KINDS,
    NEAR,
    assert_fixed,
    drawn,
    fixed,
    fresh,
    inputs,
    model_of,
    near_values,
    values,
)

pytestmark = pytest.mark.usefixtures("near_values")


def like(model: nn.Sequential) -> nn.Sequential:
    return model_of(str(model[0].weight_quantizer.spec))


def by_state_dict(model: nn.Sequential) -> nn.Module:
    again = like(model)
    again.load_state_dict(model.state_dict())
    return again


def assigned(model: nn.Sequential) -> nn.Module:
    again = like(model)
    again.load_state_dict(model.state_dict(), assign=True)
    return again


def on_meta_and_back(model: nn.Sequential) -> nn.Module:
    state = model.state_dict()
    again = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    again.load_state_dict(state)
    return again


def applied(model: nn.Sequential) -> nn.Module:
    return fq.apply(fresh(str(model[0].weight_quantizer.spec)), fq.snapshot(model))


def moved(model: nn.Sequential) -> nn.Module:
    return model.to("cpu").train().eval().requires_grad_(False).requires_grad_()


def learned_and_back(model: nn.Sequential) -> nn.Module:
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    fq.qat.set_scales(model, fq.qat.Scales.FIXED)
    return model


def calibrated(model: nn.Sequential) -> nn.Module:
    fq.calibrate(model)
    return model


def noted(model: nn.Sequential) -> nn.Module:
    mark_ranges_current(model)
    return model


@pytest.mark.parametrize(
    "way",
    [
        copy.deepcopy,
        by_state_dict,
        assigned,
        pickled,
        saved,
        on_meta_and_back,
        applied,
        moved,
        learned_and_back,
        calibrated,
        noted,
    ],
    ids=lambda way: getattr(way, "__name__", str(way)),
)
@pytest.mark.parametrize("spec", [INT16, NEAR])
def test_codes_survive(way: Callable[[nn.Sequential], nn.Module], spec: str) -> None:
    model = model_of(spec)
    codes, *_ = fixed(model)
    assert_fixed(way(model), codes)


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
        (f"{KEY}.fixed_codes", torch.zeros(4, 6, dtype=torch.uint8), "holds have other values"),
        (f"{KEY}.fixed_codes", torch.zeros(4, 6), "are torch.float32, but codes of near are stored as torch.uint8"),
        (
            f"{KEY}.fixed_codes",
            torch.zeros(6, 4, dtype=torch.uint8),
            r"shape \[6, 4\], but the weight of shape \[4, 6\]",
        ),
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
    torch.manual_seed(0)
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
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)), "int4_weight_only").eval()
    fq.calibrate(model)
    fq.ptq.improve(model, [torch.randn(64, 32) for _ in range(3)])
    product = quantized_weights(model)[KEY]
    assert product.has_fixed_codes
    scale = product.quantizer.scale.clone()
    fq.calibrate(model)
    assert_same_bits(product.quantizer.scale, scale)
    assert product.has_fixed_codes
