"""Integer execution of layers: bits against int64."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.nn import Execution
from fakequant.ops import products
from fakequant.ops import products as convolutions
from tests.support.bits import assert_same_bits
from tests.support.integer_models import assert_integer, expected, hostile, prepared

INPUTS = (
    "int8",
    "int8_narrow",
    "int4",
    "int8 per_tensor reciprocal",
    "int8 per_tensor asymmetric",
    "uint8",
    "uint8 per_tensor symmetric",
    "uint4 per_tensor input_range",
    "int[-3,100] per_tensor asymmetric identity",
)
WEIGHTS = ("int8 per_channel(0)", "int8_narrow", "int4 per_channel(0) reciprocal", "int2 per_channel(0) identity")
CONVOLUTIONS = {
    "1d": (nn.Conv1d, (3, 8, 13), {"padding": 2, "dilation": 2}),
    "2d": (nn.Conv2d, (3, 8, 9, 7), {"padding": 1}),
    "2d_wide": (nn.Conv2d, (2, 8, 11, 13), {"padding": 1, "out_channels": 7}),  # blocks of 64 rows, and what is left
    "2d_strided": (nn.Conv2d, (2, 8, 9, 7), {"padding": (0, 2), "stride": (2, 1), "dilation": (1, 2)}),
    "2d_grouped": (nn.Conv2d, (2, 8, 6, 6), {"padding": 1, "groups": 4, "bias": False}),
    "2d_depthwise": (nn.Conv2d, (2, 8, 6, 6), {"padding": "valid", "groups": 8}),
    "2d_pointwise": (nn.Conv2d, (1, 8, 5, 5), {"kernel_size": 1}),
    "3d": (nn.Conv3d, (2, 8, 5, 4, 6), {"padding": 1}),
}


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("input", INPUTS)
@pytest.mark.parametrize("shape", [(17, 33), (2, 3, 33), (33,)], ids=str)
def test_linear_is_the_definition(input, weight, shape):
    model, _ = prepared(nn.Linear(33, 21), input, weight)
    assert_integer(model)
    x = hostile(*shape)
    with torch.no_grad():
        assert_same_bits(model(x), expected(model[0], x))
    assert_same_bits(model(x).detach(), expected(model[0], x).detach())


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("input", INPUTS)
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolution_is_the_definition(kind, input, weight):
    make, shape, options = CONVOLUTIONS[kind]
    model, _ = prepared(make(8, **{"out_channels": 16, "kernel_size": 3, **options}), input, weight)
    assert_integer(model)
    for x in (hostile(*shape), hostile(*shape).movedim(1, -1).contiguous().movedim(-1, 1)):
        with torch.no_grad():
            y = model(x)
        assert_same_bits(y, expected(model[0], x).detach())
        assert y.is_contiguous() or not x.is_contiguous()
    assert_same_bits(model(x[0]).detach(), expected(model[0], x).detach()[0])


@pytest.mark.parametrize("scale", [1e-38, 1e-45, 1e-20, 1e15, 3e38])
def test_extreme_scales(scale):
    model, _ = prepared(nn.Linear(9, 5), scale=scale)
    x = hostile(4, 9)
    assert_same_bits(model(x).detach(), expected(model[0], x).detach())
    model, _ = prepared(nn.Conv2d(2, 3, 3), scale=scale)
    x = hostile(2, 2, 5, 5)
    assert_same_bits(model(x).detach(), expected(model[0], x).detach())


def test_sums_at_the_end_of_int32():
    """The largest sums that are let through, which float32 cannot hold."""
    inner = products.largest_inner_size(255, 127)
    layer = nn.Linear(inner, 2, bias=False)
    layer.weight.data[0], layer.weight.data[1] = 1.0, -1.0
    model, _ = prepared(layer, "uint8 per_tensor symmetric", "int8_narrow", scale=1.0)
    assert_integer(model)
    x = torch.full((2, inner), 255.0)
    x[1, 0] = 254
    y = model(x).detach()
    assert_same_bits(y, expected(model[0], x).detach())
    assert y[0, 0] > 2**31 * 0.99 / 127


def test_sums_beyond_int32_are_simulated_with_the_reason():
    model, _ = prepared(nn.Linear(products.largest_inner_size(128, 128) + 1, 1, bias=False))
    assert "may leave int32" in str(model[0].why_simulated())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    model, simulated = prepared(nn.Linear(33, 21))
    model, simulated = model.to(dtype), simulated.to(dtype)
    x = hostile(5, 33).to(dtype)
    assert_integer(model)
    assert_same_bits(model(x).detach(), expected(model[0], x).detach().to(dtype))
    assert model(x).dtype == simulated(x).dtype == dtype


def test_float64_is_simulated():
    model, simulated = prepared(nn.Linear(33, 21))
    x = hostile(5, 33).double()
    assert_same_bits(model.double()(x), simulated.double()(x))


def test_scales_of_every_token():
    model, _ = prepared(nn.Linear(33, 21), "int8 per_token", dynamic=True)
    assert_integer(model)
    x = hostile(2, 7, 33).clamp(-1e30, 1e30)
    x[0, 0] = 0
    assert_same_bits(model(x).detach(), expected(model[0], x).detach())


def test_nan_is_not_hidden():
    model, simulated = prepared(nn.Linear(8, 4))
    x = hostile(3, 8).clamp(-9, 9)
    x[1, 2] = torch.nan
    assert model(x)[1].isnan().all()
    assert_same_bits(model(x).detach(), simulated(x).detach())
    model[0].weight.data[0, 0] = simulated[0].weight.data[0, 0] = torch.nan
    x = torch.ones(2, 8)
    assert_same_bits(model(x).detach(), simulated(x).detach())


@pytest.mark.parametrize("make", [lambda: nn.Linear(8, 4), lambda: nn.Conv1d(8, 4, 1)], ids=["linear", "convolution"])
def test_empty_tensors_are_simulated(make):
    model, simulated = prepared(make())
    x = torch.zeros(0, 8) if isinstance(model[0], nn.Linear) else torch.zeros(0, 8, 5)
    assert_same_bits(model(x), simulated(x))


def test_watched_calls_are_simulated():
    model, simulated = prepared(nn.Linear(8, 4))
    x = hostile(3, 8).clamp(-9, 9)
    assert_same_bits(torch.func.vmap(model)(x).detach(), torch.func.vmap(simulated)(x).detach())
    assert model.to("meta")(x.to("meta")).shape == (3, 4)


def test_autocast_gives_its_dtype():
    model, simulated = prepared(nn.Linear(8, 4))
    x = hostile(3, 8).clamp(-9, 9)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == simulated(x).dtype == torch.bfloat16
        assert_same_bits(model(x).detach(), expected(model[0], x).detach().bfloat16())


def test_a_changed_weight_is_multiplied_anew():
    model, _ = prepared(nn.Conv2d(2, 3, 3))
    x = hostile(2, 2, 5, 5).clamp(-9, 9)
    with torch.no_grad():
        for change in (lambda w: w.mul_(-3), lambda w: w.data.add_(0.5), lambda w: w.view(-1)[:4].zero_()):
            model(x)
            change(model[0].weight)
            assert_same_bits(model(x), expected(model[0], x))


def test_changed_windows_are_those_of_the_product():
    model, _ = prepared(nn.Conv2d(2, 2, 3, groups=1))
    x = hostile(2, 2, 9, 9).clamp(-9, 9)
    changes = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}
    with torch.no_grad():
        for name, value in changes.items():
            model(x)
            setattr(model[0], name, value)
            assert_same_bits(model(x), expected(model[0], x))
        model[0].stride, model[0].padding, model[0].dilation = (2, 2), (1, 1), (3, 3)
        y = model(x)
        model[0].stride, model[0].padding, model[0].dilation = 2, 1, 3  # as F.conv2d takes them too
        assert_same_bits(model(x), y)
        model[0].padding_mode = "reflect"
        assert "padding_mode" in model[0].why_simulated()


def test_copies_pickles_and_checkpoints(tmp_path):
    model, _ = prepared(nn.Conv2d(2, 3, 3))
    x = hostile(2, 2, 5, 5).clamp(-9, 9)
    y = model(x).detach()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_integer(again)
        assert_same_bits(again(x).detach(), y)
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    assert not [name for name in model.state_dict() if "ready" in name or "packed" in name]
    fq.save(model, tmp_path)
    loaded = fq.load(nn.Sequential(nn.Conv2d(2, 3, 3)), tmp_path).requires_grad_(False)
    assert loaded[0].execution is Execution.AUTO
    assert_same_bits(loaded(x).detach(), y)


def test_without_kernels_the_same_bits(monkeypatch):
    model, _ = prepared(nn.Linear(33, 21), "uint8")
    convolution, _ = prepared(nn.Conv2d(2, 3, 3))
    x, images = hostile(5, 33), hostile(2, 2, 5, 5)
    before = model(x).detach(), convolution(images).detach()
    monkeypatch.setattr(products, "load_kernels", lambda: "not here")
    monkeypatch.setattr(convolutions, "load_kernels", lambda: "not here")
    monkeypatch.setattr(convolutions, "_has_kernel", lambda: False)
    assert_same_bits(model(x).detach(), before[0])
    assert_same_bits(convolution(images).detach(), before[1])


def test_an_operator_that_saturates_is_found_out(monkeypatch):
    def saturating(a, b):
        return (a.double() @ b.double()).clamp(-(2**15), 2**15 - 1).int()

    monkeypatch.setattr(products, "_multiplies_slowly", lambda device_type: False)
    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert "sums codes" in str(products.linear_unavailable.__wrapped__("cpu"))

    def missing(*_):
        raise NotImplementedError("no such operator")

    monkeypatch.setattr(torch, "_int_mm", missing)
    assert "does not run here: no such operator" in str(products.linear_unavailable.__wrapped__("cpu"))
    assert "not for meta" in str(products.linear_unavailable("meta"))


def test_export_says_the_simulated_model(tmp_path):
    model, _ = prepared(nn.Linear(8, 4))
    x = hostile(3, 8).clamp(-9, 9)
    fq.export_onnx(model, x, tmp_path / "model.onnx")
    assert fq.verify_onnx(tmp_path / "model.onnx", model, [x]).exact
