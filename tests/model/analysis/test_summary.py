"""The table of what is quantized; what of it concerns operations is in test_operations.py."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fakequant as fq
from fakequant.nn import quantizers


class Reads(nn.Module):
    """Reads the weight of one of its layers, calls another, and leaves the third alone."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.run, self.idle = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(F.linear(x, self.read.weight))


def test_layers_that_are_never_called_are_marked_and_not_counted() -> None:
    model = fq.prepare(Reads(), "int8_per_token")
    found = fq.summary(model, torch.ones(2, 8))
    assert [layer.state for layer in found.layers] == ["never called", "ready", "never called"]
    assert (found.bytes_float, found.bytes_quantized) == (3 * 256, 2 * 256 + 64 + 8 * 4)
    text = str(found)
    assert (
        "read is never called with this example: the model uses its weight in float\n"
        "idle is never called with this example: no function of this run reads its weight either\n"
    ) in text
    assert text.count("never called\n") == 2
    assert "(model): linear, 2 of 2 inputs in float" in text


def test_without_an_example_nothing_is_said_of_calls() -> None:
    found = fq.summary(fq.prepare(Reads(), "int8_per_token"))
    assert [layer.state for layer in found.layers] == ["ready"] * 3
    assert found.bytes_quantized == 3 * (64 + 8 * 4), "codes and a float32 scale for each channel"


def test_a_model_that_is_not_calibrated_yet_is_looked_at_too() -> None:
    model = fq.prepare(Reads().train(), "int8")
    found = fq.summary(model, {"x": torch.ones(2, 8)})
    assert [layer.state for layer in found.layers] == ["never called", "not calibrated", "never called"]
    assert model.training
    assert not any(layer._forward_pre_hooks for layer in model.modules())
    assert all(quantizer.mode is fq.nn.Mode.QUANTIZE for quantizer in quantizers(model).values())


def test_a_layer_that_takes_a_relu_is_called() -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "int8")
    fq.calibrate(model, [torch.ones(2, 4)])
    assert [layer.state for layer in fq.summary(model, torch.ones(2, 4)).layers] == ["ready", "ready"]


def test_a_summary_does_not_read_a_computed_weight() -> None:
    model = fq.prepare(nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4))), "int8")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fq.summary(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Joins(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x[:, :0]], 1) * 2


def test_what_calibration_left_in_float_is_said() -> None:
    x = torch.ones(2, 4)
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4), Joins()), "int8", x, target="onnxruntime")
    assert [layer.state for layer in fq.summary(model).layers][-1] == "not calibrated"
    fq.calibrate(model, [x], progress=False, unseen="float")
    site = fq.summary(model).layers[-1]
    assert site.type == "cat"
    assert "float" in site.quantizers.values()
    assert site.state == "ready"


def test_operations_of_equal_steps_are_one_line_and_a_quantizer_that_is_off_is_told() -> None:
    model = fq.prepare(nn.Sequential(nn.LSTM(6, 8)).eval(), "int8")
    x = torch.randn(9, 4, 6)
    fq.calibrate(model, [x])
    fq.nn.quantizers(model)["0._l0_hidden_quantizer"].mode = fq.nn.Mode.OFF
    text = str(fq.summary(model, x))
    assert "0: lstm_cell, 1 of 4 inputs in float, 8 times" in text  # the state before the first step is zeros
    assert text.count("lstm_cell") == 1
    assert "int8 per_tensor, int8 per_tensor off " in text
