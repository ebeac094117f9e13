"""The squared error of quantized middles of bins for every amax, without looking at every bin for every amax."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

# Thresholds times multiples that are looked at together: 512 KiB of float64, which stay in the cache.
_CELLS = 1 << 16
# So many middles cost less to round than it costs to tell which thresholds need not be tried.
_FEW = 1 << 16
# Of the thresholds every so manieth is looked at first, and then what lies between, at strides this much finer.
_COARSE, _FINER = 16, 8
# Relative to the middles: how far rounding in float32 moves a value, and the place where it becomes the next.
_MOVED = 2.0**-21
# Relative: what sums of float32 differ by from sums of real numbers: four roundings of every term, and no more than 128
# additions when torch sums up to 2**17 of them, in a tree of four levels (aten/src/ATen/native/cpu/SumKernel.cpp).
_SUMMED = 2.0**-16
# Of count * largest**2: what the prefix sums of up to 2**17 terms in float64, and their differences, are rounded by.
_ROUNDED = 2.0**-34
# Smaller thresholds have rules of their own; squares beyond the range of float32 are inf.
_SMALLEST, _LARGEST = 2.0**-24, 1e37


class SquaredError:
    """Bounds of sums of w (x - y)**2, where y is x rounded to a multiple of amax / bound, up to amax.

    In real numbers, with a step s, the error is the sum of w (x - amax)**2 less 2 s times the sum of h at the middles
    between the multiples, where h(u) is the sum of w (u - x) over all x < u: an amax costs as much as there are
    multiples. The error less the sum of w x**2, all divided by amax**2, is the smallest of functions that are linear in
    1 / amax, one for every way to round. It is therefore concave in 1 / amax, and two errors bound all that lie between
    them from below.

    Args:
        weights: of the bins, whole numbers in float32 [bins].
        centers: their middles, float32 in rising order, at nearly equal distances.
        bound: the largest multiple.
        rounded: the rounding, from middles [n, m] and amaxes [n, 1] to values.
    """

    def __init__(
        self, weights: Tensor, centers: Tensor, bound: int, rounded: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self.centers, self.bound, self.rounded = centers, bound, rounded
        w, x = weights.double().numpy(), centers.double().numpy()
        moments = np.stack([w, w * x, w * x**2])
        # Entry k is about the bins 0 to k - 1.
        self.sums = np.concatenate([np.zeros((3, 1)), np.cumsum(moments, axis=1)], axis=1)
        self.total = self.sums[:, -1]
        self.origin, self.width = x[0], (x[-1] - x[0]) / max(1, len(x) - 1) or 1.0
        self.between = (np.arange(bound) + 0.5) / bound
        irregular = np.abs(x - self.origin - self.width * np.arange(len(x))).max()
        self.rounding = self.total[0] * x[-1] ** 2 * _ROUNDED
        self.moved = _MOVED * np.sqrt(self.total[2]) + 2 * irregular * np.sqrt(self.total[0])

    def nearly_least(self, amaxes: Tensor) -> np.ndarray:
        """Which amaxes, in rising order, may have the least error when it is computed in float32; their indices."""
        largest = self.total[0] * float(self.centers[-1]) ** 2
        if amaxes[0] <= _SMALLEST or not largest < _LARGEST:
            return np.arange(len(amaxes))
        near = self._near_in_real_numbers(amaxes.double().numpy())
        if len(near) * len(self.centers) <= _FEW:
            return near
        error = np.concatenate(
            [self._of_values(part) for part in amaxes[near].split(max(1, _CELLS // self.bound // 4))]
        )
        with np.errstate(invalid="ignore"):
            low, high = ((error + s * self.rounding) * (1 + s * _SUMMED) for s in (-1, 1))
        return near[~(low > np.fmin.reduce(high, initial=np.inf))]

    def _near_in_real_numbers(self, amaxes: np.ndarray) -> np.ndarray:
        error = np.full(len(amaxes), np.inf)
        new, stride = np.union1d(np.arange(0, len(amaxes), _COARSE), len(amaxes) - 1), _COARSE
        while True:
            rows = max(1, _CELLS // self.bound)
            for i in range(0, len(new), rows):
                error[new[i : i + rows]] = self._of_real_numbers(amaxes[new[i : i + rows]])
            tried = np.flatnonzero(error < np.inf)
            limit = self._at_most(error[tried].min())
            if stride == 1:
                return tried[self._at_least(error[tried]) <= limit]
            stride = max(1, stride // _FINER)
            # Of a threshold that was tried: whether there may be a better one between it and the next.
            open = np.append(self._at_least(self._chords(amaxes[tried], error[tried])) <= limit, False)
            new = np.arange(0, len(amaxes), stride)
            new = new[open[np.searchsorted(tried, new, side="right") - 1]]
            new = new[np.isinf(error[new])]

    def _of_real_numbers(self, amaxes: np.ndarray) -> np.ndarray:
        index = np.multiply.outer(amaxes / self.width, self.between)
        # The number of middles below: of one that lies within `irregular`, it does not matter where it is counted.
        index += 1.0 - self.origin / self.width
        below = np.clip(index, 0, len(self.centers), out=index).astype(np.intp)
        count, first, second = self.total
        # Not by `@`, whose threads would fight with those of torch.
        weighted = np.einsum("ij,j->i", self.sums[0].take(below), self.between)
        h = amaxes * weighted - self.sums[1].take(below).sum(1)
        return second - 2 * amaxes * first + amaxes**2 * count - 2 * (amaxes / self.bound) * h

    def _chords(self, amaxes: np.ndarray, errors: np.ndarray) -> np.ndarray:
        """The least error that there can be between neighbours: on the chord, where it is lowest."""
        second, inverse = self.total[2], 1 / amaxes
        concave = (errors - second) * inverse**2
        slope = np.diff(concave) / np.diff(inverse)
        rest = concave[:-1] - slope * inverse[:-1]
        # E(t) = second + t**2 (rest + slope / t)
        with np.errstate(divide="ignore", invalid="ignore"):
            lowest = np.clip(np.nan_to_num(-slope / (2 * rest)), amaxes[:-1], amaxes[1:])
        inner = second + lowest * (lowest * rest + slope)
        return np.minimum(inner, np.minimum(errors[:-1], errors[1:]))

    def _of_values(self, amaxes: Tensor) -> np.ndarray:
        """The error of the values that the rounding gives in float32, in real numbers; NaN where it is not known.

        Where a value begins is read off the rounding itself, in the three bins around the place.
        """
        bins, column = len(self.centers), amaxes[:, None]
        values = self.rounded(column * (torch.arange(self.bound + 1) / self.bound), column)
        index = (column.double() * torch.from_numpy(self.between) - self.origin) / self.width
        first = index.ceil_().clamp_(0, bins).long()
        around = first[..., None] + torch.arange(-1, 2)
        y = self.rounded(self.centers[around.clamp(0, bins - 1).flatten(1)], column).view(around.shape)
        below = ((y < values[:, 1:, None]) | (around < 0)) & (around < bins)
        steps = below.sum(-1)
        start = first - 1 + steps
        # All three on one side: it may begin further away, unless there are no more bins.
        elsewhere = (((steps == 0) & (start > 0)) | ((steps == 3) & (start < bins))).any(1).numpy()
        ends = torch.nn.functional.pad(torch.nn.functional.pad(start, (1, 0)), (0, 1), value=bins).numpy()
        count, first_moment, second = np.diff(self.sums[:, ends], axis=-1)
        value = values.double().numpy()
        errors = (second - value * (2 * first_moment - value * count)).sum(1)
        return np.where(elsewhere, np.nan, errors)

    def _at_least(self, error: np.ndarray) -> np.ndarray:
        root = np.sqrt(np.maximum(error - self.rounding, 0)) - self.moved
        return np.maximum(root, 0) ** 2 * (1 - _SUMMED)

    def _at_most(self, error: np.ndarray) -> np.ndarray:
        return (np.sqrt(np.maximum(error, 0) + self.rounding) + self.moved) ** 2 * (1 + _SUMMED)
