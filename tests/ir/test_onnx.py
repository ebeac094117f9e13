"""Graphs as ONNX files: the same numbers in ONNX Runtime, names, dynamic dimensions, refusals."""

import onnx
import pytest
import torch

import fakequant as fq
from fakequant import ir
from fakequant.errors import ExportError, GraphError
from tests.support.matrix import full, sweep
from tests.support.networks import quantized


@sweep("network, preset", full(["CNN", "transformer"], ["INT8", "FP8"]), [("CNN", "INT8"), ("transformer", "FP8")])
def test_the_file_computes_the_graph(network, preset, tmp_path):
    model, x = quantized(network, preset)
    graph = ir.optimize(ir.capture(model, x)).graph
    report = ir.export_onnx(graph, tmp_path / "graph.onnx", example=(x,))
    verdict = fq.verify_onnx(tmp_path / "graph.onnx", graph.to_torch(), [x])
    assert verdict.exact
    assert sum(row.elements for row in verdict.rows) > 1000
    assert len(report.quantizers) >= 2


def test_inputs_keep_their_names_and_dynamic_dimensions(tmp_path):
    graph = ir.Graph("two inputs")
    image = graph.add_input("image", ir.IRType.Float32, (-1, 4))
    mask = graph.add_input("mask", ir.IRType.Int64, (4,))
    quantized = graph.add("FakeQuantization", image, num_bits=4, scale=0.25)
    graph.outputs = [graph.add("Mul", quantized, mask)]
    ir.export_onnx(graph, tmp_path / "graph.onnx")
    written = onnx.load(tmp_path / "graph.onnx").graph.input
    assert [value.name for value in written] == ["image", "mask"]
    first, second = (value.type.tensor_type.shape.dim for value in written)
    assert first[0].dim_param
    assert [first[1].dim_value, second[0].dim_value] == [4, 4]
    inputs = torch.linspace(-2, 2, 28).reshape(7, 4), torch.arange(4)
    assert fq.verify_onnx(tmp_path / "graph.onnx", graph.to_torch(), [inputs]).exact


def test_refused_before_anything_is_written(tmp_path):
    graph = ir.Graph("broken")
    x = graph.add_input("x", ir.IRType.Float32, (2, 4))
    with pytest.raises(GraphError, match="no outputs"):
        ir.export_onnx(graph, tmp_path / "graph.onnx")
    graph.outputs = [graph.add("ReLU", x)]
    with pytest.raises(ExportError, match="nothing in the model quantizes"):
        ir.export_onnx(graph, tmp_path / "graph.onnx")
    assert not list(tmp_path.iterdir())
