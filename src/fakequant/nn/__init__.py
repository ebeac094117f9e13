"""Quantizers and quantized layers."""

from fakequant.nn.device import Device
from fakequant.nn.functions import SiteFunction, SiteOperand, Trait, register_function
from fakequant.nn.integer import Execution
from fakequant.nn.products import MatrixProduct, Product, TurnedProduct
from fakequant.nn.quantized import attention, foreign, recurrent  # noqa: F401  for their entries in the table of layers
from fakequant.nn.quantized.layers import Add, MatMul, QuantizedLayer, layers, quantizes
from fakequant.nn.quantizer import Kind, Mode, Quantizer, quantizers
from fakequant.nn.ranges import LearnedRange, learned_ranges, register_learned_range
from fakequant.nn.transforms import BlockHadamard, ChannelScale, InputTransform, ScaledHadamard
from fakequant.nn.wrappers import cached_weights, fixed_ranges

__all__ = [
    "Add",
    "BlockHadamard",
    "ChannelScale",
    "Device",
    "Execution",
    "InputTransform",
    "Kind",
    "LearnedRange",
    "MatMul",
    "MatrixProduct",
    "Mode",
    "Product",
    "QuantizedLayer",
    "Quantizer",
    "ScaledHadamard",
    "SiteFunction",
    "SiteOperand",
    "Trait",
    "TurnedProduct",
    "cached_weights",
    "fixed_ranges",
    "layers",
    "learned_ranges",
    "quantizers",
    "quantizes",
    "register_function",
    "register_learned_range",
]
