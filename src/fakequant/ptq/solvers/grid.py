"""The values that a weight's quantizer gives, seen by an algorithm that chooses among them column by column."""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.numerics.granularity import PerChannel
from fakequant.numerics.qparams import QParams
from fakequant.numerics.scales import ScaleSpec
from fakequant.numerics.spec import QuantSpec, Rounding
from fakequant.ops import library

STRUCTURED = 0.3
"""The share of zeros in a weight above which they are a structure that the user made, such as 2:4, and stay."""
_BITS = 33  # steps of a bisection over all float32 numbers


class WeightGrid:
    """The values of a weight [out, ...] by fixed parameters, as a matrix [out, columns].

    Each column is quantized by the package's own operator with the scales of its elements, so that formats and
    granularities need no cases.

    Args:
        spec: of the weight's quantizer.
        params: its parameters.
        shape: of the weight.
        zeros: where values stay 0, bool [out, columns]; None: nowhere.

    >>> from fakequant.functional import choose_qparams
    >>> weight = torch.tensor([[0.3, -0.7], [1.0, 0.2]])
    >>> grid = WeightGrid(QuantSpec("int2"), choose_qparams(weight, "int2"), weight.shape)
    >>> grid.column(0, weight[:, 0])
    tensor([0., 1.])
    """

    def __init__(self, spec: QuantSpec, params: QParams, shape: torch.Size, zeros: Tensor | None = None) -> None:
        # The operator is fastest for positive scales without offsets: -x by -s and x + m by s have the codes of x, and
        # by a scale of 0 all values are that of the code 0. Where the format of scales has no 0, no scale is.
        blocks, plain = spec.granularity.block_shape(shape), {"scale": ScaleSpec(), "rounding": Rounding.NEAREST_EVEN}
        runs = torch.arange(params.scale[:1].numel()).reshape(params.scale[:1].shape)
        self._runs = of_elements(runs, torch.Size([1, *shape[1:]]), (1, *blocks[1:])).flatten().tolist()
        scale = _of_runs(params.scale, shape[0], blocks[0])
        self._zero = self._sign = self._zero_point = self._offset = None
        if spec.scale.is_exact:
            self._zero = _if_any(scale == 0)
            self._sign = None if _if_any(scale < 0) is None else torch.ones_like(scale).copysign(scale)
            scale = torch.where(scale == 0, 1.0, scale.abs())
        points = None if params.zero_point is None else _of_runs(params.zero_point, shape[0], blocks[0])
        if spec.offset is None:
            self._zero_point = points
        else:
            self._offset, plain = points, plain | {"offset": None, "symmetric": True}
        self._zeros = None if zeros is None else zeros.T.contiguous()
        self._scale, self._spec = scale, spec.replace(granularity=PerChannel(0, 1), **plain)

    def column(self, index: int, values: Tensor) -> Tensor:
        """The nearest values of a column [out], in the dtype of the given ones."""
        run = self._runs[index]
        found = self._nearest(values[:, None], slice(run, run + 1))[:, 0]
        return found if self._zeros is None else found.masked_fill_(self._zeros[index], 0.0)

    def nearest(self, values: Tensor) -> Tensor:
        """The nearest values of a matrix [out, columns], in the dtype of the given ones."""
        found = self._nearest(values, self._runs)
        return found if self._zeros is None else found.masked_fill_(self._zeros.T, 0.0)

    def neighbours(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The values at or just below and at or just above those of a matrix [out, columns].

        They are found by bisection over float32 numbers with the operator, so that every format has them. Both are the
        same where a value is one of the grid, or lies outside of its range.

        >>> from fakequant.functional import choose_qparams
        >>> weight = torch.tensor([[0.3, -0.7], [1.0, 5.0]])
        >>> grid = WeightGrid(QuantSpec("int3"), choose_qparams(weight[:1], "int2"), weight.shape)
        >>> [part.mul(10).round().tolist() for part in grid.neighbours(weight)]
        [[[0.0, -7.0], [7.0, 21.0]], [[7.0, -7.0], [14.0, 21.0]]]
        """
        exact = values.float()
        near = self.nearest(exact)
        rises = near < exact
        end = torch.where(rises, torch.finfo(torch.float32).max, torch.finfo(torch.float32).min)
        first, last = _order(exact), _order(end)  # numbers of the same value as the given ones, and of another one
        for _ in range(_BITS):
            middle = torch.div(first + last, 2, rounding_mode="floor")
            same = self.nearest(_in_order(middle)) == near
            first, last = torch.where(same, middle, first), torch.where(same, last, middle)
        other = torch.where(near == exact, near, self.nearest(_in_order(last)))
        pair = torch.where(rises, near, other), torch.where(rises, other, near)
        if self._zeros is not None:
            pair = pair[0].masked_fill(self._zeros.T, 0.0), pair[1].masked_fill(self._zeros.T, 0.0)
        return pair[0].to(values.dtype), pair[1].to(values.dtype)

    def _nearest(self, values: Tensor, runs: slice | list[int]) -> Tensor:
        held = (self._scale, self._zero_point, self._offset, self._sign, self._zero)
        scale, zero_point, offset, sign, zero = (None if own is None else own[runs].T.contiguous() for own in held)
        assert scale is not None
        x = values.float() if offset is None else values.float() + offset
        x = x if sign is None else x * sign
        y = library.fake_quantize(x.contiguous(), QParams(scale, zero_point), self._spec)
        y = y if zero is None else torch.where(zero, 0.0, y)
        y = y if sign is None else y * sign
        return (y if offset is None else y - offset).to(values.dtype)

    def rows(self, part: slice | Tensor) -> WeightGrid:
        """The grid of some rows of the matrix."""
        grid = object.__new__(WeightGrid)
        vars(grid).update({name: own[:, part] if isinstance(own, Tensor) else own for name, own in vars(self).items()})
        return grid


def structured_zeros(weight: Tensor) -> Tensor | None:
    """Where a weight [out, ...] has zeros that are a structure, as those of pruning, bool [out, columns]; else None.

    >>> structured_zeros(torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
    tensor([[ True, False],
            [False,  True]])
    """
    zeros = weight.flatten(1) == 0
    return zeros if int(zeros.sum()) > STRUCTURED * zeros.numel() else None


def _if_any(mask: Tensor) -> Tensor | None:
    return mask if bool(mask.any()) else None


def _of_runs(values: Tensor, rows: int, block: int) -> Tensor:
    """One value per run of columns that share one, and per row [runs, rows], from one per group."""
    return values.flatten(1).T.repeat_interleave(block, 1)[:, :rows].contiguous()


def of_elements(values: Tensor, shape: torch.Size, blocks: tuple[int, ...]) -> Tensor:
    """One value per element of a matrix [out, columns], from one per group."""
    for axis, (length, block) in enumerate(zip(shape, blocks, strict=True)):
        values = values.repeat_interleave(block, axis).narrow(axis, 0, length)
    return values.reshape(shape[0], -1)


def _order(values: Tensor) -> Tensor:
    """The places of float32 numbers in their order, int64; both zeros have place 0."""
    bits = values.view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -(2**31) - bits, bits)


def _in_order(places: Tensor) -> Tensor:
    """The float32 numbers of places."""
    return torch.where(places < 0, -(2**31) - places, places).to(torch.int32).view(torch.float32)
