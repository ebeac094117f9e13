"""Codes that stay while the scale under them is learned."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant import qat
from fakequant.errors import ConfigError
from fakequant.nn import quantizers

SCHEDULE = qat.Schedule(original_lr=0.01, original_epochs=3, fraction=1.0, start=1.0)
SPECS = ["int2_midrise per_block(-1:8)", "uint4 per_channel(0)", "int4 per_tensor", "float4_e2m1fn per_channel(0)"]
X, Y = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 4
BATCHES = [(X[:16], Y[:16]), (X[16:], Y[16:])]


def floats() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def coded(spec: str, input: str | None = None) -> nn.Sequential:
    """Two layers with a norm between, whose codes are not those of the nearest values."""
    model = floats()
    own = None if input is None else fq.TensorConfig(input)
    fq.prepare(model, fq.Config("t", (fq.Rule(input=own, weight=fq.TensorConfig(spec)),)))
    fq.calibrate(model, [X], progress=False)
    for layer in (model[0], model[2]):
        codes = layer._weight_quantizer.codes(layer.weight)[0]
        turned = torch.cat([codes[1:], codes[:1]])  # of other rows
        layer._weight_quantizer.fix_codes(turned, layer.weight)
    return model


def codes_of(model: nn.Module) -> list[Tensor]:
    return [layer._weight_quantizer.codes(layer.weight)[0] for layer in model if hasattr(layer, "_weight_quantizer")]


def finetune(model: nn.Module, **options: Any) -> list[float]:
    given = qat.Options(scales=qat.Scales.ONLY, progress=False, **options)
    return qat.finetune(model, BATCHES, nn.functional.cross_entropy, SCHEDULE, given)


@pytest.mark.parametrize("spec", SPECS)
def test_the_gradient_of_a_scale_is_the_codes(spec: str) -> None:
    model = coded(spec)
    codes = codes_of(model)
    qat.set_scales(model, qat.Scales.ONLY, gradient_factor=False)
    nn.functional.cross_entropy(model(X), Y).backward()
    plain, scales = copy.deepcopy(model), []
    for layer, given in zip((plain[0], plain[2]), codes, strict=True):
        params = layer._weight_quantizer.qparams(layer.weight)
        scale = params.scale.detach().clone().requires_grad_()
        scales.append(scale)
        size = layer._weight_quantizer.spec.granularity.block_shape(layer.weight.shape)
        ones = fq.QParams(torch.ones_like(scale), params.zero_point)
        steps = fq.dequantize(given, ones, layer._weight_quantizer.spec)
        wide = scale.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)
        del layer._weight_quantizer, layer.weight
        layer.__class__ = nn.Linear
        layer.weight = steps * wide
    x = X
    for layer in plain:
        x = nn.functional.linear(x, layer.weight, layer.bias) if type(layer) is nn.Linear else layer(x)
    nn.functional.cross_entropy(x, Y).backward()
    for layer, scale in zip((model[0], model[2]), scales, strict=True):
        assert layer.weight.grad is None
        step = layer._weight_quantizer.learned.step
        torch.testing.assert_close(step.grad, scale.grad)
        assert float(step.grad.abs().max()) > 0


@pytest.mark.parametrize("input", [None, "int8"])
@pytest.mark.parametrize("spec", SPECS)
def test_scales_alone_are_trained_and_codes_stay(spec: str, input: str | None, tmp_path: Path) -> None:
    model = coded(spec, input)
    codes, before = codes_of(model), copy.deepcopy(model.state_dict())
    history = finetune(model)
    assert history[-1] < history[0]
    after = model.state_dict()
    moved = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert {name for name in moved if "quantizer" not in name} <= {"0.weight", "2.weight"}
    assert all(name.endswith(("scale", "weight")) for name in moved)
    assert {"0._weight_quantizer.scale", "2._weight_quantizer.scale"} <= moved
    assert (input is not None) == ("0._input_quantizer.scale" in moved)
    assert all(map(torch.equal, codes_of(model), codes))
    assert all(p.requires_grad for p in model.parameters())
    assert not any(q.keeps_codes or q.learned for q in quantizers(model).values())
    for layer, given in zip((model[0], model[2]), codes, strict=True):
        quantizer = layer._weight_quantizer
        assert torch.equal(layer.weight, fq.dequantize(given, quantizer.qparams(layer.weight), quantizer.spec))
    with torch.no_grad():
        expected = model(X)
        fq.save(model, tmp_path / "model.safetensors")
        fresh = fq.load(floats(), tmp_path / "model.safetensors")
        assert torch.equal(fresh(X), expected)
        assert all(map(torch.equal, codes_of(fresh), codes))


def test_an_onnx_file_holds_the_codes_with_the_new_scales(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    import onnx

    model = coded("int4 per_channel(0)", "int8")
    codes = codes_of(model)
    finetune(model)
    fq.export_onnx(model, (X,), tmp_path / "model.onnx")
    assert fq.verify_onnx(tmp_path / "model.onnx", model, [X]).exact
    stored = [onnx.numpy_helper.to_array(one) for one in onnx.load(tmp_path / "model.onnx").graph.initializer]
    found = [torch.tensor(one.astype("int8")) for one in stored if one.shape in ((16, 16), (4, 16), (16, 4))]
    assert all(any(torch.equal(one, own) or torch.equal(one.T, own) for one in found) for own in codes)


def test_a_checkpoint_of_the_middle_goes_on_with_equal_bits(tmp_path: Path) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for x, y in BATCHES * count:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.train()(x), y).backward()
            optimizer.step()

    def start() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = coded(SPECS[0])
        qat.set_scales(model, qat.Scales.ONLY)
        return model, torch.optim.Adam([p for n, p in model.named_parameters() if "lsq" in n], 0.01)

    whole, optimizer = start()
    codes = codes_of(whole)
    steps(whole, optimizer, 2)
    torch.save([whole.state_dict(), optimizer.state_dict()], tmp_path / "half.pt")
    steps(whole, optimizer, 2)
    for weights_alone in (False, True):
        other, own = start()
        state, of_optimizer = torch.load(tmp_path / "half.pt", weights_only=False)
        other.load_state_dict(dict(state) if weights_alone else state)  # dicts of safetensors have no metadata
        own.load_state_dict(of_optimizer)
        steps(other, own, 2)
        assert torch.equal(other.eval()(X), whole.eval()(X))
        assert all(map(torch.equal, codes_of(other), codes))
    for policy in (qat.Scales.FIXED, qat.Scales.LEARNED):
        other = copy.deepcopy(whole).eval()
        expected = other(X)
        qat.set_scales(other, policy)
        assert torch.equal(other(X), expected)
        assert all(map(torch.equal, codes_of(other), codes))


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_written_in_the_middle_has_the_scales_of_now(spec: str, tmp_path: Path) -> None:
    def steps(model: nn.Module) -> None:
        qat.set_scales(model, qat.Scales.ONLY)
        optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "lsq" in n], 0.1)
        for x, y in BATCHES:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.train()(x), y).backward()
            optimizer.step()

    model = coded(spec)
    codes = codes_of(model)
    steps(model)
    expected = model.eval()(X)
    copied = floats()
    copied.load_state_dict(fq.float_state_dict(model))
    torch.testing.assert_close(copied(X), expected)
    again = fq.apply(floats(), fq.snapshot(model))
    fq.save(model, tmp_path / "model.safetensors")
    for other in (again, fq.load(floats(), tmp_path / "model.safetensors")):
        assert torch.equal(other.eval()(X), expected)
        steps(other)
    steps(model)
    for other in (again, model):
        assert all(map(torch.equal, codes_of(other), codes))
        assert torch.equal(other.eval()(X), model.eval()(X))


def test_quantizers_without_codes_or_scales_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no fixed codes"):
        fq.nn.Quantizer("int4 per_channel(0)", kind=fq.nn.Kind.WEIGHT).keep_codes()
    model = fq.prepare(
        nn.Sequential(nn.Linear(4, 4)), fq.Config("t", (fq.Rule(input=fq.TensorConfig("int8", dynamic=True)),))
    )
    with pytest.raises(ConfigError, match=r"Scales\.ONLY has nothing to train"):
        qat.set_scales(model, qat.Scales.ONLY)


def test_what_cannot_be_learned_leaves_weights_and_quantizers() -> None:
    weights = (
        fq.Rule(weight=fq.TensorConfig("int4 per_channel(0)")),
        fq.Rule("2", weight=fq.TensorConfig("float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn")),
    )
    model = fq.prepare(floats(), fq.Config("t", weights))
    fq.calibrate(model, [X], progress=False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=r"2\._weight_quantizer: .* cannot be learned"):
        qat.set_scales(model, qat.Scales.ONLY)
    after = model.state_dict()
    assert [*before] == [*after]
    assert all(torch.equal(before[name], value) for name, value in after.items())


def test_a_second_call_keeps_the_parameters_of_the_optimizer() -> None:
    model = coded(SPECS[0], "int8")
    qat.set_scales(model, qat.Scales.ONLY)
    own, codes = dict(model.named_parameters()), codes_of(model)
    with torch.no_grad():
        model[0]._weight_quantizer.learned.step.mul_(1.5)  # as a step of training between
    qat.set_scales(model, qat.Scales.ONLY)
    assert all(own[name] is parameter for name, parameter in model.named_parameters())
    assert all(map(torch.equal, codes_of(model), codes))


def test_a_group_of_scales_alone_has_their_share_of_the_learning_rate() -> None:
    made = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=1.0))
        return made[0]

    finetune(coded(SPECS[0]), scale_lr=0.5, optimizer=optimizer)
    assert [group["lr"] for group in made[0].param_groups] == [0.5 * SCHEDULE.lr(1.0)]


def test_a_failed_training_leaves_all_parameters_trainable() -> None:
    model = coded(SPECS[0])
    with pytest.raises(ConfigError, match="not a tensor of one number"):
        qat.finetune(model, BATCHES, lambda *_: None, SCHEDULE, qat.Options(scales=qat.Scales.ONLY, progress=False))
    assert all(p.requires_grad for p in model.parameters())
