"""Sizes of dynamic dimensions, and arithmetic with them."""

from __future__ import annotations

import operator

import torch

from fakequant.ir.ops.elementwise import axis
from fakequant.ir.signature import Call, Parameter
from fakequant.ir.table import add_function_row, add_row
from fakequant.ir.types import IRType, TensorShape, TensorType

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
