"""Batch normalisations that are folded while a model trains."""

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fakequant as fq
from fakequant.errors import ConfigError, FusionWarning
from fakequant.model.training import qat
from tests.support.norms import FrozenNorm, NormAct

LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(4, 6), lambda: nn.BatchNorm1d(6), (8, 4)),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, bias=False), lambda: nn.BatchNorm1d(6), (8, 4, 7)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), lambda: nn.BatchNorm2d(6), (8, 4, 5, 5)),
    "Conv2d-plain": (lambda: nn.Conv2d(4, 6, 1), lambda: nn.BatchNorm2d(6, affine=False), (8, 4, 5, 5)),
    "Conv3d": (lambda: nn.Conv3d(4, 6, 2), lambda: nn.BatchNorm3d(6), (4, 4, 3, 3, 3)),
}


def network(name: str) -> tuple[nn.Sequential, Tensor]:
    make, norm, shape = LAYERS[name]
    torch.manual_seed(0)
    model, x = nn.Sequential(make(), norm(), nn.ReLU()), torch.randn(shape)
    for parameter in model[1].parameters():
        nn.init.uniform_(parameter, 0.5, 2.0)
    with torch.no_grad():
        for _ in range(3):
            model(x)
    return model, x


def folded(name: str) -> tuple[nn.Sequential, Tensor]:
    model, x = network(name)
    qat.fold_batch_norm(fq.prepare(model, "int8"), x)
    fq.calibrate(model, [x], "max", progress=False)
    return model, x


@pytest.mark.parametrize("name", LAYERS)
def test_eval_mode_has_the_bits_of_the_float_layer_with_quantized_folded_weights(name: str) -> None:
    model, x = folded(name)
    plain = fq.fuse_batch_norm(network(name)[0].eval())
    with torch.no_grad():
        plain[0].weight.copy_(fq.fake_quantize(plain[0].weight, "int8 per_channel(0)"))
    expected = plain(fq.fake_quantize(x, "int8"))
    assert torch.equal(model.eval()(x), expected)
    model.train()
    qat.freeze_batch_norm(model)
    before = copy.deepcopy(model.state_dict())
    assert torch.equal(model(x), expected)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", LAYERS)
def test_training_is_the_scheme_written_by_hand(name: str) -> None:
    """torch.ao's ConvBn: the quantized product of the folded weight, divided by the factor, normalised by the batch."""
    model, x = folded(name)
    layer, norm = copy.deepcopy(model[0]), network(name)[0][1].train()
    given, quantized = x.clone().requires_grad_(), x.clone().requires_grad_()
    model.train()(given).square().sum().backward()
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    gamma = 1.0 if norm.weight is None else norm.weight.double()
    factors = [(norm.running_var.double() + norm.eps).rsqrt() * gamma for _ in range(2)]
    scaled = (weight.double() * factors[0].view(-1, *[1] * (weight.dim() - 1))).float()
    scaled = fq.fake_quantize(scaled, "int8 per_channel(0)", scale=layer._weight_quantizer.scale)
    inputs = fq.fake_quantize(quantized, "int8", scale=layer._input_quantizer.scale)
    product = F.linear(inputs, scaled) if name == "Linear" else layer._conv_forward(inputs, scaled, None)
    axes = (-1, *[1] * (x.dim() - 2))
    product = product / factors[1].float().view(axes)
    y = norm(product if bias is None else product + bias.view(axes))
    F.relu(y).square().sum().backward()
    assert torch.equal(given.grad, quantized.grad)
    assert torch.equal(model[0]._parameters["weight"].grad, weight.grad)
    for key, value in norm.state_dict().items():
        assert torch.equal(model[1].state_dict()[key], value)
    for parameter, other in zip(model[1].parameters(), norm.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-5)  # a sum of three, in any order


@pytest.mark.parametrize("name", LAYERS)
def test_without_quantizers_it_is_the_float_model(name: str) -> None:
    """Up to the rounding of the factor: 2e-5 of the largest output, where 1.2e-7 is one rounding."""
    model, x = folded(name)
    plain = network(name)[0]
    with fq.disabled(model):
        for training in (True, False):
            found, expected = model.train(training)(x), plain.train(training)(x)
            assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    torch.testing.assert_close(model[1].running_var, plain[1].running_var)


