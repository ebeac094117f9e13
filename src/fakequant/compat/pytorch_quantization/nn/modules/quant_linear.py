"""Linear with quantized input and weight."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.compat.pytorch_quantization import tensor_quant
from fakequant.compat.pytorch_quantization.nn.modules._utils import WeightedModule

__all__ = ["Linear", "QuantLinear"]


class QuantLinear(WeightedModule, nn.Linear):
    """nn.Linear that also takes `quant_desc_input` and `quant_desc_weight`; weights have a scale per row.

    >>> print(QuantLinear(4, 2, bias=False))
    QuantLinear(
      in_features=4, out_features=2, bias=False
      (_input_quantizer): TensorQuantizer(8bit fake per-tensor amax=dynamic calibrator=MaxCalibrator scale=1.0 quant)
      (_weight_quantizer): TensorQuantizer(8bit fake axis=0 amax=dynamic calibrator=MaxCalibrator scale=1.0 quant)
    )
    """

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self._input_quantizer(input), self.quantized_weight(), self.bias)


Linear = QuantLinear
