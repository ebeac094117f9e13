"""What engines make of exported files: which products they compute on integers, and why the others are float."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INTEGER = frozenset(
    """
    QLinearConv ConvInteger MatMulInteger QLinearMatMul MatMulIntegerToFloat DynamicQuantizeMatMul QGemm QAttention
    QLinearAdd QLinearMul QLinearConcat QLinearAveragePool QLinearGlobalAveragePool QLinearSigmoid QLinearSoftmax
    QLinearLeakyRelu QLinearReduceMean QLinearWhere QEmbedLayerNormalization
    """.split()  # noqa: SIM905
)
"""The operators of ONNX Runtime that compute on integers."""
PRODUCTS = frozenset({"Conv", "FusedConv", "ConvTranspose", "MatMul", "FusedMatMul", "Gemm", "FusedGemm", "Attention"})
_INTEGER_PRODUCTS = frozenset(
    "QLinearConv ConvInteger MatMulInteger QLinearMatMul MatMulIntegerToFloat DynamicQuantizeMatMul QGemm".split()  # noqa: SIM905
)
OPENVINO_PRODUCTS = frozenset(
    "Convolution GroupConvolution Deconvolution MatMul FullyConnected ScaledDotProductAttention".split()  # noqa: SIM905
)


@dataclass
class Computed:
    """How an engine computes a file."""

    integer: Counter[str] = field(default_factory=Counter)
    floats: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)

    @property
    def products(self) -> tuple[int, int]:
        """The number of products on integers, and of all products."""
        integer = sum(count for kind, count in self.integer.items() if kind in _INTEGER_PRODUCTS | OPENVINO_PRODUCTS)
        return integer, integer + len(self.reasons)


def by_onnxruntime(path: Path) -> Computed:
    """How ONNX Runtime computes a file with all its optimisations, read from the model that it makes of it."""
    import onnx
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(path.with_suffix(".optimized.onnx"))
    options.log_severity_level = 3
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(options.optimized_model_filepath).graph
    found = Computed()
    producers = {output: node for node in graph.node for output in node.output}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for node in graph.node:
        if node.op_type in INTEGER:
            found.integer[node.op_type] += 1
        elif node.op_type in PRODUCTS and not node.name.endswith("_bn_nchwc"):  # a batch normalisation computed as one
            found.floats[node.op_type] += 1
            found.reasons.append(_why_float(node, producers, readers))
        elif node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            found.floats[node.op_type] += 1
    return found


def by_openvino(path: Path) -> Computed:
    """How OpenVINO computes a file on the CPU, read from the model that it runs."""
    import openvino

    compiled = openvino.Core().compile_model(str(path), "CPU")
    found = Computed()
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = {key: node.get_rt_info()[key].astype(str) for key in ("layerType", "runtimePrecision", "primitiveType")}
        kind = info["layerType"]
        if info["runtimePrecision"] in ("i8", "u8"):
            found.integer[kind] += 1
        elif kind in OPENVINO_PRODUCTS:
            found.floats[kind] += 1
            found.reasons.append(
                f"{kind} {node.get_friendly_name()}: {info['runtimePrecision']} {info['primitiveType']}"
            )
        else:
            found.floats[kind] += 1
    return found


def _why_float(node: Any, producers: dict[str, Any], readers: dict[str, list[Any]]) -> str:
    """Which inputs of a product are not dequantized, and what reads its result."""
    parts = []
    for place, name in enumerate(node.input[:2]):
        producer = producers.get(name)
        if producer is None or producer.op_type != "DequantizeLinear":
            kind = "a constant or an input" if producer is None else producer.op_type
            parts.append(f"input {place} is the result of {kind}")
    after = [reader.op_type for reader in readers.get(node.output[0], [])]
    if after != ["QuantizeLinear"]:
        parts.append(f"its result goes to {', '.join(after) or 'the output'}")
    return f"{node.op_type} {node.name}: {'; '.join(parts) or 'all is quantized'}"
