"""The inputs of a wide convolution in parts, whose sums take bounded memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from fakequant.nn.products.product import MatrixProduct
from fakequant.numerics.granularity import Granularity, Shape
from fakequant.numerics.qparams import QParams

_WIDEST = 4608
"""Columns of the largest matrix of sums, that of a 3 x 3 convolution of 512 channels."""
_MOST = 2**22
"""Values of the matrices of a wider convolution together, 32 MB in float64."""

_MATRICES = 4
"""The sums, those about their means, and those in float32 twice, as they are and as a factor; and a part of another."""

_OF_HALVES = 4
"""The sums of two halves, and those about their means."""
WIDEST_HALVED = 2048
"""Columns of the widest matrix whose sums are kept for two halves of the rows, too."""


class Parts:
    """The weight [out, in, ...] of a convolution as one with a group for each part of its inputs [parts * out, ...].

    Errors of two parts are taken to be independent: the sums have no products of their columns.

    Args:
        count: the number of parts.
        shares_scales: whether all inputs of an output channel have one scale.

    >>> parts = Parts(2, shares_scales=False)
    >>> weight = torch.arange(8.0).reshape(2, 4)
    >>> parts.split(weight).tolist()
    [[0.0, 1.0], [4.0, 5.0], [2.0, 3.0], [6.0, 7.0]]
    >>> torch.equal(parts.join(parts.split(weight)), weight)
    True
    """

    def __init__(self, count: int, *, shares_scales: bool) -> None:
        self.count, self._shares = count, shares_scales

    @classmethod
    def of(cls, product: MatrixProduct) -> Parts:
        """The parts of a product; one where all its columns fit, or its blocks cannot be parted."""
        shape, spec, columns = product.tensor.shape, product.quantizer.spec, product.columns
        if not product.takes_parts or product.groups > 1 or columns <= _WIDEST:
            return cls(1, shares_scales=True)
        groups = spec.granularity.group_shape(shape)
        shares = groups[1:] == (1,) * (len(shape) - 1)
        levels = [(spec.granularity, shape), *((own, groups) for own in spec.shared_granularities)]
        cuts = [n for n in range(1, shape[1] + 1) if shape[1] % n == 0]
        counts = [n for n in cuts if n == 1 or all(_keeps_groups(n, *level, shares=shares) for level in levels)]
        enough = [n for n in counts if columns * columns // n <= _MOST]
        return cls((enough or counts[-1:])[0], shares_scales=shares)

    def rows(self, rows: Tensor) -> Tensor:
        """Rows [1, rows, columns] as those of each part [parts, rows, columns / parts]."""
        return rows if self.count == 1 else rows[0].unflatten(1, (self.count, -1)).transpose(0, 1)

    def split(self, values: Tensor) -> Tensor:
        """A weight in parts."""
        if self.count == 1:
            return values
        return values.unflatten(1, (self.count, -1)).transpose(0, 1).flatten(0, 1).contiguous()

    def join(self, values: Tensor) -> Tensor:
        """The weight whose parts are given."""
        if self.count == 1:
            return values
        return values.unflatten(0, (self.count, -1)).transpose(0, 1).flatten(1, 2).contiguous()

    def split_params(self, params: QParams) -> QParams:
        """The parameters of a weight, for its parts."""
        return _each(params, lambda x: x.repeat(self.count, *[1] * (x.dim() - 1)) if self._shares else self.split(x))

    def join_params(self, params: QParams) -> QParams:
        """The parameters of the weight, of those of its parts."""
        return _each(params, lambda x: x[: len(x) // self.count] if self._shares else self.join(x))

    def tied(self, values: Tensor, reduce: Any) -> Tensor:
        """Values of groups [parts * out, ...] with one for all parts of an output channel that share a scale."""
        if self.count == 1 or not self._shares or len(values) == 1:
            return values
        return reduce(values.unflatten(0, (self.count, -1)), 0).repeat(self.count, *[1] * (values.dim() - 1))


def memory(products: Iterable[MatrixProduct]) -> int:
    """Bytes that the sums and the choice of a layer take at most, beside the inputs that wait there.

    They are up to 4 matrices of float64 with a row and a column for each column of a weight, and 4 more of up to 2,048
    columns for two halves of the rows: 0.27 GB for 2,048.

    Args:
        products: the layers.
    """
    most = 0
    for product in products:
        parts = Parts.of(product).count
        matrices = _MATRICES + (_OF_HALVES if product.columns <= WIDEST_HALVED else 0)
        most = max(most, 8 * matrices * product.groups * parts * (product.columns // parts) ** 2)
    return most


def _keeps_groups(count: int, granularity: Granularity, shape: Shape, *, shares: bool) -> bool:
    """Whether parts of a tensor [out, in, ...] cut no group but one that holds all, or a row that shares its scale."""
    groups, rows = granularity.group_shape(shape), granularity.block_shape(shape)[0]
    whole = shares or (shape[1] % groups[1] == 0 and groups[1] % count == 0)
    return max(groups) == 1 or (rows == 1 and whole)


def _each(params: QParams, change: Any) -> QParams:
    found = [x if x is None or len(x) == 1 else change(x) for x in (params.scale, params.zero_point)]
    assert found[0] is not None
    return QParams(found[0], found[1])