@pytest.mark.parametrize("name", LAYERS)
def test_merged_layers_keep_every_bit_after_training(name: str) -> None:
    model, x = folded(name)
    names = list(model.state_dict())
    qat.finetune(model, [(x, torch.ones_like(model(x)))] * 3, F.mse_loss, qat.Schedule(0.1, 20))
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    assert list(model.state_dict()) == names
    assert {f"1.{key}" for key in network(name)[0][1].state_dict()} <= set(names)
    qat.merge_batch_norm(model)
    assert torch.equal(model(x), expected)
    assert type(model[0]) is type(fq.prepare(network(name)[0], "int8")[0])
    assert isinstance(model[1], nn.Identity)


def test_the_file_has_one_convolution(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model, x = folded("Conv2d")
    with pytest.raises(ConfigError, match=r"call fakequant\.qat\.merge_batch_norm\(model\) first"):
        fq.save(model, tmp_path / "checkpoint")
    qat.merge_batch_norm(model.eval())
    written = fq.export_onnx(model, x, tmp_path / "model.onnx")
    kinds = [node.op_type for node in onnx.load(written.path).graph.node]
    assert kinds.count("Conv") == 1
    assert not {"BatchNormalization", "Mul", "Div"} & set(kinds)
    assert fq.verify_onnx(written.path, model, [x]).exact


def test_a_file_before_merging_has_the_scales_of_the_folded_weight(tmp_path: Path) -> None:
    """They are taken when the file is written; once they were those of the parameter behind it."""
    onnx = pytest.importorskip("onnx")
    model, x = network("Conv2d")
    qat.fold_batch_norm(fq.prepare(model, "int8_weight_only"), x).eval()
    written = fq.export_onnx(model, x, tmp_path / "model.onnx")
    assert fq.verify_onnx(written.path, model, [x]).exact
    assert [node.op_type for node in onnx.load(written.path).graph.node] == ["DequantizeLinear", "Conv", "Relu"]


class Read(nn.Module):
    """A layer whose weight a function reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) + F.linear(x, self.layer.weight)


def test_a_layer_whose_weight_a_function_reads_is_not_folded() -> None:
    with pytest.warns(FusionWarning, match="norm .the output or a parameter of the layer before it is used elsewhere"):
        qat.fold_batch_norm(fq.prepare(Read(), "int8_weight_only"), torch.randn(3, 4))


class Branches(nn.Module):
    """Seven normalisations, of which the data flow lets the first be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.one, self.twice, self.read, self.plain = (nn.Linear(4, 4) for _ in range(4))
        self.b, self.c, self.d, self.zero = (nn.BatchNorm1d(4) for _ in range(4))
        nn.init.zeros_(self.zero.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.one(x))
        x = self.b(self.twice(self.twice(x)))
        y = self.read(x)
        return self.last(torch.relu(self.c(y) + y)) + self.d(self.plain(x)) + self.zero(x)


def test_pairs_are_found_by_data_flow_and_the_others_are_named() -> None:
    model = fq.prepare(Branches(), fq.presets.INT8.with_rule(fq.Rule("plain")))
    with pytest.warns(FusionWarning) as said:
        qat.fold_batch_norm(model, torch.randn(3, 4))
    text = str(said[0].message)
    assert text.startswith("1 folded, 5 batch normalisations stay: ")
    assert "b (the layer before it is called 2 times)" in text
    assert "c (the output or a parameter of the layer before it is used elsewhere, too)" in text
    assert "last, d (its input is not the output of a quantized convolution or linear layer)" in text
    assert "zero (a gamma of it is 0" in text
    assert type(model.one).__name__ == "FoldedLinear"
    with pytest.raises(ConfigError, match="got an input of shape"):
        model.first(torch.randn(2, 4, 5))


def test_what_is_refused() -> None:
    model, x = network("Linear")
    with pytest.raises(ConfigError, match=r"no quantizers; call fakequant\.prepare.* first, or fuse_batch_norm"):
        qat.fold_batch_norm(model, x)
    fq.calibrate(fq.prepare(model, "int8"), [x], "max", progress=False)
    fq.calibrate(model, pattern="*_weight_quantizer")
    kind = type(model[0])
    with pytest.raises(ConfigError, match=r"^0 is calibrated, .* between fakequant\.prepare and fakequant\.calibrate$"):
        qat.fold_batch_norm(model, x)
    assert type(model[0]) is kind


def trained_gradients(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    model = copy.deepcopy(model).train()
    run(model).square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: x for name, x in model.named_buffers() if "running" in name}


def learned(name: str) -> tuple[nn.Sequential, Tensor]:
    model, x = folded(name)
    qat.set_scales(model, qat.Scales.LEARNED)
    return model, x


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], *, near: tuple[str, ...] = ()) -> None:
    """`near`: the ends of names of gradients that are sums in any order."""
    assert one.keys() == other.keys()
    assert [name for name in one if not name.endswith(near or "-") and not torch.equal(one[name], other[name])] == []
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], rtol=1e-3, atol=1e-3
        )  # of a bias before a norm they are noise


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_checkpoints_have_the_gradients_and_statistics_of_a_plain_step(name: str, reentrant: bool) -> None:
    """They call a layer again in the backward pass, when its running statistics have moved."""
    model, x = learned(name)
    x.requires_grad_()
    again = partial(checkpoint, use_reentrant=reentrant)
    plain = trained_gradients(model, lambda m: m(x))
    assert_same(trained_gradients(model, lambda m: again(m, x)), plain, near=("1.weight",) if reentrant else ())

    def two(run: Callable[..., Tensor]) -> Callable[[nn.Module], Tensor]:
        return lambda m: run(m, x) + run(m, 2 * x)

    def alike(run: Callable[..., Tensor]) -> Callable[[nn.Module], Tensor]:
        return lambda m: run(m, x) + 2 * run(m, x.flip(-1)) + 3 * run(m, x)

    for calls in (two, alike):
        plain = trained_gradients(model, calls(lambda m, x: m(x)))
        assert_same(trained_gradients(model, calls(again)), plain, near=("weight", "bias", "step"))


