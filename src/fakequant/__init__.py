"""fakequant: fake quantization for PyTorch, bit for bit the same on every backend."""

from .errors import FakeQuantError
from .functional import choose_qparams, dequantize, fake_quantize, quantize
from .numerics.formats import FloatFormat, Format, IntegerFormat, formats, parse_format, register_format
from .numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor, PerToken
from .numerics.qparams import QParams, Range
from .numerics.spec import Arithmetic, Gradient, QuantSpec

__version__ = "0.1.0"

__all__ = [
    "Arithmetic",
    "FakeQuantError",
    "FloatFormat",
    "Format",
    "Gradient",
    "Granularity",
    "IntegerFormat",
    "PerBlock",
    "PerChannel",
    "PerTensor",
    "PerToken",
    "QParams",
    "QuantSpec",
    "Range",
    "choose_qparams",
    "dequantize",
    "fake_quantize",
    "formats",
    "parse_format",
    "quantize",
    "register_format",
]
