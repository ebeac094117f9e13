"""Where the exported files of engines that do not run here have their pairs of QuantizeLinear and DequantizeLinear."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fakequant as fq
from fakequant.errors import CoverageWarning, FusionWarning
from tests.support.placed_models import IDS, IMAGE, bert, resnet

onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install 'fakequant[onnx]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore", category=CoverageWarning),
    pytest.mark.filterwarnings("ignore", category=FusionWarning),  # densenet has norms that follow no product
]

PRODUCTS = {"Conv", "Gemm", "MatMul"}
MOVES = {"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "MaxPool", "Identity", "Expand", "Gather", "Slice"}
FUSED = {"Relu", "Clip"}


class File:
    """The nodes of an exported file, with what makes and what reads every tensor."""

    def __init__(self, path: Path) -> None:
        graph = onnx.load(path).graph
        self.nodes = list(graph.node)
        self.constants = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
        self.producers = {name: node for node in self.nodes for name in node.output}
        self.readers: dict[str, list[Any]] = {}
        for node in self.nodes:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)

    def of(self, *kinds: str) -> list[Any]:
        return [node for node in self.nodes if node.op_type in kinds]

    def source(self, name: str) -> Any:
        """The node that computes a tensor, in front of what only moves values; None for an input or a constant."""
        node = self.producers.get(name)
        while node is not None and node.op_type in MOVES:
            node = self.producers.get(node.input[0])
        return node

    def is_quantized(self, name: str) -> bool:
        node = self.source(name)
        return node is not None and node.op_type == "DequantizeLinear"

    def is_constant(self, name: str) -> bool:
        return self.source(name) is None and name in self.constants

    def computed_operands(self, node: Any) -> list[str]:
        """The operands that are no constants in float: not a bias, not the factor of attention."""
        return [name for name in node.input[:2] if not self.is_constant(name)]

    def ends(self, node: Any) -> set[str]:
        """What reads the result, behind functions that are fused and what only moves values; "" is the output."""
        readers = self.readers.get(node.output[0], [])
        found = {reader.op_type for reader in readers if reader.op_type not in FUSED | MOVES}
        for reader in readers:
            if reader.op_type in FUSED | MOVES:
                found |= self.ends(reader)
        return found or {""}

    def scale_and_zero(self, node: Any) -> tuple[Any, Any]:
        return self.constants[node.input[1]], self.constants[node.input[2]] if len(node.input) > 2 else np.zeros(1)


def exported(build: Any, target: str, preset: str, folder: Path) -> File:
    torch.manual_seed(0)
    model, x = build().eval(), IDS if build is bert else IMAGE
    if build is not bert:
        fq.fuse_batch_norm(model, x)
    fq.prepare(model, preset, example=x, target=target)
    fq.calibrate(model, [x])
    fq.export_onnx(model, x, folder / "model.onnx")
    assert fq.verify_onnx(folder / "model.onnx", model, [x])
    return File(folder / "model.onnx")


def test_tensorrt_adds_the_residual_branch_to_a_product_in_float(tmp_path: Path) -> None:
    file = exported(resnet, "tensorrt", "INT8", tmp_path)
    sums = file.of("Add")
    assert len(sums) == 4
    for node in sums:
        quantized = [file.is_quantized(name) for name in node.input]
        assert sorted(quantized) == [False, True]
        assert file.source(node.input[quantized.index(False)]).op_type == "Conv"
    for node in file.of(*PRODUCTS):
        assert all(file.is_quantized(name) for name in node.input[:2])
    for node in file.of("QuantizeLinear", "DequantizeLinear"):
        assert not file.scale_and_zero(node)[1].any()  # TensorRT takes symmetric codes alone


# XNNPACK multiplies by the reciprocal of a scale, which no QuantizeLinear does.
@pytest.mark.parametrize(("target", "first"), [("qnn", "QuantizeLinear"), ("xnnpack", "Mul")])
def test_products_and_sums_are_quantized_on_both_sides(target: str, first: str, tmp_path: Path) -> None:
    file = exported(resnet, target, "INT8_AFFINE", tmp_path)
    products, sums = file.of(*PRODUCTS), file.of("Add")
    assert (len(products), len(sums)) == (13, 4)
    for node in (*products, *sums):
        assert all(file.is_quantized(name) for name in node.input[:2])
        assert file.ends(node) == {first}


def test_qnn_gives_softmax_its_fixed_range(tmp_path: Path) -> None:
    file = exported(bert, "qnn", "INT8_AFFINE", tmp_path)
    (softmax,) = file.of("Softmax")
    (reader,) = file.readers[softmax.output[0]]
    assert reader.op_type == "QuantizeLinear"
    scale, zero = file.scale_and_zero(reader)
    assert (scale, zero) == (np.float32(1 / 255), 0)
    for node in file.of(*PRODUCTS):
        assert all(file.is_quantized(name) for name in file.computed_operands(node))


class OneProjection(torch.nn.Module):
    """Query, key and value come from one layer, and lie in memory in between each other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(b, n, c))


@pytest.mark.parametrize("target", ["openvino", "tensorrt"])
def test_attention_of_one_projection_is_exported(target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    model = fq.prepare(OneProjection().eval(), "INT8", example=x, target=target)
    fq.calibrate(model, [x])
    written = fq.export_onnx(model, x, tmp_path / "m.onnx", dynamic_shapes=({0: "batch", 1: "length"},))
    assert fq.verify_onnx(written.path, model, [x, torch.randn(3, 7, 8)]).exact