def test_a_checkpoint_of_an_unknown_input_is_refused() -> None:
    model, x = learned("Conv2d")
    calls: list[Tensor] = []

    def other(y: Tensor) -> Tensor:  # a function that is not the same when it is called again
        calls.append(y)
        return model.train()(y * len(calls))

    with pytest.raises(ConfigError, match=r"runs 0 again on an input that is not among its last 16"):
        checkpoint(other, x.requires_grad_(), use_reentrant=True).sum().backward()


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
@pytest.mark.parametrize("name", ["Linear", "Conv2d"])
def test_compiled_steps_have_the_eager_gradients(name: str, backend: str) -> None:
    """A compiled backward pass computed the factor anew from statistics that the step had moved."""
    model, x = learned(name)
    torch._dynamo.reset()
    compiled = trained_gradients(model, lambda m: torch.compile(m, backend=backend)(x))
    decomposed = ("weight", "bias", "step", "running_mean", "running_var") if "decomp" in backend else ()
    assert_same(compiled, trained_gradients(model, lambda m: m(x)), near=decomposed)


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_checkpoints_are_refused(inside: bool) -> None:
    """Each alone has the eager gradients; together the compiler computes the layer anew."""
    model, x = learned("Conv2d")
    x.requires_grad_()
    torch._dynamo.reset()
    again = partial(checkpoint, use_reentrant=False)
    ways: dict[bool, Callable[[nn.Module], Tensor]] = {
        True: lambda m: torch.compile(lambda x: again(m, x), backend="aot_eager")(x),
        False: lambda m: again(torch.compile(m, backend="aot_eager"), x),
    }
    with pytest.raises(ConfigError, match=r"use only one of checkpoint and torch\.compile, .* call freeze_batch_norm"):
        trained_gradients(model, ways[inside])


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.__setitem__(1, nn.GroupNorm(2, 6)),
        lambda m: m.__setitem__(1, nn.Identity()),
        lambda m: m.__setitem__(1, copy.deepcopy(m[1])),
        nn.SyncBatchNorm.convert_sync_batchnorm,
    ],
    ids=["group", "identity", "copy", "sync"],
)
def test_a_replaced_normalisation_is_refused(change: Callable[[nn.Module], object]) -> None:
    """The layer went on with the normalisation that was folded, and what took its place came on top of it."""
    model, x = folded("Conv2d")
    change(model)
    with pytest.raises(ConfigError, match=r"folded into 0 was replaced by a .*replace it before fold_batch_norm"):
        model.eval()(x)
    with pytest.raises(ConfigError, match="was replaced by"):
        qat.merge_batch_norm(model)


