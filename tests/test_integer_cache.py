"""Cached codes of weights: the bits of fresh ones, whatever happens to the weight."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.model.config import Config, Rule
from fakequant.nn import cached_weights
from fakequant.ops import convolutions, library
from tests.support.bits import assert_same_bits
from tests.support.weight_changes import CHANGES, Layer, recorded

SPECS = ["int8 per_channel(0)", "int4 per_tensor", "int8 per_tensor identity", "int8 per_tensor input_range"]


class Coded(Layer):
    """The values of the codes of a weight; with gradients, the quantized weight."""

    def forward(self):
        if torch.is_grad_enabled():
            return self.quantizer(self.weight)
        codes, params = self.quantizer.codes(self.weight)
        return library.dequantize(codes, params, self.quantizer.spec, self.weight.dtype)


@torch.no_grad()
def decoded(layer):
    return layer()


def fresh(layer):
    """The values of the codes of a copy, which has no cache."""
    return decoded(copy.deepcopy(layer))


@pytest.fixture
def encoded(monkeypatch):
    """The shapes of the tensors that a backend has encoded."""
    return recorded(monkeypatch, "encode")


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("text", SPECS)
def test_a_weight_is_encoded_once_with_the_same_bits(text, fixed, encoded):
    layer = Coded(text, fixed=fixed)
    wanted = decoded(layer)
    with cached_weights(layer):
        encoded.clear()
        for _ in range(3):
            assert_same_bits(decoded(layer), wanted)
        assert len(encoded) == 1


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    torch.manual_seed(1)
    layer = Coded()
    with cached_weights(layer):
        before = decoded(layer)
        CHANGES[change](layer)
        assert_same_bits(decoded(layer), fresh(layer))
    assert change == "learned" or before.dtype != layer.weight.dtype or not torch.equal(before, decoded(layer))


def test_values_and_codes_of_one_weight_do_not_mix():
    layer = Coded()
    with cached_weights(layer):
        for _ in range(2):
            assert_same_bits(layer.quantizer(layer.weight).detach(), decoded(layer))


def test_codes_that_were_written_to_are_made_anew():
    layer = Coded()
    with cached_weights(layer), torch.no_grad():
        layer.quantizer.codes(layer.weight)[0].zero_()
        assert_same_bits(layer(), fresh(layer))


def test_nan_is_never_kept():
    layer = Coded()
    with cached_weights(layer), torch.no_grad():
        layer.weight[0, 0] = torch.nan
        assert layer.quantizer.codes(layer.weight) is None
        layer.weight[0, 0] = 1.0
        assert_same_bits(layer(), fresh(layer))


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(36, 5))
    fq.prepare(net, Config("test", (Rule("*", "uint8", "int8 per_channel(0)", execution="auto"),)))
    fq.calibrate(net, [torch.rand(8, 2, 7, 7)], progress=False)
    assert all(layer.why_simulated() is None for layer in (net[0], net[2], net[4]))
    return net


def test_weights_of_layers_are_encoded_and_packed_once(encoded, monkeypatch):
    net, packed = model(), []
    pack = convolutions.PackedWeight
    monkeypatch.setattr(convolutions, "PackedWeight", lambda *given: packed.append(1) or pack(*given))
    x = torch.rand(3, 2, 7, 7)
    with torch.no_grad():
        wanted = net(x)
        packed.clear()
        with cached_weights(net):
            encoded.clear()
            for _ in range(3):
                assert_same_bits(net(x), wanted)
    weights = {tuple(net[i].weight.shape) for i in (0, 2, 4)}
    assert sorted(shape for shape in encoded if shape in weights) == sorted(weights)
    assert not packed


def test_copies_pickles_and_checkpoints_while_codes_are_kept():
    net, x = model(), torch.rand(3, 2, 7, 7)
    with cached_weights(net), torch.no_grad():
        wanted = net(x)
        stream = io.BytesIO()
        torch.save(net, stream)
        stream.seek(0)
        copies = copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(stream, weights_only=False)
        other = model()
        other[0].weight.mul_(0.5)
        net.load_state_dict(other.state_dict())
        assert_same_bits(net(x), other(x))
        for again in copies:
            assert_same_bits(again(x), wanted)
            again[0].weight.mul_(0.5)
            again[2].weight.copy_(other[2].weight)
            again[4].weight.copy_(other[4].weight)
            again[0]._weight_quantizer.set_qparams(other[0]._weight_quantizer.qparams(other[0].weight))
            assert_same_bits(again(x), other(x))
