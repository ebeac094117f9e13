"""Quantizers and quantized layers."""

from fakequant.nn import attention as _attention  # noqa: F401  for its entry in the table of layers
from fakequant.nn import bilinear as _bilinear  # noqa: F401  likewise
from fakequant.nn import embedding as _embedding  # noqa: F401  likewise
from fakequant.nn import experts as _experts  # noqa: F401  likewise
from fakequant.nn import foreign as _foreign  # noqa: F401  likewise
from fakequant.nn import pooling as _pooling  # noqa: F401  likewise
from fakequant.nn import recurrent_layers as _recurrent_layers  # noqa: F401  likewise
from fakequant.nn import transposed as _transposed  # noqa: F401  likewise
from fakequant.nn.contexts import cached_weights, fixed_ranges
from fakequant.nn.elementwise import Add, MatMul
from fakequant.nn.integer import Execution
from fakequant.nn.layers import QuantizedLayer, layers, quantizes
from fakequant.nn.learned import LearnedRange, learned_ranges, register_learned_range
from fakequant.nn.products.product import MatrixProduct, Product, TurnedProduct
from fakequant.nn.quantizer import Kind, Mode, Quantizer, quantizers
from fakequant.nn.site_functions import SiteFunction, SiteOperand, register_function
from fakequant.nn.traits import Trait
from fakequant.nn.transforms import BlockHadamard, ChannelScale, InputTransform

__all__ = [
    "Add",
    "BlockHadamard",
    "ChannelScale",
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
