"""Weights of experts that are stacked in one parameter, as a matrix for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.nn.operands import Role
from fakequant.nn.products.product import Matrix, MatrixProduct
from fakequant.numerics.granularity import Granularity, PerBlock
from fakequant.numerics.qparams import QParams


class ExpertProduct(MatrixProduct):
    """The tokens of each expert multiplied with its weight, of a stack [experts, out, in] or [experts, in, out].

    The layer says by `tokens(attribute, *args, **kwargs)` what tokens each expert multiplies in a call with these
    arguments, before the quantizer.
    """

    readers = 0
    is_stack = True
    is_result = False

    @property
    def input_quantizer(self) -> None:
        """Experts share the quantizers of their inputs, so that none of them chooses a range."""
        return None

    @property
    def input_transform(self) -> None:
        return None

    @property
    def is_matrix(self) -> bool:
        """Every expert has scales of its own."""
        quantizer, shape = self.quantizer, self.tensor.shape
        return quantizer is None or quantizer.spec.granularity.group_shape(shape)[0] == shape[0]

    @property
    def bias(self) -> tuple[nn.Parameter | None, slice]:
        return None, slice(None)

    @property
    def columns(self) -> int:
        return self.tensor.shape[1 if self._is_transposed else 2]

    @property
    def _is_transposed(self) -> bool:
        """Whether a matrix is [in, out]."""
        return self.layer.factors(self.layer)[self.attribute].reduction == -2

    @property
    def reads(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(range(len(self.tensor)))

    def makes_same_rows(self, other: MatrixProduct) -> bool:
        return self is other

    def inputs(self, call: Any) -> tuple[Tensor, ...]:
        return tuple(self.layer.tokens(self.attribute, *call.args, **call.kwargs))

    def quantized_inputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Quantized as one tensor, whose scales all experts share."""
        operands = self.layer.factors(self.layer)
        inputs_of_layer = [name for name, own in operands.items() if own.role is Role.INPUT]
        weights = [name for name, own in operands.items() if own.role is Role.WEIGHT]
        name = inputs_of_layer[weights.index(self.attribute)]
        return self.layer.quantized(name, torch.cat([*inputs])).split([len(x) for x in inputs])

    def matrices(self) -> list[Matrix]:
        weight, quantizer = self.tensor.detach(), self.quantizer
        spec, params, nearest = quantizer.spec, quantizer.qparams(weight), quantizer(weight)
        scale = spec.scale
        if scale.granularity is not None:
            scale = replace(scale, granularity=self._of_one(scale.granularity, params.scale.shape))
        one = spec.replace(granularity=self._of_one(spec.granularity, weight.shape), scale=scale)
        return [
            Matrix(self.matrix(weight[expert]), one, self._each(params, expert), self.matrix(nearest[expert]))
            for expert in range(len(weight))
        ]

    def _of_one(self, granularity: Granularity, shape: torch.Size) -> Granularity:
        """The granularity of one matrix [out, in]."""
        _, *blocks = granularity.block_shape(shape)
        return PerBlock(dict(enumerate(reversed(blocks) if self._is_transposed else blocks)), pad=True)

    def _each(self, params: QParams, expert: int) -> QParams:
        scale, zero_point = params.scale, params.zero_point
        return QParams(self.matrix(scale[expert]), None if zero_point is None else self.matrix(zero_point[expert]))

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.mT.contiguous() if self._is_transposed else weight

    def joined(self, values: Sequence[Tensor], params: Sequence[QParams]) -> tuple[Tensor, QParams]:
        points = [own.zero_point for own in params if own.zero_point is not None]
        scale = torch.stack([self.matrix(own.scale) for own in params])
        zero_point = torch.stack([self.matrix(point) for point in points]) if points else None
        return torch.stack([self.matrix(own) for own in values]), QParams(scale, zero_point)
