"""Quantizers and quantized layers."""

from fakequant.nn.integer import Execution
from fakequant.nn.layers import Add, MatMul, QuantizedLayer, layers, quantizes
from fakequant.nn.learned import LearnedRange, learned_ranges, register_learned_range
from fakequant.nn.quantizer import Kind, Mode, Quantizer, cached_weights, fixed_ranges, quantizers

__all__ = [
    "Add",
    "Execution",
    "Kind",
    "LearnedRange",
    "MatMul",
    "Mode",
    "QuantizedLayer",
    "Quantizer",
    "cached_weights",
    "fixed_ranges",
    "layers",
    "learned_ranges",
    "quantizers",
    "quantizes",
    "register_learned_range",
]
