"""Calibrators that compute an amax from batches of tensors, or from histograms of magnitudes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from fakequant.compat.pytorch_quantization.tensor_quant import NumBits, fake_quantize, integer_format
from fakequant.compat.pytorch_quantization.utils import logger, reduce_amax
from fakequant.errors import CalibrationError
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
    """The left edge of the first bin at which the counts reach the percentile, as a 0-d tensor."""
    shares = np.cumsum(counts / counts.sum())
    return torch.tensor(edges[np.searchsorted(shares, percentile / 100)].item(), device="cpu")


def mse_amax(
    counts: np.ndarray, edges: np.ndarray, num_bits: NumBits, unsigned: bool, *, stride: int = 1, start_bin: int = 128
) -> Tensor:
    """The bin centre that, as amax, gives the smallest mean squared error; of equal centres the first.

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
        """The weighted squared errors for thresholds [thresholds, bins], in parts."""
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
    """The indices of thresholds whose error may be the smallest, in rising order, from the errors of a few thresholds.

    In real numbers, (error - mean of w x**2) / amax**2 is the smallest of functions that are linear in 1 / amax, one
    for every way to round. It is therefore concave in 1 / amax, and two errors bound all errors between them from
    below: thresholds between two others are computed only if this bound does not exclude them.

    Args:
        errors: a function from indices of thresholds to the means of w (x - y)**2, as float32 sums them.
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
    """A lower bound of the errors of all thresholds between a and b, on the chord between their errors."""

    def at_least(error: np.ndarray) -> np.ndarray:
        """The error minus the largest change that rounding of float32 sums can make."""
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
    """The edge up to which quantizing the histogram has the smallest loss; the last such edge.

    The loss is the Kullback-Leibler divergence KL(P || Q). P is the bins below the edge, with the clipped counts added
    to the last. Q is the same bins without the clipped counts: the counts of each cell (the bins of one magnitude of a
    code) are spread evenly over its bins that are not empty. Bin 0 gets the count of bin 1.

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
    """The divergence KL(P || Q) of a quantized histogram, for each number of bins that are kept."""

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
        """A lower bound of the divergence: the divergence after all bins except the last are merged; -inf for no bound.

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
        """The divergence for every number of kept bins, by cumulative sums; only the last digits are inexact.

        With N counts in all, C of them kept and T clipped, r = the counts of P and a cell of S counts in n bins:
        KL = (sum r log r - sum S log(S / n) - T log(S / n of the last)) / N - log N + log C.
        """
        rows = max(1, _CELLS // self.cells)
        parts = []
        for part in (kept[i : i + rows] for i in range(0, len(kept), rows)):
            total, inside = self.mass[-1], self.mass[part]
            last, clipped = self.counts[part - 1], total - inside
            starts = self._starts(part)
            mass = np.diff(self.mass[starts], axis=1)
            spread = np.diff(self.filled[starts], axis=1)
            with np.errstate(divide="ignore", invalid="ignore"):
                log_q = np.where(mass > 0, np.log(mass / spread), 0.0)
                last_cell = self.cells - 1 - np.argmax(mass[:, ::-1] > 0, axis=1)
                log_last = log_q[np.arange(len(part)), last_cell]
                p_log_p = self.information[part] - _x_log_x(last) + _x_log_x(last + clipped)
                p_log_q = (mass * log_q).sum(1) + clipped * log_last
                found = (p_log_p - p_log_q) / total - np.log(total) + np.log(inside)
            parts.append(np.where((inside == 0) | ((last == 0) & (clipped > 0)), np.inf, found))
        return np.concatenate(parts)

    def of_one(self, kept: int) -> float:
        """The divergence for one number of kept bins, summed in a fixed order, so that ties have equal bits."""
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
            # log1p where p and q are close; inf where only q is 0.
            close = (ratio > 0.5) & (ratio < 2)
            terms = p * np.where(close, np.log1p((p - q) / q), np.log(ratio))
        return float(np.where(p > 0, terms, 0.0).sum())

    def _starts(self, kept: np.ndarray) -> np.ndarray:
        """For each number of kept bins: the first bin of every cell, then this number: [len(kept), cells + 1]."""
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


__all__ = ["HistogramCalibrator", "MaxCalibrator", "_Calibrator", "calibrate_weights"]


def __getattr__(name: str) -> ModuleType:
    """Return this module as `max`, the original's submodule; a global `max` would hide the built-in function."""
    if name != "max":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return sys.modules[__name__]


