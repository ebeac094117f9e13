"""Operations on every element by itself: activations, arithmetic, comparisons, conversions.

Sizes of dynamic dimensions, and arithmetic with them.

Sums, means and extrema over dimensions.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from fakequant.errors import GraphError
from fakequant.ir.op import ArgumentKind, Call, IRType, Parameter, Ref, TensorShape, TensorType
from fakequant.ir.table import add_function_row, add_row


def same(call: Call) -> list[TensorType]:
    """The type of the first input."""
    return [call.inputs[0]]


def number(call: Call) -> list[TensorType]:
    """The type of the first input, which must not be true or false."""
    if call.inputs[0].type is IRType.Boolean:
        raise GraphError(f"takes numbers, got {call.inputs[0]}")
    return [call.inputs[0]]


def real(call: Call) -> list[TensorType]:
    """The type of the first input; Float32 where that is no real or complex number."""
    type, shape = call.inputs[0]
    with_fraction = type.floating or type in (IRType.Complex, IRType.Complex64)
    return [TensorType(type if with_fraction else IRType.Float32, shape)]


def floating(call: Call) -> list[TensorType]:
    """The type of the first input, which must be a real number."""
    if not call.inputs[0].type.floating:
        raise GraphError(f"takes floating-point numbers, got {call.inputs[0]}")
    return [call.inputs[0]]


def broadcast(call: Call) -> TensorShape:
    """The shape of all tensors together."""
    shape = TensorShape()
    for parameter in call.signature.parameters:
        if parameter.kind is ArgumentKind.TENSOR and call.has(parameter.name):
            shape = shape.broadcast_with(call.shape(parameter.name))
    return shape


def promoted(call: Call, *names: str) -> IRType:
    """The element type of arithmetic between two operands, as torch promotes types."""
    first, second = (_example(call, name) for name in names)
    return IRType.of(torch.result_type(first, second))


def _example(call: Call, name: str) -> Any:
    value = call.arguments[name]
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, Ref) and call.inputs[value.position].type is IRType.Index:
        return 1
    type, shape = call.type(name)
    # Only whether there are dimensions decides, not how long they are.
    return torch.empty([1] * len(shape), dtype=type.dtype, device="meta")


def arithmetic(call: Call) -> list[TensorType]:
    """Broadcast, in the promoted type."""
    return [TensorType(promoted(call, *_operands(call)), broadcast(call))]


def division(call: Call) -> list[TensorType]:
    """The type of arithmetic; Float32 for integers, unless the quotient is rounded."""
    ((type, shape),) = arithmetic(call)
    whole = not type.floating and type not in (IRType.Complex, IRType.Complex64)
    rounded = any(p.name == "rounding_mode" for p in call.signature.parameters) and call.has("rounding_mode")
    return [TensorType(IRType.Float32 if whole and not rounded else type, shape)]


def comparison(call: Call) -> list[TensorType]:
    """Broadcast, true or false."""
    return [TensorType(IRType.Boolean, broadcast(call))]


def predicate(call: Call) -> list[TensorType]:
    """True or false for every element."""
    return [TensorType(IRType.Boolean, call.inputs[0].shape)]


def _operands(call: Call) -> tuple[str, str]:
    names = [p.name for p in call.signature.parameters]
    return names[0], names[1]


def chosen(call: Call) -> list[TensorType]:
    """`where`: broadcast, in the type of both choices."""
    if call.type("condition").type not in (IRType.Boolean, IRType.Byte):
        raise GraphError(f"takes a condition that is Boolean, got {call.type('condition')}")
    return [TensorType(promoted(call, "self", "other"), broadcast(call))]


def masked(call: Call) -> list[TensorType]:
    """`masked_fill`: the first input's type, broadcast with the mask."""
    if call.type("mask").type is not IRType.Boolean:
        raise GraphError(f"takes a mask that is Boolean, got {call.type('mask')}")
    return [TensorType(call.type("self").type, call.shape("self").broadcast_with(call.shape("mask")))]


def clamped(call: Call) -> list[TensorType]:
    """`clamp`: the first input's type, promoted by the bounds."""
    found = call.type("self").type
    for name in ("min", "max"):
        if call.has(name):
            found = IRType.of(torch.promote_types(found.dtype, promoted(call, "self", name).dtype))
    return [TensorType(found, broadcast(call))]


