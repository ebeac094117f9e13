"""The quantizations that TensorRT's ONNX parser supports, and its own operators for MXFP8.

Weights: INT8 and FP8 per tensor or channel, INT4 in blocks of 64 or 128, MXFP8, NVFP4. Activations: INT8 and FP8 per
tensor with a constant scale, and MXFP8 in blocks with dynamic scales. All are symmetric.

Sources: onnx-tensorrt, onnxOpImporters.cpp (the operators of domain `trt`; scales are initializers, FP4 blocks have 16
and MXFP8 blocks 32 elements); TensorRT, Working with Quantized Types and the pages of Quantize and DynamicQuantize;
cuDNN, Block Scaling (the exponent is rounded up). Nothing here has been run in TensorRT.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from fakequant.errors import ExportError
from fakequant.export.capability import Dimension, ScaleLayout
from fakequant.export.nodes.site import EmittedSite
from fakequant.export.style import Style
from fakequant.numerics.formats import FLOAT4_E2M1FN, FLOAT8_E4M3FN, FLOAT8_E8M0FNU, INT4, IntegerFormat
from fakequant.numerics.granularity import PerBlock, PerChannel, PerTensor
from fakequant.numerics.qparams import QParams
from fakequant.numerics.scales import ScaleRounding
from fakequant.numerics.spec import Arithmetic, QuantSpec

DOMAIN = "trt"

_INT4_BLOCKS, _MXFP8_BLOCK, _NVFP4_BLOCK = (64, 128), 32, 16


def check(spec: QuantSpec, shape: Sequence[Dimension] | None, *, constant: bool, dynamic: bool) -> None:
    """Check that TensorRT supports a quantization.

    Args:
        spec: the specification.
        shape: the shape of the tensor, or None if it is not known yet.
        constant: whether the tensor is a weight.
        dynamic: whether the range is computed from every tensor.

    Raises:
        ExportError: TensorRT does not support it; the message says what it supports.
    """
    if not spec.symmetric:
        _refuse(spec, "TensorRT has no zero points; use a symmetric specification such as int8")
    if spec.arithmetic is not Arithmetic.DIVIDE and not constant:
        _refuse(spec, "TensorRT's QuantizeLinear takes the scale itself; use Arithmetic.DIVIDE")
    allowed = _block_sizes(spec, constant=constant)
    if not allowed:
        _check_unblocked(spec, constant=constant, dynamic=dynamic)
        return
    _check_blocks(spec, shape, allowed)
    if constant:
        return
    if spec.format != FLOAT8_E4M3FN or not dynamic:
        _refuse(
            spec,
            "TensorRT supports blocks of activations only in dynamic MXFP8, and in NVFP4 with a constant scale of the "
            "tensor, which no specification here has; use dynamic quantization with "
            '"float8_e4m3fn per_block(-1:32) scale=float8_e8m0fnu:ceil", or quantize the weights only',
        )
    if spec.scale.rounding is not ScaleRounding.CEIL:
        _refuse(spec, "TensorRT rounds the exponents of MXFP8 up; use scale=float8_e8m0fnu:ceil")
    if shape is not None and len(shape) not in (2, 3):
        _refuse(spec, f"TensorRT quantizes tensors of 2 or 3 axes in blocks, got {len(shape)}; leave it in float")


def _block_sizes(spec: QuantSpec, *, constant: bool) -> tuple[int, ...]:
    """Return the block sizes that TensorRT supports for a format and its scales; empty if it supports no blocks.

    Raises:
        ExportError: TensorRT does not support the format or its scales.
    """
    fmt, scale = spec.format, spec.scale.format
    if fmt == FLOAT8_E4M3FN and scale == FLOAT8_E8M0FNU:
        return (_MXFP8_BLOCK,)
    if fmt == FLOAT4_E2M1FN and scale == FLOAT8_E4M3FN and isinstance(spec.scale.granularity, PerTensor):
        return (_NVFP4_BLOCK,)
    if scale is None and fmt == INT4 and constant:
        return _INT4_BLOCKS
    if scale is None and (fmt == FLOAT8_E4M3FN or (isinstance(fmt, IntegerFormat) and fmt.signed and fmt.bits == 8)):
        return ()
    what = "weights" if constant else "activations"
    _refuse(
        spec,
        f"TensorRT has no such {what}; use int8, float8_e4m3fn or MXFP8 (float8_e4m3fn under float8_e8m0fnu), or for "
        "weights also INT4 in blocks or NVFP4",
    )


def _check_unblocked(spec: QuantSpec, *, constant: bool, dynamic: bool) -> None:
    per_tensor = isinstance(spec.granularity, PerTensor)
    per_channel = isinstance(spec.granularity, PerChannel) and len(spec.granularity.axes) == 1
    if not per_tensor and not (per_channel and constant):
        kinds = "per tensor or along one channel axis" if constant else "per tensor"
        _refuse(spec, f"TensorRT has {spec.format} only {kinds}; use such a granularity")
    if dynamic and not constant:
        _refuse(spec, "TensorRT's scales are constants; calibrate the quantizer instead of leaving it dynamic")


def _check_blocks(spec: QuantSpec, shape: Sequence[Dimension] | None, allowed: tuple[int, ...]) -> None:
    sizes = list(spec.granularity.sizes) if isinstance(spec.granularity, PerBlock) else []
    if len(sizes) != 1 or sizes[0][1] not in allowed:
        _refuse(
            spec, f"TensorRT has it only in blocks of {' or '.join(map(str, allowed))} along one axis; use such blocks"
        )
    if shape is None:
        return
    axis, size = sizes[0]
    if axis % len(shape) < len(shape) - 2:
        _refuse(spec, f"TensorRT has blocks along one of the last two axes, got axis {axis} of {len(shape)}")
    length = shape[axis]
    if isinstance(length, str) or length % size:
        _refuse(
            spec,
            f"axis {axis} has {length} elements, but TensorRT wants a constant multiple of {size}; pad the tensor, or "
            "leave the layer in float",
        )


def place(spec: QuantSpec, axes: int) -> ScaleLayout | None:
    """Return the layout of scales in blocks, also if one block covers its axis; None if TensorRT has no blocks here."""
    if not isinstance(spec.granularity, PerBlock):
        return None
    ((axis, size),) = spec.granularity.sizes
    return ScaleLayout(axis % axes, size, (1,) * axes)


def _refuse(spec: QuantSpec, reason: str) -> NoReturn:
    raise ExportError(f'{spec}: {reason}; or use style="standard" or "portable"')


def needed(site: EmittedSite) -> bool:
    """Whether a quantizer needs TensorRT's own operators."""
    return site.style is Style.TRT and site.spec.scale.format == FLOAT8_E8M0FNU


