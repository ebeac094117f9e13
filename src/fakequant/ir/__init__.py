"""A typed graph of a quantized model: to see where it is quantized, to check it, to optimise it, to run it compiled."""

from __future__ import annotations

from fakequant.ir import ops as ops
from fakequant.ir.fake_quantization import FakeQuantizationOp
from fakequant.ir.graph import Graph, backward, capture, export_onnx, to_text
from fakequant.ir.op import IROp, IRType, Ref, TensorShape, TensorType
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
from fakequant.ir.run.execute import CompiledGraph, cache_info, clear_cache, compile
from fakequant.ir.structure import Constant, Input, Validity

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
