"""The demo's quantized model by codes beside the simulated one, image by image."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fakequant.model.execution import set_execution

# Logits as near to each other as this share of the largest one: the float sums of a simulated layer round by more.
TIE = 1e-5


@dataclass(frozen=True)
class ByCodes:
    """How a model that multiplies codes reads images, beside its simulated twin.

    Attributes:
        images: how many.
        differing: how many are read as another digit.
        ties: of them, those of which the simulated logits of both digits are a tie.
        largest_difference: between two logits, as a share of the largest logit.
    """

    images: int
    differing: int
    ties: int
    largest_difference: float

    def __str__(self) -> str:
        read = f"{self.differing} of {self.images} images read otherwise than simulated"
        tied = f", {self.ties} of them ties" if self.differing else ""
        return f"{read}{tied}; logits differ by up to {self.largest_difference:.1e} of the largest"


@torch.no_grad()
def by_codes(model: nn.Module, images: Tensor) -> tuple[nn.Module, ByCodes]:
    """A copy of a simulated model that multiplies codes, and how its logits [n, classes] compare."""
    coded = set_execution(copy.deepcopy(model), "auto")
    simulated, found = model(images), coded(images)
    return coded, compare(simulated, found)


def compare(simulated: Tensor, found: Tensor) -> ByCodes:
    """Two tensors of logits [n, classes].

    >>> compare(torch.tensor([[1.0, 2.0], [3.0, 3.000001]]), torch.tensor([[1.0, 2.0], [3.000001, 3.0]]))
    ByCodes(images=2, differing=1, ties=1, largest_difference=3.17891e-07)
    """
    largest = simulated.abs().max()
    was, now = simulated.argmax(1, keepdim=True), found.argmax(1, keepdim=True)
    others = (was != now).squeeze(1)
    gaps = (simulated.gather(1, was) - simulated.gather(1, now)).squeeze(1)
    ties = others & (gaps <= TIE * largest)
    difference = ((simulated - found).abs().max() / largest).item()
    return ByCodes(len(simulated), int(others.sum()), int(ties.sum()), float(f"{difference:.6g}"))
