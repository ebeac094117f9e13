"""Time of the interfaces in `fakequant.compat` beside that of the originals.

`python -m benchmarks.compat` prints a row for the training of a model with torch.ao's quantizers by torch and by
`compat.aten`, one for a quantizer alone, and one for the entropy search of `compat.pytorch_quantization` over the
original's loops for every number of bins. It exits with 1 if a result differs, if a step is not faster than torch's, or
if the search is less than 50 times as fast.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.ao import quantization as ao

from fakequant.compat import aten
from fakequant.compat.pytorch_quantization.calib import HistogramCalibrator

from .exactness import differing
from .kernels import ratio

BINS = (2048, 8192)
LEAST = 50.0
ROUNDS = 16


def entropy_by_loops(
    counts: NDArray[Any], edges: NDArray[Any], num_bits: int, unsigned: bool, stride: int = 1, start_bin: int = 128
) -> float:
    """The amax by the rules of pytorch-quantization 2.2.1, one bin at a time in Python."""
    from scipy.stats import entropy

    counts = counts.astype(np.int64)
    counts[0] = counts[1]
    cells = 1 << (num_bits - 1 + int(unsigned))
    divergences = []
    for kept in range(start_bin, len(counts) + 1, stride):
        cell_of = np.digitize(range(kept), np.linspace(0, kept, cells + 1)) - 1
        cell_of[counts[:kept] == 0] = -1
        mass = np.zeros(cells)
        for position, cell in enumerate(cell_of):
            if cell != -1:
                mass[cell] += counts[position]
        for cell, bins in Counter(cell_of).items():
            if cell != -1:
                mass[cell] /= bins
        candidate = np.zeros(kept)
        for position, cell in enumerate(cell_of):
            if cell != -1:
                candidate[position] = mass[cell]
        reference = np.array(counts[:kept])
        reference[-1] += counts[kept:].sum()
        # Of a candidate without any counts the divergence is no number, which argmin would take.
        divergences.append(entropy(reference, candidate) if candidate.any() else np.inf)
    last = len(divergences) - 1 - int(np.argmin(divergences[::-1]))
    return float(edges[last * stride + start_bin])


def entropy_search() -> bool:
    """Whether the search finds what the loops find, and fast enough; prints a row for every number of bins."""
    x, good = torch.randn(1_000_000), True
    for bins in BINS:
        calibrator = HistogramCalibrator(8, None, False, num_bins=bins)
        calibrator.collect(x)
        kept = calibrator._calib_hist, calibrator._calib_bin_edges
        counts, edges = (torch.as_tensor(each).numpy() for each in kept)
        start = time.perf_counter()
        wanted = entropy_by_loops(counts, edges, 8, False)
        loops, times = time.perf_counter() - start, []
        for _ in range(5):
            start = time.perf_counter()
            amax = calibrator.compute_amax("entropy")
            times.append(time.perf_counter() - start)
        search, same = statistics.median(times), amax is not None and amax.item() == wanted
        good &= same and loops / search >= LEAST
        print(
            f"entropy, {bins} bins: loops {loops:.2f} s, search {search * 1e3:.1f} ms, {loops / search:.0f} times "
            f"as fast (bar: {LEAST:.0f}), amax {wanted:.6f}, {'the same' if same else 'DIFFERENT'}"
        )
    return good


activation_quantizer = ao.FakeQuantize.with_args(observer=ao.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
weight_quantizer = ao.FakeQuantize.with_args(
    observer=ao.MovingAveragePerChannelMinMaxObserver,
    quant_min=-128,
    quant_max=127,
    dtype=torch.qint8,
    qscheme=torch.per_channel_symmetric,
)


def separable_convolutions() -> nn.Module:
    """A model that torch.ao has prepared for training, with a FakeQuantize at every weight and activation."""
    layers: list[nn.Module] = [ao.QuantStub(), nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).train()
    model.qconfig = ao.QConfig(activation_quantizer, weight_quantizer)  # pyright: ignore[reportArgumentType]
    return ao.prepare_qat(model)


def training_step(model: nn.Module) -> Callable[[Tensor], None]:
    """One step of gradient descent on a batch of images."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(images: Tensor) -> None:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    return step


def gradient(quantizer: nn.Module) -> Callable[[Tensor], None]:
    """Forward and backward of a quantizer alone."""
    return lambda x: quantizer(x).sum().backward()


@dataclass(frozen=True)
class TorchAo:
    """A model with quantizers of torch.ao, a step with it, and the shape of its input."""

    name: str
    model: Callable[[], nn.Module]
    step: Callable[[nn.Module], Callable[[Tensor], None]]
    shape: tuple[int, ...]


TORCH_AO = (
    TorchAo("torch.ao's FakeQuantize, forward and backward", activation_quantizer, gradient, (1 << 22,)),
    TorchAo("training step of separable convolutions", separable_convolutions, training_step, (16, 3, 64, 64)),
)


def trained(row: TorchAo, *, by_us: bool, batches: list[Tensor]) -> list[Tensor]:
    """All tensors of the model after some steps, and the gradients of its inputs."""
    torch.manual_seed(0)
    model = row.model()
    step = row.step(model)
    leaves = [x.clone().requires_grad_() for x in batches]
    with aten.routed() if by_us else nullcontext():
        for leaf in leaves:
            step(leaf)
    return [*model.state_dict().values(), *(leaf.grad + 0.0 for leaf in leaves if leaf.grad is not None)]


def torch_ao() -> bool:
    """Whether models of torch.ao train to the same bits by `compat.aten`, and faster; prints a row for each."""
    good = True
    for row in TORCH_AO:
        batches = [torch.randn(row.shape).requires_grad_() for _ in range(4)]
        tensors = zip(*(trained(row, by_us=by_us, batches=batches) for by_us in (True, False)), strict=True)
        wrong = sum(differing(mine, theirs) for mine, theirs in tensors)
        model = row.model()
        found = ratio(aten.routed()(row.step(model)), row.step(copy.deepcopy(model)), batches, rounds=ROUNDS)
        good &= not wrong and found.median < 1
        print(
            f"{row.name}: torch {found.other_seconds * 1e3:.1f} ms, ours {found.seconds * 1e3:.1f} ms, ratio "
            f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f}), {wrong} differing elements"
        )
    return good


def main() -> int:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return int(not all([torch_ao(), entropy_search()]))


if __name__ == "__main__":
    sys.exit(main())
