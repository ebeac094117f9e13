"""Sums over the inputs x of a layer, such as x x^T: they give the output's error for any change of the weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fakequant.distributed import gather
from fakequant.errors import CalibrationError
from fakequant.ops import library

_ROWS = 16_384
"""Rows of a chunk: its products are computed in float32, and chunks are added in float64."""
_MIRRORED = 128
"""Rows of the upper half that are copied into the lower half at a time."""
_NOISE = 1e-6
"""A variance below this share of the mean square comes from the rounding of float32 products."""

MOST_DRIFT = 0.5
"""A `Drift` is used up to this variance, as a share of the variance of the rows; between unrelated rows it is 2."""


@dataclass
class Drift:
    """Sums over the drift d of rows x, and over y = W d, the drift times the weight W of the layer.

    The drift is the row of the float model minus x: they differ because earlier layers are quantized.

    Attributes:
        total: the sum of d, float64 [groups, columns].
        squares: the sum of |d|^2 [groups].
        products: the sum of y x^T [groups, outputs, columns]; the sum of d x^T would be [groups, columns, columns].
        output_total: the sum of y [groups, outputs].
        output_squares: the sum of |y|^2 [groups].

    >>> drift = Drift.of(torch.ones(1, 1, 2))
    >>> drift.add(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[1.5, 2.0]]]), torch.ones(1, 1, 2))
    >>> drift.products
    tensor([[[0.5000, 1.0000]]], dtype=torch.float64)
    """

    total: Tensor
    squares: Tensor
    products: Tensor
    output_total: Tensor
    output_squares: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Drift:
        """Sums over no rows, all 0, for a weight [groups, outputs, columns]."""
        groups, outputs, columns = weight.shape
        shapes = (groups, columns), (groups,), (groups, outputs, columns), (groups, outputs), (groups,)
        return cls(*(weight.new_zeros(shape, dtype=torch.float64) for shape in shapes))

    def add(self, rows: Tensor, wanted: Tensor, weight: Tensor, beside: Tensor | None = None) -> None:
        """Add rows [groups, rows, columns].

        Args:
            rows: the inputs of the layer.
            wanted: the inputs of the layer in the float model.
            weight: the weight of the layer [groups, outputs, columns].
            beside: the drift of the value to which the layer's output is added, [groups, rows, outputs]; None: 0.

        Raises:
            CalibrationError: `wanted` holds NaN or inf.
        """
        _check_finite(wanted)
        matrix = weight.float().mT
        for start in range(0, rows.shape[1], _ROWS):
            x = rows[:, start : start + _ROWS].float()
            d = wanted[:, start : start + _ROWS].float() - x
            y = d @ matrix
            if beside is not None:
                y += beside[:, start : start + _ROWS]
            self.total += d.sum(1, dtype=torch.float64)
            self.squares += d.double().square().sum((1, 2))
            _add_products(self.products, y, x)
            self.output_total += y.sum(1, dtype=torch.float64)
            self.output_squares += y.double().square().sum((1, 2))

    def merge_processes(self, group: dist.ProcessGroup) -> None:
        """Merge the sums of all processes of a group; each process calls this, and gets the same bits."""
        for tensor in self.tensors():
            dist.all_reduce(tensor, group=group)

    def about_mean(self, total: Tensor, count: int) -> Drift:
        """The sums about the means of d and x, from the total of the rows x [groups, columns] and their count."""
        return Drift(
            torch.zeros_like(self.total),
            self.squares - self.total.square().sum(1) / count,
            _less_outer(self.products, self.output_total, total, count),
            torch.zeros_like(self.output_total),
            self.output_squares - self.output_total.square().sum(1) / count,
        )

    def tensors(self) -> list[Tensor]:
        """The five tensors of sums, in the order of the fields."""
        return [getattr(self, field.name) for field in fields(self)]


class InputSums:
    """Sums over the rows x that a layer multiplies with the rows of its weight matrix.

    Attributes:
        total: the sum of x, float64 [groups, columns].
        count: the number of rows of each group.
        drift: the sums over the drift of the rows; None without a drift.
        halves: the sums over two halves of the rows; empty if they are not kept. See `HalvedSums`.
        made: a function that makes the sums with the drift of a slice of outputs, if the drift of all outputs takes too
            much memory; else None.

    >>> sums = InputSums()
    >>> sums.add(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    >>> sums.moments
    tensor([[[10., 14.],
             [14., 20.]]], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self.moments = self.total = torch.zeros(0, device="cpu")
        self.drift: Drift | None = None
        self.count = 0
        self.halves: tuple[InputSums, ...] = ()
        self.made: Callable[[slice], InputSums] | None = None
        self.ordered = list[Any]()
        """The cache of `Problem.ordered`: the last key and result, or empty."""

    @property
    def moments(self) -> Tensor:
        """The sum of x x^T over the rows x, float64 [groups, columns, columns]; its lower half is filled on access."""
        if not self._is_whole:
            moments, columns = self._moments, self._moments.shape[1]
            for start in range(0, columns, _MIRRORED):
                rows, later = slice(start, start + _MIRRORED), slice(start + _MIRRORED, None)
                square = moments[:, rows, rows]
                square.copy_(square.triu().add_(square.triu(1).mT))
                moments[:, later, rows] = moments[:, rows, later].mT
            self._is_whole = True
        return self._moments

    @moments.setter
    def moments(self, values: Tensor) -> None:
        self._moments, self._is_whole = values, True

    def add(self, rows: Tensor) -> None:
        """Add rows [groups, rows, columns], the inputs of the layer.

        Raises:
            CalibrationError: the rows hold NaN or inf.
        """
        _check_finite(rows)
        if not self.count:
            self._begin(rows.shape[0], rows.shape[2], rows.device)
        for start in range(0, rows.shape[1], _ROWS):
            x = rows[:, start : start + _ROWS].float()
            _add_products(self._moments, x, x, upper=True)
            self.total += x.sum(1, dtype=torch.float64)
        self._is_whole = False
        self.count += rows.shape[1]

    def with_drift(self, drift: Drift | None) -> InputSums:
        """A new InputSums with the same tensors, but with another drift."""
        found = InputSums()
        vars(found).update(vars(self), drift=drift)
        return found

    def of_outputs(self, part: slice) -> InputSums:
        """An InputSums with the same tensors, but only the drift of a slice of each group's outputs."""
        if self.made is not None:
            return self.made(part)
        drift = self.drift
        if drift is None:
            return self
        of_part = drift.products[:, part], drift.output_total[:, part]
        found = self.with_drift(Drift(drift.total, drift.squares, *of_part, drift.output_squares))
        found.halves = tuple(half.of_outputs(part) for half in self.halves)
        return found

    def merge_processes(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Merge the sums of all processes of a group, without the drift; each process calls this, and gets equal bits.

        Args:
            group: a process group of torch.distributed.
            device: the device of the layer, for a process without rows.
        """
        seen = gather((self.count, (len(self.total), self.total.shape[1]) if self.count else None), group)
        shapes = [shape for _, shape in seen if shape is not None]
        if not shapes:
            return
        if not self.count:
            groups, columns = shapes[0]
            self._begin(groups, columns, device)
        for tensor in (self.moments, self.total):
            dist.all_reduce(tensor, group=group)
        self.count = sum(count for count, _ in seen)

    def _begin(self, groups: int, columns: int, device: torch.device) -> None:
        self.moments = torch.zeros(groups, columns, columns, dtype=torch.float64, device=device)
        self.total = torch.zeros(groups, columns, dtype=torch.float64, device=device)

    def about_mean(self) -> InputSums:
        """The sums about the means of x and of the drift, which a bias cannot correct; 0 for constant columns."""
        found = InputSums()
        found.count, count = self.count, max(self.count, 1)
        found.total = torch.zeros_like(self.total)
        found.moments = _less_outer(self.moments, self.total, self.total, count)
        # A column that is constant has no moments: what is left of them may make the matrix indefinite.
        squares = self.moments.diagonal(dim1=1, dim2=2)
        varies = (found.moments.diagonal(dim1=1, dim2=2) > _NOISE * squares).double()
        found.moments.mul_(varies[:, :, None]).mul_(varies[:, None, :])
        return found.with_drift_about_mean(self)

    def with_drift_about_mean(self, sums: InputSums) -> InputSums:
        """These sums, made by `sums.about_mean()`, with the drift of `sums` about its mean."""
        if sums.drift is None:
            return self
        drift = sums.drift.about_mean(sums.total, max(sums.count, 1))
        drift.products.mul_(self.moments.diagonal(dim1=1, dim2=2)[:, None] > 0)
        return self.with_drift(drift)

    def mean(self) -> Tensor:
        """The mean of x [groups, columns]."""
        return self.total / max(self.count, 1)


class HalvedSums:
    """Adds rows to the sums over all rows, or to the sums over two halves of the rows.

    The first rows of each `add` go to the first half and the last rows to the second, so that the halves have different
    examples. A row in the middle goes to the first half if its number of positive values is odd, whichever process adds
    the row.

    Args:
        whole: the sums over all rows without their drift, if they are known.

    >>> gathered = HalvedSums([InputSums(), InputSums()])
    >>> gathered.add(torch.tensor([[[1.0], [2.0], [3.0]]]))
    >>> sums = gathered.joined()
    >>> sums.moments.item(), [half.moments.item() for half in sums.halves]
    (14.0, [5.0, 9.0])
    """

    def __init__(self, parts: Sequence[InputSums], whole: InputSums | None = None) -> None:
        self._parts, self._whole = parts, whole

    @classmethod
    def of_drift(cls, sums: InputSums, weight: Tensor) -> HalvedSums:
        """A HalvedSums to add the drift of rows to their other sums, `sums`; `weight` is [groups, outputs, columns]."""
        return cls([one.with_drift(Drift.of(weight)) for one in sums.halves or [sums]], sums)

    def add(self, rows: Tensor) -> None:
        """Add rows [groups, rows, columns]; raises the errors of `InputSums.add`."""
        for part, own in self._divided(rows):
            part.add(own)

    def add_drift(self, rows: Tensor, wanted: Tensor, weight: Tensor, beside: Tensor | None = None) -> None:
        """Add the drift of rows that were added in the same order; arguments as those of `Drift.add`."""
        for part, *own in self._divided(rows, wanted, *([] if beside is None else [beside])):
            assert part.drift is not None
            part.drift.add(own[0], own[1], weight, *own[2:])

    def _divided(self, *rows: Tensor) -> list[tuple[Any, ...]]:
        """For each part of the sums, the part and its rows of each tensor; a half without rows is left out."""
        if len(self._parts) == 1:
            return [(self._parts[0], *rows)]
        middle, is_odd = divmod(rows[0].shape[1], 2)
        end = middle + int((rows[0][:, middle] > 0).sum()) % 2 if is_odd else middle
        halves = [one[:, :end] for one in rows], [one[:, end:] for one in rows]
        return [(part, *own) for part, own in zip(self._parts, halves, strict=True) if own[0].shape[1]]

    def merge_processes(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Merge the sums of all processes; if there is a drift, only its sums. See `InputSums.merge_processes`."""
        for part in self._parts:
            if part.drift is None:
                part.merge_processes(group, device)
            else:
                part.drift.merge_processes(group)

    def joined(self) -> InputSums:
        """The sums over all rows, with `halves` if both halves have rows."""
        seen = [part for part in self._parts if part.count] or self._parts[:1]
        if len(seen) == 1:
            return seen[0]
        drifts = [part.drift.tensors() for part in seen if part.drift is not None]
        drift = Drift(*(one + other for one, other in zip(*drifts, strict=True))) if drifts else None
        if self._whole is not None:
            found = self._whole.with_drift(drift)
        else:
            found = InputSums()
            found.moments, found.total = seen[0].moments + seen[1].moments, seen[0].total + seen[1].total
            found.count = sum(part.count for part in seen)
        found.halves = tuple(seen)
        return found


_LEAST_PART, _SQUARES = 2**16, 4
"""A part of a matrix has 4 outputs for each column, and at least 65,536 values. Its choice takes 15 times the memory
of its values: 31 GB for a whole head of 128,256 x 4,096."""


def parts_of_outputs(shape: Sequence[int]) -> list[slice]:
    """Slices of the outputs of a matrix [groups, outputs, columns]; codes are chosen slice by slice.

    A single group with many more outputs than columns, such as the head of a language model, has several slices.

    >>> [len(parts_of_outputs(shape)) for shape in ((1, 14_336, 4096), (1, 128_256, 4096), (1, 512, 64), (2, 512, 64))]
    [1, 8, 1, 1]
    """
    groups, outputs, columns = shape
    size = max(_SQUARES * columns, _LEAST_PART // max(columns, 1), 1)
    if groups > 1 or outputs <= size:
        return [slice(None)]
    return [slice(start, start + size) for start in range(0, outputs, size)]


def _check_finite(rows: Tensor) -> None:
    if not bool(rows.isfinite().all()):
        raise CalibrationError("an input holds NaN or inf; leave the batch out")


def _add_products(sums: Tensor, one: Tensor, other: Tensor, *, upper: bool = False) -> None:
    """Add one^T other to sums [groups, a, b], some rows at a time; `upper`: only the upper half of a square result."""
    width = max(library.at_once(one) // max(len(one) * other.shape[2], 1), 64)
    for start in range(0, one.shape[2], width):
        rows, first = slice(start, start + width), start if upper else 0
        sums[:, rows, first:] += one[:, :, rows].mT @ other[:, :, first:]


def _less_outer(moments: Tensor, one: Tensor, other: Tensor, count: int) -> Tensor:
    """The moments minus the outer product of two totals divided by a count, with a single temporary matrix."""
    outer = (one[:, :, None] * other[:, None, :]).div_(count)
    return torch.sub(moments, outer, out=outer)


def drift_share(sums: InputSums) -> float:
    """The variance of the drift as a share of the variance of the rows; 0 without a drift."""
    if not sums.count or sums.drift is None:
        return 0.0
    drift = float(sums.drift.squares.sum() - sums.drift.total.square().sum() / sums.count)
    rows = float(sums.moments.diagonal(dim1=1, dim2=2).sum() - sums.total.square().sum() / sums.count)
    return drift / rows if rows > 0 else 0.0


def stacked(parts: Sequence[InputSums]) -> InputSums:
    """One InputSums [groups, ...] from the InputSums of groups that read different inputs.

    Each group is weighted as if it had as many rows as the largest group, so that its mean error counts.
    """
    seen = [part for part in parts if part.count]
    if len(parts) == 1 or not seen:
        return parts[0]
    found, count = InputSums(), max(part.count for part in seen)
    shares = [count / part.count if part.count else 0.0 for part in parts]
    for name in ("moments", "total"):
        like = torch.zeros_like(getattr(seen[0], name))
        own = [getattr(part, name) if part.count else like for part in parts]
        setattr(found, name, torch.cat([x * share for x, share in zip(own, shares, strict=True)]))
    drifts = [part.drift for part in parts if part.drift is not None]
    if len(drifts) == len(parts):
        tensors = zip(*(drift.tensors() for drift in drifts), strict=True)
        found.drift = Drift(*(torch.cat([x * n for x, n in zip(own, shares, strict=True)]) for own in tensors))
    if all(part.halves for part in parts):
        found.halves = tuple(stacked(halves) for halves in zip(*(part.halves for part in parts), strict=True))
    found.count = count
    return found
