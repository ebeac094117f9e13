"""Operators for onnx's ReferenceEvaluator in numpy, written from the documentation and independent of the exporter.

`QuantizeLinear` replaces the evaluator's own for integers, which converts to int32 before it saturates: beyond 2**31
steps, and for inf, it returns the lowest integer (seen in onnx 1.23). ONNX specifies that the result saturates.

The operators of domain `trt` are TensorRT's. Its documentation does not specify inf, NaN or the exponent of a block of
zeros. Here the range ignores inf and NaN, inf saturates, and a block of zeros has the smallest exponent.

Sources: ONNX, QuantizeLinear; TensorRT, DynamicQuantize and Working with Quantized Types; cuDNN, Block Scaling (the
exponent is rounded up).
"""

from __future__ import annotations

import numpy as np
from ml_dtypes import finfo
from onnx import TensorProto, helper, numpy_helper
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_quantize_linear import QuantizeLinear_25

_INTEGERS: dict[int, tuple[int, int]] = {
    TensorProto.INT2: (-2, 1),
    TensorProto.UINT2: (0, 3),
    TensorProto.INT4: (-8, 7),
    TensorProto.UINT4: (0, 15),
    TensorProto.INT8: (-128, 127),
    TensorProto.UINT8: (0, 255),
    TensorProto.INT16: (-32768, 32767),
    TensorProto.UINT16: (0, 65535),
}
_E8M0_BIAS = 127


class QuantizeLinear(QuantizeLinear_25):
    """Returns saturate(rint(x / scale) + zero_point) for integers; other types use the evaluator's definition."""

    op_domain = ""

    def _run(
        self,
        *args: np.ndarray,
        axis: int = 1,
        saturate: bool = True,
        block_size: int = 0,
        output_dtype: int | None = None,
        precision: int | None = None,
    ) -> tuple[np.ndarray]:
        x, scale, *rest = args
        zero_point = rest[0] if rest else None
        declared = output_dtype or TensorProto.UINT8
        kind = declared if zero_point is None else helper.np_dtype_to_tensor_dtype(zero_point.dtype)
        if kind not in _INTEGERS:
            place = {"axis": axis, "block_size": block_size}
            return super()._run(*args, **place, saturate=saturate, output_dtype=output_dtype, precision=precision)
        computed = helper.tensor_dtype_to_np_dtype(precision) if precision else scale.dtype
        quotient = x.astype(computed) / _spread(scale, x.shape, axis, block_size).astype(computed)
        # float64 represents every sum of a 16-bit integer and a quotient in range exactly.
        code = np.rint(quotient).astype(np.float64)
        if zero_point is not None:
            code = code + _spread(zero_point, x.shape, axis, block_size).astype(np.float64)
        low, high = _INTEGERS[kind]
        limited = np.where(np.isnan(code), low, np.clip(code, low, high))
        return (limited.astype(np.int32).astype(helper.tensor_dtype_to_np_dtype(kind)),)


class TRT_MXFP8DynamicQuantize(OpRun):
    """Returns x / 2**e in FP8 E4M3 and the bits of 2**e in E8M0, with e = ceil(log2(amax / 448)) for each block."""

    op_domain = "trt"

    def _run(
        self,
        x: np.ndarray,
        *,
        axis: int = -1,
        block_size: int = 32,
        output_dtype: int = TensorProto.FLOAT8E4M3FN,
    ) -> tuple[np.ndarray, np.ndarray]:
        element = helper.tensor_dtype_to_np_dtype(output_dtype)
        values = x.astype(np.float32)
        finite = np.where(np.isfinite(values), np.abs(values), np.float32(0))
        amax = np.maximum.reduceat(finite, np.arange(0, x.shape[axis], block_size), axis=axis)
        mantissa, exponent = np.frexp(amax / np.float32(finfo(element).max))
        exponent = np.where(amax > 0, exponent - (mantissa == 0.5), -_E8M0_BIAS).clip(-_E8M0_BIAS, _E8M0_BIAS)
        power = np.ldexp(np.float32(1), exponent)
        codes = numpy_helper.saturate_cast(values / _spread(power, x.shape, axis, block_size), element)
        return codes, (exponent + _E8M0_BIAS).astype(np.uint8)


class TRT_MXFP8DequantizeLinear(OpRun):
    """Returns codes * 2**(exponent - 127)."""

    op_domain = "trt"

    def _run(
        self,
        codes: np.ndarray,
        exponents: np.ndarray,
        *,
        axis: int = -1,
        block_size: int = 32,
        output_dtype: int = TensorProto.FLOAT,
    ) -> tuple[np.ndarray]:
        power = np.ldexp(np.float32(1), exponents.astype(np.int32) - _E8M0_BIAS)
        values = codes.astype(np.float32) * _spread(power, codes.shape, axis, block_size)
        return (values.astype(helper.tensor_dtype_to_np_dtype(output_dtype)),)


OPERATORS: tuple[type[OpRun], ...] = (QuantizeLinear, TRT_MXFP8DynamicQuantize, TRT_MXFP8DequantizeLinear)


def _spread(values: np.ndarray, shape: tuple[int, ...], axis: int, block_size: int) -> np.ndarray:
    """Expand values per tensor, per index of an axis or per block, so that they broadcast with a tensor."""
    if values.size == 1:
        return values.reshape(())
    if not block_size:
        return values.reshape([-1 if i == axis % len(shape) else 1 for i in range(len(shape))])
    return np.repeat(values, block_size, axis=axis).take(np.arange(shape[axis]), axis=axis)
