"""Formats that ONNX Runtime cannot store, computed exactly in float32 with basic operators.

* Small floats: the spacing of a number is the power of two below it, found by comparisons, times a constant power of
  two. Quotients and products with powers of two are exact, Round goes to even, and -0.0 and NaN are kept.
* Tables: a binary search over the smallest numbers that round to each value.
* Weights: codes in 4 or 8 bits, whose values Gather looks up.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from fakequant.errors import ExportError
from fakequant.export.nodes.site import EmittedSite, Emitter
from fakequant.export.nodes.steps import look_up, thresholds
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.formats.floats import FloatFormat
from fakequant.numerics.formats.format import Format
from fakequant.numerics.formats.tables import TableFormat
from fakequant.numerics.spec import Arithmetic


def round_to(to: Emitter, value: str, fmt: Format) -> str:
    """Add nodes that round a value in code units to the nearest code of a format; NaN is kept.

    Raises:
        ExportError: the kind of format has no implementation here.
    """
    if isinstance(fmt, FloatFormat):
        return _round_clamped(to, _clamp(to, value, fmt), fmt)
    if isinstance(fmt, TableFormat):
        return _round_to_table(to, value, fmt)
    if isinstance(fmt, IntegerFormat):
        return _positive_zero(to, to.emit("Round", _clamp(to, value, fmt)))
    raise ExportError(f"the format {fmt} has no form in ONNX; use an integer, float or table format")


def _clamp(to: Emitter, value: str, fmt: Format) -> str:
    # The standard does not specify Clip, Min and Max for NaN.
    for name, compare, bound in (("code_high", "Greater", fmt.quant_max), ("code_low", "Less", fmt.quant_min)):
        limit = to.number(name, bound)
        value = to.emit("Where", to.emit(compare, value, limit), limit, value)
    return value


def _round_clamped(to: Emitter, value: str, fmt: FloatFormat) -> str:
    lowest = fmt.grid.min_exponent
    highest = math.frexp(fmt.quant_max)[1] - 1
    magnitude = to.emit("Abs", value)
    power = to.number("smallest_power", 2.0**lowest)
    for bit in reversed(range((highest - lowest).bit_length())):
        larger = to.emit("Mul", power, to.number(f"power_{bit}", 2.0 ** (1 << bit)))
        power = to.emit("Where", to.emit("GreaterOrEqual", magnitude, larger), larger, power)
    spacing = to.emit("Mul", power, to.number("unit", 2.0**-fmt.mantissa_bits))
    code = to.emit("Mul", to.emit("Round", to.emit("Div", value, spacing)), spacing)
    return code if fmt.grid.negative_zero else _positive_zero(to, code)


def _positive_zero(to: Emitter, code: str) -> str:
    zero = to.number("zero", 0.0)
    return to.emit("Where", to.emit("Equal", code, zero), zero, code)


def _round_to_table(to: Emitter, value: str, fmt: TableFormat) -> str:
    values = torch.tensor(fmt.values, dtype=torch.float32, device="cpu")
    limits = thresholds(lambda v: fmt.to_storage(v).long(), len(values))
    return to.emit("Where", to.emit("IsNaN", value), value, look_up(to, "table", value, limits, values))


def express(site: EmittedSite) -> tuple[str, str]:
    """Add the nodes of an activation; returns the name of its scale and a description."""
    from onnx import TensorProto

    scale = site.scale if site.constant is None else site.add("scale", site.constant.scale)
    spread = site.spread_computed(scale)
    value = site.as_float32(site.x)
    if site.spec.arithmetic is Arithmetic.RECIPROCAL:
        scaled = site.emit("Mul", value, site.emit("Div", site.number("one", 1.0), spread))
    else:
        scaled = site.emit("Div", value, spread)
    code = round_to(site, scaled, site.spec.format)
    kind = site.editor.type(site.x)
    if kind == TensorProto.FLOAT:
        site.emit("Mul", code, spread, result=site.y)
    else:
        site.emit("Cast", site.emit("Mul", code, spread), result=site.y, to=kind)
    return scale, "comparisons and Gather" if isinstance(site.spec.format, TableFormat) else "comparisons and Round"


def fold(site: EmittedSite) -> tuple[str, str, str]:
    """Add the codes of a constant weight and its nodes; returns the names of codes and scale, and a description."""
    from onnx import TensorProto, helper

    assert site.constant is not None
    fmt = site.spec.format
    stored = site.weight_codes(site.constant).view(torch.uint8)
    element = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(site.encoding.element.name))
    codes = site.add("codes", stored.numpy().astype(element))
    scale = site.add("scale", site.constant.scale)
    values = site.add("values", code_values(fmt))
    gathered = site.emit("Gather", values, site.emit("Cast", codes, to=TensorProto.INT32))
    kind = site.editor.type(site.x)
    if kind == TensorProto.FLOAT:
        site.emit("Mul", gathered, site.spread_computed(scale), result=site.y)
    else:
        site.emit("Cast", site.emit("Mul", gathered, site.spread_computed(scale)), result=site.y, to=kind)
    return codes, scale, f"{site.encoding.element.name} codes, Gather and Mul"


def code_values(fmt: Format) -> np.ndarray:
    """Return the value of every code of a format of at most 8 bits, in float32.

    >>> from fakequant.numerics.formats import FLOAT4_E2M1FN
    >>> code_values(FLOAT4_E2M1FN)[:8]
    array([0. , 0.5, 1. , 1.5, 2. , 3. , 4. , 6. ], dtype=float32)
    """
    count = len(fmt.values) if isinstance(fmt, TableFormat) else 1 << fmt.bits
    stored = torch.arange(count, dtype=torch.uint8, device="cpu").view(fmt.storage)
    return fmt.from_storage(stored, torch.float32).numpy()
