"""FP8 in files of torch.onnx.export(dynamo=False): TensorRT's operators, as NVIDIA pytorch-quantization writes them.

That exporter knows no float8. `fakequant.export_onnx` writes the standard operators instead.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fakequant.numerics.formats import FLOAT8_E4M3FN
from fakequant.numerics.formats.floats import Format
from fakequant.numerics.qparams import compute_dtype

# The numbers of types in ONNX (TensorProto.DataType), for the Cast to float32 and back.
_FLOAT = 1
_NARROW = {"Half": 10, "BFloat16": 16}


def writes_trt_fp8(fmt: Format) -> bool:
    """Whether the TorchScript exporter is running, and TensorRT has operators for the format."""
    return fmt == FLOAT8_E4M3FN and torch.jit.is_tracing() and torch.onnx.is_in_onnx_export()


def as_trt_fp8(x: Tensor, scale: Tensor | None) -> Tensor:
    """Fake-quantized x [...], written to the file as TRT_FP8QuantizeLinear and TRT_FP8DequantizeLinear.

    Args:
        x: the tensor to quantize, any shape.
        scale: one number in a tensor of any shape; None and 0 mean 1.

    Raises:
        AssertionError: several scales.
        ValueError: a negative scale.
    """
    if scale is not None and any(n != 1 for n in scale.shape):
        raise AssertionError(f"floats are exported per tensor only, got an amax of shape {list(scale.shape)}")
    with warnings.catch_warnings():
        # The tracer warns that a number stays as it is in the file. Here it must.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        number = 1.0 if scale is None else float(scale)
    if number < 0:
        raise ValueError(f"Negative values in amax: its scale is {number:g}; give the largest magnitude")
    # The operators would divide by a scale of 0.
    result: Tensor = _Operators.apply(x, number or 1.0)  # type: ignore[no-untyped-call]
    return result


class _Operators(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        """The values that the nodes compute, by torch's operators, which the tracer reads."""
        bound = torch.finfo(torch.float8_e4m3fn).max
        codes = (x.to(compute_dtype(x.dtype)) / scale).clamp(-bound, bound).to(torch.float8_e4m3fn)
        return (codes.to(compute_dtype(x.dtype)) * scale).to(x.dtype)

    @staticmethod
    def symbolic(g: Any, x: Any, scale: float) -> Any:
        """The nodes of the file; both operators take and return float32, so that other types are cast."""
        kind = x.type()
        narrow = _NARROW.get(kind.scalarType())
        if narrow is not None:
            x = g.op("Cast", x, to_i=_FLOAT)
        constant = g.op("Constant", value_t=torch.tensor(scale, dtype=torch.float32, device="cpu"))
        codes = g.op("trt::TRT_FP8QuantizeLinear", x, constant).setType(kind.with_dtype(torch.uint8))
        y = g.op("trt::TRT_FP8DequantizeLinear", codes, constant).setType(kind.with_dtype(torch.float32))
        return y if narrow is None else g.op("Cast", y, to_i=narrow).setType(kind)
