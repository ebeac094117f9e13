"""The predicted order of random mixes of formats against the measured one.

python -m benchmarks.accuracy.allocation
"""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import torch

import fakequant as fq
from benchmarks.accuracy.models import tasks
from fakequant.ptq.allocation import Allocation, Scores

CHOICES = ("INT8_WEIGHT_ONLY", "INT4_GROUP32", "NVFP4_WEIGHT_ONLY")


def random_mixes(found: Scores, count: int, seed: int = 0) -> list[Allocation]:
    """Mixes with a choice drawn for each group of layers."""
    draw = random.Random(seed)
    mixes = []
    for _ in range(count):
        choices = {
            layer: name
            for group in found.ties
            for name in [draw.choice(list(found.layers[group[0]]))]
            for layer in group
        }
        mixes.append(found.predict(choices))
    return mixes


def rank_correlation(ones: list[float], others: list[float]) -> float:
    """Spearman's."""
    ranks = [torch.tensor(values).argsort().argsort().double() for values in (ones, others)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def main() -> None:
    """Print the rank correlation for every model."""
    warnings.simplefilter("ignore")
    for task in tasks(Path(__file__).parents[2] / "build" / "accuracy").values():
        found = fq.ptq.scores(task.model, task.batches, CHOICES, progress=False)
        mixes = fq.ptq.verify(task.model, task.held_out, random_mixes(found, 20))
        predicted, measured = [mix.loss for mix in mixes], [mix.measured or 0.0 for mix in mixes]
        correlation = rank_correlation(predicted, measured)
        print(f"{task.name}: rank correlation {correlation:.3f} of 20 mixes of {', '.join(CHOICES)}")


if __name__ == "__main__":
    main()
