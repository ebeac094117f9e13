"""Codes of weights that layers find once."""

import copy

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.model.config import Config, Rule
from fakequant.nn import cached_weights
from fakequant.ops import products
from tests.support.backends import recorded_calls
from tests.support.bits import assert_same_bits
from tests.support.copies import pickled, saved
from tests.support.processor import why_sums_saturate


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
