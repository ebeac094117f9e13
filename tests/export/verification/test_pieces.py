"""Sessions of a file: inner tensors of the whole, or in pieces; what cannot be loaded or run is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import VerificationError
from fakequant.export import verify
from fakequant.export.verdict import Session
from fakequant.export.verify import Evaluator, Pieces
from tests.support.bits import assert_same_bits
from tests.support.export_models import assert_tensors_are_seen, model_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def net(blocks: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 8)
    model = fq.prepare(nn.Sequential(*(Block() for _ in range(blocks))), "INT8", example=x, target=None)
    fq.calibrate(model, [x])
    return model.eval(), x


@pytest.mark.parametrize("load", [Session, Evaluator])
@pytest.mark.parametrize("size", [1, 3])
def test_pieces_give_the_tensors_of_the_whole(load: Any, size: int, tmp_path: Path, monkeypatch: Any) -> None:
    model, x = net(3)
    file = onnx.load(fq.export_onnx(model, x, tmp_path / "m.onnx").path)
    groups = [[node.input[0], node.output[0]] for node in file.graph.node if node.op_type in ("Gemm", "MatMul", "Add")]
    (given,) = (value.name for value in file.graph.input)
    whole = load(file, [name for group in groups for name in group]).run({given: x})
    monkeypatch.setattr(verify, "_TENSORS_PER_PIECE", size)
    cut = Pieces(file, groups, load)
    seen, most, values = set[int](), 0, dict[str, Tensor]()
    for values, indices in cut.run({given: x}):
        most = max(most, len(values))
        seen.update(indices)
        for index in indices:
            for name in groups[index]:
                assert_same_bits(values[name], whole[name])
    assert seen == set(range(len(groups)))
    assert most < len(whole)
    assert_same_bits(values[cut.outputs[0]], whole[cut.outputs[0]])


def test_tensors_that_numpy_lacks_stay_in_one_piece(monkeypatch: Any) -> None:
    """A skip of bfloat16 over everything, an output from the first piece, and an input that is an output."""
    monkeypatch.setattr(verify, "_TENSORS_PER_PIECE", 1)
    kinds = {"x": TensorProto.FLOAT, "b": TensorProto.BFLOAT16, "c": TensorProto.FLOAT, "d": TensorProto.FLOAT}
    kinds |= {"e": TensorProto.FLOAT, "f": TensorProto.FLOAT, "u": TensorProto.FLOAT}
    value = {name: helper.make_tensor_value_info(name, kind, [2]) for name, kind in kinds.items()}
    nodes = [
        helper.make_node("Cast", ["x"], ["b"], to=TensorProto.BFLOAT16),
        helper.make_node("Neg", ["x"], ["c"]),
        helper.make_node("Cast", ["b"], ["d"], to=TensorProto.FLOAT),
        helper.make_node("Neg", ["d"], ["e"]),
        helper.make_node("Add", ["e", "u"], ["f"]),
    ]
    graph = helper.make_graph(nodes, "g", [value["x"], value["u"]], [value["c"], value["f"]])
    graph.value_info.extend(value[name] for name in "bde")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    loaded: list[list[str]] = []

    def load(part: Any, watched: list[str]) -> Session:
        loaded.append([node.output[0] for node in part.graph.node])
        return Session(part, watched)

    x, u = torch.tensor([1.001, -2.0]), torch.tensor([1.0, 0.0])
    *_, (values, _) = Pieces(model, [["c"], ["d"], ["e"]], load).run({"x": x, "u": u})
    assert loaded == [["b", "c", "d"], ["e"], ["f"]]
    assert_same_bits(values["c"], -x)
    assert_same_bits(values["f"], u - x.bfloat16().float())


def frames(call: Any) -> int:
    count = 0

    def counting(*_: Any) -> None:
        nonlocal count
        count += 1

    sys.setprofile(counting)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def test_verification_grows_with_the_model_not_with_its_square(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(verify, "_TENSORS_PER_PIECE", 8)
    counts = []
    for blocks in (1, 2, 4, 6):  # the first imports
        model, x = net(blocks)
        path = fq.export_onnx(model, x, tmp_path / "m.onnx").path
        counts.append(frames(lambda path=path, model=model, x=x: fq.verify_onnx(path, model, [x])))
    assert counts[3] - counts[2] < 1.1 * (counts[2] - counts[1])


@pytest.mark.parametrize("load", [Session, Evaluator])
def test_inputs_inner_tensors_and_outputs_are_seen_and_the_model_stays(load: Any) -> None:
    assert_tensors_are_seen(load)


@pytest.mark.parametrize(
    ("load", "name"), [(Session, "ONNX Runtime"), (Evaluator, "the ReferenceEvaluator of onnx .*")], ids=["ort", "onnx"]
)
def test_what_does_not_load_or_run_is_an_error_with_its_message(load: Any, name: str) -> None:
    with pytest.raises(VerificationError, match=f"{name} cannot load it: .*NoSuchOperator"):
        load(model_of("NoSuchOperator"))
    with pytest.raises(VerificationError, match=r"cannot (load|run) it: .*no_such_tensor"):
        load(model_of(), ["no_such_tensor"]).run({"x": torch.zeros(2)})


@pytest.mark.parametrize("load", [Session, Evaluator])
@pytest.mark.parametrize("x", [torch.zeros(2).double(), torch.zeros(2, 1), torch.zeros(3)], ids=str)
def test_inputs_that_do_not_fit_are_an_error(load: Any, x: torch.Tensor) -> None:
    with pytest.raises(VerificationError, match=r"the input x is float\d\d \[.*but the file takes float32 \[2\]"):
        load(model_of()).run({"x": x})
