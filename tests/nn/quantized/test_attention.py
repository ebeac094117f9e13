"""Attention in visible parts: torch's bits without quantizers, and every product quantized with them."""

import copy
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError, ShapeError
from fakequant.nn.quantized.attention import QuantMultiheadAttention
from tests.support.bits import assert_same_bits

EMBED, HEADS, QUERIES, KEYS, N = 8, 2, 3, 5, 4


def data(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def slow_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(EMBED, HEADS, **options)
    for parameter in layer.parameters():  # biases are zeros at first
        nn.init.normal_(parameter, std=0.4)
    return layer.eval()


def inputs(kind: str, layer: nn.MultiheadAttention, batched: bool) -> tuple[Tensor, Tensor, Tensor]:
    def one(length: int, features: int, seed: int) -> Tensor:
        x = data(N, length, features, seed=seed) if batched else data(length, features, seed=seed)
        return x.transpose(0, 1) if batched and not layer.batch_first else x

    query = one(QUERIES, EMBED, 1)
    if kind == "self":
        return query, query, query
    key = one(KEYS, layer.kdim, 2)
    return query, key, key if kind == "memory" else one(KEYS, layer.vdim, 4)


def masks(attn: str, padding: str, keys: int, batched: bool) -> dict[str, Tensor | None]:
    n = N if batched else 1
    shape = (QUERIES, keys) if attn.endswith("2") else (n * HEADS, QUERIES, keys)
    hidden = data(*shape, seed=5) > 0.5
    hidden[..., 0] = False
    padded = (data(n, keys, seed=6) > 0.5) if batched else data(keys, seed=6) > 0.5
    padded[..., 0] = False
    return {
        "attn_mask": {"n": None, "b": hidden, "f": data(*shape, seed=7).masked_fill(hidden, -torch.inf)}[attn[0]],
        "key_padding_mask": {"n": None, "b": padded, "f": data(*padded.shape, seed=8).masked_fill(padded, -9.0)}[
            padding[0]
        ],
    }


def outcome(layer: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
    torch.manual_seed(11)
    try:
        return layer(*args, **options)
    except (AssertionError, RuntimeError) as error:
        return type(error)


LAYERS = [
    {"batch_first": first, "add_bias_kv": kv, "add_zero_attn": zero, "bias": bias, "dropout": dropout, **dims}
    for first, kv, zero, bias, dropout in itertools.product((False, True), repeat=5)
    for dims in ({}, {"kdim": 6, "vdim": 6}, {"kdim": 6, "vdim": 10})
]

CALLS = list(
    itertools.product(
        ("none", "b2", "f2", "b3", "f3"),
        ("none", "b", "f"),
        (False, True),
        ({"need_weights": False}, {}, {"average_attn_weights": False}),
    )
)


@pytest.mark.parametrize("every", [401, 101, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_without_quantizers_every_combination_has_the_bits_of_torch(every: int) -> None:
    """Each 401st of 34,560 combinations in the usual run: 401 shares no factor with the numbers of values."""
    number, refused = 0, 0
    for options, batched in itertools.product(LAYERS, (True, False)):
        layers: tuple[Any, Any] | None = None
        for kind, (attn, padding, causal, weights) in itertools.product(("self", "memory", "all"), CALLS):
            number += fits(kind, options)
            if number % every or not fits(kind, options):
                continue
            layer, quantized = layers = layers or both(options)
            args = inputs(kind, layer, batched)
            keys = args[1].shape[0 if not batched or not layer.batch_first else 1]
            case = {**masks(attn, padding, keys, batched), "is_causal": causal, **weights}
            with warnings.catch_warnings(), slow_path(), fq.disabled(quantized):
                warnings.simplefilter("ignore")  # masks of two types are deprecated
                expected, actual = outcome(layer, args, case), outcome(quantized, args, case)
            compare(actual, expected, (options, kind, case))
            refused += isinstance(expected, type)
    assert number == 34560
    assert refused < number / every / 5


def both(options: dict[str, Any]) -> tuple[Any, Any]:
    layer = attention(**{**options, "dropout": 0.3 if options["dropout"] else 0.0})
    layer.train(options["dropout"])
    quantized = fq.prepare(copy.deepcopy(layer), "int8")
    assert type(quantized) is QuantMultiheadAttention
    return layer, quantized


def test_layers_without_quantizers_and_their_gradients_have_the_bits_of_torch() -> None:
    for dims, weights in itertools.product(({}, {"kdim": 6, "vdim": 10}), (True, False)):
        layer = attention(**dims, add_bias_kv=True, dropout=0.2).train()
        quantized = fq.prepare(copy.deepcopy(layer), "int8")
        for attribute in quantized.operands(quantized):
            setattr(quantized, attribute, None)
        args = [x.requires_grad_() for x in inputs("all", layer, True)]
        for model in (layer, quantized):
            torch.manual_seed(5)
            y, _ = model(*args, need_weights=weights)
            y.square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert_same_bits(quantized.get_parameter(name).grad, parameter.grad, name)


def fits(kind: str, options: dict[str, Any]) -> bool:
    return kind == "all" or ("kdim" not in options if kind == "self" else options.get("kdim") == options.get("vdim"))


def compare(actual: Any, expected: Any, label: Any) -> None:
    if isinstance(expected, type):
        assert actual is expected, label
        return
    assert_same_bits(actual[0], expected[0], label)
    assert (actual[1] is None) == (expected[1] is None), label
    if expected[1] is not None:
        assert_same_bits(actual[1], expected[1], label)


def by_hand(model: Any, x: Tensor, scale: float) -> Tensor:
    """Self-attention [n, length, features] in eval mode, every operand quantized by its quantizer."""

    def quantized(attribute: str, value: Tensor) -> Tensor:
        quantizer = getattr(model, attribute)
        return fq.fake_quantize(value, quantizer.spec, scale=quantizer.scale, zero_point=quantizer.zero_point)

    n, length, _ = x.shape
    weight = quantized("_in_proj_weight_quantizer", model.in_proj_weight)
    projected = F.linear(quantized("_input_quantizer", x).transpose(0, 1), weight, model.in_proj_bias)
    q, k, v = (
        part.reshape(length, n, HEADS, EMBED // HEADS).permute(1, 2, 0, 3) for part in projected.split(EMBED, dim=-1)
    )
    q, k = quantized("_query_quantizer", q * scale), quantized("_key_quantizer", k)
    weights = quantized("_probability_quantizer", torch.softmax(q @ k.transpose(-2, -1), -1))
    y = (weights @ quantized("_value_quantizer", v)).permute(2, 0, 1, 3).reshape(length * n, EMBED)
    y = quantized("_out_proj_input_quantizer", y)
    y = F.linear(y, quantized("_out_proj_weight_quantizer", model.out_proj.weight), model.out_proj.bias)
    return y.view(length, n, EMBED).transpose(0, 1)


X = data(N, QUERIES, EMBED)


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = attention(batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def quantized(config: Any = "int8", **options: Any) -> SelfAttention:
    model = fq.prepare(SelfAttention(**options).eval(), config)
    fq.calibrate(model, [X], "max")
    return model


@pytest.mark.parametrize("config", ["int8", "uint8 asymmetric"])
def test_every_operand_is_quantized(config: str) -> None:
    if config != "int8":
        config = fq.Config("uint8", fq.Rule("*", input="uint8 asymmetric", weight="int8 per_channel(0)"))
    model = quantized(config)
    for need_weights in (True, False):
        y, _ = model.attention(X, X, X, need_weights=need_weights)
        assert_same_bits(y, by_hand(model.attention, X, (EMBED // HEADS) ** -0.5))


def test_a_packed_weight_has_one_scale_per_row() -> None:
    layer = quantized().attention
    assert layer._in_proj_weight_quantizer.scale.shape == (3 * EMBED, 1)
    assert layer._out_proj_weight_quantizer.scale.shape == (EMBED, 1)


def test_quantizers_that_self_attention_does_without_are_taken_away() -> None:
    model = quantized()
    assert model.attention._key_input_quantizer is None
    assert model.attention._value_input_quantizer is None
    assert all(quantizer.calibrated for quantizer in fq.nn.quantizers(model).values())
    with pytest.raises(
        CalibrationError, match=r"the key of this attention is a separate tensor, .* prepare the model again"
    ):
        model.attention(X, X + 1, X)


def test_inputs_that_differ_have_quantizers_of_their_own() -> None:
    layer = attention(batch_first=True, kdim=6, vdim=10)
    fq.prepare(layer, "int8")
    args = inputs("all", layer, True)
    fq.calibrate(layer, [args], "max")
    scales = [getattr(layer, f"_{name}input_quantizer").scale.item() for name in ("", "key_", "value_")]
    assert scales == [(x.abs().max() / 127).item() for x in args]
    assert [name for name in fq.nn.quantizers(layer) if name.endswith("weight_quantizer")] == [
        f"_{name}_proj_weight_quantizer" for name in ("q", "k", "v", "out")
    ]


def test_a_dynamic_key_quantizer_stays() -> None:
    layer = attention()
    fq.prepare(layer, "int8_per_token")
    query, key, value = inputs("all", layer, True)
    y, _ = layer(query, key, value)
    with fq.disabled(layer):
        assert not torch.equal(layer(query, key, value)[0], y)


def test_without_a_quantizer_of_probabilities_it_is_one_operation() -> None:
    model = quantized()
    model.attention._probability_quantizer = None
    seen = []
    attend, F.scaled_dot_product_attention = F.scaled_dot_product_attention, None
    try:
        F.scaled_dot_product_attention = lambda *args, **options: (seen.append(args), attend(*args, **options))[1]
        y = model(X)
    finally:
        F.scaled_dot_product_attention = attend
    (q, *_), layer = seen[0], model.attention
    assert_same_bits(layer._query_quantizer(q), q)
    torch.testing.assert_close(y, layer(X, X, X)[0])


def test_a_query_whose_keys_are_all_hidden_gets_zeros_as_in_one_operation() -> None:
    layer = attention(batch_first=True)
    fq.prepare(layer, "int8")
    fq.calibrate(layer, [(X, X, X)], "max", forward=lambda model, batch: model(*batch, need_weights=False))
    hidden = torch.zeros(N, QUERIES, dtype=torch.bool)
    hidden[1] = True
    x = X.clone().requires_grad_()
    y, _ = layer(x, x, x, key_padding_mask=hidden, need_weights=False)
    assert_same_bits(y[1].detach(), layer.out_proj.bias.detach().expand(QUERIES, -1).contiguous())
    y.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_nested_tensors_are_refused() -> None:
    layer = fq.prepare(attention(batch_first=True), "int8_weight_only")
    nested = torch.nested.nested_tensor([X[0], X[1, :2]])
    with pytest.raises(ShapeError, match="pad the inputs, and give a mask"):
        layer(nested, nested, nested)
