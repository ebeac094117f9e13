"""Operands of backward products with the scales of earlier steps: those of an independent implementation."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.nn.backward.config import GradientConfig
from tests.support import oracle
from tests.support.bits import assert_same_bits
from tests.support.cases import FORMATS

OWN = "float8_e5m2; input=float8_e4m3fn; weight=float8_e4m3fn"
WAYS = ["delayed_max:3", "delayed_most_recent:3"]
SIZES = [1.0, 300.0, 2.0, 0.0, 0.0, 1e-3, 1e-3, 1e-3, 1e-3, 5.0]
"""By how much the gradients of the steps differ; most steps are clipped, or use few of the codes."""


class Recipe:
    """The scale of one tensor in numpy, as `amax_and_scale_update_after_reduction` of Transformer Engine writes it."""

    def __init__(self, scale: str, name: str) -> None:
        way, _, steps = scale.partition(":")
        self.is_max, self.history, self.case = way == "delayed_max", np.zeros(int(steps), np.float32), FORMATS[name]
        self.name = name
        self.scale = np.float32(1)

    def __call__(self, x: Tensor) -> Tensor:
        """x quantized by the scale of before; its magnitude goes to the first place."""
        values = np.ascontiguousarray(x.detach().numpy())
        self.history[0] = max(self.history[0], np.abs(values).max())
        scale = np.broadcast_to(self.scale, values.shape)
        found = oracle.fake_quantize(values, np.ascontiguousarray(scale), None, self.case.oracle, "divide").value
        return torch.from_numpy(found)

    def update(self) -> None:
        """The end of a step."""
        last = self.history[0]
        if last == 0:
            return
        rolled = np.roll(self.history, -1)
        amax = rolled.max() if self.is_max else last
        self.history = rolled
        self.history[0] = 0
        bound = np.float32({"float8_e5m2": 57344, "float8_e4m3fn": 448, "int8": 127}[self.name])
        self.scale = amax / bound


def prepared(layer: nn.Module, gradient: Any, preset: str = "int8_per_token") -> Any:
    return fq.prepare(nn.Sequential(layer), fq.Config(fq.Rule("*", preset, gradient=gradient)))


def gradients(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(model(x), [x, *model.parameters()], dy))


def histories(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if name.endswith("history")}


@pytest.mark.parametrize("scale", WAYS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_scales_and_gradients_are_those_of_the_recipe(scale: str, compiled: bool) -> None:
    torch._dynamo.reset()
    layer = nn.Linear(24, 16)
    model = prepared(layer, f"{OWN}; scale={scale}")
    call = torch.compile(model, fullgraph=True) if compiled else model
    of_dy, of_x, of_w = (Recipe(scale, name) for name in ("float8_e5m2", "float8_e4m3fn", "float8_e4m3fn"))
    generator = torch.Generator().manual_seed(0)
    for step, size in enumerate(SIZES):
        x, dy = (torch.randn(32, n, generator=generator) * size for n in (24, 16))
        with torch.no_grad():
            layer.weight.mul_(1.5)
        dx, dw, db = gradients(call, x, dy)
        rounded = of_dy(dy)
        assert_same_bits(dx, rounded @ of_w(layer.weight), step)
        assert_same_bits(dw, rounded.T @ of_x(x), step)
        if not compiled:
            assert_same_bits(db, dy.sum(0))
        for one in (of_dy, of_x, of_w):
            one.update()


def test_convolutions_and_other_arithmetics_and_formats() -> None:
    """A scale that is held becomes that of the next step; values beyond it have the largest code."""
    for gradient in ("int8", "int8 reciprocal", "float8_e4m3fn multiplier"):
        model = prepared(nn.Conv1d(4, 8, 3, bias=False), f"{gradient}; scale=delayed_max:2")
        x, spec = torch.randn(2, 4, 9), fq.QuantSpec.parse(gradient)
        first, second = torch.randn(2, 8, 7), 3 * torch.randn(2, 8, 7)
        gradients(model, x, first)
        dx, _ = gradients(model, x, second)
        params = fq.choose_qparams(first, spec)
        rounded = fq.fake_quantize(second, spec, scale=params.scale)
        weight = model[0].quantized_weight().detach()
        assert_same_bits(dx, torch.nn.grad.conv1d_input(x.shape, weight, rounded))
        assert rounded.abs().max() <= first.abs().max() * 1.01


def test_what_is_not_finite_is_no_magnitude() -> None:
    model = prepared(nn.Linear(8, 4), "float8_e5m2; scale=delayed_max:4")
    x, dy = torch.randn(3, 8), torch.randn(3, 4)
    bad = dy.clone()
    bad[0, 0] = float("inf")
    dx, *_ = gradients(model, x, bad)
    assert not dx[0].isfinite().any()
    assert dx[1].isfinite().all()
    (history,) = histories(model).values()
    assert history.tolist() == [bad[bad.isfinite()].abs().max().item(), 0.0, 0.0, 0.0, 0.0]
    gradients(model, x, torch.full((3, 4), float("nan")))
    gradients(model, x, torch.zeros(3, 4))
    dx, *_ = gradients(model, x, dy)
    assert dx.isfinite().all()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).tanh())


def test_calls_of_one_backward_pass_have_one_scale_and_are_one_step() -> None:
    model = fq.prepare(Twice(), fq.Config(fq.Rule("*", "int8_per_token", gradient="int8; scale=delayed_max:4")))
    x, seen = torch.randn(3, 8), list[float]()
    model.inner.register_full_backward_hook(lambda _, __, dy: seen.append(dy[0].abs().max().item()))
    for step in range(3):
        model(x).mul(step + 1.0).sum().backward()
    (history,) = histories(model).values()
    assert len(seen) == 6
    assert history.tolist() == [max(seen[place : place + 2]) for place in (4, 2, 0)] + [0.0, 0.0]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_checkpointed_layers_give_the_same_bits_and_histories(reentrant: bool, compiled: bool) -> None:
    if compiled and reentrant:
        pytest.skip("torch.compile takes checkpoints without reentrance alone")
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    rule = fq.Rule("*", input="float8_e4m3fn", weight="float8_e4m3fn", gradient="float8_e5m2; scale=delayed_max:2")
    x = torch.randn(4, 8, requires_grad=True)
    plain = fq.prepare(net, fq.Config(rule))
    fq.calibrate(plain, [x.detach()])
    fq.qat.set_scales(plain, fq.qat.Scales.LEARNED, "delayed_max", steps=3)
    other = copy.deepcopy(plain)

    def call(x: Tensor) -> Any:
        return checkpoint(other, x, use_reentrant=reentrant)

    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    for step in range(4):
        for model, y in ((plain, plain(x * (step + 1))), (other, call(x * (step + 1)))):
            model.zero_grad()
            y.square().sum().backward()
        for one, own in zip(plain.parameters(), other.parameters(), strict=True):
            assert_same_bits(own.grad, one.grad)  # type: ignore[arg-type]
    assert histories(plain).keys() == histories(other).keys()
    assert len(histories(plain)) == 6
    for name, value in histories(plain).items():
        assert_same_bits(histories(other)[name], value, name)


def test_products_of_a_layer_have_histories_of_their_own() -> None:
    config = fq.Config(fq.Rule("*", "int8_per_token", gradient=f"{OWN}; scale=delayed_max:2"))
    x = torch.randn(2, 5, 8, requires_grad=True)
    for layer, products in (
        (nn.MultiheadAttention(8, 2, batch_first=True), ["in_proj", "scores", "values", "out_proj"]),
        (
            nn.MultiheadAttention(8, 2, batch_first=True, kdim=6),
            ["q_proj", "k_proj", "v_proj", "scores", "values", "out_proj"],
        ),
        (nn.LSTM(8, 4, bidirectional=True, batch_first=True), ["ih_l0", "hh_l0", "ih_l0_reverse", "hh_l0_reverse"]),
        (nn.Linear(8, 8), ["product"]),
    ):
        model = fq.prepare(nn.Sequential(layer), config)
        inputs = (x, x[..., : layer.kdim], x) if isinstance(layer, nn.MultiheadAttention) else (x,)
        for _ in range(2):
            y: Any = model[0](*inputs)
            (y[0] if isinstance(y, tuple) else y).square().sum().backward()
        found = histories(model)
        names = [
            f"0._gradient_ranges.{one}_{own}.history" for one in products for own in ("gradient", "input", "weight")
        ]
        assert list(found) == names
        assert all(history.shape == (3,) and history[0] > 0 and history[1] > 0 for history in found.values())


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x) @ x.mT


def test_functions_have_histories_of_their_own() -> None:
    x = torch.randn(2, 5, 8, requires_grad=True)
    rule = fq.Rule(
        "*", "int8_per_token", gradient="int8; scale=delayed_max:2", ops=["scaled_dot_product_attention", "matmul"]
    )
    model = fq.prepare(Attention(), fq.Config(rule), x.detach())
    model(x).sum().backward()
    names = [
        "scaled_dot_product_attention_0._gradient_ranges.scores",
        "scaled_dot_product_attention_0._gradient_ranges.values",
    ]
    names.append("matmul_0._gradient_ranges.product")
    assert list(histories(model)) == [f"_sites.{name}_gradient.history" for name in names]
    assert all(history[0] > 0 for history in histories(model).values())


def trained(model: nn.Module, steps: range) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 8, generator=generator) * (1 + step % 3)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [own.detach().clone() for own in model.parameters()]


def made() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model = fq.prepare(
        net,
        fq.Config(fq.Rule("*", input="float8_e4m3fn", weight="float8_e4m3fn", gradient=f"{OWN}; scale=delayed_max:4")),
    )
    fq.calibrate(model, [torch.ones(2, 8)])
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED, "delayed_most_recent", steps=2)
    return model


@pytest.mark.parametrize("way", ["state dict", "copy", "pickle", "file"])
def test_training_goes_on_with_the_same_bits(way: str, tmp_path: Any) -> None:
    model = made()
    trained(model, range(3))
    if way == "state dict":
        other = made()
        other.load_state_dict(model.state_dict())
    elif way == "copy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        other = fq.load(net, fq.save(model, tmp_path / "model")).train()
    assert len(histories(other)) == 2 * (2 + 3)
    for one, own in zip(trained(model, range(3, 7)), trained(other, range(3, 7)), strict=True):
        assert_same_bits(own, one)


def test_evaluation_notes_nothing() -> None:
    model = made()
    trained(model, range(3))
    before, x = histories(model), torch.randn(4, 8) * 100
    model.eval()
    gradients(model, x, torch.randn(4, 8))
    for name, value in histories(model).items():
        assert_same_bits(value, before[name], name)


def test_a_float_state_dict_has_none_and_loads() -> None:
    model = made()
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    net.load_state_dict(fq.float_state_dict(model))
    before = histories(model)
    model.load_state_dict(net.state_dict())
    assert histories(model).keys() == before.keys()
    other = fq.prepare(
        nn.Sequential(nn.Linear(8, 8)), fq.Config(fq.Rule("*", "int8", gradient="int8; scale=delayed_max:3"))
    )
    model = fq.prepare(
        nn.Sequential(nn.Linear(8, 8)), fq.Config(fq.Rule("*", "int8", gradient="int8; scale=delayed_max:4"))
    )
    with pytest.raises(RuntimeError, match="history is of 3 steps, and the model counts 4"):
        model.load_state_dict(other.state_dict())


def test_histories_stay_in_float32_in_half_precision() -> None:
    model = made().to(torch.bfloat16)
    trained_bits = [one.dtype for one in histories(model).values()]
    assert set(trained_bits) == {torch.float32}
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_transforms_of_functions_are_refused_in_training_alone() -> None:
    model, x = prepared(nn.Linear(8, 4), "int8; scale=delayed_max:4"), torch.randn(3, 8)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, weights, (x,)).sum()

    weights = dict(model.named_parameters())
    with pytest.raises(ConfigError, match=r"transforms of torch\.func"):
        vmap(torch.func.grad(loss), (None, 0))(weights, x)
    model.eval()
    assert vmap(torch.func.grad(loss), (None, 0))(weights, x)["0.weight"].shape == (3, 4, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int8; scale=delayed", "scale must be such as 'delayed_max:16'"),
        ("int8; scale=delayed_max", "scale must be such as 'delayed_max:16'"),
        ("int8; scale=delayed_min:3", "scale must be such as 'delayed_max:16'"),
        ("int8; scale=delayed_max:0", "the number of steps that count, 1 to 65536, such as 16, got 0"),
        ("int8 per_token; scale=delayed_max:4", "int8 per_token cannot have a delayed scale"),
        ("uint8; scale=delayed_max:4", "uint8 .* cannot have a delayed scale"),
        (
            "int8; input=float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor; scale=delayed_max:4",
            "cannot have a delayed",
        ),
        ("int8; input=int8; hadamard=16; scale=delayed_max:4", "leave out hadamard= or scale="),
    ],
)
def test_what_cannot_be_delayed_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientConfig.parse(text)


def test_what_is_no_text_is_refused() -> None:
    for wrong in (16, True):
        with pytest.raises(ConfigError, match="scale must be such as 'delayed_max:16'"):
            GradientConfig("int8", scale=wrong)  # type: ignore[arg-type]


def test_the_text_form() -> None:
    config = GradientConfig("float8_e5m2", scale="delayed_most_recent:16")
    assert str(config) == "float8_e5m2 per_tensor; scale=delayed_most_recent:16"
    assert GradientConfig.parse(str(config)) == config
