"""Layers that multiply codes: bits against int64, gradients against the simulated layer, and what stays simulated."""

import copy
import io
import pickle

import pytest
import torch
from bits import assert_same_bits
from torch import nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.model.config import Config, Rule, TensorConfig
from fakequant.nn import Execution
from fakequant.numerics import products as reference
from fakequant.numerics.products import Factor, Places
from fakequant.ops import convolutions, products

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


def hostile(*shape):
    """Ties and their neighbours at scale 1/64, what saturates, zeros of both signs, infinities."""
    x = torch.randint(-400, 400, shape, generator=torch.Generator().manual_seed(3)) / 128
    flat = x.view(-1)
    flat[1::7] = torch.nextafter(flat[1::7], torch.tensor(torch.inf))
    flat[2::7] = torch.nextafter(flat[2::7], torch.tensor(-torch.inf))
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3e38, 1e-45])
    flat[: special.numel()] = special
    return x


def prepared(layer, input="int8", weight="int8 per_channel(0)", scale=1 / 64, dynamic=False):
    """A model of one layer with given scales that multiplies codes, and its simulated twin."""
    rule = Rule("*", TensorConfig(input, dynamic=dynamic), weight, execution="auto")
    model = fq.prepare(nn.Sequential(layer), Config("test", (rule,)))
    quantizer = model[0]._input_quantizer
    if not dynamic:
        zero_point = None if quantizer.spec.symmetric else torch.tensor([3], dtype=torch.int32)
        quantizer.set_qparams(fq.QParams(torch.tensor([scale]), zero_point))
    simulated = copy.deepcopy(model)
    fq.set_execution(simulated, "simulate")
    return model, simulated


def factor(quantizer, x):
    params = quantizer.qparams(x)
    spec = quantizer.spec
    codes, _ = fq.quantize(x, spec, scale=params.scale, zero_point=params.zero_point)
    return Factor(codes, params.scale, params.zero_point)


def expected(layer, x):
    """By the definition, in int64."""
    given = factor(layer._input_quantizer, x), factor(layer._weight_quantizer, layer.weight), layer.bias
    if isinstance(layer, nn.Linear):
        return reference.linear(*given)
    padding = [0] * len(layer.kernel_size) if layer.padding == "valid" else layer.padding
    return reference.convolution(*given, Places(layer.stride, padding, layer.dilation, layer.groups))


def assert_integer(model):
    assert model[0].execution is not Execution.SIMULATE
    assert model[0].why_simulated() is None


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("input", INPUTS)
@pytest.mark.parametrize("shape", [(17, 33), (2, 3, 33), (33,)], ids=str)
def test_linear_is_the_definition(input, weight, shape):
    torch.manual_seed(0)
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
    torch.manual_seed(0)
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


def step(model, x, *, learn=""):
    if learn:
        for quantizer in (model[0]._input_quantizer, model[0]._weight_quantizer):
            quantizer.freeze(model[0].weight) if not quantizer.calibrated else None
            quantizer.learn(learn)
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    return {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


LAYERS = {
    "linear": (lambda: nn.Linear(24, 9), (7, 24)),
    "tokens": (lambda: nn.Linear(24, 9, bias=False), (2, 3, 24)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 5)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False), (2, 4, 7, 5)),
    "one_axis": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 11)),
}


@pytest.mark.parametrize("learn", ["", "lsq"])
@pytest.mark.parametrize("input", ["int8", "uint8", "int4 per_tensor input_range", "int8 per_tensor clip"])
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_those_of_the_simulated_layer(kind, input, learn):
    if learn and input != "int8":
        learn = "lsq_plus" if input == "uint8" else learn
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    model, simulated = prepared(make(), input)
    x = hostile(*shape).clamp(-100, 100)
    found, wanted = step(model, x, learn=learn), step(simulated, x, learn=learn)
    assert_integer(model)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_same_bits(found[name], gradient, name)


def test_gradients_of_nothing_and_of_parts():
    model, simulated = prepared(nn.Linear(8, 4))
    for m in (model, simulated):
        m[0].weight.requires_grad_(False)
    x = hostile(3, 8).clamp(-9, 9)
    found, wanted = step(model, x), step(simulated, x)
    assert found["0.weight"] is None
    assert_same_bits(found["x"], wanted["x"])


