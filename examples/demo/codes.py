"""Compare integer execution of the demo's model with simulation, image by image."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fakequant.model.engine import set_execution

# Logits closer than this share of the largest logit are a tie: the float sums of a simulated layer have larger errors.
TIE = 1e-5


@dataclass(frozen=True)
class ByCodes:
    """The predictions with integer execution, compared with those of simulation.

    Attributes:
        images: the number of images.
        differing: the number of images with another prediction.
        ties: the number of differing images whose two predictions are a tie of the simulated logits.
        largest_difference: the largest difference of two logits, as a share of the largest logit.
    """

    images: int
    differing: int
    ties: int
    largest_difference: float

    def __str__(self) -> str:
        differing = f"{self.differing} of {self.images} predictions differ from simulation"
        tied = f", {self.ties} of them ties" if self.differing else ""
        return f"{differing}{tied}; logits differ by up to {self.largest_difference:.1e} of the largest"


@torch.no_grad()
def by_codes(model: nn.Module, images: Tensor) -> tuple[nn.Module, ByCodes]:
    """Return a copy of a simulated model with integer execution, and the comparison of their predictions."""
    integer = set_execution(copy.deepcopy(model), "auto")
    return integer, compare(model(images), integer(images))


def compare(simulated: Tensor, integer: Tensor) -> ByCodes:
    """Compare two tensors of logits [n, classes].

    >>> compare(torch.tensor([[1.0, 2.0], [3.0, 3.000001]]), torch.tensor([[1.0, 2.0], [3.000001, 3.0]]))
    ByCodes(images=2, differing=1, ties=1, largest_difference=3.17891e-07)
    """
    largest = simulated.abs().max()
    was, now = simulated.argmax(1, keepdim=True), integer.argmax(1, keepdim=True)
    differing = (was != now).squeeze(1)
    gaps = (simulated.gather(1, was) - simulated.gather(1, now)).squeeze(1)
    ties = differing & (gaps <= TIE * largest)
    difference = ((simulated - integer).abs().max() / largest).item()
    return ByCodes(len(simulated), int(differing.sum()), int(ties.sum()), float(f"{difference:.6g}"))
