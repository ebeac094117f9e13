"""Quantized layers of two inputs; registered as the layers in `layers.py`."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.nn.backward.products import BatchedSum, Factor, WeightedSum, is_trained, matmul
from fakequant.nn.integer_products import MatMulProduct
from fakequant.nn.leaf import Proxy, as_leaf
from fakequant.nn.quantized.elementwise import Add, MatMul
from fakequant.nn.quantized.layers import QuantizedLayer, quantizes
from fakequant.nn.quantizer import Quantizer


class _QuantPair(QuantizedLayer):
    inputs: ClassVar[tuple[str, ...]] = ("_input_quantizer", "_other_quantizer")
    input_reductions: ClassVar[tuple[int, ...]] = (-1, -1)
    _other_quantizer: Quantizer | None


@quantizes(MatMul)
class QuantMatMul(_QuantPair, MatMul):
    """MatMul of two quantized activations [..., n, k] and [..., k, m]."""

    output_channels: ClassVar[int | None] = None
    input_reductions = (-1, -2)
    product = MatMulProduct()

    @classmethod
    def weighted_sum(cls, layer: nn.Module) -> WeightedSum | None:
        return BatchedSum()

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return as_leaf(self, input, other)
        if is_trained(self.gradient):
            factors = Factor.of(self, "_input_quantizer", input), Factor.of(self, "_other_quantizer", other)
            return matmul(self.backward_of(), *factors)
        if (y := self.integer_product(input, other)) is not None:
            return y
        return super().forward(self.quantized_input(input), self.quantized("_other_quantizer", other))


@quantizes(Add)
class QuantAdd(_QuantPair, Add):
    """Add of two quantized activations."""

    output_channels: ClassVar[int | None] = None

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return as_leaf(self, input, other)
        return super().forward(self.quantized_input(input), self.quantized("_other_quantizer", other))


@quantizes(nn.Bilinear)
class QuantBilinear(_QuantPair, nn.Bilinear):
    """Bilinear with quantized inputs [..., in1] and [..., in2] and weight [out, in1, in2].

    The product sums over both of the weight's last axes. Blocks of the weight lie along its last one, as those of the
    second input.

    >>> model = prepare(nn.Bilinear(4, 6, 2), presets.INT8)
    >>> used = calibrate(model, [(torch.ones(3, 4), torch.ones(3, 6))])
    >>> model._other_quantizer.calibrated
    True
    """

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """The output [..., out] of two inputs, as `nn.Bilinear` computes it."""
        if isinstance(input1, Proxy):
            return as_leaf(self, input1, input2)
        first, second = self.quantized_input(input1), self.quantized("_other_quantizer", input2)
        return F.bilinear(first, second, self.quantized_weight(), self.bias)
