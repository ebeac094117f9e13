"""Choose an amax from a histogram of magnitudes with entropy, mse or percentile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fakequant.compat.pytorch_quantization.specification import NumBits, integer_format
from fakequant.compat.pytorch_quantization.tensor_quant import fake_quantize
from fakequant.numerics.formats.floats import IntegerFormat

# Thresholds times cells that are evaluated together: 512 KiB of float64, which fit into the cache.
_CELLS = 1 << 16
# Thresholds times bins that are evaluated together: 512 KiB of float32.
_VALUES = 1 << 17
# Closer divergences (in nats) are computed again one by one: sums in another order differ by less.
_SAME_DIVERGENCE = 1e-10
# The number of thresholds in the first estimate of the smallest divergence.
_SAMPLE = 50
# The distance of the first thresholds whose squared error is computed, and into how many parts it is cut each time.
_COARSE, _FINER = 100, 4
# Relative to the middles: how far rounding in float32 moves a value, and the place where it becomes the next.
_MOVED = 2.0**-21
# Relative: what sums of float32 differ by from sums of real numbers: five roundings of every term, and no more than 128
# additions when torch sums up to 2**17 of them, in a tree of four levels (aten/src/ATen/native/cpu/SumKernel.cpp).
_SUMMED = 2.0**-16


def percentile_amax(counts: np.ndarray, edges: np.ndarray, percentile: float) -> Tensor:
    """Return the left edge of the bin in which the share of smaller magnitudes reaches the percentile."""
    shares = np.cumsum(counts / counts.sum())
    return torch.tensor(edges[np.searchsorted(shares, percentile / 100)].item(), device="cpu")


def mse_amax(
    counts: np.ndarray, edges: np.ndarray, num_bits: NumBits, unsigned: bool, *, stride: int = 1, start_bin: int = 128
) -> Tensor:
    """Return the bin centre whose use as amax gives the smallest mean squared error; the first of equals.

    Raises:
        ValueError: there are not more bins than start_bin.
    """
    weighed, ends = torch.from_numpy(counts), torch.from_numpy(edges).float()
    centers = (ends[1:] + ends[:-1]) / 2
    candidates = centers[start_bin::stride].contiguous()
    _check_candidates(len(candidates), len(centers), start_bin)
    fmt = _integers(num_bits, unsigned)
    weights = weighed.float()

    def squares(indices: np.ndarray) -> Iterator[Tensor]:
        """The weighted squared errors of thresholds [thresholds, bins], in parts."""
        for part in candidates[torch.from_numpy(indices)].split(max(1, _VALUES // len(centers))):
            values = fake_quantize(centers.expand(len(part), -1), part[:, None], fmt)
            yield values.sub_(centers).square_().mul_(weights)

    exact, largest = weighed.double(), float(centers[-1])
    near = np.arange(len(candidates))
    # Smaller thresholds have rules of their own; squares beyond the range of float32 are inf.
    if float(candidates[0]) > 2.0**-24 and float(exact.sum()) * largest**2 < 1e37:
        second = float(exact @ centers.double().square()) / len(centers)
        near = _nearly_least(
            lambda indices: torch.cat([part.mean(1) for part in squares(indices)]).double().numpy(),
            candidates.double().numpy(),
            second,
        )
    # Row by row, as one sum each: torch may sum the rows of a matrix in another order.
    means = [row.mean().item() for part in squares(near) for row in part]
    return candidates[near[int(np.argmin(means))]].clone()


def _nearly_least(errors: Callable[[np.ndarray], np.ndarray], amax: np.ndarray, second: float) -> np.ndarray:
    """The thresholds whose error may be the least, in rising order, by the errors of few.

    The error in real numbers, less the mean of w x**2 and divided by amax**2, is the smallest of functions that are
    linear in 1 / amax, one for every way to round. It is therefore concave in 1 / amax, and two errors bound all that
    lie between them from below: thresholds between two others are computed only where this bound leaves a choice.

    Args:
        errors: from indices of thresholds to the means of w (x - y)**2, as float32 sums them.
        amax: the thresholds in rising order.
        second: the mean of w x**2.
    """
    found = np.full(len(amax), np.inf)
    ends = np.unique(np.append(np.arange(0, len(amax), _COARSE), len(amax) - 1))
    found[ends] = errors(ends)
    left, right = ends[:-1], ends[1:]
    while left.size:
        lowest = _lowest_between(found[left], found[right], amax[left], amax[right], second)
        wanted = (right - left > 1) & ~(lowest > found.min())
        ends = np.linspace(left[wanted], right[wanted], _FINER + 1, dtype=np.int64)
        inner = np.unique(ends[np.isinf(found[ends])])
        if inner.size:
            found[inner] = errors(inner)
        left, right = ends[:-1].ravel(), ends[1:].ravel()
    return np.flatnonzero(found * (1 - _SUMMED) <= found.min() * (1 + _SUMMED))


@np.errstate(divide="ignore", invalid="ignore")
def _lowest_between(at_a: np.ndarray, at_b: np.ndarray, a: np.ndarray, b: np.ndarray, second: float) -> np.ndarray:
    """A lower bound of the errors of all thresholds between a and b, by those of both: on the chord between them."""

    def at_least(error: np.ndarray) -> np.ndarray:
        """What other roundings leave of an error."""
        return np.maximum(np.sqrt(np.maximum(error, 0.0)) - _MOVED * second**0.5, 0.0) ** 2

    at_a, at_b = at_least(at_a * (1 - _SUMMED)), at_least(at_b * (1 - _SUMMED))
    concave_a, concave_b = (at_a - second) / a**2, (at_b - second) / b**2
    slope = (concave_b - concave_a) / (1 / b - 1 / a)
    rest = concave_a - slope / a
    bottom, ends = -slope / (2 * rest), np.minimum(at_a, at_b)
    # error(t) = second + t**2 (rest + slope / t)
    lowest = np.where((bottom > a) & (bottom < b), second + bottom * (bottom * rest + slope), ends)
    return at_least(np.minimum(lowest, ends)) * (1 - _SUMMED)


def entropy_amax(
    counts: np.ndarray, edges: np.ndarray, num_bits: NumBits, unsigned: bool, *, stride: int = 1, start_bin: int = 128
) -> Tensor:
    """Return the edge with the smallest loss when the histogram up to it is quantized; the last of equal edges.

    The loss is the Kullback-Leibler divergence of the bins below the edge, the clipped counts added to the last of
    them, from the same bins without these counts, merged into as many cells as there are magnitudes of codes and spread
    evenly over the bins of a cell that are not empty. Bin 0 counts as much as its neighbour.

    Raises:
        ValueError: there are fewer bins than start_bin.

    Source: Migacz, "8-bit inference with TensorRT", GTC 2017.
    """
    divergence = _Divergence(counts, int(_integers(num_bits, unsigned).bound) + 1)
    kept = np.arange(start_bin, len(counts) + 1, stride)
    _check_candidates(len(kept), len(counts), start_bin)
    least = divergence.of_all(kept[:: -(-len(kept) // _SAMPLE)]).min()
    kept = kept[divergence.at_least(kept) <= least + _SAME_DIVERGENCE]
    found = divergence.of_all(kept)
    near = kept[found <= found.min() + _SAME_DIVERGENCE]
    exact = np.array([divergence.of_one(int(n)) for n in near])
    best = near[len(near) - 1 - int(np.argmin(exact[::-1]))]
    return torch.tensor(edges[best].item(), device="cpu")


class _Divergence:
    """KL(P || Q) for numbers of bins kept."""

    def __init__(self, counts: np.ndarray, cells: int) -> None:
        self.cells = cells
        self.counts = counts.astype(np.int64)
        self.counts[0] = self.counts[1] if len(counts) > 1 else self.counts[0]
        values = self.counts.astype(np.float64)
        # Entry k is about the bins 0 to k - 1.
        self.mass = _from_zero(np.cumsum(self.counts))
        self.filled = _from_zero(np.cumsum(self.counts > 0))
        self.information = _from_zero(np.cumsum(_x_log_x(values)))

    def at_least(self, kept: np.ndarray) -> np.ndarray:
        """Return a lower bound of the divergence: all bins except the last are merged; -inf if there is no bound.

        Merging outcomes never increases a divergence (Cover and Thomas, Elements of Information Theory, section 2.7).
        """
        start = np.ceil((self.cells - 1) * (kept / self.cells)).astype(np.int64)
        inside, last = self.mass[kept], self.counts[kept - 1]
        with np.errstate(divide="ignore", invalid="ignore"):
            p = (last + self.mass[-1] - inside) / self.mass[-1]
            q = (inside - self.mass[start]) / (self.filled[kept] - self.filled[start]) / inside
            found = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
        return np.where((last > 0) & np.isfinite(found), found, -np.inf)

    def of_all(self, kept: np.ndarray) -> np.ndarray:
        """Return the divergence for every number of bins kept, computed in parts."""
        rows = max(1, _CELLS // self.cells)
        return np.concatenate([self._of_many(kept[i : i + rows]) for i in range(0, len(kept), rows)])

    def _of_many(self, kept: np.ndarray) -> np.ndarray:
        """Return the divergence for every number of bins kept from cumulative sums, accurate except in the last digits.

        With N counts in all, C of them kept and T clipped, r = the counts of P and a cell of S counts in n bins:
        KL = (sum r log r - sum S log(S / n) - T log(S / n of the last)) / N - log N + log C.
        """
        total, inside = self.mass[-1], self.mass[kept]
        last, clipped = self.counts[kept - 1], total - inside
        starts = self._starts(kept)
        mass = np.diff(self.mass[starts], axis=1)
        spread = np.diff(self.filled[starts], axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_q = np.where(mass > 0, np.log(mass / spread), 0.0)
            last_cell = self.cells - 1 - np.argmax(mass[:, ::-1] > 0, axis=1)
            log_last = log_q[np.arange(len(kept)), last_cell]
            p_log_p = self.information[kept] - _x_log_x(last) + _x_log_x(last + clipped)
            p_log_q = (mass * log_q).sum(1) + clipped * log_last
            found = (p_log_p - p_log_q) / total - np.log(total) + np.log(inside)
        return np.where((inside == 0) | ((last == 0) & (clipped > 0)), np.inf, found)

    def of_one(self, kept: int) -> float:
        """Return the divergence for one number of bins kept, in a fixed order, so that equal ones have equal bits."""
        counts = self.counts[:kept]
        if not counts.any():
            return np.inf
        cell = np.repeat(np.arange(self.cells), np.diff(self._starts(np.array([kept]))[0]))
        filled = counts > 0
        mass = np.bincount(cell, counts, self.cells)
        spread = np.bincount(cell, filled, self.cells)
        q = np.where(filled, (mass / np.maximum(spread, 1))[cell], 0.0)
        p = counts.astype(np.float64)
        p[-1] += self.mass[-1] - self.mass[kept]
        p, q = p / p.sum(), q / q.sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = p / q
            # By log1p where the two are close; inf where only q is 0.
            close = (ratio > 0.5) & (ratio < 2)
            terms = p * np.where(close, np.log1p((p - q) / q), np.log(ratio))
        return float(np.where(p > 0, terms, 0.0).sum())

    def _starts(self, kept: np.ndarray) -> np.ndarray:
        """Return the first bin of every cell, and the number kept [kept, cells + 1]."""
        starts = np.ceil(np.arange(self.cells + 1) * (kept / self.cells)[:, None]).astype(np.int64)
        starts[:, -1] = kept
        return starts


def _x_log_x(values: np.ndarray) -> np.ndarray:
    return values * np.log(np.maximum(values, 1))


def _from_zero(cumulative: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, cumulative.dtype), cumulative])


# Building them takes a quarter of a search; they are few.
@lru_cache(maxsize=None, typed=True)
def _integers(num_bits: NumBits, unsigned: bool) -> IntegerFormat:
    if not isinstance(num_bits, int):
        raise TypeError(f"entropy and mse search for the amax of integers, not of floats {num_bits}; use percentile")
    return integer_format(num_bits, unsigned)


def _check_candidates(candidates: int, bins: int, start_bin: int) -> None:
    if not candidates:
        raise ValueError(f"there is no threshold to try: the histogram has {bins} bins and start_bin is {start_bin}")