def converted(call: Call) -> list[TensorType]:
    """A conversion to the attribute `dtype`."""
    dtype = call.value("dtype")
    type, shape = call.inputs[0]
    return [TensorType(type if dtype is None else IRType.of(dtype), shape)]


def along(call: Call) -> list[TensorType]:
    """`softmax`: the first input's type; `dim` must be one of its dimensions."""
    type, shape = call.inputs[0]
    axis(call.value("dim"), shape)
    given = call.value("dtype") if any(p.name == "dtype" for p in call.signature.parameters) else None
    return [TensorType(type if given is None else IRType.of(given), shape)]


def axis(dim: int, shape: TensorShape, extra: int = 0) -> int:
    """A dimension counted from the front; `extra` are added to those of the shape.

    Raises:
        GraphError: the shape has no such dimension.
    """
    rank = max(len(shape) + extra, 1)
    if not -rank <= dim < rank:
        raise GraphError(f"dim {dim} is out of range for shape {shape}: {-rank} to {rank - 1}")
    return dim % rank


for _name, _target in {
    "ReLU": "aten.relu.default",
    "Neg": "aten.neg.default",
    "Abs": "aten.abs.default",
    "Round": "aten.round.default",
    "Floor": "aten.floor.default",
}.items():
    add_row(_name, _target, number)
for _name, _target in {
    "Clone": "aten.clone.default aten.contiguous.default",
    "Detach": "aten.detach.default",
}.items():
    add_row(_name, _target, same)
add_row("Dropout", "aten.dropout.default", same, draws=lambda op: op.attributes.get("train") is not False)
for _name, _target in {
    "GELU": "aten.gelu.default",
    "SiLU": "aten.silu.default",
    "LeakyReLU": "aten.leaky_relu.default",
    "ELU": "aten.elu.default",
    "HardSwish": "aten.hardswish.default",
    "HardSigmoid": "aten.hardsigmoid.default",
    "HardTanh": "aten.hardtanh.default",
}.items():
    add_row(_name, _target, floating)
for _name in ("Sigmoid", "Tanh", "Exp", "Log", "Sqrt", "Rsqrt", "Erf", "Sin", "Cos"):
    add_row(_name, f"aten.{_name.lower()}.default", real)
for _name in ("Add", "Sub", "Mul"):
    add_row(_name, f"aten.{_name.lower()}.Tensor aten.{_name.lower()}.Scalar", arithmetic)
add_row("Div", "aten.div.Tensor aten.div.Tensor_mode aten.div.Scalar", division)
add_row("Pow", "aten.pow.Tensor_Scalar aten.pow.Tensor_Tensor", arithmetic)
add_row("Maximum", "aten.maximum.default", arithmetic)
add_row("Minimum", "aten.minimum.default", arithmetic)
for _name, _target in {"Equal": "eq", "Less": "lt", "Greater": "gt", "LessEqual": "le", "GreaterEqual": "ge"}.items():
    add_row(_name, f"aten.{_target}.Scalar aten.{_target}.Tensor", comparison)
add_row("IsFinite", "aten.isfinite.default", predicate)
add_row("Clamp", "aten.clamp.default", clamped)
add_row("Where", "aten.where.ScalarOther aten.where.ScalarSelf aten.where.self", chosen)
add_row("MaskedFill", "aten.masked_fill.Scalar", masked)
add_row("Cast", "aten.to.dtype aten._to_copy.default", converted)
add_row("Softmax", "aten.softmax.int", along)
add_row("LogSoftmax", "aten.log_softmax.int", along)


_INDEX = TensorType(IRType.Index, TensorShape())


def size(call: Call) -> list[TensorType]:
    """The length of a dimension."""
    axis(call.value("dim"), call.inputs[0].shape)
    return [_INDEX]


def index(call: Call) -> list[TensorType]:
    """A number computed from sizes."""
    return [_INDEX]


add_row("Size", "aten.sym_size.int", size)
_PAIR = (Parameter("self", "int"), Parameter("other", "int"))
for _name, _function in {
    "IndexAdd": operator.add,
    "IndexSub": operator.sub,
    "IndexMul": operator.mul,
    "IndexFloorDiv": operator.floordiv,
    "IndexMod": operator.mod,
    "IndexMax": torch.sym_max,
    "IndexMin": torch.sym_min,
}.items():
    add_function_row(_name, _function, _PAIR, index)


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
