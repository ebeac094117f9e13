import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fakequant import fake_quantize
from fakequant.errors import ConfigError
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Config, Rule
from fakequant.model.prepare import prepare
from fakequant.model.presets import INT4_WEIGHT_ONLY, INT8
from fakequant.nn import QuantizedLayer, Quantizer, layers, quantizes
from tests.support.layer_cases import CASES, data

EVERYTHING = type(INT8)("everything", INT8.rules[:1])


# Layers with several products, which have test files of their own.
ATTENTION = {nn.MultiheadAttention}
RECURRENT = {nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell}


def test_every_layer_of_the_table_has_a_case() -> None:
    assert {type(module) for module, _ in CASES.values()} == set(layers()) - ATTENTION - RECURRENT


@pytest.mark.parametrize("name", CASES)
def test_layer_is_the_float_layer_on_quantized_tensors(name: str) -> None:
    """The same layer in float, given inputs and weight that were fake-quantized by hand, computes the same bits."""
    module, inputs = CASES[name]
    expected_module = copy.deepcopy(module)
    expected_inputs = [fake_quantize(x, "int8") if x.is_floating_point() else x for x in inputs]
    if hasattr(module, "weight"):
        channels = 1 if "Transpose" in name else 0
        with torch.no_grad():
            expected_module.weight.copy_(fake_quantize(module.weight, f"int8 per_channel({channels})"))
    quantized = prepare(copy.deepcopy(module), EVERYTHING)
    calibrate(quantized, [inputs], "max", inputs=slice(len(inputs)))
    got, expected = quantized(*inputs), expected_module(*expected_inputs)
    if not isinstance(got, tuple):
        got, expected = (got,), (expected,)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    assert isinstance(quantized, type(module))
    assert set(module.state_dict()) <= set(quantized.state_dict())


def test_output_size_of_a_transposed_convolution() -> None:
    layer = nn.ConvTranspose2d(2, 3, 3, stride=2)
    x = data(1, 2, 4, 4)
    shape = layer(x, output_size=[10, 10]).shape
    prepare(layer, INT4_WEIGHT_ONLY)
    assert layer(x, output_size=[10, 10]).shape == shape


def test_gradients_reach_input_weight_and_bias() -> None:
    layer = prepare(nn.Linear(4, 3), INT8)
    x = data(2, 4).requires_grad_()
    calibrate(layer, [x.detach()], "max")
    layer(x).sum().backward()
    weight = fake_quantize(layer.weight, "int8 per_channel(0)").detach()
    assert torch.equal(x.grad, F.linear(torch.ones(2, 3), weight.t()))
    assert layer.weight.grad is not None
    assert torch.equal(layer.bias.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}], ids=str)
def test_embeddings_with_options_that_change_the_table_are_refused(cls: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^0: {cls.__name__}\({next(iter(options))}=.*leave it in float by a rule"):
        prepare(nn.Sequential(cls(3, 2, **options)), INT8)


@pytest.mark.parametrize("padding", [None, 3])
def test_a_bag_with_weights_for_its_rows(padding: int | None) -> None:
    """The weights are not quantized; values and gradients are those of a bag of the quantized rows."""
    bag = prepare(nn.EmbeddingBag(7, 4, mode="sum", padding_idx=padding), INT8)
    calibrate(bag, [torch.tensor([[0, 1]])], "max")
    ids, factors = torch.tensor([[0, 3], [6, 3]]), torch.tensor([[0.3, 7.1], [-2.0, 1.5]], requires_grad=True)
    y = bag(ids, per_sample_weights=factors)
    table, given = fake_quantize(bag.weight, "int8 per_channel(0)").detach(), [bag.weight, factors]
    copies = [table.requires_grad_(), factors.detach().clone().requires_grad_()]
    options: Any = {"mode": "sum", "padding_idx": padding}
    expected = F.embedding_bag(ids, copies[0], per_sample_weights=copies[1], **options)
    assert torch.equal(y, expected)
    found, wanted = (torch.autograd.grad(one.sum(), of) for one, of in ((y, given), (expected, copies)))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_gradients_of_a_bilinear_layer_reach_both_inputs_and_the_weight() -> None:
    layer = nn.Bilinear(3, 4, 2)
    x, y = data(5, 3), data(5, 4)
    prepare(layer, INT8)
    calibrate(layer, [(x, y)], "max")
    given = [x.requires_grad_(), y.requires_grad_(), layer.weight]
    found = torch.autograd.grad(layer(x, y).sum(), given)
    quantized = [
        fake_quantize(t.detach(), spec).requires_grad_()
        for t, spec in zip(given, ("int8", "int8", "int8 per_channel(0)"), strict=True)
    ]
    expected = torch.autograd.grad(F.bilinear(*quantized, layer.bias).sum(), quantized)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_registration_needs_a_subclass() -> None:
    class NotLinear(QuantizedLayer):
        pass

    with pytest.raises(ConfigError, match="NotLinear is not a subclass of Linear"):
        quantizes(nn.Linear)(NotLinear)
    with pytest.raises(ConfigError, match="Linear already has the quantized class QuantLinear"):
        quantizes(nn.Linear)(type("Other", (QuantizedLayer, nn.Linear), {}))


def test_conv_channels_last() -> None:
    layer = nn.Conv2d(4, 6, 3)
    x = data(2, 4, 6, 6)
    quantized = prepare(layer, INT8)
    calibrate(quantized, [x], "max")
    nchw = quantized(x)
    nhwc = quantized(x.to(memory_format=torch.channels_last))
    # The product may be summed in another order; the quantized operands are the same bits.
    assert torch.equal(quantized.quantized_input(x), quantized.quantized_input(x.to(memory_format=torch.channels_last)))
    assert nhwc.shape == nchw.shape


def test_quantizers_have_public_names():
    layer = prepare(nn.Sequential(nn.Linear(4, 4)), INT8)[0]
    keys = list(layer.state_dict())
    assert layer.input_quantizer is layer._input_quantizer
    assert layer.weight_quantizer is layer._weight_quantizer
    other = Quantizer("int4")
    layer.input_quantizer, layer.weight_quantizer = other, None
    assert layer._input_quantizer is other is layer.input_quantizer
    assert layer._weight_quantizer is None is layer.weight_quantizer
    assert {name for name, _ in layer.named_modules()} == {"", "_input_quantizer"}
    assert list(layer.state_dict()) == keys
    pool = prepare(nn.Sequential(nn.MaxPool2d(2)), Config("pools", (Rule("*", input="int8"),)))[0]
    with pytest.raises(AttributeError, match="weight_quantizer"):
        pool.weight_quantizer  # noqa: B018
