"""A typed graph of a quantized model, to show where it is quantized, and to check, optimise and compile it."""

from __future__ import annotations

from fakequant.ir import ops as ops
from fakequant.ir.capture import capture, export_onnx
from fakequant.ir.graph import CompiledGraph, Constant, Graph, Input, Validity, backward, compile, to_text
from fakequant.ir.op import IROp, IRType, Ref, TensorShape, TensorType
from fakequant.ir.ops import FakeQuantizationOp
from fakequant.ir.passes import (
    ALL,
    EXACT,
    FoldConstants,
    FoldConvBatchNorm,
    FuseOperations,
    MergeCommonSubexpressions,
    MoveFakeQuantize,
    Optimized,
    Pass,
    RemoveDeadCode,
    RemoveDuplicateFakeQuantize,
    Statistics,
    optimize,
    values_of,
)

__all__ = [
    "ALL",
    "EXACT",
    "CompiledGraph",
    "Constant",
    "FakeQuantizationOp",
    "FoldConstants",
    "FoldConvBatchNorm",
    "FuseOperations",
    "Graph",
    "IROp",
    "IRType",
    "Input",
    "MergeCommonSubexpressions",
    "MoveFakeQuantize",
    "Optimized",
    "Pass",
    "Ref",
    "RemoveDeadCode",
    "RemoveDuplicateFakeQuantize",
    "Statistics",
    "TensorShape",
    "TensorType",
    "Validity",
    "backward",
    "capture",
    "compile",
    "export_onnx",
    "optimize",
    "to_text",
    "values_of",
]
