"""Weights that are quantized once: the bits of fresh ones, and changes that are refused."""

import copy
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import CallError
from fakequant.nn import Kind, Mode, Quantizer, cached_weights
from fakequant.ops import library
from tests.support.backends import recorded_calls
from tests.support.bits import assert_same_bits
from tests.support.copies import pickled, saved

SPECS = ["int8 per_channel(0)", "uint4 per_tensor", "float8_e4m3fn per_block(-1:4)", "int8 per_tensor identity"]


class Layer(nn.Module):
    def __init__(self, spec="int8 per_channel(0)", *, fixed=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))
        self.quantizer = Quantizer(spec, kind=Kind.WEIGHT)
        if fixed:
            # Narrower than the weight: the mask matters.
            self.quantizer.freeze(self.weight.detach() * 0.5)

    def forward(self):
        return self.quantizer(self.weight)

    def codes(self):
        return self.quantizer.codes(self.weight)


@pytest.fixture
def quantized(monkeypatch):
    return recorded_calls(monkeypatch)


@torch.enable_grad()
def fresh(layer):
    """Values and gradient of the weight, quantized without a cache."""
    leaf = layer.weight.detach().clone().requires_grad_()
    clone = copy.deepcopy(layer.quantizer)
    assert clone._cache is None
    y = clone(leaf)
    (dx,) = torch.autograd.grad(y, leaf, torch.arange(1.0, y.numel() + 1).view_as(y).to(y.dtype))
    return y.detach(), dx


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("text", SPECS)
def test_a_weight_is_quantized_once_with_the_same_bits(text, fixed, quantized):
    layer = Layer(text, fixed=fixed)
    wanted, _ = fresh(layer)
    with cached_weights(layer), torch.no_grad():
        quantized.clear()
        for _ in range(3):
            assert_same_bits(layer(), wanted)
        assert len(quantized) == 1
    quantized.clear()
    for _ in range(2):
        layer()
    assert len(quantized) == 2


@pytest.mark.parametrize("text", SPECS)
def test_where_a_gradient_is_wanted_a_weight_is_quantized_as_usual(text):
    layer = Layer(text)
    wanted, wanted_gradient = fresh(layer)
    with cached_weights(layer):
        for _ in range(2):
            with torch.no_grad():
                assert_same_bits(layer(), wanted)
            y = layer()
            assert_same_bits(y.detach(), wanted)
            dy = torch.arange(1.0, y.numel() + 1).view_as(y)
            assert_same_bits(torch.autograd.grad(y, layer.weight, dy)[0], wanted_gradient)
        layer.weight.requires_grad_(False)
        assert layer().data_ptr() == layer().data_ptr()


def test_training_inside_is_not_changed():
    model = fq.prepare(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), "INT8")
    batches = [torch.randn(5, 8) for _ in range(4)]
    fq.calibrate(model, batches, progress=False)
    other = copy.deepcopy(model)
    for trained in (model, other):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5, momentum=0.9)
        with cached_weights(trained) if trained is model else torch.enable_grad():
            for x in batches:
                optimizer.zero_grad()
                trained(x).square().mean().backward()
                optimizer.step()
    for got, wanted in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_bits(got.detach(), wanted.detach())


def _step(make):
    def change(layer):
        optimizer = make([layer.weight])
        with torch.enable_grad():
            layer().square().sum().backward()
        optimizer.step()

    return change


CHANGES = {
    "sgd": _step(lambda p: torch.optim.SGD(p, lr=0.3)),
    "sgd foreach": _step(lambda p: torch.optim.SGD(p, lr=0.3, foreach=True)),
    "in place": lambda layer: torch.no_grad()(layer.weight.mul_)(0.3),
    "in place, detached": lambda layer: layer.weight.detach().mul_(0.3),
    "in place, one row": lambda layer: layer.weight.detach()[2].zero_(),
    "in place, inference mode": lambda layer: torch.inference_mode()(layer.weight.mul_)(0.3),
    "copy_": lambda layer: torch.no_grad()(layer.weight.copy_)(torch.randn(6, 8)),
    "data": lambda layer: setattr(layer.weight, "data", torch.randn(6, 8)),
    "data, transposed": lambda layer: setattr(layer.weight, "data", torch.randn(8, 6).T),
    "vector_to_parameters": lambda layer: nn.utils.vector_to_parameters(torch.randn(48), [layer.weight]),
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(6, 8))),
    "load_state_dict": lambda layer: layer.load_state_dict(Layer().state_dict()),
    "load_state_dict, assigned": lambda layer: layer.load_state_dict(Layer().state_dict(), assign=True),
    "half": lambda layer: layer.half(),
    "double": lambda layer: layer.double(),
    "bfloat16": lambda layer: layer.to(torch.bfloat16),
    "range": lambda layer: layer.quantizer.set_range(fq.Range(torch.full((6, 1), -0.7), torch.full((6, 1), 0.3))),
    "scale in place": lambda layer: layer.quantizer.scale.mul_(1.5),
    "reset": lambda layer: layer.quantizer.reset(),
    "specification": lambda layer: setattr(layer.quantizer, "spec", fq.QuantSpec("int4", fq.PerChannel(0))),
    "normalised": lambda layer: nn.init.orthogonal_(layer.weight),
}


