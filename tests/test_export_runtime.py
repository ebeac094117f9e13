"""Looking at tensors inside a file that ONNX Runtime runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fakequant.errors import VerificationError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from fakequant.export.runtime import Session  # noqa: E402
from tests.support.bits import assert_same_bits  # noqa: E402


def model_of(operator: str = "Neg", opset: int = 21) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Cast", ["x"], ["b"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["b"], ["c"], to=TensorProto.FLOAT),
        helper.make_node(operator, ["c"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y")]
    inner = [helper.make_tensor_value_info("b", TensorProto.BFLOAT16, [2])]
    constants = [numpy_helper.from_array(np.zeros(1, np.float32), "unused")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants, value_info=inner)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def test_inputs_inner_tensors_and_outputs_are_seen_and_the_model_stays() -> None:
    model = model_of()
    before = model.SerializeToString()
    x = torch.tensor([1.001, -0.0])
    values = Session(model, ["x", "b", "c", "y", "b"]).run({"x": x})
    assert_same_bits(values["x"], x)
    assert_same_bits(values["b"], x.bfloat16())
    assert_same_bits(values["c"], x.bfloat16().float())
    assert_same_bits(values["y"], -x.bfloat16().float())
    assert model.SerializeToString() == before


def test_what_does_not_load_or_run_is_an_error_with_its_message() -> None:
    with pytest.raises(VerificationError, match=r"ONNX Runtime cannot load it: .*NoSuchOperator"):
        Session(model_of("NoSuchOperator"))
    with pytest.raises(VerificationError, match="ONNX Runtime cannot load it: "):
        Session(model_of(), ["no_such_tensor"])
    with pytest.raises(VerificationError, match="ONNX Runtime cannot run it: "):
        Session(model_of()).run({"x": torch.zeros(3)})
