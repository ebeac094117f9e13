"""What a quantizer computes while ONNX export is enabled: the arithmetic of QuantizeLinear and DequantizeLinear.

Those divide by a scale and multiply with it, where the quantizer otherwise multiplies with 1 / scale and divides: with
it, a model computes in torch what its file computes. Values differ by at most one unit in the last place.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fakequant.compat.pytorch_quantization.specification import granularity_of
from fakequant.numerics.formats.floats import Format, IntegerFormat
from fakequant.numerics.granularity import PerChannel
from fakequant.numerics.qparams import QParams, Range, compute_dtype
from fakequant.numerics.spec import Gradient, QuantSpec
from fakequant.ops import library
from fakequant.ops.trt_fp8 import as_trt_fp8, writes_trt_fp8

# What TensorRT runs.
_BITS = 8


def check(amax: Tensor | None, fmt: Format, narrow_range: bool) -> None:
    """Whether TensorRT has a form for a quantizer.

    Raises:
        AssertionError: it has none, or amax is missing.
    """
    if amax is None:
        raise AssertionError("the quantizer has no amax: calibrate it and load amax before exporting to ONNX")
    several = sum(n != 1 for n in amax.shape)
    if not fmt.has_zero_point:
        if several:
            raise AssertionError(f"floats are exported per tensor only, got an amax of shape {list(amax.shape)}")
        return
    if fmt.bits != _BITS:
        raise AssertionError(f"integers are exported with {_BITS} bits only, got num_bits={fmt.bits}")
    if fmt.signed and narrow_range:
        raise AssertionError("a narrow range is not exported: ONNX has all 256 codes; set narrow_range=False")
    if several > 1:
        raise AssertionError(f"amax may vary along one axis only, got shape {list(amax.shape)}")


def fake_quantize(inputs: Tensor, amax: Tensor, fmt: Format) -> Tensor:
    """Inputs [...] fake-quantized, amax [1s but along one axis] being mapped to the format's bound."""
    granularity, shape = granularity_of(amax.shape, inputs.shape)
    amax = amax.detach().to(inputs.device, compute_dtype(inputs.dtype)).reshape(shape)
    scale = amax / torch.full_like(amax, fmt.bound)
    # Any scale gives 0 for 0, but ONNX and TensorRT want a positive one.
    scale = torch.where(scale > 0, scale, 1.0)
    if writes_trt_fp8(fmt):
        return as_trt_fp8(inputs, scale)
    if torch.onnx.is_in_onnx_export():
        # QuantizeLinear takes no half precision before opset 19, and later none beside a float32 scale.
        return _as_torch_operator(inputs.to(scale.dtype), scale, granularity, fmt).to(inputs.dtype)
    spec = QuantSpec(fmt, granularity, symmetric=True, gradient=Gradient.INPUT_RANGE)
    return library.fake_quantize(inputs, QParams(scale, None, Range(-amax, amax)), spec)


def _as_torch_operator(x: Tensor, scale: Tensor, granularity: object, fmt: Format) -> Tensor:
    """The operator for which torch.onnx.export knows QuantizeLinear and DequantizeLinear.

    Raises:
        AssertionError: a float format, for which torch has none.
    """
    if not isinstance(fmt, IntegerFormat):
        raise AssertionError(f"torch.onnx.export has no form for {fmt}; use fakequant.export_onnx")
    zero_point = torch.zeros(scale.numel(), dtype=torch.int32, device=x.device)
    codes = int(fmt.quant_min), int(fmt.quant_max)
    if not isinstance(granularity, PerChannel):
        return torch.fake_quantize_per_tensor_affine(x, scale.reshape(()), zero_point.reshape(()), *codes)
    axis = cast("PerChannel", granularity).axes[0]
    return torch.fake_quantize_per_channel_affine(x, scale.reshape(-1), zero_point, axis, *codes)
