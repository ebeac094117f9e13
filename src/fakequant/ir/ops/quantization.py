"""The operations that quantize, and the one that finds their scales."""

from __future__ import annotations

from typing import Any

from torch import nn

from fakequant.errors import FakeQuantError, GraphError
from fakequant.ir.fake_quantization import (
    FakeQuantizationOp,
    FakeQuantize,
    group_shape,
    parameter_faults,
    plain_quantizer,
)
from fakequant.ir.op import Call, IRType, Parameter, TensorShape, TensorType
from fakequant.ir.table import OP_CLASSES, add_module_row, add_row
from fakequant.numerics.qparams import compute_dtype
from fakequant.numerics.spec import QuantSpec, Rounding


def spec_of(call: Call) -> QuantSpec:
    """The specification that an operation carries as text.

    Raises:
        GraphError: the text is none.
    """
    try:
        return QuantSpec.parse(call.value("spec"))
    except FakeQuantError as error:
        raise GraphError(str(error)) from error


def _scale_type(call: Call, spec: QuantSpec) -> TensorType:
    x = call.type("x")
    if not x.type.floating:
        raise GraphError(f"quantizes floating-point numbers, got {x}")
    try:
        return TensorType(IRType.of(compute_dtype(x.type.dtype)), group_shape(spec, x.shape))
    except FakeQuantError as error:
        raise GraphError(str(error)) from error


def fake_quantize(call: Call) -> list[TensorType]:
    """x of any shape; scale and zero point [groups, axes kept]."""
    spec = spec_of(call)
    expected = _scale_type(call, spec)
    if call.has("scale") and not _is(call.type("scale"), expected):
        raise GraphError(f"{spec} on {call.type('x')} takes a scale of {expected}, got {call.type('scale')}")
    if call.has("zero_point"):
        zero_point = call.type("zero_point")
        if spec.symmetric or not call.has("scale"):
            raise GraphError(
                f"has a zero point, which belongs to a given scale and symmetric=False, but {spec} has none"
            )
        if not expected.shape.matches(zero_point.shape):
            raise GraphError(f"{spec} takes a zero point of shape {expected.shape}, got {zero_point.shape}")
    random = spec.rounding is Rounding.STOCHASTIC
    if random != call.has("seed"):
        raise GraphError(f"{spec} {'takes a seed (Int64 scalar)' if random else 'rounds to nearest and takes no seed'}")
    if random and call.type("seed") != TensorType(IRType.Int64, TensorShape()):
        raise GraphError(f"takes a seed of Int64 scalar, got {call.type('seed')}")
    return [call.type("x")]


def _is(type: TensorType, expected: TensorType) -> bool:
    return type.type is expected.type and expected.shape.matches(type.shape)


def choose_scale(call: Call) -> list[TensorType]:
    """The scales [groups, axes kept] by the range of x."""
    return [_scale_type(call, spec_of(call))]


def fake_quantization(call: Call) -> list[TensorType]:
    """x of any shape."""
    if found := parameter_faults(*_numbers(call)):
        raise GraphError(found[0])
    if not call.inputs[0].type.floating:
        raise GraphError(f"quantizes floating-point numbers, got {call.inputs[0]}")
    return [call.inputs[0]]


def _quantizer(call: Call) -> nn.Module:
    return FakeQuantize(spec_of(call))


def _plain_quantizer(call: Call) -> nn.Module:
    return plain_quantizer(*_numbers(call))


def _numbers(call: Call) -> list[Any]:
    return [call.value(name) for name in ("num_bits", "scale", "zero_point", "symmetric")]


_OPTIONAL = "Optional[Tensor]"
add_module_row(
    "FakeQuantize",
    (
        Parameter("x", "Tensor"),
        *(Parameter(name, _OPTIONAL, required=False) for name in ("scale", "zero_point", "seed")),
        Parameter("spec", "str"),
    ),
    fake_quantize,
    _quantizer,
)
add_row("ChooseScale", "fakequant.choose_scale.default", choose_scale)
OP_CLASSES["FakeQuantization"] = FakeQuantizationOp
add_module_row(
    "FakeQuantization",
    (
        Parameter("x", "Tensor"),
        Parameter("num_bits", "int", False, 8),
        Parameter("scale", "Optional[float]", False),
        Parameter("zero_point", "float", False, 0.0),
        Parameter("symmetric", "bool", False, True),
    ),
    fake_quantization,
    _plain_quantizer,
)
