"""What calibration costs: the search for a threshold in a histogram, and a whole model against plain forward passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

import fakequant as fq
from benchmarks.harness import CannotRunError, Prepared
from examples.demo import digits
from fakequant.compat.pytorch_quantization.calib import HistogramCalibrator
from tests.support import compat_rules as rules
from tests.support.exactness import by_the_reference, differing

LOOPS = "pytorch-quantization's search"
FORWARD = "plain forward passes"
BINS, PERCENTILE = 2048, 99.99
METHODS = ("percentile", "entropy", "mse")


def fewer(bins: int) -> str:
    """The name of the search in a histogram of fewer bins, as something to be timed beside."""
    return f"{bins} bins"


@dataclass(frozen=True)
class Search:
    """The search for a threshold in a histogram of a million normal numbers.

    Args:
        method: percentile, entropy or mse.
        elements: bins of the histogram.
    """

    method: str
    elements: int = BINS
    direction: str = "search"
    dtype_name: str = "float32"
    text: str = "int8"

    @property
    def name(self) -> str:
        return f"{self.method} search in a histogram"

    def differing(self) -> int:
        """Whether another amax is found than by the original's search, of at most 2048 bins: its loops take 20 s."""
        bins = min(self.elements, BINS)
        found = _calibrator(bins).compute_amax(self.method, percentile=PERCENTILE)
        return int(found is None or found.item() != _search_of_the_original(self.method, bins)())

    def prepare(self, against: str) -> Prepared:
        if against == LOOPS:
            theirs = _search_of_the_original(self.method, self.elements)
        elif against == fewer(BINS):
            theirs = self._of(BINS)
        else:
            raise CannotRunError(f"{against} has no such search")
        ours = self._of(self.elements)
        return Prepared(lambda _: ours(), lambda _: theirs(), [torch.empty(0)])

    def _of(self, bins: int) -> Callable[[], Tensor | None]:
        calibrator, method = _calibrator(bins), self.method
        return lambda: calibrator.compute_amax(method, percentile=PERCENTILE)


@cache
def _calibrator(bins: int) -> HistogramCalibrator:
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    return rules.collected([x], num_bins=bins)


def _search_of_the_original(method: str, bins: int) -> Callable[[], float]:
    """What pytorch-quantization does: one bin at a time for entropy and mse, sums of numpy for percentile."""
    counts, edges = rules.histogram_of(_calibrator(bins))
    if method == "entropy":
        return lambda: rules.entropy_by_loops(counts, edges, 8, False)
    if method == "mse":
        return lambda: rules.mse_by_loops(counts, edges, 8, False)

    def by_sums() -> float:
        below = np.cumsum(counts / counts.sum())
        return float(edges[np.searchsorted(below, PERCENTILE / 100)])

    return by_sums


@dataclass(frozen=True)
class WholeModel:
    """The calibration of the demo's network on its training images, by one method; in one thread, as the demo does.

    Args:
        method: of the activations.
    """

    method: str
    direction: str = "calibration"
    dtype_name: str = "float32"
    text: str = "INT8"

    @property
    def name(self) -> str:
        return f"demo's network, {self.method}"

    @property
    def elements(self) -> int:
        return sum(batch.numel() for batch in _batches())

    def differing(self) -> int:
        """Quantizers that get another range by the kernels than by the reference."""
        found = []
        for context in (nullcontext, by_the_reference):
            model = _prepared()
            with context():
                fq.calibrate(model, _batches(), self.method, progress=False)
            found.append([q.scale for q in model.modules() if isinstance(q, fq.nn.Quantizer)])
        return sum(differing(ours, right) for ours, right in zip(*found, strict=True))

    def prepare(self, against: str) -> Prepared:
        if against != FORWARD:
            raise CannotRunError(f"{against} calibrates nothing")
        plain, model, batches = _float_model(), _prepared(), _batches()

        @digits.one_thread()
        def calibrated(_: Tensor) -> None:
            fq.calibrate(model, batches, self.method, progress=False)

        @digits.one_thread()
        @torch.no_grad()
        def forward(_: Tensor) -> None:
            for batch in batches:
                plain(batch)

        return Prepared(calibrated, forward, [torch.empty(0)])


def _float_model() -> nn.Module:
    torch.manual_seed(digits.SEED)
    return digits.Net().eval()


def _prepared() -> nn.Module:
    return fq.prepare(copy.deepcopy(_float_model()), fq.presets.INT8)


@cache
def _batches() -> tuple[Tensor, ...]:
    training, _ = digits.load_digits()
    return training.images.split(128)
