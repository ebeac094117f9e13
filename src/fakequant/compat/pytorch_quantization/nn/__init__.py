"""The quantizer and quantized layers, also under the names of the float layers that they stand for."""

# ruff: noqa: F403  each module says in __all__ what it offers
from fakequant.compat.pytorch_quantization.nn import functional as functional
from fakequant.compat.pytorch_quantization.nn import modules as modules
from fakequant.compat.pytorch_quantization.nn.modules.clip import *
from fakequant.compat.pytorch_quantization.nn.modules.quant_conv import *
from fakequant.compat.pytorch_quantization.nn.modules.quant_instancenorm import *
from fakequant.compat.pytorch_quantization.nn.modules.quant_linear import *
from fakequant.compat.pytorch_quantization.nn.modules.quant_pooling import *
from fakequant.compat.pytorch_quantization.nn.modules.quant_rnn import *
from fakequant.compat.pytorch_quantization.nn.modules.tensor_quantizer import *
