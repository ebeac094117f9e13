"""Weights that are nearly zero beside their bias: an engine's int32 bias holds, and torch's results stay the same."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationWarning, StaleScaleWarning
from fakequant.model.weights import raise_scales
from fakequant.nn import Kind, quantizers
from fakequant.nn.paths import layer_of
from tests.support.bits import assert_same_bits
from tests.support.matrix import full, sweep


class Recurrent(nn.Module):
    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.first, self.last = cls(4, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)[0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x, x, x)[0])


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8) * 0.3), nn.Parameter(torch.randn(8) * 0.1)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(F.linear(x, self.weight, self.bias)))


def image(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.ReLU(), nn.Conv2d(8, 4, 2))


MODELS = {
    "convolution": (lambda: image(nn.Conv2d(4, 8, 2)), (1, 4, 4, 4)),
    "grouped": (lambda: image(nn.Conv2d(4, 8, 2, groups=2)), (1, 4, 4, 4)),
    "depthwise": (lambda: image(nn.Conv2d(8, 8, 2, groups=8)), (1, 8, 4, 4)),
    "transposed": (lambda: image(nn.ConvTranspose2d(4, 8, 2)), (1, 4, 2, 2)),
    "transposed_grouped": (lambda: image(nn.ConvTranspose2d(4, 8, 2, groups=2)), (1, 4, 2, 2)),
    "linear": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), (4, 8)),
    "lstm": (lambda: Recurrent(nn.LSTM), (2, 2, 4)),
    "gru": (lambda: Recurrent(nn.GRU), (2, 2, 4)),
    "attention": (Attention, (2, 3, 8)),
    "functional": (Functional, (4, 8)),
    "folded": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 2)),
        (1, 4, 4, 4),
    ),
}
SHARES = {"live": 1.0, "small": 1e-6, "smaller": 1e-12, "smallest": 1e-33, "zero": 0.0}
HISTORIES = ("calibrated", "trained", "learned", "following", "improved", "pruned", "again")
PRESETS = {"int8": fq.presets.INT8, "affine": fq.presets.INT8_AFFINE}


@torch.no_grad()
def made(kind: str, share: float) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    model, shape = MODELS[kind][0](), MODELS[kind][1]
    x = torch.rand(shape)
    if kind == "folded":
        model[1].weight[3], model[1].bias[3] = share, 0.5
        return fq.fuse_batch_norm(model.eval(), x), x
    first = model if kind == "functional" else model[0] if isinstance(model, nn.Sequential) else model.first
    for name, parameter in first.named_parameters():
        if "bias" in name:
            parameter[3] = 0.5
        elif "transposed" in kind:
            parameter[:, 3] *= share
        elif not name.startswith("last"):
            parameter[3] *= share
    return model.eval(), x


def trained(model: nn.Module, x: Tensor, share: float) -> None:
    """Two steps; they would revive a dead channel, whose weights are given back, because its bias is what matters."""
    start = {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith("weight") and share < 1}
    optimizer = torch.optim.SGD(model.train().parameters(), 1e-4)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        for name, before in start.items():
            parameter = model.get_parameter(name)
            parameter.copy_(torch.where(before.abs() <= share, before, parameter))


def ready(kind: str, share: float, preset: str = "int8", history: str = "calibrated") -> tuple[nn.Module, Tensor]:
    model, x = made(kind, share)
    if history == "pruned":
        torch.nn.utils.prune.l1_unstructured(model[0], "weight", 0.3)
    model = fq.prepare(model, PRESETS[preset], x, target="onnxruntime" if kind == "functional" else None)
    with warnings.catch_warnings(action="ignore", category=CalibrationWarning):
        fq.calibrate(model, [x, x * 0.9])
    if history == "following":
        for quantizer in quantizers(model).values():
            if quantizer.kind is Kind.WEIGHT:
                quantizer.reset()
    if history == "learned":
        fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    if history in ("trained", "learned", "following"):
        trained(model, x, share)
    if history == "improved":
        fq.ptq.improve(model, [x, x * 0.9], "fast", judge=[], progress=False)
    if history == "again":
        fq.recalibrate(model, method="max")
    return model.eval(), x


def decibels(y: Tensor, other: Tensor) -> float:
    return float(10 * torch.log10(y.double().square().sum() / (y.double() - other).square().sum().clamp(min=1e-30)))


def in_engine(model: nn.Module, x: Tensor, path: Any) -> Tensor:
    """What ONNX Runtime computes by default."""
    onnxruntime = pytest.importorskip("onnxruntime")
    file = fq.export_onnx(model, x, path).path
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@sweep(
    "kind, share, preset, history",
    full(MODELS, SHARES, PRESETS, HISTORIES),
    [
        ("convolution", "zero", "int8", "calibrated"),
        ("grouped", "small", "affine", "trained"),
        ("depthwise", "smaller", "int8", "following"),
        ("transposed", "smallest", "int8", "learned"),
        ("convolution", "smaller", "affine", "improved"),
        ("folded", "small", "int8", "again"),
        ("convolution", "smallest", "int8", "pruned"),
    ],
)
@pytest.mark.filterwarnings("ignore:the scales of:fakequant.errors.StaleScaleWarning", "ignore:weights that are zero")
def test_the_engine_computes_what_torch_does(kind, share, preset, history, tmp_path):
    if history == "pruned" and not isinstance(made(kind, 1.0)[0], nn.Sequential):
        pytest.skip("one layer of a sequence is pruned")
    # Where a value is nearly between two codes, the engine's rounded bias decides: the model without a dead channel
    # says how near the engine comes.
    (model, x), (live, _) = ready(kind, SHARES[share], preset, history), ready(kind, 1.0, preset, history)
    with torch.no_grad():
        before = model(x)
        found = in_engine(model, x, tmp_path / "model.onnx")
        assert decibels(model(x), found) >= min(100, decibels(live(x), in_engine(live, x, tmp_path / "live.onnx")) - 6)
        assert decibels(before, model(x)) >= 120


@pytest.mark.parametrize("history", ["calibrated", "improved", "again"])
@pytest.mark.parametrize("kind", ["convolution", "transposed", "linear", "lstm", "attention", "functional", "folded"])
@pytest.mark.parametrize("share", ["small", "smallest", "zero"])
def test_every_bias_fits_int32_as_soon_as_there_is_a_scale(kind, share, history):
    model, _ = ready(kind, SHARES[share], history=history)
    assert raise_scales(model) == []
    found = quantizers(model)
    owners = {layer_of(path) for path, q in found.items() if q.kind is Kind.WEIGHT}
    assert len(owners) >= 2
    for owner in owners:  # a scale of a weight is multiplied with those of the inputs of its own layer
        held = [q for path, q in found.items() if layer_of(path) == owner]
        scales, inputs = ([q.scale.min() for q in held if q.kind is kind] for kind in (Kind.WEIGHT, Kind.INPUT))
        assert 0.5 / (min(scales) * min(inputs)) < 2**31


@pytest.mark.parametrize("kind", MODELS)
def test_live_channels_keep_their_scales(kind):
    model, _ = ready(kind, 1e-3)
    wanted = {
        name: fq.choose_qparams(weight.tensor, weight.quantizer.spec).scale
        for name, weight in fq.model.weights.quantized_weights(model).items()
    }
    for name, scale in wanted.items():
        assert_same_bits(model.get_submodule(name).scale, scale)


def test_only_the_scale_of_the_dead_channel_changes_and_export_says_so(tmp_path):
    model, x = ready("convolution", 1e-9)
    model[0].weight_quantizer.reset()
    before = copy.deepcopy(model)
    with pytest.warns(
        StaleScaleWarning, match=r"the scales of 1 weights were enlarged, in the model, too: 0\._weight_q"
    ):
        file = fq.export_onnx(model, x, tmp_path / "model.onnx").path
    assert fq.verify_onnx(file, model).exact
    own = model[0].weight_quantizer.scale
    other = before[0].weight_quantizer.qparams(before[0].weight).scale
    assert (own != other).flatten().nonzero().tolist() == [[3]]
    with warnings.catch_warnings(action="error"):
        fq.export_onnx(model, x, tmp_path / "again.onnx")


def test_chosen_codes_stay_codes():
    model, _ = ready("convolution", 1e-9, history="improved")
    layer = model[0]
    assert_same_bits(layer.weight_quantizer(layer.weight), layer.weight)


@pytest.mark.parametrize("kind", ["convolution", "transposed_grouped", "linear", "lstm", "gru"])
@pytest.mark.filterwarnings("ignore")
def test_offloaded_biases_raise_the_scales_that_plain_ones_raise(kind):
    accelerate = pytest.importorskip("accelerate")
    (plain, x), scales = made(kind, 1e-9), []
    for model in (plain, accelerate.cpu_offload(copy.deepcopy(plain), torch.device("cpu"))):
        fq.calibrate(prepared := fq.prepare(model, "int8", x), [x])
        scales.append({name: q.scale for name, q in quantizers(prepared).items() if q.scale is not None})
    assert scales[0].keys() == scales[1].keys()
    for name, scale in scales[0].items():
        assert_same_bits(scales[1][name], scale)


@pytest.mark.parametrize("preset", ["int8_weight_only", "int4_group32", "fp8", "int8_per_token"])
def test_scales_that_meet_no_int32_bias_stay(preset):
    model, x = made("linear", 1e-9)
    model = fq.prepare(model, preset)
    fq.calibrate(model, [x])
    assert raise_scales(model) == []
    weight = model[0].weight
    assert_same_bits(model[0].weight_quantizer.scale, fq.choose_qparams(weight, model[0].weight_quantizer.spec).scale)