def test_twice_differentiated_is_refused():
    model, _ = prepared(nn.Linear(8, 4))
    x = hostile(3, 8).clamp(-9, 9).requires_grad_()
    with pytest.raises(ConfigError, match="through simulated layers only"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


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


def test_saved_bytes_per_element():
    model, _ = prepared(nn.Linear(1024, 8, bias=False))
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel() * t.element_size()) or t, lambda t: t
    )
    x = torch.randn(512, 1024)
    with hooks:
        y = model(x)
    # Codes are attributes of the nodes, which the hooks do not see.
    codes = y.grad_fn.factors[0].codes
    assert codes.dtype == torch.int8
    assert sum(kept) + codes.numel() < 1.25 * x.numel()


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
    loaded = fq.load(nn.Sequential(nn.Conv2d(2, 3, 3)), tmp_path)
    assert loaded[0].execution is Execution.AUTO
    assert_same_bits(loaded(x).detach(), y)


REASONS = {
    "float8": (nn.Linear(4, 4), "float8_e4m3fn", "int8", "no integers"),
    "float_input": (nn.Linear(4, 4), None, "int8", "input is in float"),
    "float_weight": (nn.Linear(4, 4), "int8", None, "weight is in float"),
    "int16": (nn.Linear(4, 4), "int16", "int8", "do not fit 8 bits"),
    "multiplier": (nn.Linear(4, 4), "int8 per_tensor multiplier", "int8", "MULTIPLIER"),
    "stochastic": (nn.Linear(4, 4), "int8 per_tensor stochastic", "int8", "stochastic"),
    "blocks": (nn.Linear(4, 4), "int8 per_block(-1:2)", "int8", "one scale"),
    "weight_blocks": (nn.Linear(4, 4), "int8", "int8 per_block(-1:2)", "one scale"),
    "weight_inner": (nn.Linear(4, 4), "int8", "int8 per_channel(1)", "one scale"),
    "unsigned_weight": (nn.Linear(4, 4), "int8", "uint8", "signed"),
    "tokens_of_images": (nn.Conv2d(4, 4, 1), "int8 per_token", "int8", "one scale"),
    "reflect": (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), "int8", "int8", "padding_mode"),
    "same": (nn.Conv2d(4, 4, 3, padding="same"), "int8", "int8", "padding='same'"),
    "embedding": (nn.Embedding(4, 4), None, "int8", "no integer product for Embedding"),
    "transposed": (nn.ConvTranspose2d(4, 4, 3), "int8", "int8", "no integer product for ConvTranspose2d"),
}


@pytest.mark.parametrize("name", REASONS)
def test_why_a_layer_is_simulated(name):
    layer, input, weight, reason = REASONS[name]
    rule = Rule("*", input, weight, execution="integer")
    with pytest.raises(ConfigError, match=reason):
        fq.prepare(nn.Sequential(copy.deepcopy(layer)), Config("test", (rule,)))
    model = fq.prepare(
        nn.Sequential(copy.deepcopy(layer)), Config("test", (Rule("*", input, weight, execution="auto"),))
    )
    assert reason in str(model[0].why_simulated())
    assert reason in str(fq.summary(model))
    with pytest.raises(ConfigError, match=reason):
        fq.set_execution(model, "integer")


def test_set_execution_refuses_whole_or_not_at_all():
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4)), Config("w", (Rule("*", "int8", "int8"),)))
    with pytest.raises(ConfigError, match="1: there is no integer product"):
        fq.set_execution(model, "integer")
    assert model[0].execution is Execution.SIMULATE
    fq.set_execution(model, "integer", pattern="0")
    assert [m.execution.value for m in model] == ["integer", "simulate"]
    with pytest.raises(ConfigError, match="no quantized layer matches 'x'"):
        fq.set_execution(model, "auto", pattern="x")
    with pytest.raises(ConfigError, match="'simulate', 'auto', 'integer', got 'fast'"):
        fq.set_execution(model, "fast")


def test_a_quantizer_that_is_off_leaves_its_layer_to_simulation():
    model, simulated = prepared(nn.Linear(8, 4))
    x = hostile(3, 8).clamp(-9, 9)
    with fq.disabled(model), fq.disabled(simulated):
        assert_same_bits(model(x).detach(), simulated(x).detach())
        assert "mode off" in str(model[0].why_simulated())
    assert_integer(model)


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
