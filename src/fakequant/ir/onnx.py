"""Graphs as ONNX files."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from fakequant.export import ExportReport
from fakequant.export import export_onnx as export_model
from fakequant.ir.graph import Graph
from fakequant.ir.types import DYNAMIC, TensorType

# The length that a dynamic dimension has in an example: torch.export takes 1 for a constant.
_LENGTH = 2


def export_onnx(
    graph: Graph, path: str | os.PathLike[str], example: tuple[Tensor, ...] | None = None, **options: Any
) -> ExportReport:
    """Write a graph as ONNX, every quantizer as QuantizeLinear and DequantizeLinear with the same results.

    Inputs have the names that they have in the graph. Folded weights are float constants in the file.

    Args:
        graph: what to write; it is checked.
        path: the file to write.
        example: its inputs, whose ranges `fakequant.verify_onnx` draws its own from; by default numbers from -1 to 1
            and zeros for integers, with 2 for dynamic dimensions.
        options: further ones of `fakequant.export_onnx`: opset, style, output_names.

    Raises:
        GraphError: the graph is not valid.
        ExportError, OutputError: as `fakequant.export_onnx` raises them.

    >>> import tempfile
    >>> from fakequant.ir import IRType
    >>> graph = Graph("example")
    >>> x = graph.add_input("image", IRType.Float32, (-1, 4))
    >>> graph.outputs = [graph.add("FakeQuantization", x, num_bits=8, scale=0.5)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = export_onnx(graph, folder + "/graph.onnx")
    >>> [q.expressed for q in report.quantizers]
    ['QuantizeLinear and DequantizeLinear, INT8, per tensor']
    """
    inputs = list(graph.check().inputs.values())
    given = tuple(_example(value.type) for value in inputs) if example is None else example
    shapes = tuple({axis: Dim.AUTO for axis, n in enumerate(i.type.shape) if n == DYNAMIC} for i in inputs)
    names = [value.name for value in inputs]
    dynamic = shapes if any(shapes) else None
    return export_model(graph.to_torch(), given, path, dynamic_shapes=dynamic, input_names=names, **options)


def _example(type: TensorType) -> Tensor:
    shape = [_LENGTH if n == DYNAMIC else n for n in type.shape]
    x = torch.zeros(shape, dtype=type.type.dtype)
    if not type.type.floating:
        return x
    return torch.linspace(-1.0, 1.0, x.numel()).reshape(shape).to(x.dtype)
