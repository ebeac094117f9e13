"""Small models that are trained here, with their data: what a format costs a model without training is no figure."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.demo import digits, text

_FEATURES = 128
"""The width of the transformers: a group of 128 weights is a whole row of most matrices, one of 32 is not."""


@dataclass(frozen=True)
class Task:
    """A trained model in float, batches to choose by, and other data to measure on."""

    name: str
    model: nn.Module
    batches: list[Tensor]
    held_out: list[Tensor]
    score: Callable[[nn.Module], float]
    """Accuracy in percent, larger is better."""


class Separable(nn.Module):
    """Depthwise-separable convolutions on images [n, 1, 8, 8]; gives logits [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU6())
        self.blocks = nn.Sequential(_separable(32, 64, 2), _separable(64, 64, 1), _separable(64, 128, 2))
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def _separable(channels: int, out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU6(),
        nn.Conv2d(channels, out, 1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU6(),
    )


class VisionTransformer(nn.Module):
    """Patches of 2 x 2 of images [n, 1, 8, 8] through torch's own encoder layers; gives logits [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, _FEATURES, 2, 2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, _FEATURES))
        self.blocks = nn.Sequential(*(text.Block(_FEATURES, 4) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(_FEATURES), nn.Linear(_FEATURES, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


class Perceptron(nn.Module):
    """Fully connected layers with normalisations on images [n, 1, 8, 8]; gives logits [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 128, 128)
        layers = [
            nn.Sequential(nn.Linear(one, other), nn.LayerNorm(other), nn.GELU())
            for one, other in itertools.pairwise(widths)
        ]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(images.flatten(1)))


class Rows(nn.Module):
    """An LSTM of two layers over the rows of images [n, 1, 8, 8]; gives logits [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.LSTM(8, 96, 2, batch_first=True), nn.Linear(96, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.rows(images[:, 0])[0][:, -1])


class Gated(nn.Module):
    """Convolutions with SiLU, whose channels a gate multiplies, on images [n, 1, 8, 8]; gives logits [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = _activated(1, 32), nn.ModuleList(_activated(32, 32) for _ in range(3))
        self.gates = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 8, 1), nn.SiLU(), nn.Conv2d(8, 32, 1), nn.Sigmoid()) for _ in range(3)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block, gate in zip(self.blocks, self.gates, strict=True):
            y = block(x)
            x = x + y * gate(y.mean((2, 3), keepdim=True))
        return self.head(x.mean((2, 3)))


def _activated(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.SiLU())


def classifiers(folder: Path) -> dict[str, Task]:
    """Three more trained models, for what needs no other library."""
    return _of_digits(
        folder, ("perceptron", Perceptron, 30, 0.05), ("LSTM", Rows, 30, 0.2), ("gated CNN", Gated, 20, 0.1)
    )


def tasks(folder: Path) -> dict[str, Task]:
    """The four trained models; trained ones are kept in a folder and read from there."""
    found = _of_digits(
        folder,
        ("digits CNN", digits.Net, 20, 0.1),
        ("separable CNN", Separable, 30, 0.05),
        ("vision transformer", VisionTransformer, 30, 0.02),
    )
    corpus = text.load_corpus()
    model = _kept(
        folder / "byte transformer.pt",
        lambda: text.Transformer(_FEATURES),
        lambda model: model.load_state_dict(text.train(corpus, 800, _FEATURES).state_dict()),
    )
    windows = [window for window, _ in text.Windows(corpus.training, 8, seed=1)]
    tested = list(corpus.held_out.unfold(0, text.CONTEXT, text.CONTEXT)[:256].split(32))
    found["byte transformer"] = Task(
        "byte transformer", model, windows, tested, lambda model: _next_bytes(model, corpus.held_out)
    )
    return found


def _of_digits(folder: Path, *named: tuple[str, Callable[[], nn.Module], int, float]) -> dict[str, Task]:
    """Classifiers of digits: name, model, epochs and learning rate."""
    training, held = digits.load_digits()
    chosen = list(training.images[:256].split(32))
    found = {}
    for name, make, epochs, rate in named:
        model = _kept(folder / f"{name}.pt", make, lambda model, e=epochs, r=rate: _fit(model, training, e, r))
        found[name] = Task(
            name, model, chosen, list(held.images.split(200)), lambda model: digits.percent_right(model, held)
        )
    return found


def _kept(path: Path, make: Callable[[], nn.Module], train: Callable[[nn.Module], object]) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    if path.exists():
        model.load_state_dict(torch.load(path))
    else:
        with digits.one_thread():
            train(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    return model.eval()


def _fit(model: nn.Module, split: digits.Split, epochs: int, rate: float) -> None:
    batches = digits.AugmentedBatches(split)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * len(batches))
    model.train()
    for _ in range(epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            digits.loss(model(images), labels).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def _next_bytes(model: nn.Module, held_out: Tensor) -> float:
    windows = held_out.unfold(0, text.CONTEXT + 1, text.CONTEXT + 1)[:256]
    right = sum(int((model(part[:, :-1]).argmax(-1) == part[:, 1:]).sum()) for part in windows.split(32))
    return 100 * right / windows[:, 1:].numel()


@torch.no_grad()
def output_error(model: nn.Module, reference: nn.Module, batches: list[Tensor]) -> float:
    """The squared error of a model's outputs as a share of the energy of those of another."""
    lost = energy = 0.0
    for x in batches:
        wanted = reference(x)
        lost += float((model(x) - wanted).double().square().sum())
        energy += float((wanted - F.adaptive_avg_pool1d(wanted, 1)).double().square().sum())
    return lost / energy