@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused(change, codes):
    torch.manual_seed(1)
    layer = Layer()
    use = layer.codes if codes else layer
    with cached_weights(layer), torch.no_grad():
        use()
        CHANGES[change](layer)
        with pytest.raises(CallError, match=r"changed inside cached_weights, .* change it outside of the context"):
            use()
    layer()


@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
def test_replaced_memory_does_not_come_back_at_its_address(codes):
    """A new tensor there would look as the old one: `data` counts no change."""
    layer, memory = Layer(), np.ones((6, 8), np.float32)
    layer.weight.data = torch.from_numpy(memory)
    kept = weakref.ref(memory)
    del memory
    with cached_weights(layer), torch.no_grad():
        (layer.codes if codes else layer)()
        layer.weight.data = torch.zeros(6, 8)
        assert kept() is not None
    assert kept() is None


def test_codes_are_found_once_and_are_not_values(quantized):
    layer = Layer()
    with cached_weights(layer), torch.no_grad():
        quantized.clear()
        for _ in range(2):
            codes, params = layer.codes()
            values = library.dequantize(codes, params, layer.quantizer.spec, torch.float32)
            assert_same_bits(values, layer())
        assert sorted(what for what, _ in quantized) == ["codes", "values"]


def test_a_weight_with_nan_has_no_codes():
    layer = Layer()
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan
    with cached_weights(layer), torch.no_grad():
        assert layer.codes() is None
        assert layer.codes() is None


def test_what_is_given_out_may_be_written_to():
    layer = Layer()
    with cached_weights(layer), torch.no_grad():
        layer().zero_()
        assert_same_bits(layer(), fresh(layer)[0])


def test_inference_mode_keeps_plain_tensors():
    layer = Layer()
    with cached_weights(layer):
        with torch.inference_mode():
            y = layer()
        assert_same_bits(y.clone(), fresh(layer)[0])
        with torch.no_grad():
            assert_same_bits(layer(), fresh(layer)[0])


def test_nothing_is_kept_of_tensors_made_in_inference_mode():
    with torch.inference_mode():
        layer = Layer(fixed=False)
        with cached_weights(layer):
            layer()
            layer.weight.mul_(0.3)
            assert_same_bits(layer(), copy.deepcopy(layer.quantizer)(layer.weight))


def test_other_modes_and_stochastic_rounding_are_not_kept():
    layer = Layer("int8 per_channel(0) stochastic")
    with cached_weights(layer), torch.no_grad():
        assert not torch.equal(layer(), layer())
        layer.quantizer.mode = Mode.OFF
        assert layer() is layer.weight


def test_function_transforms_and_compilers_are_not_served():
    layer = Layer()
    wanted, _ = fresh(layer)
    with cached_weights(layer), torch.no_grad():
        layer()
        result = torch.func.functional_call(layer, {"weight": layer.weight.detach() * 0.3})
        assert_same_bits(result, copy.deepcopy(layer.quantizer)(layer.weight.detach() * 0.3))
        rows = torch.func.vmap(lambda shift: torch.func.functional_call(layer, {"weight": layer.weight + shift}))(
            torch.tensor([0.0, 0.25])
        )
        assert_same_bits(rows[0].detach(), wanted)
        assert not torch.equal(rows[1], rows[0])
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            assert_same_bits(compiled().detach(), fresh(layer)[0])
            layer.weight.data.mul_(0.3)  # without a trace
        exported = torch.export.export(layer, ()).module()
        assert_same_bits(exported().detach(), fresh(layer)[0])


def test_copies_and_pickles_have_no_cache():
    layer = Layer()
    with cached_weights(layer), torch.no_grad():
        layer()
        for other in (copy.deepcopy(layer), pickled(layer), saved(layer)):
            assert other.quantizer._cache is None
        assert set(layer.state_dict()) == {"weight", "quantizer.scale"}
    assert layer.quantizer._cache is None


def test_contexts_nest_and_end():
    layer = Layer()
    with cached_weights(layer), torch.no_grad():
        before = layer()
        with cached_weights(layer):
            assert_same_bits(layer(), before)
        assert layer.quantizer._cache is not None
        assert layer().data_ptr() == before.data_ptr()
    assert layer.quantizer._cache is None


def test_what_leaves_no_trace_is_what_the_documentation_says():
    layer = Layer()
    with cached_weights(layer), torch.no_grad():
        before = layer()
        layer.weight.data.mul_(0.3)
        assert_same_bits(layer(), before)
    assert_same_bits(layer().detach(), fresh(layer)[0])