def test_converted_normalisations_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", nn.BatchNorm2d.forward)  # torch's runs on GPUs alone
    model, x = network("Conv2d")
    expected = qat.fold_batch_norm(fq.prepare(copy.deepcopy(model), "int8_weight_only"), x)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    qat.fold_batch_norm(fq.prepare(model, "int8_weight_only"), x)
    for training in (True, False):
        assert torch.equal(model.train(training)(x), expected.train(training)(x))
    assert isinstance(model[1], nn.SyncBatchNorm)


@pytest.mark.parametrize("act", [nn.ReLU(), nn.PReLU(6)])
def test_a_normalisation_with_an_activation_folds_like_the_two(act: nn.Module) -> None:
    plain, x = network("Conv2d")
    plain[2] = copy.deepcopy(act)
    one = nn.Sequential(copy.deepcopy(plain[0]), NormAct(6, copy.deepcopy(act)))
    one[1].load_state_dict(plain[1].state_dict(), strict=False)
    models = [qat.fold_batch_norm(fq.prepare(model, "int8_weight_only"), x) for model in (plain, one)]
    for training in (True, False):
        first, second = (model.train(training)(x) for model in models)
        assert torch.equal(first, second)
    for model in models:
        qat.merge_batch_norm(model)
    assert torch.equal(models[0](x), models[1](x))


def test_frozen_normalisations_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), FrozenNorm(4))
    with pytest.warns(FusionWarning, match="a FrozenNorm does not train: call fuse_batch_norm before"):
        qat.fold_batch_norm(fq.prepare(model, "int8"), torch.randn(2, 3, 5, 5))


class Gated(nn.Module):
    """Its own functions have quantizers, and the results of both normalisations, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1, bias=False)
        self.norm, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.b(F.hardswish(self.norm(self.a(x))) * x))


def _ending() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Hardswish(), nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4))


def _with_activation() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 6, 3), NormAct(6, nn.Hardswish()), nn.Conv2d(6, 4, 1))


@pytest.mark.parametrize("target", ["onnxruntime", "xnnpack", "qnn"])
@pytest.mark.parametrize("make", [_ending, Gated, _with_activation])
@pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")
def test_a_result_that_an_engine_quantizes_is_folded_with_its_quantizer(
    make: Callable[[], nn.Module], target: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net, x = make(), torch.randn(4, 4, 9, 9)
    net.train()(x)
    fused = fq.prepare(fq.fuse_batch_norm(copy.deepcopy(net).eval(), x), "int8_affine", x, target=target)
    model = fq.prepare(net.eval(), "int8_affine", x, target=target)
    with warnings.catch_warnings(action="error", category=FusionWarning):
        qat.fold_batch_norm(model, x)
    for own in (fused, model):
        fq.calibrate(own, [x], progress=False)
    assert all(one.name == path for path, one in fq.nn.quantizers(model).items())
    assert torch.equal(model(x), fused(x))
    model.train()(x).square().sum().backward()
    before = model.eval()(x)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), before)
    assert torch.equal(qat.merge_batch_norm(model)(x), before)
    fresh = fq.fuse_batch_norm(make().eval(), x)
    assert torch.equal(fq.load(fresh, fq.save(model, tmp_path / "merged"))(x), before)


def test_a_normalisation_with_other_quantizers_stays_and_is_named() -> None:
    class Squared(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * input

    model, x = nn.Sequential(nn.Conv2d(4, 4, 1), Squared(4)).eval(), torch.randn(2, 4, 3, 3)
    fq.prepare(model, fq.presets.INT8.with_rule(fq.Rule("*", input="int8", ops="mul")), x)
    with pytest.warns(FusionWarning, match=r"1 \(functions that it calls have quantizers; call fuse_batch_norm before"):
        qat.fold_batch_norm(model, x)


def test_a_layer_without_a_folded_form_is_named() -> None:
    model, x = nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6)), torch.randn(2, 4, 3, 3)
    with pytest.warns(FusionWarning, match="before it, a QuantConvTranspose2d, has no folded form; call fuse_"):
        qat.fold_batch_norm(fq.prepare(model, "int8"), x)
