"""The demo's network and data: scikit-learn's handwritten digits, and an ordinary small PyTorch training on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.errors import RecipeError
from fakequant.nn import Add

SEED = 0
LEARNING_RATE = 0.1
BATCH = 64
VERSIONS = 10


class Net(nn.Module):
    """A small residual network for images [n, 1, 8, 8]; gives logits [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(1, 32), nn.ReLU(), _convolution(32, 64), nn.ReLU())
        self.shrink = nn.MaxPool2d(2)
        self.block = nn.Sequential(_convolution(64, 64), nn.ReLU(), _convolution(64, 64))
        # A module instead of `+`, so that `prepare` can quantize its inputs.
        self.add = Add()
        self.pool = nn.AvgPool2d(2)
        self.head = nn.Linear(64 * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.shrink(self.stem(images))
        x = torch.relu(self.add(x, self.block(x)))
        return self.head(self.pool(x).flatten(1))


def _convolution(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out))


@dataclass(frozen=True)
class Split:
    """Images [n, 1, 8, 8] from 0 to 1 and their digits [n]."""

    images: Tensor
    digits: Tensor


def load_digits() -> tuple[Split, Split]:
    """The handwritten digits of scikit-learn: two thirds for training, one third held out, stratified.

    Raises:
        RecipeError: scikit-learn, which ships the data, is not installed.
    """
    if find_spec("sklearn") is None:
        raise RecipeError("the digits come with scikit-learn, which is not installed; pip install fakequant[demo]")
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    images, digits = load(return_X_y=True)
    parts = train_test_split(images, digits, test_size=1 / 3, stratify=digits, random_state=SEED)
    train_images, held_images, train_digits, held_digits = (torch.tensor(part) for part in parts)
    return (
        Split(train_images.float().reshape(-1, 1, 8, 8) / 16, train_digits),
        Split(held_images.float().reshape(-1, 1, 8, 8) / 16, held_digits),
    )


class AugmentedBatches:
    """The batches of one epoch in a new order each time, every image slightly turned, scaled, sheared and moved."""

    def __init__(self, split: Split, seed: int = SEED) -> None:
        self.split = split
        self.random = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-len(self.split.digits) // BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self.split.digits), generator=self.random).split(BATCH):
            yield self.distort(self.split.images[chosen]), self.split.digits[chosen]

    def distort(self, images: Tensor) -> Tensor:
        """Images [n, 1, 8, 8], each changed at random."""
        angle, shear = (self._uniform(len(images), 0.2) for _ in range(2))
        wide, high, right, down = (self._uniform(len(images), 0.1) for _ in range(4))
        first = torch.stack([1 + wide, shear - angle.sin(), right], 1)
        second = torch.stack([angle.sin(), (1 + high) * angle.cos(), down], 1)
        grid = F.affine_grid(torch.stack([first, second], 1), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, align_corners=False)

    def _uniform(self, count: int, limit: float) -> Tensor:
        return (torch.rand(count, generator=self.random) * 2 - 1) * limit


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread.

    More threads do not speed up such a small network, and take ten times as long while other programs use the cores.
    With one thread, sums also round equally on every machine with the same kind of processor.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def loss(logits: Tensor, digits: Tensor) -> Tensor:
    """Return the training loss."""
    return F.cross_entropy(logits, digits, label_smoothing=0.1)


def train(split: Split, epochs: int, network: Callable[[], nn.Module] = Net, seed: int = SEED) -> nn.Module:
    """A float network, trained with one cycle of SGD."""
    torch.manual_seed(seed)
    model, batches = network(), AugmentedBatches(split, seed)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=epochs * len(batches))
    for _ in range(epochs):
        for images, digits in batches:
            optimizer.zero_grad()
            loss(model(images), digits).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def right(model: nn.Module, split: Split) -> Tensor:
    """Return for each image whether its digit is recognized, bool [n]."""
    return model(split.images).argmax(1) == split.digits


def percent_right(model: nn.Module, split: Split) -> float:
    """Return the accuracy in percent."""
    return 100 * int(right(model, split).sum()) / len(split.digits)


def in_versions(split: Split) -> Split:
    """Every image in ten distorted versions: on clean images this network makes one mistake in 599."""
    distort = AugmentedBatches(split, SEED + 2).distort
    images = torch.cat([distort(split.images) for _ in range(VERSIONS)])
    return Split(images, split.digits.repeat(VERSIONS))


def margin(right: Tensor, wanted: Tensor) -> float:
    """Half the width of the 95 % interval of a change of accuracy, in points, of two models on the same images.

    The versions of one image are not independent: each image counts once, by the mean change of its versions.
    """
    changes = (right.double() - wanted.double()).view(VERSIONS, -1).mean(0)
    return 100 * 1.96 * float(changes.std()) / len(changes) ** 0.5
