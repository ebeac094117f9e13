"""Sums, means and extrema over dimensions."""

from __future__ import annotations

from typing import Any

from fakequant.errors import GraphError
from fakequant.ir.ops.elementwise import axis
from fakequant.ir.signature import Call
from fakequant.ir.table import add_row
from fakequant.ir.types import IRType, TensorShape, TensorType


def _reduced(call: Call) -> TensorShape:
    """The first input's shape without the dimensions `dim`, or all if none is given."""
    shape = call.inputs[0].shape
    names = [p.name for p in call.signature.parameters]
    dims: Any = call.value("dim") if "dim" in names else None
    keep = bool(call.value("keepdim")) if "keepdim" in names else False
    dims = [] if dims is None else [dims] if isinstance(dims, int) else list(dims)
    chosen = [axis(dim, shape) for dim in dims]
    if len(set(chosen)) < len(chosen):
        raise GraphError(f"names a dimension of shape {shape} twice: {dims}")
    gone = set(chosen) if dims else set(range(len(shape)))
    return TensorShape(1 if i in gone else n for i, n in enumerate(shape) if keep or i not in gone)


def _dtype(call: Call) -> Any:
    return call.value("dtype") if any(p.name == "dtype" for p in call.signature.parameters) else None


def total(call: Call) -> list[TensorType]:
    """A sum; that of integers is Int64."""
    type, given = call.inputs[0].type, _dtype(call)
    if given is not None:
        type = IRType.of(given)
    elif not type.floating and type not in (IRType.Complex, IRType.Complex64):
        type = IRType.Int64
    return [TensorType(type, _reduced(call))]


def average(call: Call) -> list[TensorType]:
    """A mean of floating-point numbers."""
    type = call.inputs[0].type if _dtype(call) is None else IRType.of(_dtype(call))
    if not type.floating and type not in (IRType.Complex, IRType.Complex64):
        raise GraphError(f"takes floating-point numbers, got {call.inputs[0]}")
    return [TensorType(type, _reduced(call))]


def extremum(call: Call) -> list[TensorType]:
    """The largest or smallest element."""
    return [TensorType(call.inputs[0].type, _reduced(call))]


add_row("Sum", "aten.sum.dim_IntList aten.sum.default", total)
add_row("Mean", "aten.mean.dim aten.mean.default", average)
add_row("Max", "aten.amax.default aten.max.default", extremum)
add_row("Min", "aten.amin.default aten.min.default", extremum)
