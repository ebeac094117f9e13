"""The quantized bilinear layer, a product of two inputs and a weight; registered as the layers in `layers.py`."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.nn.leaf import Proxy, as_leaf
from fakequant.nn.quantized.layers import QuantizedLayer, quantizes
from fakequant.nn.quantizer import Quantizer


@quantizes(nn.Bilinear)
class QuantBilinear(QuantizedLayer, nn.Bilinear):
    """Bilinear with quantized inputs [..., in1] and [..., in2] and weight [out, in1, in2].

    The product sums over both of the weight's last axes. Blocks of the weight lie along its last one, as those of the
    second input.

    >>> model = prepare(nn.Bilinear(4, 6, 2), presets.INT8)
    >>> used = calibrate(model, [(torch.ones(3, 4), torch.ones(3, 6))])
    >>> model._other_quantizer.calibrated
    True
    """

    inputs: ClassVar[tuple[str, ...]] = ("_input_quantizer", "_other_quantizer")
    input_reductions: ClassVar[tuple[int, ...]] = (-1, -1)
    _other_quantizer: Quantizer | None

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """The output [..., out] of two inputs, as `nn.Bilinear` computes it."""
        if isinstance(input1, Proxy):
            return as_leaf(self, input1, input2)
        first, second = self.quantized_input(input1), self.quantized("_other_quantizer", input2)
        return F.bilinear(first, second, self.quantized_weight(), self.bias)
