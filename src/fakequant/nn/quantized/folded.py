"""Quantized layers that compute with the weight into which the batch normalisation behind them is folded.

Source: Jacob et al. 2018, section 3.2, with the statistics of torch.ao's `ConvBn`: the weight is scaled by the running
statistics, and in training the output is scaled back and normalised by those of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from fakequant.errors import ConfigError
from fakequant.nn.leaf import as_leaf
from fakequant.nn.quantized.layers import QuantConv1d, QuantConv2d, QuantConv3d, QuantizedLayer, QuantLinear


class FoldedNorm(nn.modules.batchnorm._BatchNorm):
    """A batch normalisation whose layer computes it: it returns its input, and keeps parameters and statistics."""

    layer: str
    axes: int

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return as_leaf(self, input)
        if input.dim() != self.axes:
            raise ConfigError(
                f"the batch normalisation that is folded into {self.layer} got an input of shape {list(input.shape)}, "
                f"whose channels are not those of {self.layer}; only inputs of {self.axes} axes can be computed after "
                "fold_batch_norm"
            )
        return input

    def normalised(self, x: Tensor) -> Tensor:
        """What the batch normalisation computes; in training it moves the running statistics."""
        return super().forward(x)


class FoldedBatchNorm1d(FoldedNorm, nn.BatchNorm1d):
    """BatchNorm1d that the layer before it computes."""


class FoldedBatchNorm2d(FoldedNorm, nn.BatchNorm2d):
    """BatchNorm2d that the layer before it computes."""


class FoldedBatchNorm3d(FoldedNorm, nn.BatchNorm3d):
    """BatchNorm3d that the layer before it computes."""


class FoldedLayer(QuantizedLayer):
    """What layers with a folded batch normalisation share: their weight and bias are those that an engine sees.

    They compute with them in eval mode, and in training as soon as the normalisation is in eval mode. In training with
    statistics of the batch, the product with the folded weight is divided by the factor of its channel again, and then
    normalised. Statistics are those of the quantized product.
    """

    plain_class: type[QuantizedLayer]
    _norm: tuple[FoldedNorm]  # in a tuple, because the module has its place in the model already

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The parameter times gamma / sigma of each output channel, in float64 and rounded once."""
        own = cast("Tensor", self._parameters["weight"])
        return (own.double() * self._factor().view(-1, *(1 for _ in own.shape[1:]))).to(own.dtype)

    @property
    def bias(self) -> Tensor:  # type: ignore[override]
        """What is added to the product with the folded weight, likewise."""
        norm, own = self._norm[0], self._parameters.get("bias")
        assert norm.running_mean is not None
        offset = ((0.0 if own is None else own.double()) - norm.running_mean.double()) * self._factor()
        offset = offset if norm.bias is None else offset + norm.bias.double()
        return offset.to(cast("Tensor", self._parameters["weight"]).dtype)

    def _factor(self) -> Tensor:
        """Gamma / sigma [out] of the running statistics, in float64."""
        norm = self._norm[0]
        assert norm.running_var is not None
        factor = (norm.running_var.double() + norm.eps).rsqrt()
        return factor if norm.weight is None else factor * norm.weight.double()

    def _without_bias(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        norm = self._norm[0]
        if isinstance(input, Proxy) or not norm.training:
            return cast("Callable[..., Tensor]", super().forward)(input)
        y = self._without_bias(self.quantized_input(input), self.quantized_weight())
        channels = (-1, *(1 for _ in range(norm.axes - 2)))
        factor = self._factor().to(y.dtype).view(channels)
        y = y / torch.where(factor == 0, 1.0, factor)
        own = self._parameters.get("bias")
        return norm.normalised(y if own is None else y + own.view(channels))


class FoldedLinear(FoldedLayer, QuantLinear):  # type: ignore[misc]
    """QuantLinear with a folded BatchNorm1d."""

    plain_class = QuantLinear

    def _without_bias(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


class _FoldedConv(FoldedLayer):
    _conv_forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def _without_bias(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._conv_forward(x, weight, None)


class FoldedConv1d(_FoldedConv, QuantConv1d):  # type: ignore[misc]
    """QuantConv1d with a folded BatchNorm1d."""

    plain_class = QuantConv1d


class FoldedConv2d(_FoldedConv, QuantConv2d):  # type: ignore[misc]
    """QuantConv2d with a folded BatchNorm2d."""

    plain_class = QuantConv2d


class FoldedConv3d(_FoldedConv, QuantConv3d):  # type: ignore[misc]
    """QuantConv3d with a folded BatchNorm3d."""

    plain_class = QuantConv3d


FOLDED_NORMS: dict[type[nn.Module], type[FoldedNorm]] = {
    nn.BatchNorm1d: FoldedBatchNorm1d,
    nn.BatchNorm2d: FoldedBatchNorm2d,
    nn.BatchNorm3d: FoldedBatchNorm3d,
}
FOLDED_LAYERS: dict[type[nn.Module], type[Any]] = {
    cls.plain_class: cls for cls in (FoldedLinear, FoldedConv1d, FoldedConv2d, FoldedConv3d)
}
