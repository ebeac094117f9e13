"""Quantized gradients: their operands are those of an independent implementation, and training works with them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight

import fakequant as fq
from fakequant.errors import ConfigError, CoverageWarning
from fakequant.nn.backward import GradientConfig
from fakequant.numerics.philox import draw_seed
from tests.support.bits import assert_same_bits
from tests.support.gradient_oracles import GROUPS, PLAIN, by_oracle

NVFP4 = "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor"
MXFP4 = "float4_e2m1fn per_block(-1:32,pad) scale=float8_e8m0fnu:floor"
TRAINING = [getattr(fq.presets, f"{name}_TRAINING").rules[0].gradient for name in ("FP8", "MXFP8", "MXFP4", "NVFP4")]


GRADIENTS_OF_16_BITS = fq.Config(fq.Rule("*", weight="int16", gradient="int16; input=int16; weight=int16"))


def prepared(layer: nn.Module, gradient: Any, preset: str = "int8_per_token") -> Any:
    model = fq.prepare(nn.Sequential(layer), fq.Config(fq.Rule("*", preset, gradient=gradient)))
    return model.double() if next(layer.parameters()).dtype is torch.float64 else model


def gradients(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(model(x), [x, *model.parameters()], dy))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", PLAIN)
def test_operands_of_linear_layers_are_the_oracles(name: str, groups: str) -> None:
    case, generator = PLAIN[name], torch.Generator().manual_seed(0)
    spec = case.spec(GROUPS[groups], fq.Arithmetic.DIVIDE)
    layer = nn.Linear(24, 16)
    x, dy = (torch.randn(32, n, generator=generator) * torch.rand(32, 1, generator=generator) for n in (24, 16))
    model = prepared(layer, GradientConfig(spec, input=spec, weight=spec))
    dx, dw, db = gradients(model, x, dy)
    weight = layer.weight.detach()
    assert_same_bits(dx, by_oracle(dy, case, groups) @ by_oracle(weight.T, case, groups).T)
    assert_same_bits(dw, by_oracle(dy.T, case, groups) @ by_oracle(x.T, case, groups).T)
    assert_same_bits(db, dy.sum(0))


@pytest.mark.parametrize("name", PLAIN)
def test_operands_of_convolutions_are_the_oracles(name: str) -> None:
    case, generator = PLAIN[name], torch.Generator().manual_seed(0)
    layer = nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2)
    x, dy = (torch.randn(shape, generator=generator) for shape in ((4, 6, 9, 9), (4, 8, 5, 5)))
    spec = case.spec(fq.PerTensor(), fq.Arithmetic.DIVIDE)
    model = prepared(layer, GradientConfig(spec, input=spec, weight=spec))
    dx, dw, db = gradients(model, x, dy)
    of_dy, options = by_oracle(dy, case, "tensor"), ((2, 2), (1, 1), (1, 1), 2)
    assert_same_bits(dx, conv2d_input(x.shape, by_oracle(layer.weight.detach(), case, "tensor"), of_dy, *options))
    assert_same_bits(dw, conv2d_weight(by_oracle(x, case, "tensor"), layer.weight.shape, of_dy, *options))
    assert_same_bits(db, dy.sum((0, 2, 3)))


def test_blocks_of_convolutions_lie_along_channels_and_along_samples() -> None:
    layer = nn.Conv1d(4, 8, 3)
    spec = "int8 per_block(-1:4)"
    x, dy = torch.randn(8, 4, 7), torch.randn(8, 8, 5)
    dx, dw, _ = gradients(prepared(layer, GradientConfig(spec, input=spec, weight=spec)), x, dy)

    def along(axis: int, value: Tensor) -> Tensor:
        return fq.fake_quantize(value.movedim(axis, -1).contiguous(), spec).movedim(-1, axis)

    weight = layer.weight.detach()
    assert_same_bits(dx, torch.nn.grad.conv1d_input(x.shape, along(0, weight), along(1, dy)))
    assert_same_bits(dw, torch.nn.grad.conv1d_weight(along(0, x), weight.shape, along(0, dy)))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, padding=(1, 2), padding_mode="circular"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, (4, 3), padding="same"),
        nn.Conv2d(4, 4, 3, padding="same", dilation=2),
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
    ],
    ids=lambda layer: f"{layer.padding}, {layer.padding_mode}",
)
def test_all_paddings(layer: Any) -> None:
    """In float64 with operands of 16 bits gradients are nearly those of torch."""
    layer = layer.double()
    with torch.no_grad():
        layer.weight.copy_(layer.weight.mul(64).round().clamp(-15, 15))
    config = fq.Config(fq.Rule("*", weight="int16"))
    plain = fq.prepare(nn.Sequential(copy.deepcopy(layer)), config)
    model = fq.prepare(nn.Sequential(copy.deepcopy(layer)), GRADIENTS_OF_16_BITS)
    x = torch.randint(-8, 9, (3, 4, 9, 8)).double()
    dy = torch.randint(-8, 9, layer(x).shape).double()
    for found, right in zip(gradients(model, x, dy), gradients(layer, x, dy), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3 * right.abs().max().item())
    assert_same_bits(model(x), plain(x))
    with fq.disabled(model):  # gradients, too
        for found, right in zip(gradients(model, x, dy), gradients(layer, x, dy), strict=True):
            assert_same_bits(found, right)


def test_convolutions_do_without_a_hadamard_matrix() -> None:
    x, dy, layer = torch.randn(4, 2, 7), torch.randn(4, 3, 5), nn.Conv1d(2, 3, 3)
    plain, with_it = (prepared(copy.deepcopy(layer), f"int8; input=int8{more}") for more in ("", "; hadamard=16"))
    for one, other in zip(gradients(plain, x, dy), gradients(with_it, x, dy), strict=True):
        assert_same_bits(other, one)


def test_without_more_the_operands_are_those_of_the_forward_product() -> None:
    layer = nn.Linear(16, 8)
    model = prepared(layer, "float8_e5m2")
    x, dy = torch.randn(3, 5, 16), torch.randn(3, 5, 8)
    dx, dw, _ = gradients(model, x, dy)
    rows, of_x, of_w = fq.fake_quantize(dy, "float8_e5m2").view(15, 8), model[0]._input_quantizer(x), None
    of_w = model[0].quantized_weight().detach()
    assert_same_bits(dx, (rows @ of_w).view(3, 5, 16))
    assert_same_bits(dw, rows.T @ of_x.view(15, 16))


def test_the_forward_pass_and_runs_without_gradients_stay_as_they_are() -> None:
    for layer, x in ((nn.Linear(16, 8), torch.randn(3, 5, 16)), (nn.Conv2d(4, 8, 3, bias=False), torch.randn(4, 6, 6))):
        plain = fq.prepare(nn.Sequential(copy.deepcopy(layer)), "int8_per_token")
        model = prepared(layer, "int4")
        assert_same_bits(model(x), plain(x))
        with torch.no_grad():
            assert_same_bits(model(x), plain(x))


@pytest.mark.parametrize("layer", [nn.Linear(16, 8), nn.Conv1d(16, 8, 1)], ids=["linear", "convolution"])
def test_layers_in_integer_execution_are_simulated_where_a_gradient_is_wanted(layer: nn.Module) -> None:
    x = torch.randn(16, 16)
    dy = torch.randn(layer(x).shape)
    simulated = prepared(layer, "int4", "int8")
    fq.calibrate(simulated, [x])
    model = fq.set_execution(copy.deepcopy(simulated), "auto")
    for one, other in zip(gradients(model, x, dy), gradients(simulated, x, dy), strict=True):
        assert_same_bits(one, other)


def test_stochastic_gradients_are_those_of_their_seeds_and_average_to_the_gradient() -> None:
    spec = "int4 per_token stochastic"
    model = prepared(nn.Linear(8, 16), spec)
    x, dy = torch.randn(64, 8), torch.randn(64, 16)
    torch.manual_seed(3)
    dx, dw, _ = gradients(model, x, dy)
    torch.manual_seed(3)
    first, second = draw_seed(), draw_seed()
    weight, of_x = model[0].quantized_weight().detach(), model[0]._input_quantizer(x)
    of_dx = fq.fake_quantize(dy, fq.QuantSpec.parse(spec), seed=first)
    assert_same_bits(dx, of_dx @ weight)
    own = fq.fake_quantize(dy, fq.QuantSpec.parse("int4 per_channel(1) stochastic"), seed=second)
    assert_same_bits(dw, own.T @ of_x)
    mean = torch.stack([gradients(model, x, dy)[1] for _ in range(600)]).mean(0)
    exact, once = dy.T @ of_x, (dw - dy.T @ of_x).norm()
    assert (mean - exact).norm() < 3 * once / 600**0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_and_autocast(dtype: torch.dtype) -> None:
    model = prepared(nn.Linear(32, 16), GradientConfig(NVFP4, input=NVFP4, hadamard=16)).to(dtype)
    found = gradients(model, torch.randn(48, 32, dtype=dtype), torch.randn(48, 16, dtype=dtype))
    assert {one.dtype for one in found} == {dtype}
    model = prepared(nn.Linear(32, 16), GradientConfig(NVFP4, input=NVFP4, weight=NVFP4, hadamard=16))
    x = torch.randn(48, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert {x.grad.dtype, model[0].weight.grad.dtype} == {torch.float32}


@pytest.mark.parametrize("shape", [(0, 16), (16,), (1, 16), (2, 3, 5, 16)])
def test_shapes(shape: tuple[int, ...]) -> None:
    for config in (GradientConfig(NVFP4, NVFP4, hadamard=16), GradientConfig(MXFP4, MXFP4, MXFP4, 32)):
        model = prepared(nn.Linear(16, 8), config)
        dx, dw, db = gradients(model, torch.randn(shape), torch.randn(*shape[:-1], 8))
        assert (dx.shape, dw.shape, db.shape) == (shape, (8, 16), (8,))
        assert all(one.isfinite().all() for one in (dx, dw, db))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("config", [*TRAINING, GradientConfig("int8 per_token stochastic")], ids=str)
def test_what_is_not_finite_reaches_the_gradients(config: GradientConfig, value: float) -> None:
    """As a GradScaler looks for it; where it lies in no row or column of a gradient, that is what it was."""
    model = prepared(nn.Linear(32, 8), config)
    dy = torch.randn(32, 8)
    dy[3, 2] = value
    dx, dw, db = gradients(model, torch.randn(32, 32), dy)
    assert not dx[3].isfinite().any()
    assert not dw[2].isfinite().any()
    assert not db[2].isfinite()
    assert dx[4].isfinite().all()
    assert dw[1].isfinite().all()


def test_a_grad_scaler_sees_what_overflows_in_a_convolution() -> None:
    model = prepared(nn.Conv2d(2, 4, 3), "float8_e5m2")
    before, optimizer = copy.deepcopy(model.state_dict()), torch.optim.SGD(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    with torch.autocast("cpu", torch.float16):
        y = model(torch.randn(2, 2, 6, 6))
    scaler.scale(y.float().sum()).backward()  # by 2 ** 20, which is beyond float16
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 2.0**20
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_frozen_weights_and_inputs_without_gradient() -> None:
    model = prepared(nn.Linear(16, 8), "int8 stochastic")
    model[0].weight.requires_grad_(False)
    x = torch.randn(4, 16, requires_grad=True)
    model(x).sum().backward()
    assert model[0].weight.grad is None
    assert x.grad is not None
    model[0].weight.requires_grad_(True)
    model(x.detach()).sum().backward()
    assert model[0].weight.grad is not None


def test_a_rule_goes_to_text_and_a_layer_to_a_checkpoint(tmp_path: Any) -> None:
    config = fq.Config("own", fq.Rule("*", "int8", gradient=f"{MXFP4}; input={MXFP4}; weight={MXFP4}; hadamard=32"))
    assert fq.Config.from_dict(config.to_dict()) == config
    assert "gradient='float4_e2m1fn" in repr(config.rules[0])
    model = fq.prepare(nn.Sequential(nn.Linear(8, 8)), config)
    assert copy.deepcopy(model)[0].gradient == model[0].gradient == config.rules[0].gradient
    fq.calibrate(model, [torch.randn(4, 8)])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        fq.load(nn.Sequential(nn.Linear(8, 8)), fq.save(model, tmp_path / "model")),
        torch.load(file, weights_only=False),
    ):
        assert other[0].gradient == model[0].gradient


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int8; other=int8", "cannot read 'other=int8'"),
        ("int8; input=int8; input=int8", "cannot read 'input=int8'"),
        ("int8; input", "cannot read 'input'"),
        ("int8; input=int8; hadamard=x", "power of two such as 16, got 'x'"),
        ("int8; input=int8; hadamard=12", "power of two such as 16, or 0 for none, got 12"),
        ("int8; hadamard=16", "but only the gradient is; give input="),
        ("int99x", "int99x"),
        (None, "expected a QuantSpec or its text"),
    ],
)
def test_texts_that_mean_nothing_are_refused(text: str | None, message: str) -> None:
    with pytest.raises((ConfigError, fq.errors.SpecError), match=message):
        fq.Rule("*", "int8", gradient=GradientConfig(None) if text is None else text)  # type: ignore[arg-type]


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ConfigError, match="pass input= or weight="):
        fq.Rule("*", gradient="int8")
    with pytest.raises(ConfigError, match="must be a GradientConfig"):
        fq.Rule("*", "int8", gradient=3)
    norm = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2))
    fq.prepare(norm, fq.Config(fq.Rule("0", "int8", gradient="int8")))
    with pytest.raises(ConfigError, match="0 quantizes its gradients"):
        fq.qat.fold_batch_norm(norm, torch.ones(1, 2, 5, 5))


def test_products_whose_gradients_stay_in_float_are_said() -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.LSTM(8, 8), nn.ConvTranspose1d(8, 8, 3))
    with pytest.warns(CoverageWarning, match=r"gradients of these products stay in float: 3 \(ConvTranspose1d\)\."):
        fq.prepare(model, fq.Config(fq.Rule("*", "int8", gradient="int8")))


def test_a_summary_counts_layers_and_functions() -> None:
    said, x = "gradients of layers and functions, in {} of them: float8_e5m2 per_tensor", torch.randn(2, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Doubled(8, 8))
    config = fq.Config(fq.Rule("*", "int8", gradient="float8_e5m2"))
    assert said.format(1) in str(fq.summary(fq.prepare(copy.deepcopy(model[:2]), config)))
    assert said.format(2) in str(fq.summary(fq.prepare(model, config, x)))
    assert "gradients" not in str(fq.summary(fq.prepare(nn.Sequential(nn.Linear(8, 8)), "int8")))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(x, self.weight)


def test_products_in_a_forward_of_its_own_have_the_gradients_of_their_layer() -> None:
    x, dy, rule = torch.randn(32, 8), torch.randn(32, 8), fq.Rule("*", "int8_per_token", gradient="int8")
    own = Doubled(8, 8, bias=False)
    plain = prepared(nn.Linear(8, 8, bias=False), "int8")
    plain[0].load_state_dict(own.state_dict(), strict=False)
    model = fq.prepare(own, fq.Config(rule), x)
    assert model._sites.linear_0.gradient == rule.gradient
    for one, other in zip(gradients(model, x, dy), gradients(plain, x, 2 * dy), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("config", [GradientConfig("float8_e5m2"), GradientConfig(NVFP4, NVFP4, hadamard=16)])
def test_compiled_gradients_are_the_same_bits_without_a_graph_break(config: GradientConfig) -> None:
    model = prepared(nn.Linear(32, 16), config, "nvfp4")
    x, dy = torch.randn(64, 32), torch.randn(64, 16)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    for one, other in zip(gradients(model, x, dy)[:2], gradients(compiled, x, dy)[:2], strict=True):
        assert_same_bits(other, one)  # not that of the bias: a float sum, which Inductor adds up in another order


@pytest.mark.parametrize(("dynamic", "formats"), [(None, slice(4)), (True, slice(2, 4)), (True, slice(4))])
def test_models_with_gradients_of_several_formats_are_compiled_one_after_the_other(
    dynamic: bool | None, formats: slice
) -> None:
    """A compiler takes a number that was another one the last time for one that varies, such as a format's largest."""
    torch._dynamo.reset()
    x, dy = torch.randn(64, 32), torch.randn(64, 16)
    for config in TRAINING[formats][::-1]:
        model = copy.deepcopy(prepared(nn.Linear(32, 16), config))
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        torch.manual_seed(0)
        found = gradients(compiled, x, dy)
        torch.manual_seed(0)
        for one, other in zip(found, gradients(model, x, dy), strict=True):
            assert_same_bits(one, other, str(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_gradient_that_is_not_finite_is_that_of_eager(dtype: torch.dtype) -> None:
    """In each element to the bit, the sign of a zero too."""
    torch._dynamo.reset()
    model = prepared(nn.Linear(8, 8, bias=False), "int8 per_token; input=int8; weight=int8").to(dtype)
    dy = torch.randn(16, 8, dtype=dtype)
    dy[0, 0], dy[1, 1], dy[2, 2], dy[3] = float("inf"), -float("inf"), float("nan"), -0.0
    found = [
        gradients(own, torch.ones(16, 8, dtype=dtype), dy) for own in (model, torch.compile(model, fullgraph=True))
    ]
    assert {row for row in range(16) if not found[0][0][row].isfinite().all()} == {0, 1, 2}
    for one, other in zip(*found, strict=True):
        assert_same_bits(other, one)
