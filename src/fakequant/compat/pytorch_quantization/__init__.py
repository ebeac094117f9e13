"""The interface of NVIDIA's pytorch-quantization 2.2.1, on any device, under the same submodule names.

`num_bits`, `axis`, `amax` and the calibration methods mean what they mean there; docs/notes/pytorch-quantization.md
lists what differs and why.
"""

from . import calib, cuda_ext, nn, quant_modules, tensor_quant, utils
from .quant_modules import deactivate, enable_onnx_export, initialize
from .version import __version__

__all__ = [
    "__version__",
    "calib",
    "cuda_ext",
    "deactivate",
    "enable_onnx_export",
    "initialize",
    "nn",
    "quant_modules",
    "tensor_quant",
    "utils",
]
