"""Models of one layer for integer execution, and their results in int64."""

import copy

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.model.config import Config, Rule, TensorConfig
from fakequant.nn import Execution
from fakequant.numerics import products as reference
from fakequant.numerics.products import ConvParams, QuantizedOperand
from tests.support.processor import why_sums_saturate


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
    """A frozen model of one layer with given scales in integer execution, and its simulated twin.

    Skips the test where the processor cannot: the layer is simulated there.
    """
    if not isinstance(layer, nn.Linear) and (reason := why_sums_saturate()) is not None:
        pytest.skip(reason)
    rule = Rule("*", input=TensorConfig(input, dynamic=dynamic), weight=weight, execution="auto")
    model = fq.prepare(nn.Sequential(layer), Config("test", (rule,)))
    quantizer = model[0]._input_quantizer
    if not dynamic:
        zero_point = None if quantizer.spec.symmetric else torch.tensor([3], dtype=torch.int32)
        quantizer.set_qparams(fq.QParams(torch.tensor([scale]), zero_point))
    simulated = copy.deepcopy(model.requires_grad_(False))
    fq.set_execution(simulated, "simulate")
    return model, simulated


def factor(quantizer, x):
    params = quantizer.qparams(x)
    spec = quantizer.spec
    codes, _ = fq.quantize(x, spec, scale=params.scale, zero_point=params.zero_point)
    return QuantizedOperand(codes, params.scale, params.zero_point)


def expected(layer, x):
    """By the definition, in int64."""
    given = factor(layer._input_quantizer, x), factor(layer._weight_quantizer, layer.weight), layer.bias
    if isinstance(layer, nn.Linear):
        return reference.linear(*given)
    padding = [0] * len(layer.kernel_size) if layer.padding == "valid" else layer.padding
    return reference.convolution(*given, ConvParams(layer.stride, padding, layer.dilation, layer.groups))


def assert_integer(model):
    assert model[0].execution is not Execution.SIMULATE
    assert model[0].why_simulated() is None
