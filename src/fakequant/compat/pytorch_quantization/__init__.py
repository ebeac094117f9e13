"""The interface of NVIDIA's pytorch-quantization 2.2.1, on any device, with the same submodule names.

`num_bits`, `axis`, `amax` and the calibration methods have the meaning of the original;
docs/notes/pytorch-quantization.md lists what differs and why.
"""

import sys

from . import calib, cuda_ext, nn, optim, quant_modules, quantizer, tensor_quant, utils
from .quant_modules import deactivate, enable_onnx_export, initialize

__version__ = "2.2.1"
"""The version of pytorch-quantization whose interface this is."""

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

# The submodules of the original that share a file here: scripts import them, and pickles name them.
_SHARED = {
    "calib.calibrator": calib,
    "calib.histogram": calib,
    "calib.max": calib,
    "nn.functional": quantizer,
    "nn.modules": nn,
    "nn.modules._utils": nn,
    "nn.modules.clip": quantizer,
    "nn.modules.quant_conv": nn,
    "nn.modules.quant_instancenorm": nn,
    "nn.modules.quant_linear": nn,
    "nn.modules.quant_pooling": nn,
    "nn.modules.quant_rnn": nn,
    "nn.modules.tensor_quantizer": quantizer,
    "optim.helper": optim,
    "utils.quant_logging": utils,
    "utils.reduce_amax": utils,
    "version": sys.modules[__name__],
}
for _path, _module in _SHARED.items():
    sys.modules[f"{__name__}.{_path}"] = _module
    _parent, _, _name = f"{__name__}.{_path}".rpartition(".")
    if not hasattr(sys.modules[_parent], _name):  # such as the function utils.reduce_amax
        setattr(sys.modules[_parent], _name, _module)
