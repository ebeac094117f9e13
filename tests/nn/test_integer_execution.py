"""Which layers run in integers and which are simulated, with the reasons, and how that is chosen."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.model.config import Config, Rule
from fakequant.nn import Execution, cached_weights
from fakequant.ops import products
from tests.support.backends import recorded_calls
from tests.support.bits import assert_same_bits
from tests.support.copies import pickled, saved
from tests.support.integer_models import assert_integer, hostile, prepared
from tests.support.processor import why_sums_saturate

REASONS = {
    "float8": (nn.Linear(4, 4), "float8_e4m3fn", "int8", "are not integers"),
    "float_input": (nn.Linear(4, 4), None, "int8", "input is in float"),
    "float_weight": (nn.Linear(4, 4), "int8", None, "weight is in float"),
    "int16": (nn.Linear(4, 4), "int16", "int8", "do not fit 8 bits"),
    "multiplier": (nn.Linear(4, 4), "int8 per_tensor multiplier", "int8", "MULTIPLIER"),
    "two scales": (nn.Linear(4, 4), "int8 per_tensor q8_0", "int8", "Q8_0 does not multiply codes by their scale"),
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
    rule = Rule("*", input=input, weight=weight, execution="integer")
    with pytest.raises(ConfigError, match=reason):
        fq.prepare(nn.Sequential(copy.deepcopy(layer)), Config("test", (rule,)))
    model = fq.prepare(
        nn.Sequential(copy.deepcopy(layer)), Config("test", (Rule("*", input=input, weight=weight, execution="auto"),))
    )
    assert reason in str(model[0].why_simulated())
    assert reason in str(fq.summary(model))
    with pytest.raises(ConfigError, match=reason):
        fq.set_execution(model, "integer")


def test_set_execution_refuses_whole_or_not_at_all():
    model = fq.prepare(
        nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4)), Config("w", (Rule("*", input="int8", weight="int8"),))
    )
    with pytest.raises(ConfigError, match=r": 1 \(there is no integer product"):
        fq.set_execution(model, "integer")
    assert model[0].execution is Execution.SIMULATE
    fq.set_execution(model, "integer", pattern="0")
    assert [m.execution.value for m in model] == ["integer", "simulate"]
    with pytest.raises(ConfigError, match="no quantized layer matches 'x'"):
        fq.set_execution(model, "auto", pattern="x")
    with pytest.raises(ConfigError, match=r"'simulate', 'auto', 'integer', .*got 'fast'"):
        fq.set_execution(model, "fast")


def test_a_quantizer_that_is_off_leaves_its_layer_to_simulation():
    model, simulated = prepared(nn.Linear(8, 4))
    x = hostile(3, 8).clamp(-9, 9)
    with fq.disabled(model), fq.disabled(simulated):
        assert_same_bits(model(x).detach(), simulated(x).detach())
        assert "mode off" in str(model[0].why_simulated())
    assert_integer(model)


@pytest.mark.parametrize("make", [lambda: nn.Linear(8, 4), lambda: nn.Conv2d(8, 4, 1)], ids=["linear", "convolution"])
def test_scales_of_float64_are_rounded_to_float32(make):
    model, simulated = prepared(make(), weight="int8")
    x = hostile(2, 8, 3, 8).clamp(-2, 2)
    with torch.no_grad():
        wanted = model(x)
        for net in (model, simulated):
            for quantizer in (net[0]._input_quantizer, net[0]._weight_quantizer):
                quantizer.double()
                quantizer.set_range(fq.Range(torch.tensor([-1.0]).double(), torch.tensor([1.0]).double()))
        torch.testing.assert_close(model(x), simulated(x))
        assert not torch.equal(model(x), wanted)


def test_what_torch_refuses_is_refused():
    """Dtypes that differ, outside of autocast; whatever the values."""
    model, simulated = prepared(nn.Linear(8, 4))
    for net in (model, simulated):
        with pytest.raises(RuntimeError, match="dtype"):
            net(torch.ones(2, 8, dtype=torch.bfloat16))


def scaled_twins(x_scale, w_scale):
    """A layer in integer execution and its simulated twin, with these scales, and an input of all of its codes."""
    layer = nn.Linear(64, 32, bias=False)
    generator = torch.Generator().manual_seed(0)
    codes, w_codes = (torch.randint(-127, 128, shape, generator=generator) for shape in ((16, 64), (32, 64)))
    layer.weight.data = w_codes * torch.tensor(w_scale)
    model, simulated = prepared(layer, weight="int8", scale=x_scale)
    for net in (model, simulated):
        net[0]._weight_quantizer.set_qparams(fq.QParams(torch.tensor([w_scale]), None))
    return model, simulated, codes * torch.tensor(x_scale)


@pytest.mark.parametrize(("x_scale", "w_scale", "defined"), [(1e25, 1e15, False), (1e25, 3.4e13, True)])
def test_scales_whose_product_overflows_make_nan_of_zero(x_scale, w_scale, defined):
    model, simulated, x = scaled_twins(x_scale, w_scale)
    with torch.no_grad():
        assert_same_bits(simulated(0 * x), torch.zeros(16, 32))
        assert_same_bits(model(0 * x), torch.full((16, 32), 0.0 if defined else torch.nan))


def test_a_first_call_that_is_watched_decides_nothing():
    model, _ = prepared(nn.Linear(8, 4))
    products.linear_unavailable.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(torch.ones(2, 8))).shape == (2, 4)
    assert products.linear_unavailable("cpu") is None
    assert_integer(model)


def allocate_too_much():
    torch.empty(1 << 55, dtype=torch.int8)


def raise_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("fail", [allocate_too_much, raise_out_of_memory])
def test_a_trial_without_memory_decides_nothing(fail, monkeypatch):
    def without_memory(*_):
        fail()

    products.linear_unavailable.cache_clear()
    monkeypatch.setattr(products, "_multiplies_slowly", lambda device_type: False)
    monkeypatch.setattr(torch, "_int_mm", without_memory)
    with pytest.raises(RuntimeError, match="memory"):
        products.linear_unavailable("cpu")
    monkeypatch.undo()
    assert products.linear_unavailable("cpu") is None


@pytest.mark.parametrize("exponent", range(-124, -150, -3))
def test_scales_whose_product_is_subnormal_lose_what_the_page_says(exponent):
    x_scale, w_scale = 1.37 * 2.0**-60, 1.29 * 2.0 ** (exponent + 60)
    model, simulated, x = scaled_twins(x_scale, w_scale)
    quantized = simulated[0]._input_quantizer(x).double(), simulated[0]._weight_quantizer(simulated[0].weight).double()
    wanted = nn.functional.linear(*quantized)
    lost = ((model(x) - wanted).abs().max() / wanted.abs().max()).item()
    assert lost <= 2.0**-150 / (x_scale * w_scale) + 2.0**-22
    assert lost > 2.0**-16 or exponent > -136


LAYERS = {
    "linear": (lambda: nn.Linear(24, 9), (7, 24)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 5)),
}


def step(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("learn", ["", *fq.nn.learned_ranges()])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_training_step_is_that_of_the_simulated_layer(kind, learn):
    make, shape = LAYERS[kind]
    models, x = [model.requires_grad_() for model in prepared(make())], hostile(*shape).clamp(-100, 100)
    for model in models:
        for quantizer in (model[0]._input_quantizer, model[0]._weight_quantizer) if learn else ():
            quantizer.freeze(model[0].weight) if not quantizer.calibrated else None
            quantizer.learn(learn)
    found, wanted = (step(model, x) for model in models)
    assert_integer(models[0])
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_same_bits(found[name], value, name)


@pytest.mark.parametrize("wants", ["x", "weight", "bias", "scale", None])
def test_codes_are_multiplied_only_where_no_gradient_is_wanted(wants):
    model, simulated = prepared(nn.Linear(24, 9))
    x = hostile(7, 24).clamp(-100, 100)
    with torch.no_grad():
        by_codes, in_float = model(x), simulated(x)
    assert not torch.equal(by_codes, in_float)  # otherwise the comparison below says nothing
    for layer in (model[0], simulated[0]):
        tensors = {"x": x, "weight": layer.weight, "bias": layer.bias, "scale": layer._input_quantizer.scale}
        if wants:
            tensors[wants].requires_grad_()
    assert_same_bits(model(x).detach(), in_float if wants else by_codes)


def test_a_model_calibrated_in_inference_mode_learns():
    model = prepared(nn.Linear(16, 8))[0].requires_grad_()
    x = torch.randn(4, 16)
    with torch.inference_mode():
        fq.calibrate(model, [x])
    model(x).sum().backward()
    assert model[0].weight.grad is not None


def model():
    if (reason := why_sums_saturate()) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(36, 5))
    fq.prepare(net, Config("test", (Rule("*", input="uint8", weight="int8 per_channel(0)", execution="auto"),)))
    fq.calibrate(net, [torch.rand(8, 2, 7, 7)], progress=False)
    assert all(layer.why_simulated() is None for layer in (net[0], net[2], net[4]))
    return net


def test_weights_of_layers_are_encoded_and_packed_once(monkeypatch):
    quantized = recorded_calls(monkeypatch)
    net, packed = model(), []
    pack = products.PackedWeight
    monkeypatch.setattr(products, "PackedWeight", lambda *given: packed.append(1) or pack(*given))
    x = torch.rand(3, 2, 7, 7)
    with torch.no_grad():
        wanted = net(x)
        packed.clear()
        with cached_weights(net):
            quantized.clear()
            for _ in range(3):
                assert_same_bits(net(x), wanted)
    weights = {tuple(net[i].weight.shape) for i in (0, 2, 4)}
    assert sorted(shape for what, shape in quantized if what == "codes" and shape in weights) == sorted(weights)
    assert not packed


def test_copies_and_pickles_encode_their_own_weights():
    net, x = model(), torch.rand(3, 2, 7, 7)
    with cached_weights(net), torch.no_grad():
        wanted = net(x)
        for again in (copy.deepcopy(net), pickled(net), saved(net)):
            assert_same_bits(again(x), wanted)
            again[0].weight.mul_(0.5)
            assert not torch.equal(again(x), wanted)
        assert_same_bits(net(x), wanted)
