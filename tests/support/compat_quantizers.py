"""Quantizers of the pytorch_quantization interface, and a tensor for them."""

import torch

from fakequant.compat.pytorch_quantization.nn import TensorQuantizer
from fakequant.compat.pytorch_quantization.tensor_quant import QuantDescriptor

X = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(7))


def quantizer(*, if_clip=False, if_calib=False, disabled=False, **options) -> TensorQuantizer:
    return TensorQuantizer(QuantDescriptor(**options), disabled=disabled, if_clip=if_clip, if_calib=if_calib)
