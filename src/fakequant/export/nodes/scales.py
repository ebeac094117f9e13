"""Write scales that have their own format: powers of two in E8M0, or codes times a second-level scale.

`Encoding.scale` is their element type. It is None (float32) in `Style.PORTABLE` and for specifications whose scales
have no format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fakequant.errors import QParamsError
from fakequant.export.capability import Dimension, ElementType, block_sizes
from fakequant.export.graph import stored
from fakequant.export.nodes.site import EmittedSite, Emitter
from fakequant.numerics.formats.floats import ExponentFormat
from fakequant.numerics.qparams import QParams
from fakequant.numerics.scales import ScaleRounding
from fakequant.numerics.spec import QuantSpec


class FactoredScale(NamedTuple):
    """Scales as positive codes [groups, axes kept] times one float32 factor per block of codes [blocks, axes kept]."""

    codes: Tensor
    shared: Tensor


class ScaleNames(NamedTuple):
    """Names in the file.

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
    """Factor float32 scales exactly into codes of their format and shared scales; None if that is not possible.

    `numerics.scales` makes scales as such products, except where it keeps them normal or within a limit.

    Args:
        scale: the scales [groups, axes kept].
        spec: the specification with the format and granularity of the scales.

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


def multiply(to: Emitter, codes: str, shared: str, shape: Sequence[Dimension], blocks: Sequence[Dimension]) -> str:
    """Add nodes that multiply codes by their shared factors: one DequantizeLinear if all codes share one factor.

    Args:
        to: receives the nodes.
        codes: name of the codes.
        shared: name of the factors.
        shape: the shape of the codes.
        blocks: the number of codes per factor along every axis.
    """
    if all(b == n for n, b in zip(shape, blocks, strict=True)):
        return to.emit("DequantizeLinear", codes, shared if to.editor.is_constant(shared) else to.scalar(shared))
    divided = [axis for axis, (n, b) in enumerate(zip(shape, blocks, strict=True)) if b not in (1, n)]
    spread = to.repeat(shared, [b if isinstance(b, int) else 0 for b in blocks], shape, divided)
    return to.emit("Mul", to.emit("DequantizeLinear", codes, to.number("one", 1.0)), spread)


def scale_codes(to: Emitter, quotient: str, smallest: str, element: ElementType) -> str:
    """Add nodes that round scales, in units of their shared factor, to codes of at least the smallest positive code."""
    from onnx import TensorProto

    kind = TensorProto.DataType.Value(element.name)
    return to.emit("QuantizeLinear", to.emit("Max", quotient, smallest), to.number("one", 1.0), output_dtype=kind)


def powers_of_two(to: Emitter, amax: str, spec: QuantSpec, limit: float, result: str) -> None:
    """Add nodes that choose the power of two of every group as `numerics.scales` does, with Cast to E8M0.

    Cast rounds down, but not below 2**-127. Products with powers of two are exact.
    """
    fmt, element = spec.scale.format, spec.format
    assert isinstance(fmt, ExponentFormat)
    if spec.scale.rounding is ScaleRounding.CEIL:
        quotient = to.emit("Div", amax, to.number("bound", element.bound))
        power = _power_below(to, quotient)
        power = _double_where(to, to.emit("Greater", quotient, power), power)
    else:
        below = _power_below(to, amax)
        power = to.emit("Mul", below, to.number("unit", 2.0 ** (1 - math.frexp(element.bound)[1])))
        if (up_from := spec.scale.up_from(element)) < 1:  # of the mantissa, whose powers begin with 0.5
            near = to.emit("Mul", below, to.number("near", 2 * up_from))
            power = _double_where(to, to.emit("GreaterOrEqual", amax, near), power)
    power = to.emit("Max", power, to.number("smallest", fmt.grid.quant_min))
    largest = 2.0 ** min(fmt.exponent_bias, math.frexp(limit)[1] - 1)
    to.emit("Min", power, to.number("limit", largest), result=result)


def _double_where(to: Emitter, condition: str, power: str) -> str:
    return to.emit("Where", condition, to.emit("Mul", power, to.number("two", 2.0)), power)


def _power_below(to: Emitter, value: str) -> str:
    from onnx import TensorProto

    return to.emit("Cast", _to_e8m0(to, value), to=TensorProto.FLOAT)


def _to_e8m0(to: Emitter, value: str) -> str:
    """Cast to the power of two below; rounding up would turn the subnormal 2**-127 into 2**-126 in onnx 1.23."""
    from onnx import TensorProto

    return to.emit("Cast", value, to=TensorProto.FLOAT8E8M0, round_mode="down")
