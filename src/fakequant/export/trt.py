"""Emitters of a quantizer's nodes, scales with a format, and the quantizations that TensorRT's parser supports.

TensorRT. Weights: INT8 and FP8 per tensor or channel, INT4 in blocks of 64 or 128, MXFP8, NVFP4. Activations: INT8 and
FP8 per tensor with a constant scale, and MXFP8 in blocks with dynamic scales. All are symmetric.

Sources: onnx-tensorrt, onnxOpImporters.cpp (the operators of domain `trt`; scales are initializers, FP4 blocks have 16
and MXFP8 blocks 32 elements); TensorRT, Working with Quantized Types and the pages of Quantize and DynamicQuantize;
cuDNN, Block Scaling (the exponent is rounded up). Nothing here has been run in TensorRT.

Scales with their own format are powers of two in E8M0, or codes times a second-level scale. `Encoding.scale` is their
element type. It is None (float32) in `Style.PORTABLE` and for specifications whose scales have no format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from fakequant.errors import ExportError, QParamsError
from fakequant.export.capability import Dimension, ElementType, Encoding, ScaleLayout, Style, block_sizes
from fakequant.export.inputs import GraphEditor, stored
from fakequant.numerics.formats import FLOAT4_E2M1FN, FLOAT8_E4M3FN, FLOAT8_E8M0FNU, INT4, IntegerFormat
from fakequant.numerics.formats.floats import ExponentFormat
from fakequant.numerics.granularity import PerBlock, PerChannel, PerTensor
from fakequant.numerics.qparams import QParams
from fakequant.numerics.scales import ScaleRounding
from fakequant.numerics.spec import Arithmetic, QuantSpec
from fakequant.ops import library

if TYPE_CHECKING:
    from onnx import NodeProto


@dataclass
class Emitter:
    """Collects the nodes and constants that replace one node; their names begin with its label."""

    editor: GraphEditor
    label: str
    nodes: list[NodeProto] = field(default_factory=list, kw_only=True)
    added: list[str] = field(default_factory=list, kw_only=True)

    def emit(self, operator: str, *inputs: str, result: str | None = None, **attributes: Any) -> str:
        """Add a node and return the name of its result; attributes that are None are left out."""
        from onnx import helper

        same = sum(node.op_type == operator for node in self.nodes)
        name = f"{self.label}/{operator}{f'_{same}' if same else ''}"
        present = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(operator, inputs, [result or name], name, **present))
        return result or name

    def split(self, value: str, sizes: str, results: Sequence[str]) -> None:
        """Add a node that splits a value along its last axis; `sizes` names the lengths of the parts."""
        from onnx import helper

        self.nodes.append(helper.make_node("Split", [value, sizes], [*results], f"{results[0]}/Split", axis=-1))

    def add(self, name: str, values: Tensor | np.ndarray) -> str:
        """Add a constant and return its name."""
        array = values.numpy() if isinstance(values, Tensor) else values
        self.added.append(self.editor.add(f"{self.label}/{name}", array, shared=name == "codes"))
        return self.added[-1]

    def number(self, name: str, value: float) -> str:
        """Add a float32 scalar constant and return its name."""
        return self.add(name, np.array(value, np.float32))

    def scalar(self, value: str) -> str:
        """Reshape a value with one element to a scalar."""
        return self.emit("Reshape", value, self.add("no_axes", np.array([], np.int64)))

    def as_float32(self, value: str) -> str:
        """Cast a value to float32 if it has another type."""
        from onnx import TensorProto

        return value if self.editor.type(value) == TensorProto.FLOAT else self.emit("Cast", value, to=TensorProto.FLOAT)

    def repeat(
        self, value: str, blocks: Sequence[Dimension], shape: Sequence[Dimension], axes: Iterable[int] | None = None
    ) -> str:
        """Repeat values [groups per axis], so that each element of [shape] has the value of its group.

        By default the values are repeated along the axes that blocks divide.
        """
        if axes is None:
            axes = [axis for axis, (n, b) in enumerate(zip(shape, blocks, strict=True)) if b not in (1, n)]
        for axis in axes:
            n, block = shape[axis], blocks[axis]
            assert isinstance(n, int), "an axis that blocks divide is checked to have a known length"
            assert isinstance(block, int)
            index = np.arange(n, dtype=np.int64) // block
            value = self.emit("Gather", value, self.add(f"block_of_{axis}", index), axis=axis)
        return value


@dataclass
class EmittedSite(Emitter):
    """A FakeQuantize node, its parameters, and the nodes that replace it."""

    path: str
    spec: QuantSpec
    style: Style
    encoding: Encoding
    layout: ScaleLayout
    blocks: list[Dimension]
    """The block size along every axis."""
    x: str
    y: str
    scale: str
    zero_point: str | None
    constant: QParams | None
    """The parameters [groups per axis], if they are constants in the file; else None."""
    fixed_codes: Tensor | None = None
    """The fixed codes of a weight, if quantizing the weight would give other codes; else None."""

    def weight_codes(self, params: QParams) -> Tensor:
        """Return the codes of a constant weight."""
        weight = self.editor.tensor(self.x)
        if self.fixed_codes is None:
            return library.quantize(weight, params, self.spec)
        if self.fixed_codes.shape != weight.shape:
            shapes = f"{list(self.fixed_codes.shape)}, but the graph holds its weight as {list(weight.shape)}"
            raise ExportError(f"its codes are fixed in the shape {shapes}; call release_codes() on its quantizer")
        return self.fixed_codes

    def place(self) -> dict[str, Any]:
        """Return the attributes `axis` and `block_size` for the layout of the scales."""
        return {"axis": self.layout.axis, "block_size": self.layout.block_size or None}

    def arrange(self, values: Tensor) -> Tensor:
        """Bring constant values [groups per axis] to the shape that ONNX expects."""
        if self.layout.axis is None:
            return values.reshape(())
        if not self.layout.block_size:
            return values.reshape(-1)
        return self._repeated(values, self._repeats())

    def arranged(self, name: str) -> str:
        """Bring computed values [groups per axis] to the shape that ONNX expects; returns their name."""
        if self.layout.block_size:
            return self.repeat(name, self.blocks, self.editor.shape(self.x), self._repeats())
        shape = np.array([] if self.layout.axis is None else [-1], np.int64)
        return self.emit("Reshape", name, self.add("shape", shape))

    def spread(self, values: Tensor) -> Tensor:
        """Repeat constant values [groups per axis] along the axes that blocks divide, so they broadcast with x."""
        return self._repeated(values, self._divided(list(values.shape)))

    def spread_computed(self, name: str) -> str:
        """Repeat computed values [groups per axis] along the axes that blocks divide; returns their name."""
        return self.repeat(name, self.blocks, self.editor.shape(self.x), self._divided(self.editor.shape(self.scale)))

    def _repeats(self) -> list[int]:
        return [axis for axis, count in enumerate(self.layout.repeats) if count != 1]

    def _divided(self, groups: Sequence[Dimension]) -> list[int]:
        pairs = zip(groups, self.editor.shape(self.x), strict=True)
        return [axis for axis, (g, n) in enumerate(pairs) if g not in (1, n)]

    def _repeated(self, values: Tensor, axes: Sequence[int]) -> Tensor:
        shape = self.editor.shape(self.x)
        for axis in axes:
            n, block = shape[axis], self.blocks[axis]
            assert isinstance(n, int)
            assert isinstance(block, int)
            values = values.index_select(axis, torch.arange(n, device=values.device) // block)
        return values


class FactoredScale(NamedTuple):
    """Scales as positive codes [groups per axis] times one float32 factor per block of codes [blocks per axis]."""

    codes: Tensor
    shared: Tensor


class ScaleNames(NamedTuple):
    """The names of a quantizer's scales in the file.

    Args:
        scale: the scale that QuantizeLinear and DequantizeLinear take.
        constant: the stored constant: the scales, or their codes.
        shared: the factor of the codes; None for scales without a second level.
    """

    scale: str
    constant: str
    shared: str | None = None


def constant_scale(site: EmittedSite, params: QParams) -> ScaleNames:
    """Add constant scales to the file and return their names."""
    element, granularity = site.encoding.scale, site.spec.scale.granularity
    if element is not None and granularity is not None and (factored := factor(params.scale, site.spec)):
        codes = site.add("scale_codes", stored(factored.codes.numpy(), element))
        single = factored.shared.numel() == 1
        shared = site.add("scale_of_scales", factored.shared.reshape(()) if single else factored.shared)
        shape = factored.codes.shape
        scale = multiply(site, codes, shared, shape, block_sizes(granularity, shape))
        return ScaleNames(site.arranged(scale), codes, shared)
    values = site.arrange(params.scale)
    powers = element if site.encoding.powers else None
    name = site.add("scale", values if powers is None else stored(values.numpy(), powers))
    return ScaleNames(name, name)


def computed_scale(site: EmittedSite) -> str:
    """Convert computed scales to the form that QuantizeLinear and DequantizeLinear take; returns their name."""
    arranged = site.arranged(site.scale)
    return _to_e8m0(site, arranged) if site.encoding.powers else arranged


def factor(scale: Tensor, spec: QuantSpec) -> FactoredScale | None:
    """Factor float32 scales exactly into codes of their format and second-level scales; None if that is not possible.

    `numerics.scales` computes scales [groups per axis] as these products, except where it enlarges or limits a scale.

    >>> spec = QuantSpec.parse("float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor")
    >>> factor(torch.tensor([[448.0, 3.5, 0.875]]) * 0.1, spec)
    FactoredScale(codes=tensor([[448.0000,   3.5000,   0.8750]]), shared=tensor([[0.1000]]))
    """
    try:
        codes, shared = spec.scale.split(scale)
    except QParamsError:
        return None
    if spec.scale.format is None or shared is None or not scale.numel():
        return None
    return FactoredScale(spec.scale.format.from_storage(codes, scale.dtype), shared)


def multiply(emitter: Emitter, codes: str, shared: str, shape: Sequence[Dimension], blocks: Sequence[Dimension]) -> str:
    """Add nodes that multiply codes [shape] by their shared factors, one for each block of codes.

    The nodes are one DequantizeLinear if all codes share one factor.
    """
    if all(b == n for n, b in zip(shape, blocks, strict=True)):
        return emitter.emit(
            "DequantizeLinear", codes, shared if emitter.editor.is_constant(shared) else emitter.scalar(shared)
        )
    spread = emitter.repeat(shared, blocks, shape)
    return emitter.emit("Mul", emitter.emit("DequantizeLinear", codes, emitter.number("one", 1.0)), spread)


def scale_codes(emitter: Emitter, quotient: str, smallest: str, element: ElementType) -> str:
    """Add nodes that round scales, divided by their shared factor, to codes: at least the smallest positive code."""
    from onnx import TensorProto

    kind = TensorProto.DataType.Value(element.name)
    return emitter.emit(
        "QuantizeLinear", emitter.emit("Max", quotient, smallest), emitter.number("one", 1.0), output_dtype=kind
    )


def powers_of_two(emitter: Emitter, amax: str, spec: QuantSpec, limit: float, result: str) -> None:
    """Add nodes that choose the power of two of every group as `numerics.scales` does, with Cast to E8M0.

    Cast rounds down, but not below 2**-127. Products with powers of two are exact.
    """
    fmt, element = spec.scale.format, spec.format
    assert isinstance(fmt, ExponentFormat)
    if spec.scale.rounding is ScaleRounding.CEIL:
        quotient = emitter.emit("Div", amax, emitter.number("bound", element.bound))
        power = _power_below(emitter, quotient)
        power = _double_where(emitter, emitter.emit("Greater", quotient, power), power)
    else:
        below = _power_below(emitter, amax)
        power = emitter.emit("Mul", below, emitter.number("unit", 2.0 ** (1 - math.frexp(element.bound)[1])))
        if (up_from := spec.scale.up_from(element)) < 1:  # of the mantissa, whose powers begin with 0.5
            near = emitter.emit("Mul", below, emitter.number("near", 2 * up_from))
            power = _double_where(emitter, emitter.emit("GreaterOrEqual", amax, near), power)
    power = emitter.emit("Max", power, emitter.number("smallest", fmt.grid.quant_min))
    largest = 2.0 ** min(fmt.exponent_bias, math.frexp(limit)[1] - 1)
    emitter.emit("Min", power, emitter.number("limit", largest), result=result)


def _double_where(emitter: Emitter, condition: str, power: str) -> str:
    return emitter.emit("Where", condition, emitter.emit("Mul", power, emitter.number("two", 2.0)), power)


def _power_below(emitter: Emitter, value: str) -> str:
    from onnx import TensorProto

    return emitter.emit("Cast", _to_e8m0(emitter, value), to=TensorProto.FLOAT)


def _to_e8m0(emitter: Emitter, value: str) -> str:
    """Cast to the power of two below; rounding up would turn the subnormal 2**-127 into 2**-126 in onnx 1.23."""
    from onnx import TensorProto

    return emitter.emit("Cast", value, to=TensorProto.FLOAT8E8M0, round_mode="down")


DOMAIN = "trt"

_INT4_BLOCKS, _MXFP8_BLOCK, _NVFP4_BLOCK = (64, 128), 32, 16


def check(spec: QuantSpec, shape: Sequence[Dimension] | None, *, constant: bool, dynamic: bool) -> None:
    """Check that TensorRT supports a quantization.

    The arguments are as for `export.trace.check`.

    Raises:
        ExportError: TensorRT does not support it; the message says what it supports.
    """
    if not spec.symmetric:
        _refuse(spec, "TensorRT has no zero points; use a symmetric specification such as int8")
    if spec.arithmetic is not Arithmetic.DIVIDE and not constant:
        _refuse(spec, "TensorRT's QuantizeLinear takes the scale itself; use Arithmetic.DIVIDE")
    allowed = _block_sizes(spec, constant=constant)
    if not allowed:
        per_channel = isinstance(spec.granularity, PerChannel) and len(spec.granularity.axes) == 1
        if not isinstance(spec.granularity, PerTensor) and not (per_channel and constant):
            kinds = "per tensor or along one channel axis" if constant else "per tensor"
            _refuse(spec, f"TensorRT has {spec.format} only {kinds}; use such a granularity")
        if dynamic and not constant:
            _refuse(spec, "TensorRT's scales are constants; calibrate the quantizer instead of leaving it dynamic")
        return
    sizes = list(spec.granularity.sizes) if isinstance(spec.granularity, PerBlock) else []
    if len(sizes) != 1 or sizes[0][1] not in allowed:
        _refuse(
            spec, f"TensorRT has it only in blocks of {' or '.join(map(str, allowed))} along one axis; use such blocks"
        )
    if shape is not None:
        axis, size = sizes[0]
        if axis % len(shape) < len(shape) - 2:
            _refuse(spec, f"TensorRT has blocks along one of the last two axes, got axis {axis} of {len(shape)}")
        length = shape[axis]
        if isinstance(length, str) or length % size:
            _refuse(
                spec,
                f"axis {axis} has {length} elements, but TensorRT wants a constant multiple of {size}; pad the tensor, "
                "or leave the layer in float",
            )
    if constant:
        return
    if spec.format != FLOAT8_E4M3FN or not dynamic:
        _refuse(
            spec,
            "TensorRT supports blocks of activations only in dynamic MXFP8, and in NVFP4 with a constant scale of the "
            "tensor, which no QuantSpec describes; use dynamic quantization with "
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


def place(spec: QuantSpec, axes: int) -> ScaleLayout | None:
    """Return the layout of scales in blocks, which may cover their axis; None if TensorRT has no blocks for them."""
    if not isinstance(spec.granularity, PerBlock):
        return None
    ((axis, size),) = spec.granularity.sizes
    return ScaleLayout(axis % axes, size, (1,) * axes)


def _refuse(spec: QuantSpec, reason: str) -> NoReturn:
    raise ExportError(f'{spec}: {reason}; or use style="standard" or "portable"')


def needed(site: EmittedSite) -> bool:
    """Whether a quantizer needs the TensorRT operators of domain `trt`."""
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
