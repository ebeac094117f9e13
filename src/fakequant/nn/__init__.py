"""Quantizers and quantized layers."""

from fakequant.nn.layers import Add, MatMul, QuantizedLayer, layers, quantizes
from fakequant.nn.quantizer import Kind, Mode, Quantizer, quantizers

__all__ = ["Add", "Kind", "MatMul", "Mode", "QuantizedLayer", "Quantizer", "layers", "quantizers", "quantizes"]
