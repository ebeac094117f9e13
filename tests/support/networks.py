"""Four networks on which graphs are measured: what is captured of them is what a user's models are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import fakequant as fq
from examples.demo.text import Transformer
from fakequant.nn import Add
from fakequant.nn.quantized.recurrent import GateQuantizers, unroll
from fakequant.nn.quantizer import Kind, Quantizer

PRESETS = ("INT8", "FP8", "NVFP4")
_WORDS = 32


class Cnn(nn.Module):
    def __init__(self, side: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.second_norm = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(side * side, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.first_norm(self.first(x))))
        x = self.pool(torch.relu(self.second_norm(self.second(x))))
        return self.head(x.flatten(1))


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalisation, added to their input [n, channels, h, w]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.second, self.second_norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.add, self.relu = Add(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first_norm(self.first(x)))
        return self.relu(self.add(self.second_norm(self.second(y)), x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.Sequential(ResidualBlock(8), ResidualBlock(8))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.stem(x))).flatten(1))


class LstmClassifier(nn.Module):
    def __init__(self, spec: fq.QuantSpec) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(_WORDS, 16), nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 5)
        self.steps = Quantizer(spec, dynamic=True)
        self.weights = Quantizer(spec, kind=Kind.WEIGHT, dynamic=True)

    def forward(self, words: Tensor) -> Tensor:
        x, _ = unroll(self.lstm, self.words(words), None, [GateQuantizers(self.steps, self.weights)])
        assert isinstance(x, Tensor)
        return self.head(x[:, -1])


def _images(count: int, side: int) -> Tensor:
    return torch.randn(count, 1, side, side)


def _text(count: int) -> Tensor:
    return torch.randint(0, _WORDS, (count, 12))


NETWORKS: dict[str, Callable[[fq.QuantSpec, int], tuple[nn.Module, Tensor]]] = {
    "CNN": lambda spec, count: (Cnn(8), _images(count, 8)),
    "ResNet": lambda spec, count: (ResNet(), _images(count, 8)),
    "LSTM": lambda spec, count: (LstmClassifier(spec), _text(count)),
    "transformer": lambda spec, count: (Transformer(), _text(count)),
}


def quantized(network: str, preset: str, count: int = 4) -> tuple[nn.Module, Tensor]:
    """A network in eval mode, quantized and calibrated, with statistics as training leaves them, and an input."""
    torch.manual_seed(0)
    config = getattr(fq.presets, preset)
    input = config.rules[0].input
    model, x = NETWORKS[network](input.spec, count)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for tensor in (norm.running_mean, norm.weight.data, norm.bias.data):
                tensor.normal_()
            norm.running_var.uniform_(0.5, 2.0)
    own = {name: module for name, module in model.named_children() if isinstance(module, Quantizer)}
    for name in own:
        delattr(model, name)
    # The steps of the LSTM are quantized by the network itself.
    fq.prepare(model.eval(), config.with_rule(fq.Rule("lstm", optional=True)))
    for name, quantizer in own.items():
        setattr(model, name, quantizer)
    fq.calibrate(model, [x], progress=False)
    return model, x
