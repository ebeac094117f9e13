"""A typed graph of a quantized model: to see where it is quantized, to check it, to optimise it, to run it compiled."""

from __future__ import annotations

from fakequant.ir import ops as ops
from fakequant.ir.attributes import Ref
from fakequant.ir.capture import capture
from fakequant.ir.check import Validity
from fakequant.ir.fake_quantization import FakeQuantizationOp
from fakequant.ir.gradient import backward
from fakequant.ir.graph import Graph
from fakequant.ir.onnx import export_onnx
from fakequant.ir.op import IROp
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
)
from fakequant.ir.passes.duplicate_fake_quantize import values_of
from fakequant.ir.run.compiler import CompiledGraph, cache_info, clear_cache, compile
from fakequant.ir.structure import Constant, Input
from fakequant.ir.text import to_text
from fakequant.ir.types import IRType, TensorShape, TensorType

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
    "cache_info",
    "capture",
    "clear_cache",
    "compile",
    "export_onnx",
    "optimize",
    "to_text",
    "values_of",
]
