"""Operators for onnx's ReferenceEvaluator, by their documents, in numpy: independent of what they are to check.

`QuantizeLinear` replaces the evaluator's own for integers, because that converts to int32 before it saturates: beyond
2**31 steps, and for inf, it gives the lowest integer (seen in onnx 1.23). ONNX says that the result saturates.

Those of domain `trt` are TensorRT's. Its documents leave open what becomes of inf and NaN, and the exponent of a block
of zeros: here inf and NaN do not count for the range, inf saturates, and zeros have the smallest exponent.

Sources: ONNX, QuantizeLinear; TensorRT, DynamicQuantize and Working with Quantized Types; cuDNN, Block Scaling, for the
exponent that is rounded up.
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
    """saturate(rint(x / scale) + zero_point) of integers; all other types as the evaluator has them."""

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
        given = output_dtype or TensorProto.UINT8
        kind = given if zero_point is None else helper.np_dtype_to_tensor_dtype(zero_point.dtype)
        if kind not in _INTEGERS:
            place = {"axis": axis, "block_size": block_size}
            return super()._run(*args, **place, saturate=saturate, output_dtype=output_dtype, precision=precision)
        computed = helper.tensor_dtype_to_np_dtype(precision) if precision else scale.dtype
        quotient = x.astype(computed) / _spread(scale, x.shape, axis, block_size).astype(computed)
        # float64 has every sum of an integer of 16 bits and a quotient that does not saturate.
        code = np.rint(quotient).astype(np.float64)
        if zero_point is not None:
            code = code + _spread(zero_point, x.shape, axis, block_size).astype(np.float64)
        low, high = _INTEGERS[kind]
        limited = np.where(np.isnan(code), low, np.clip(code, low, high))
        return (limited.astype(np.int32).astype(helper.tensor_dtype_to_np_dtype(kind)),)


class TRT_MXFP8DynamicQuantize(OpRun):
    """x / 2**e in FP8 E4M3 and the bits of 2**e in E8M0, with e = ceil(log2(amax / 448)) of every block."""

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
    """codes * 2**(exponent - 127)."""

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
    """Values per tensor, per index of an axis or per block of it, so that they broadcast with a tensor."""
    if values.size == 1:
        return values.reshape(())
    if not block_size:
        return values.reshape([-1 if i == axis % len(shape) else 1 for i in range(len(shape))])
    return np.repeat(values, block_size, axis=axis).take(np.arange(shape[axis]), axis=axis)
