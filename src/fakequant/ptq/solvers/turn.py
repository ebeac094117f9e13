"""Weights [in, out, ...] as the matrices [out, in, ...] that all algorithms see, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec
from fakequant.ptq.solvers.kinds import is_turned


class Turn:
    """Exchanges the first two axes of what belongs to the weight of a layer, if they are [in, out]; twice is none.

    Args:
        layer: with a weight matrix.
    """

    def __init__(self, layer: Any) -> None:
        self._is_turned = is_turned(layer)
        axes = cast("Tensor", layer.weight).dim()
        self._axes = {0: 1, 1: 0, -axes: 1, 1 - axes: 0}

    def tensor(self, values: Tensor) -> Tensor:
        """A weight, or one value for each of its groups."""
        return values.transpose(0, 1).contiguous() if self._is_turned and values.dim() > 1 else values

    def params(self, params: QParams) -> QParams:
        """The parameters of a weight."""
        if not self._is_turned:
            return params
        return QParams(self.tensor(params.scale), None if params.zero_point is None else self.tensor(params.zero_point))

    def spec(self, spec: QuantSpec) -> QuantSpec:
        """What quantizes a weight."""
        if not self._is_turned:
            return spec
        spec = spec.replace(granularity=spec.granularity.remap_axes(self._axes))
        if spec.scale.granularity is None:
            return spec
        return spec.replace(scale=replace(spec.scale, granularity=spec.scale.granularity.remap_axes(self._axes)))