def dequantize(site: EmittedSite, codes: str, params: QParams) -> tuple[str, str]:
    """Add the exponents of an MXFP8 weight and its DequantizeLinear; returns their name and a description."""
    exponent = torch.frexp(site.arrange(params.scale))[1] - 1 + FLOAT8_E8M0FNU.exponent_bias
    exponents = site.add("exponents", exponent.to(torch.uint8))
    _dequantize(site, codes, exponents)
    return exponents, f"{site.encoding.element.name} codes and TRT_MXFP8DequantizeLinear, {site.layout}"


def quantize(site: EmittedSite) -> str:
    """Add the nodes of an MXFP8 activation whose scales TensorRT computes; returns a description."""
    from onnx import TensorProto, helper

    codes, exponents = f"{site.label}/codes", f"{site.label}/exponents"
    node = helper.make_node(
        "TRT_MXFP8DynamicQuantize",
        [site.x],
        [codes, exponents],
        f"{site.label}/TRT_MXFP8DynamicQuantize",
        domain=DOMAIN,
        axis=site.layout.axis,
        block_size=site.layout.block_size,
        output_dtype=TensorProto.FLOAT8E4M3FN,
    )
    site.nodes.append(node)
    _dequantize(site, codes, exponents)
    return f"TRT_MXFP8DynamicQuantize and TRT_MXFP8DequantizeLinear, {site.layout}"


def _dequantize(site: EmittedSite, codes: str, exponents: str) -> None:
    kind = site.editor.type(site.x)
    place = {**site.place(), "output_dtype": kind}
    site.emit("TRT_MXFP8DequantizeLinear", codes, exponents, result=site.y, domain=DOMAIN, **place)