class _Calibrator:
    """Collects statistics of tensors and computes an amax.

    Args:
        num_bits: bits of a code.
        axis: the axis or axes that keep one amax per index; None for one amax in all.
        unsigned: whether codes begin at 0.
    """

    def __init__(self, num_bits: NumBits, axis: int | tuple[int, ...] | None, unsigned: bool) -> None:
        self._num_bits = num_bits
        self._axis = axis
        self._unsigned = unsigned
        self._told: set[str] = set()

    def collect(self, x: Tensor) -> None:
        """Add a tensor to the collected data."""
        raise NotImplementedError

    def reset(self) -> None:
        """Discard all collected data."""
        raise NotImplementedError

    def compute_amax(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The amax of the collected data, or None without data."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"num_bits={self._num_bits} axis={self._axis} unsigned={self._unsigned}"

    def _tell(self, message: str) -> None:
        """Log a warning, but only the first time."""
        if message not in self._told:
            self._told.add(message)
            logger.warning(message)


class MaxCalibrator(_Calibrator):
    """Collects the largest magnitude of all tensors.

    Args:
        num_bits: bits of a code.
        axis: the axis or axes that keep one amax per index; negative numbers count from the end.
        unsigned: whether codes begin at 0; negative values then only cause a warning.
        track_amax: whether to keep the amax of every tensor in `amaxs`.

    >>> calibrator = MaxCalibrator(8, 0, False)
    >>> calibrator.collect(torch.tensor([[1.0, -3.0], [0.5, 0.25]]))
    >>> calibrator.collect(torch.tensor([[2.0, 2.0], [2.0, 2.0]]))
    >>> calibrator.compute_amax()
    tensor([[3.],
            [2.]])
    """

    def __init__(
        self,
        num_bits: NumBits,
        axis: int | tuple[int, ...] | None,
        unsigned: bool,
        track_amax: bool = False,
    ) -> None:
        super().__init__(num_bits, axis, unsigned)
        self._track_amax = track_amax
        self._amaxs: list[np.ndarray] = []
        self._calib_amax: Tensor | None = None

    @property
    def amaxs(self) -> list[np.ndarray]:
        """The amax of every collected tensor if `track_amax` is set."""
        return self._amaxs

    @torch.inference_mode(False)
    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Update the largest magnitudes with the magnitudes of a tensor.

        Raises:
            RuntimeError: amax has another shape than for the tensors before, or the tensor has no elements.
            IndexError: an axis that the tensor does not have.
        """
        axes = self._axis if isinstance(self._axis, list | tuple) else [] if self._axis is None else [self._axis]
        if beyond := [axis for axis in axes if not -x.dim() <= axis < x.dim()]:
            raise IndexError(f"axis {beyond[0]} is out of range for a tensor of shape {list(x.shape)}")
        kept = {axis % x.dim() for axis in axes}
        amax = reduce_amax(x.detach(), [axis for axis in range(x.dim()) if axis not in kept])
        if self._unsigned and x.numel() and bool((x < 0).any()):
            self._tell("Calibrator encountered negative values, although codes are unsigned; is this the right tensor?")
        if bool(amax.isnan().any()):
            self._tell("Calibrator encountered NaN, so amax is NaN; repair the layer that makes it.")
        if self._track_amax:
            self._amaxs.append(amax.cpu().float().numpy())
        if self._calib_amax is not None:
            if amax.shape != self._calib_amax.shape:
                raise RuntimeError(
                    f"amax shape changed! It was {list(self._calib_amax.shape)} and is {list(amax.shape)} for a tensor "
                    f"of shape {list(x.shape)}; collect tensors of one layout"
                )
            amax = torch.maximum(self._calib_amax, amax.to(self._calib_amax.device))
        self._calib_amax = amax

    def reset(self) -> None:
        """Discard all collected data."""
        self._calib_amax = None

    def compute_amax(self) -> Tensor | None:
        """A copy of the largest magnitudes, or None if nothing was collected."""
        return None if self._calib_amax is None else self._calib_amax.clone()

    def __str__(self) -> str:
        return f"MaxCalibrator(track_amax={self._track_amax})"

    def __repr__(self) -> str:
        tracked = f" amaxs={self._amaxs}" if self._track_amax else ""
        amax = f" calib_amax={self._calib_amax} track_amax={self._track_amax}{tracked}"
        return f"MaxCalibrator({super().__repr__()}{amax})"


# Beyond this number of bins, half a MiB of counts, neighbours are merged instead of bins appended. The mse search
# quantizes every bin with every threshold, and takes seconds at this size.
_MOST_BINS = 1 << 16
# histc counts in float32, which is exact up to this number.
_EXACT_COUNTS = 1 << 24


class HistogramCalibrator(_Calibrator):
    """Counts magnitudes in bins of equal width.

    The first tensor decides the width: `num_bins` bins from 0 to its largest magnitude. For larger magnitudes, bins of
    that width are appended; beyond 65,536 bins (or `num_bins`) neighbours are merged. Counts are exact.

    Args:
        num_bits: bits of a code.
        axis: None, because all values share a histogram.
        unsigned: whether codes begin at 0.
        num_bins: bins of the first tensor.
        grow_method: has no effect.
        skip_zeros: whether exact zeros do not count.
        torch_hist: whether to count on the tensor's device. Otherwise numpy counts; its first bin begins at the
            smallest magnitude of the first tensor, and smaller magnitudes of later tensors are not counted.

    Raises:
        NotImplementedError: an axis.

    >>> calibrator = HistogramCalibrator(8, None, False)
    >>> calibrator.collect(torch.linspace(-1, 1, 1001))
    >>> print(calibrator)
    HistogramCalibrator(calib_bin_edges=[0.000, ..., 1.000](2049))
    >>> calibrator.compute_amax("percentile", percentile=90)
    tensor(0.8999)
    """

    def __init__(
        self,
        num_bits: NumBits,
        axis: int | tuple[int, ...] | None,
        unsigned: bool,
        num_bins: int = 2048,
        grow_method: str | None = None,
        skip_zeros: bool = False,
        torch_hist: bool = True,
    ) -> None:
        super().__init__(num_bits, axis, unsigned)
        if axis is not None:
            raise NotImplementedError("Calibrator histogram collection only supports per tensor scaling")
        if grow_method is not None:
            self._tell(f"grow_method is deprecated and has no effect, got {grow_method}.")
        self._first_bins = self._num_bins = num_bins
        self._skip_zeros = skip_zeros
        self._torch_hist = torch_hist
        self._calib_bin_edges: Tensor | np.ndarray | None = None
        self._calib_hist: Tensor | np.ndarray | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Count the magnitudes of a tensor; NaN is ignored.

        Raises:
            CalibrationError: a tensor without elements; it is also a RuntimeError.
            OverflowError: the tensor holds inf.
        """
        if not x.numel():
            raise CalibrationError(f"nothing to collect in a tensor of shape {list(x.shape)}")
        x = x.detach().abs().float()
        if self._skip_zeros:
            x = x[x != 0]
        largest = x.max() if x.numel() else x.new_zeros(())
        if bool(largest.isnan()):
            self._tell("Calibrator encountered NaN, which does not count; repair the layer that makes it.")
            x = x[~x.isnan()]
            largest = x.max() if x.numel() else largest.zero_()
        if bool(largest.isinf()):
            raise OverflowError("a histogram cannot hold inf; repair the layer that makes it, or clamp the tensor")
        if not x.numel():
            return
        if self._torch_hist:
            self._count(x, largest)
        else:
            self._count_by_numpy(x.cpu().numpy())

    def reset(self) -> None:
        """Discard all collected data."""
        self._calib_bin_edges = self._calib_hist = None
        self._num_bins = self._first_bins

    def compute_amax(
        self, method: str, *, stride: int = 1, start_bin: int = 128, percentile: float = 99.99
    ) -> Tensor | None:
        """The amax by a method, as a 0-d tensor on the CPU, or None if nothing was collected.

        Args:
            method: "entropy", "mse" or "percentile".
            stride: for entropy and mse, the distance in bins of two tested thresholds.
            start_bin: for entropy and mse, the first tested threshold.
            percentile: for percentile, the percentage of values that must not be clipped.

        Raises:
            TypeError: an unknown method.
            ValueError: a percentile that is not in [0, 100], or fewer bins than start_bin.
        """
        if method not in ("entropy", "mse", "percentile"):
            raise TypeError(f"Unknown calibration method {method}; known are entropy, mse and percentile")
        if method == "percentile" and not 0 <= percentile <= 100:
            raise ValueError(f"Invalid percentile {percentile}. Must be in range 0 <= percentile <= 100.")
        if self._calib_hist is None or self._calib_bin_edges is None:
            return None
        counts, edges = (torch.as_tensor(each).cpu().numpy() for each in (self._calib_hist, self._calib_bin_edges))
        if method == "percentile":
            return percentile_amax(counts, edges, percentile)
        search = entropy_amax if method == "entropy" else mse_amax
        return search(counts, edges, self._num_bits, self._unsigned, stride=stride, start_bin=start_bin)

    def _count(self, x: Tensor, largest: Tensor) -> None:
        edges, counts = self._calib_bin_edges, self._calib_hist
        if not isinstance(edges, Tensor) or not isinstance(counts, Tensor):
            self._calib_bin_edges = torch.linspace(0, largest.item(), self._num_bins + 1, device=x.device)
            self._calib_hist = _histogram(x, self._num_bins, largest.item())
            return
        edges, counts = edges.to(x.device), counts.to(x.device)
        if not bool(edges[-1]):
            # So far there were only zeros, which belong to bin 0 for any width.
            edges = torch.linspace(0, largest.item(), self._num_bins + 1, device=x.device)
        elif bool(largest > edges[-1]):
            width = edges[1] - edges[0]
            factor = _merged(largest.item() / width.item(), max(_MOST_BINS, self._first_bins))
            width, counts = width * float(factor), _merge(counts, factor)
            edges = torch.arange(0, (largest + width).item(), width.item(), device=edges.device)
            # Because of rounding there may be an edge too many or too few.
            if bool(edges[-1] < largest):
                edges = torch.cat([edges, edges[-1:] + width])
            elif bool(edges[-2] >= largest):
                edges = edges[:-1]
        self._num_bins = edges.numel() - 1
        found = _histogram(x, self._num_bins, edges[-1].item())
        found[: counts.numel()] += counts
        self._calib_bin_edges, self._calib_hist = edges, found

    def _count_by_numpy(self, values: np.ndarray) -> None:
        edges, counts = self._calib_bin_edges, self._calib_hist
        if not isinstance(edges, np.ndarray) or not isinstance(counts, np.ndarray):
            self._calib_hist, self._calib_bin_edges = np.histogram(values, bins=self._num_bins)
            return
        largest = values.max()
        if largest > edges[-1]:
            width = edges[1] - edges[0]
            factor = _merged(float((largest - edges[0]) / width), max(_MOST_BINS, self._first_bins))
            if factor > 1:
                counts, width = _merge(torch.from_numpy(counts), factor).numpy(), width * edges.dtype.type(factor)
                edges = edges[0] + width * np.arange(len(counts) + 1, dtype=edges.dtype)
            edges = np.hstack([edges, np.arange(edges[-1] + width, largest + width, width)])
        found, _ = np.histogram(values, bins=edges)
        found[: len(counts)] += counts
        self._calib_bin_edges, self._calib_hist = edges, found

    def __str__(self) -> str:
        edges = self._calib_bin_edges
        text = "None" if edges is None else f"[{edges[0]:.3f}, ..., {edges[-1]:.3f}]({len(edges)})"
        return f"HistogramCalibrator(calib_bin_edges={text})"

    def __repr__(self) -> str:
        counts = f"calib_bin_edges={self._calib_bin_edges} calib_hist={self._calib_hist}"
        return f"HistogramCalibrator({super().__repr__()} {counts})"


def _histogram(x: Tensor, bins: int, largest: float) -> Tensor:
    """The counts int64 [bins] of values from 0 to `largest`."""
    counts = torch.zeros(bins, dtype=torch.int64, device=x.device)
    if largest == 0:
        counts[0] = x.numel()
        return counts
    for part in x.reshape(-1).split(_EXACT_COUNTS):
        counts += torch.histc(part, bins=bins, min=0, max=largest).to(torch.int64)
    return counts


def _merged(bins: float, most: int) -> int:
    """How many neighbouring bins to merge, a power of two, so that at most `most` bins remain."""
    factor = 1
    while bins > most * factor:
        factor *= 2
    return factor


def _merge(counts: Tensor, factor: int) -> Tensor:
    factor = min(factor, counts.numel())
    return torch.nn.functional.pad(counts, (0, -counts.numel() % factor)).view(-1, factor).sum(1)


@torch.no_grad()
def calibrate_weights(
    model: nn.Module,
    method: str = "percentile",
    perchannel: bool = True,
    percentile: float = 99.99,
    num_bins: int = 2048,
) -> None:
    """Set the amax of every weight quantizer from the weight of its module.

    Args:
        model: modules with a `weight` and a `weight_quantizer` are calibrated, without their calibrators.
        method: "max", "percentile" or "mse".
        perchannel: one amax per output channel; otherwise one per weight.
        percentile: the percentage of magnitudes that must not be clipped.
        num_bins: bins of the histograms of magnitudes, from 0 to the largest.

    Raises:
        TypeError: another method.
    """
    if method not in ("max", "percentile", "mse"):
        raise TypeError(f"Unsupported calibration method {method}; known are max, percentile and mse")
    for name, module in model.named_modules():
        quantizer, weight = getattr(module, "weight_quantizer", None), getattr(module, "weight", None)
        if quantizer is None or not isinstance(weight, Tensor):
            continue
        logger.info("Calibrate weight of %s", name)
        axis = (1 if isinstance(module, _ConvTransposeNd) else 0) if perchannel else None
        magnitudes = weight.detach().abs().float().cpu()
        channels = magnitudes.reshape(1, -1) if axis is None else magnitudes.movedim(axis, 0).flatten(1)
        if method == "max":
            amax = channels.amax(1)
        else:
            found = []
            for each in channels.numpy():
                if each.max() == 0:
                    found.append(torch.tensor(0.0, device="cpu"))
                    continue
                counts, edges = np.histogram(each, bins=num_bins, range=(0, each.max()))
                if method == "percentile":
                    found.append(percentile_amax(counts, edges, percentile))
                else:
                    found.append(mse_amax(counts, edges, quantizer.num_bits, quantizer.unsigned))
            amax = torch.stack(found)
        shape = [] if axis is None else [-1 if each == axis else 1 for each in range(weight.dim())]
        quantizer.amax = amax.reshape(shape).numpy()
