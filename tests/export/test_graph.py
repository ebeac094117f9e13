"""Names and constants of a graph that is being changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

import fakequant as fq  # noqa: E402
from fakequant.export.capability import encoding  # noqa: E402
from fakequant.export.inputs import GraphEditor, stored_codes  # noqa: E402
from tests.support.bits import assert_same_bits  # noqa: E402


def editor() -> GraphEditor:
    value = helper.make_tensor_value_info
    return GraphEditor(
        helper.make_graph(
            [helper.make_node("Add", ["x", "a"], ["y"])],
            "g",
            [value("x", TensorProto.FLOAT16, ["n", 2])],
            [value("y", TensorProto.FLOAT16, ["n", 2])],
            [numpy_helper.from_array(np.zeros(2, np.float16), "a"), numpy_helper.from_array(np.ones(3), "unused")],
        )
    )


def test_types_and_shapes() -> None:
    graph = editor()
    assert (graph.type("x"), graph.shape("x")) == (TensorProto.FLOAT16, ["n", 2])
    assert (graph.type("a"), graph.shape("a")) == (TensorProto.FLOAT16, [2])
    assert graph.is_constant("a")
    assert not graph.is_constant("x")


def test_labels_are_unique() -> None:
    graph = editor()
    assert [graph.label("q"), graph.label("q"), graph.label("r"), graph.label("q")] == ["q", "q#2", "r", "q#3"]


def test_equal_constants_of_a_name_are_one_and_others_are_renamed() -> None:
    graph = editor()
    zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
    assert [graph.add("q/s", zeros), graph.add("q/s", zeros), graph.add("q/s", ones)] == ["q/s", "q/s", "q/s#2"]
    assert graph.add("other", zeros) == "other"
    assert [graph.add("c", ones, shared=True), graph.add("d", ones, shared=True)] == ["c", "c"]


def test_unused_constants_and_notes_on_the_source_go() -> None:
    graph = editor()
    node = graph.graph.node[0]
    node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value="/home/author/model.py")
    graph.finish([node])
    assert [tensor.name for tensor in graph.graph.initializer] == ["a"]
    assert not graph.graph.node[0].metadata_props


def test_a_constant_read_only_inside_a_branch_is_kept() -> None:
    branch = helper.make_graph([helper.make_node("Neg", ["unused"], ["z"])], "branch", [], [])
    graph = editor()
    graph.finish([*graph.graph.node, helper.make_node("If", ["y"], [], then_branch=branch, else_branch=branch)])
    assert {tensor.name for tensor in graph.graph.initializer} == {"a", "unused"}


@pytest.mark.parametrize("name", ["int4", "uint4", "int8", "uint8", "int16", "uint16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("count", [4, 5, 0])
def test_codes_come_back(name: str, count: int) -> None:
    fmt = fq.parse_format(name)
    values = torch.tensor([fmt.quant_min, -0.0, 1.0, fmt.quant_max, 3.0])[:count]
    codes, _ = fq.quantize(values, fq.QuantSpec(fmt), scale=1.0)
    graph = editor()
    graph.add("codes", stored_codes(codes, encoding(fmt).element))
    assert_same_bits(graph.tensor("codes").float(), codes.float())


def test_bfloat16_constants() -> None:
    tensor = helper.make_tensor("b", TensorProto.BFLOAT16, [2], [1.5, -0.0])
    graph = GraphEditor(helper.make_graph([], "g", [], [], [tensor]))
    assert_same_bits(graph.tensor("b"), torch.tensor([1.5, -0.0], dtype=torch.bfloat16))
