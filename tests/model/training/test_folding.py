"""Batch normalisations that are folded while a model trains."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError, FusionWarning
from fakequant.model.training import qat

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
