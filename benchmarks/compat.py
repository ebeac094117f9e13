"""Time of the entropy search of compat.pytorch_quantization over that of the original's loops.

`python -m benchmarks.compat` prints a row for every number of bins, and exits with 1 if an amax differs or the search
is less than 50 times as fast.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fakequant.compat.pytorch_quantization.calib import HistogramCalibrator

BINS = (2048, 8192)
LEAST = 50.0


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


def main() -> int:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(1_000_000)
    failed = False
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
        failed |= not same or loops / search < LEAST
        print(
            f"entropy, {bins} bins: loops {loops:.2f} s, search {search * 1e3:.1f} ms, {loops / search:.0f} times "
            f"as fast (bar: {LEAST:.0f}), amax {wanted:.6f}, {'the same' if same else 'DIFFERENT'}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
