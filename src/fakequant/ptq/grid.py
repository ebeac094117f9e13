"""The values that a weight's quantizer gives, seen by an algorithm that chooses among them column by column."""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.numerics.granularity import PerChannel
from fakequant.numerics.qparams import QParams
from fakequant.numerics.scales import ScaleSpec
from fakequant.numerics.spec import QuantSpec, Rounding
from fakequant.ops import library


class Grid:
    """The values of a weight [out, ...] by fixed parameters, as a matrix [out, columns].

    Each column is quantized by the package's own operator with the scales of its elements, so that formats and
    granularities need no cases.

    Args:
        spec: of the weight's quantizer.
        params: its parameters.
        shape: of the weight.

    >>> from fakequant.functional import choose_qparams
    >>> weight = torch.tensor([[0.3, -0.7], [1.0, 0.2]])
    >>> grid = Grid(QuantSpec("int2"), choose_qparams(weight, "int2"), weight.shape)
    >>> grid.column(0, weight[:, 0])
    tensor([0., 1.])
    """

    def __init__(self, spec: QuantSpec, params: QParams, shape: torch.Size) -> None:
        self._spec = spec.replace(granularity=PerChannel(0, 1), scale=ScaleSpec(), rounding=Rounding.NEAREST_EVEN)
        blocks = spec.granularity.block_shape(shape)
        self._scale = of_elements(params.scale, shape, blocks)
        self._zero_point = None if params.zero_point is None else of_elements(params.zero_point, shape, blocks)

    def column(self, index: int, values: Tensor) -> Tensor:
        """The nearest values of a column [out], in the dtype of the given ones."""
        return self._nearest(values[:, None], slice(index, index + 1))[:, 0]

    def nearest(self, values: Tensor) -> Tensor:
        """The nearest values of a matrix [out, columns], in the dtype of the given ones."""
        return self._nearest(values, slice(None))

    def _nearest(self, values: Tensor, columns: slice) -> Tensor:
        zero_point = None if self._zero_point is None else self._zero_point[:, columns].contiguous()
        params = QParams(self._scale[:, columns].contiguous(), zero_point)
        return library.fake_quantize(values.float().contiguous(), params, self._spec).to(values.dtype)

    def rows(self, part: slice) -> Grid:
        """The grid of some rows of the matrix."""
        grid = object.__new__(Grid)
        grid._spec = self._spec
        grid._scale = self._scale[part]
        grid._zero_point = None if self._zero_point is None else self._zero_point[part]
        return grid


def of_elements(values: Tensor, shape: torch.Size, blocks: tuple[int, ...]) -> Tensor:
    """One value per element of a matrix [out, columns], from one per group."""
    for axis, (length, block) in enumerate(zip(shape, blocks, strict=True)):
        values = values.repeat_interleave(block, axis).narrow(axis, 0, length)
    return values.reshape(shape[0], -1)
