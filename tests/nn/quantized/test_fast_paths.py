"""Encoders of torch: what they compute is quantized with and without gradients, in training and in eval mode."""

import copy

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from tests.support.bits import assert_same_bits

BATCH = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(7))
PADDED = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 2 + [True] * 3])


def encoder_layer(activation: str = "relu") -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation=activation, batch_first=True).eval()


def encoder() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(encoder_layer(), 2).eval()


def quantized(model: nn.Module, config: fq.Config | str = "INT4_WEIGHT_ONLY") -> nn.Module:
    fq.prepare(model, config)
    fq.calibrate(model, [BATCH])
    return model


def assert_quantized_everywhere(model: nn.Module, reference: nn.Module, **masks: Tensor) -> None:
    """Without gradients it computes what it does with them, which is far from the float model.

    With those of its input: for those of a weight, `torch.matmul` uses another matrix product, with other last bits.
    """
    expected = model.requires_grad_(False)(BATCH.clone().requires_grad_(), **masks).detach()
    with torch.no_grad():
        got = model(BATCH, **masks)
        in_float = reference(BATCH, **masks)
    assert_same_bits(got, expected)
    kept = ~masks.get("src_key_padding_mask", torch.zeros(BATCH.shape[:2], dtype=torch.bool))
    assert (got - in_float)[kept].abs().max() > 0.01


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_layer_is_quantized_without_gradients(activation: str) -> None:
    layer = encoder_layer(activation)
    assert_quantized_everywhere(quantized(copy.deepcopy(layer)), layer)


@pytest.mark.parametrize("masks", [{}, {"src_key_padding_mask": PADDED}], ids=["whole", "padded"])
def test_an_encoder_is_quantized_without_gradients(masks: dict[str, Tensor]) -> None:
    assert_quantized_everywhere(quantized(encoder()), encoder(), **masks)


def test_layers_in_float_keep_their_fast_path() -> None:
    model = quantized(nn.Sequential(encoder_layer(), nn.Linear(16, 2)), fq.presets.INT8.with_rule(fq.Rule("0.*")))
    with torch.no_grad():
        assert torch.equal(model[0](BATCH), encoder_layer()(BATCH))
    assert model[0].activation_relu_or_gelu == 1
