"""Quantized gradients of products beside those of linear layers: their bits are those of an independent reference."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.nn.backward import rotated
from tests.support.bits import assert_same_bits
from tests.support.gradient_oracles import GROUPS, PLAIN, REFERENCES, Held, Reference, assert_same_gradients, exact_sums

__all__ = ["exact_sums"]
pytestmark = pytest.mark.usefixtures("exact_sums")
INT8 = Reference(PLAIN["int8"])


def wanted(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


SHAPES = {
    "heads": ((2, 3, 16, 24), (2, 3, 24, 8)),
    "one matrix": ((2, 16, 24), (24, 8)),
    "broadcast": ((16, 24), (3, 24, 8)),
    "both broadcast": ((4, 1, 16, 24), (3, 24, 8)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", PLAIN)
def test_products_of_two_inputs(name: str, groups: str, shape: str) -> None:
    reference, x, other = Reference(PLAIN[name], groups), *(wanted(*own) for own in SHAPES[shape])
    model = fq.prepare(fq.nn.MatMul(), fq.Config(reference.rule()))
    assert_same_gradients(model(x, other), reference.matmul(x, other), model, nn.Module(), x, other)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reference", REFERENCES, ids=str)
def test_rounding_and_rotation_of_products_of_two_inputs(reference: Reference, shape: str) -> None:
    x, other = (wanted(*own) for own in SHAPES[shape])
    model = fq.prepare(fq.nn.MatMul(), fq.Config(reference.rule()))
    assert_same_gradients(model(x, other), reference.matmul(x, other), model, nn.Module(), x, other)


def test_vectors() -> None:
    model = fq.prepare(fq.nn.MatMul(), fq.Config(INT8.rule()))
    for x, other in ((wanted(8), wanted(8, 3)), (wanted(5, 8), wanted(8)), (wanted(8), wanted(2, 8, 3))):
        one, two = (x[None] if x.dim() == 1 else x), (other[:, None] if other.dim() == 1 else other)
        found = model(x, other)
        assert_same_gradients(found, INT8.matmul(one, two).reshape(found.shape), model, nn.Module(), x, other)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(24, 8)), nn.Parameter(torch.randn(24))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.weight, self.bias).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return torch.matmul((q @ k.mT).softmax(-1), v)


@pytest.mark.parametrize("reference", [*map(Reference, PLAIN.values()), *REFERENCES], ids=str)
def test_functions(reference: Reference) -> None:
    plain, x = Own(), wanted(2, 8, 8)
    model = fq.prepare(copy.deepcopy(plain), fq.Config(reference.rule(ops=("linear", "matmul"))), x.detach())
    q, k, v = reference.linear(x, plain.weight, plain.bias).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    right = reference.matmul(reference.matmul(q, k.mT).softmax(-1), v)
    assert_same_gradients(model(x), right, model, plain, x)


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}], ids=str)
@pytest.mark.parametrize("reference", REFERENCES, ids=str)
def test_attention(reference: Reference, options: dict[str, Any]) -> None:
    """Its operands are q, k, v, and the probabilities of the visible parts, which stay in float in the forward pass."""
    heads = 2 if options.get("enable_gqa") else 4
    q, k, v = inputs = wanted(2, 4, 8, 16), wanted(2, heads, 8, 16), wanted(2, heads, 8, 16)
    rule = reference.rule(ops=("sdpa",))
    model = fq.prepare(Attention(**options), fq.Config(rule), inputs)
    plain = fq.prepare(Attention(**options), fq.Config(replace(rule, gradient=None)), inputs)
    torch.testing.assert_close(model(*inputs), plain(*inputs))
    with torch.no_grad():
        assert_same_bits(model(*inputs), plain(*inputs))
    k, v = (one.repeat_interleave(4 // heads, 1) for one in (k, v))
    scores = reference.matmul(q, k.mT) * options.get("scale", 0.25)
    if options.get("is_causal"):
        scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)
    right = reference.matmul(scores.softmax(-1), v, in_float=True)
    assert_same_gradients(model(*inputs), right, model, plain, *inputs)


def attended(reference: Reference, layer: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What a MultiheadAttention [n, length, features] computes, as the text books have it."""
    heads, width = layer.num_heads, layer.embed_dim // layer.num_heads
    biases = layer.in_proj_bias.chunk(3)
    inputs = [x.transpose(0, 1) for x in (q, k, v)]
    if q is k is v:
        projected = reference.linear(inputs[0], layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    else:
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        projected = [reference.linear(*given) for given in zip(inputs, weights, biases, strict=True)]
    q, k, v = (x.unflatten(-1, (heads, width)).permute(1, 2, 0, 3) for x in projected)
    scores = reference.matmul(q * math.sqrt(1 / width), k.mT)
    y = reference.matmul(scores.softmax(-1), v).permute(2, 0, 1, 3).flatten(2)
    y = reference.linear(y.flatten(0, 1), layer.out_proj.weight, layer.out_proj.bias).view_as(y)
    return y.transpose(0, 1)


@pytest.mark.parametrize("others", [{}, {"kdim": 12, "vdim": 20}], ids=["one weight", "three weights"])
@pytest.mark.parametrize("reference", REFERENCES, ids=str)
def test_multihead_attention(reference: Reference, others: dict[str, int]) -> None:
    plain = nn.MultiheadAttention(16, 2, batch_first=True, **others)
    nn.init.normal_(plain.in_proj_bias)
    model = fq.prepare(copy.deepcopy(plain), fq.Config(reference.rule()))
    x = wanted(3, 8, 16)
    inputs = [x, *(wanted(3, 8, width) for width in others.values())] if others else [x]
    given = inputs if others else [x] * 3
    right = attended(reference, plain, *given)
    names = [path for path, _ in model.named_parameters()]
    assert names == [path for path, _ in plain.named_parameters()]
    assert_same_gradients(model(*given)[0], right, model, plain, *inputs)
    assert_same_bits(model(*given, need_weights=False)[0], right)


def after(mode: str, x: Tensor, h: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden state and cell after a step: formulas of the documentation of torch.nn."""
    if mode == "LSTM":
        i, f, g, o = (x + h).chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell
    if mode == "GRU":
        (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), h.chunk(3, 1)
        n = (xn + (xr + hr).sigmoid() * hn).tanh()
        return n + (xz + hz).sigmoid() * (hidden - n), cell
    return (x + h).tanh() if mode == "RNN_TANH" else (x + h).relu(), cell


def unrolled(reference: Reference, layer: Any, x: Tensor, ending: str, mode: str) -> list[Tensor]:
    hidden = cell = x.new_zeros(x.shape[1], layer.hidden_size)
    outputs = []
    w, u, b, c = (getattr(layer, f"{name}{ending}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    for step in reversed(x) if "reverse" in ending else x:
        held = Held.apply(hidden)
        own, kept = reference.linear(step, w, b), reference.linear(hidden, u, c, held)
        hidden, cell = after(mode, own, kept, held, cell)
        outputs.append(hidden)
    return outputs[::-1] if "reverse" in ending else outputs


LAYERS: dict[str, Callable[[], Any]] = {
    "LSTM": lambda: nn.LSTM(8, 16, bidirectional=True),
    "GRU": lambda: nn.GRU(8, 16),
    "RNN_TANH": lambda: nn.RNN(8, 16),
    "RNN_RELU": lambda: nn.RNN(8, 16, nonlinearity="relu"),
}


@pytest.mark.parametrize("reference", REFERENCES, ids=str)
@pytest.mark.parametrize("mode", LAYERS)
def test_recurrent_layers(mode: str, reference: Reference) -> None:
    plain, x = LAYERS[mode](), wanted(4, 3, 8)
    model = fq.prepare(copy.deepcopy(plain), fq.Config(reference.rule()))
    endings = ["_l0", "_l0_reverse"] if plain.bidirectional else ["_l0"]
    outputs = [unrolled(reference, plain, x, ending, mode) for ending in endings]
    right = torch.stack([torch.cat(both, 1) for both in zip(*outputs, strict=True)])
    assert_same_gradients(model(x)[0], right, model, plain, x)


@pytest.mark.parametrize("mode", ["LSTM", "GRU", "RNN_TANH"])
def test_cells(mode: str) -> None:
    plain, x = getattr(nn, f"{mode.removesuffix('_TANH')}Cell")(8, 16), wanted(3, 8)
    model = fq.prepare(copy.deepcopy(plain), fq.Config(INT8.rule()))
    found = model(x)
    found = found[0] if mode == "LSTM" else found
    assert_same_gradients(found, unrolled(INT8, plain, x[None], "", mode)[0], model, plain, x)


def test_a_checkpoint_and_a_copy_keep_the_gradients_of_functions(tmp_path: Any) -> None:
    x, plain = torch.randn(2, 8, 8), Own()
    config = fq.Config(INT8.rule(ops=("linear", "matmul")))
    model = fq.prepare(copy.deepcopy(plain), config, x)
    for other in (copy.deepcopy(model), fq.load(copy.deepcopy(plain), fq.save(model, tmp_path / "model"))):
        assert {site.gradient for site in other._sites.by_key().values()} == {INT8.gradient}


ATTN_QAT = {
    "NVFP4": "float4_e2m1fn per_block(-1:16) identity scale=float8_e4m3fn@per_tensor",
    "NVFP4, probabilities by query first": "float4_e2m1fn per_block(-1:16) identity scale=float8_e4m3fn@per_token",
    "MXFP4": "float4_e2m1fn per_block(-1:32) identity scale=float8_e8m0fnu:floor",
    "INT8": "int8 per_token identity",
}


class Chain(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul((torch.matmul(q, k.mT) * 0.25).softmax(-1), v)


def expected(spec: fq.QuantSpec, dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of q, k, v, by the formulas of the papers, through quantizers straight."""

    def quantized(x: Tensor) -> Tensor:
        return fq.fake_quantize(x.contiguous(), spec)

    with torch.no_grad():
        q, k = map(quantized, inputs[:2])
        v = quantized(inputs[2].mT).mT
        p = (q @ k.mT * 0.25).softmax(-1)
        low = quantized(p)
        dp = dy @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * 0.25
        return low @ v, ds @ k, ds.mT @ q, low.mT @ dy


@pytest.mark.parametrize("text", ATTN_QAT.values(), ids=ATTN_QAT)
def test_gradients_of_the_value_alone_see_quantized_probabilities(text: str) -> None:
    inputs = tuple(torch.randn(2, 3, 64, 64, dtype=torch.float64, requires_grad=True) for _ in range(3))
    rule: Any = fq.Rule("*", ops=("matmul",), input=f"{text} dynamic")
    model = fq.prepare(Chain(), fq.Config(rule), inputs)
    y, dy = model(*inputs), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    right, *gradients = expected(fq.QuantSpec.parse(text), dy, *inputs)
    torch.testing.assert_close(y, right, rtol=0, atol=1e-12)
    found = torch.autograd.grad(y, inputs, dy)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    in_float = (inputs[0] @ inputs[1].mT * 0.25).softmax(-1)
    assert (found[2] - in_float.mT @ dy).abs().max() > 1e-3
    assert_same_bits(model(*inputs), y)


TURNED = [(37, 6), (32, 16), (5, 40, 3), (40, 5, 2, 3), (0, 6)]


def test_a_hadamard_matrix_changes_no_sum() -> None:
    dy, x = torch.randint(-8, 9, (37, 4)).float(), torch.randint(-8, 9, (37, 6)).float()
    assert_same_bits(rotated(dy, 16).T @ rotated(x, 16), dy.T @ x)
    assert_same_bits(rotated(dy, 4).T @ rotated(x, 4), dy.T @ x)
    first = torch.zeros(16, 1)
    first[3] = 16.0
    assert rotated(first, 16).abs().unique().tolist() == [4.0]
    signs = torch.stack([rotated(torch.eye(16)[:, [row]], 16)[0, 0] for row in range(16)]).sign()
    assert 4 <= int((signs < 0).sum()) <= 12


def whole(*shape: int) -> Tensor:
    """Numbers whose sums are exact in any order."""
    return torch.randint(-8, 9, shape).float()


@pytest.mark.parametrize("shape", TURNED, ids=str)
@pytest.mark.parametrize("block", [4, 16])
def test_both_axes_are_rotated_alike(shape: tuple[int, ...], block: int) -> None:
    x = whole(*shape)
    assert_same_bits(rotated(x.transpose(0, 1).contiguous(), block, 1), rotated(x, block).transpose(0, 1))


@pytest.mark.parametrize("shape", TURNED[:-1], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_the_node_of_a_compiled_graph_is_what_it_declares(shape: tuple[int, ...], axis: int) -> None:
    for x in (whole(*shape), whole(*shape[::-1]).permute(*range(len(shape) - 1, -1, -1)), whole(*shape).half()):
        node = torch.ops.fakequant.rotate
        torch.library.opcheck(node.default, (x, 4, axis), test_utils=("test_schema", "test_faketensor"))
        assert_same_bits(node(x, 4, axis), rotated(x, 4, axis))


def test_a_compiled_rotation_serves_batches_of_any_size() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(rotated, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (8, 37, 50):
        for axis in (0, 1):
            x = whole(rows, 12)
            assert_same_bits(compiled(x, 16, axis), rotated(x, 16, axis))
