"""The inputs of a file, those of a model's state, and the constants of a graph that is being changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ExportError, VerificationError
from fakequant.export.inputs import GraphEditor, depends_on
from tests.support.bits import assert_same_bits


class Two(nn.Module):
    """Two tensors, each with a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) - torch.tanh(self.b(y))


class Listed(Two):
    """The second tensor in a list of states."""

    def forward(self, x: Tensor, states: list[Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(x, states[0]) + states[1]


class Attention(nn.Module):
    """Query, key and value as three arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.layer(q, k, v, need_weights=False)[0]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Z, ROW = torch.zeros(8, 16), drawn(2, 5, 16)
TWICE: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "tuple": (Two, (Z, Z), (drawn(8, 16), drawn(8, 16, seed=1))),
    "dict": (Two, {"x": Z, "y": Z}, {"x": drawn(8, 16), "y": drawn(8, 16, seed=1)}),
    "list": (Listed, (Z, [Z, Z]), (drawn(8, 16), [drawn(8, 16, seed=1), drawn(8, 16, seed=2)])),
    "attention": (Attention, (ROW, ROW, ROW), tuple(drawn(2, 5, 16, seed=seed) for seed in (1, 2, 3))),
}


@pytest.mark.parametrize(("make", "example", "batch"), TWICE.values(), ids=TWICE)
def test_a_tensor_that_occurs_twice_is_two_inputs(
    make: Callable[[], nn.Module], example: Any, batch: Any, tmp_path: Path
) -> None:
    model = fq.prepare(make().eval(), "int8")
    fq.calibrate(model, [batch])
    report = fq.export_onnx(model, example, tmp_path / "m.onnx")
    assert report.unread == []
    assert fq.verify_onnx(report.path, model, [batch]).exact
    assert fq.verify_onnx(report.path, model, [example]).exact
    if not isinstance(batch, dict):
        graph = fq.ir.capture(model, example)
        leaves = torch.utils._pytree.tree_leaves(batch)
        torch.testing.assert_close(graph.run(*leaves), model(*batch), rtol=0, atol=1e-6)


def test_a_model_that_takes_one_tensor_for_all_is_exported_so(tmp_path: Path) -> None:
    model = fq.prepare(Attention().eval(), "int8")
    fq.calibrate(model, [(ROW, ROW, ROW)])
    with pytest.warns(UserWarning, match="one tensor for several arguments, and the model takes no other tensors"):
        report = fq.export_onnx(model, (ROW, ROW, ROW), tmp_path / "m.onnx")
    assert report.unread == ["q", "k"]
    assert fq.verify_onnx(report.path, model, [(2 * ROW,) * 3]).exact


def test_an_input_that_the_model_does_not_use_is_named(tmp_path: Path) -> None:
    class Unused(Two):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.a(x)

    model = fq.prepare(Unused().eval(), "int8_weight_only")
    report = fq.export_onnx(model, (Z, Z), tmp_path / "m.onnx")
    assert report.unread == ["y"]
    assert "no node reads the input y: the model's outputs do not depend on it" in str(report)
    found = fq.verify_onnx(report.path, model)
    assert (found.unread, found.ignored, found.passed) == (["y"], [], True)


def test_an_input_that_became_a_constant_is_refused(tmp_path: Path) -> None:
    class Constant(Two):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.a(x) * (2.0 if torch.compiler.is_compiling() else y.mean())

    model = fq.prepare(Constant().eval(), "int8_weight_only")
    with pytest.raises(ExportError, match="no node of the file would read the input y, on which the model"):
        fq.export_onnx(model, (Z + 1, Z + 2), tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize("x", [drawn(3), torch.arange(3), torch.tensor([True]), torch.zeros(2, dtype=torch.int64)])
def test_what_results_depend_on(x: Tensor) -> None:
    assert depends_on(lambda batch: batch[1] * 2, (Z, x), 1) is True
    assert depends_on(lambda batch: batch[0] * 2, (Z, x), 1) is False
    if x.is_floating_point():  # whatever their order
        assert depends_on(lambda batch: batch[1].double().sum(), (Z, x), 1) is True
    index = (torch.zeros(2, dtype=torch.int64),)
    assert depends_on(lambda batch: torch.zeros(1)[batch[0]], index, 0) is None  # it cannot be tried


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"]])
@pytest.mark.parametrize("option", ["input_names", "output_names"])
def test_names_are_counted(option: str, names: list[str], tmp_path: Path) -> None:
    class Outputs(Two):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return x, super().forward(x, y)

    model = fq.prepare(Outputs().eval(), "int8_weight_only")
    what = option.partition("_")[0]
    with pytest.raises(ExportError, match=f"{option} has {len(names)} names for 2 {what}s; give one for each"):
        fq.export_onnx(model, (Z, Z), tmp_path / "m.onnx", **{option: names})
    fq.export_onnx(model, (Z, Z), tmp_path / "m.onnx", **{option: ["a", "b"]})


SINGLE: dict[str, tuple[Callable[[], nn.Module], Any, Any, Any]] = {
    "tuple": (lambda: nn.Sequential(nn.Linear(16, 4)), drawn(1, 16), ({0: "batch"},), drawn(5, 16)),
    "dict": (Two, {"x": Z[:1], "y": Z[:1] + 1}, {"x": {0: "n"}, "y": {0: "n"}}, {"x": Z[:3], "y": Z[:3]}),
    "list": (Listed, (Z[:1], [Z[:1], Z[:1]]), ({0: "n"}, [{0: "n"}, {0: "n"}]), (Z, [Z, Z])),
    "one_of_two": (Two, (Z[:1], Z[:1]), ({0: "n"}, None), (Z, Z[:1])),
}


@pytest.mark.parametrize(("make", "example", "shapes", "batch"), SINGLE.values(), ids=SINGLE)
def test_an_example_of_one_sample_has_a_dynamic_batch(
    make: Callable[[], nn.Module], example: Any, shapes: Any, batch: Any, tmp_path: Path
) -> None:
    model = fq.prepare(make().eval(), "int8")
    fq.calibrate(model, [batch])
    path = fq.export_onnx(model, example, tmp_path / "m.onnx", dynamic_shapes=shapes).path
    assert fq.verify_onnx(path, model, [batch, example]).exact


def test_a_model_that_takes_one_sample_alone_says_so(tmp_path: Path) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.view(1, 16))

    with pytest.raises(ExportError, match=r"a dynamic axis of the example has length 1.*an example of two samples"):
        fq.export_onnx(fq.prepare(One(), "int8_weight_only"), Z[:1], tmp_path / "m.onnx", dynamic_shapes=({0: "n"},))


class Written(nn.Module):
    """Adds what it gave before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 16)
        self.register_buffer("h", torch.zeros(4, 16))
        self.register_buffer("count", torch.zeros(()))
        self.h: Tensor
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x) + self.h)
        self.h.copy_(y)
        self.count += 1
        return 2 * y


class Assigned(Written):
    def forward(self, x: Tensor) -> Tensor:
        self.h = torch.tanh(self.layer(x) + self.h)
        return self.h + 1


class Delayed(nn.Module):
    """Gives the input of the run before the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(4, 16))
        self.register_buffer("b", torch.zeros(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        y, self.b, self.a = self.b, self.a, x
        return y


class Inside(nn.Module):
    """A module whose submodule has the state, which torch.export loses where it is assigned."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Outer(nn.Module):
    """A window of earlier inputs, and a module with a state inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.filter = Written(), nn.Conv1d(4, 4, 3)
        self.register_buffer("past", torch.zeros(4, 4, 2))
        self.past: Tensor

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.cat([self.past, x.unflatten(-1, (4, 4))], -1)
        self.past.copy_(x[..., -2:])
        return {"y": self.inner(self.filter(x).flatten(1))}


STATES = {
    "written": (Written, ["state_h"]),
    "assigned": (Assigned, ["state_h"]),
    "nested": (Outer, ["state_past", "state_inner_h"]),
    "assigned inside": (lambda: Inside(Assigned()), ["state_inner_h"]),
    "delayed": (
        lambda: Inside(nn.Sequential(nn.Linear(16, 16), Delayed())),
        ["state_inner_1_a", "state_inner_1_b"],
    ),
}


@pytest.mark.parametrize("shapes", [None, ({0: "batch"},)], ids=["static", "dynamic"])
@pytest.mark.parametrize(("make", "names"), STATES.values(), ids=STATES)
def test_buffers_that_the_model_writes_are_inputs_and_outputs(
    make: Callable[[], nn.Module], names: list[str], shapes: Any, tmp_path: Path
) -> None:
    xs = [drawn(4, 16, seed=seed) for seed in range(4)]
    model = fq.prepare(make().eval(), "int8")
    fq.calibrate(model, xs)
    with pytest.warns(UserWarning, match=f"forward writes the buffers .* such as {names[0]} and next_{names[0]}"):
        report = fq.export_onnx(model, xs[0], tmp_path / "m.onnx", dynamic_shapes=shapes)
    assert [*report.state] == names
    graph = onnx.load(report.path).graph
    assert [value.name for value in graph.input] == ["x", *names]
    assert [value.name for value in graph.output][1:] == [f"next_{name}" for name in names]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert fq.verify_onnx(report.path, model, xs).exact
    assert fq.verify_onnx(report.path, model).exact
    assert fq.verify_onnx(report.path).exact
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")  # sums that no processor saturates
    session = onnxruntime.InferenceSession(report.path, options)
    state = {name: model.get_buffer(path).numpy().copy() for name, path in report.state.items()}
    for x in xs:
        y, *after = session.run(None, {"x": x.numpy(), **state})
        state = dict(zip(names, after, strict=True))
        expected = model(x)
        expected = expected["y"] if isinstance(expected, dict) else expected
        torch.testing.assert_close(torch.from_numpy(y), expected, rtol=0, atol=1e-5)


def test_a_model_without_the_buffers_of_a_file_is_another_one(tmp_path: Path) -> None:
    model = fq.prepare(Written().eval(), "int8_weight_only")
    with pytest.warns(UserWarning, match="forward writes the buffers h"):
        path = fq.export_onnx(model, Z[:4], tmp_path / "m.onnx").path
    other = fq.prepare(nn.ModuleDict({"layer": nn.Linear(16, 16)}), "int8_weight_only")
    with pytest.raises(VerificationError, match="the model lacks the buffers"):
        fq.verify_onnx(path, other)


class Attribute(nn.Module):
    """Keeps a tensor that is not a buffer."""

    def __init__(self, keep: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.h, self.hs, self.keep = nn.Linear(16, 16), torch.zeros(4, 16), [torch.zeros(4, 16)], keep

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + self.h + self.hs[0]
        self.keep(self, y)
        return y


def assigned(own: Any, y: Tensor) -> None:
    own.h = y


def in_a_list(own: Any, y: Tensor) -> None:
    own.hs[0] = y


def in_place(own: Any, y: Tensor) -> None:
    own.h.copy_(y)


def through_data(own: Any, y: Tensor) -> None:
    own.h.data.copy_(y)


@pytest.mark.parametrize(("keep", "name"), [(assigned, "h"), (in_a_list, r"hs\[0\]")], ids=["attribute", "list"])
def test_a_state_that_is_no_buffer_is_said_to_be_constant(
    keep: Callable[[Any, Tensor], None], name: str, tmp_path: Path
) -> None:
    model = fq.prepare(Attribute(keep).eval(), "int8_weight_only")
    with pytest.warns(UserWarning, match=f"forward assigns {name}, whose present values become constants"):
        path = fq.export_onnx(model, Z[:4], tmp_path / "m.onnx").path
    assert not fq.verify_onnx(path, model, [Z[:4] + 1, Z[:4] + 1]).exact


@pytest.mark.parametrize("keep", [in_place, through_data])
def test_a_state_that_cannot_be_traced_is_refused(keep: Callable[[Any, Tensor], None], tmp_path: Path) -> None:
    model = fq.prepare(Attribute(keep).eval(), "int8_weight_only")
    with pytest.raises(ExportError, match=r"forward (writes|computes) .*(register_buffer|copy_)"):
        fq.export_onnx(model, Z[:4], tmp_path / "m.onnx")


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


def test_equal_constants_of_a_name_are_one_and_others_are_renamed() -> None:
    graph = editor()
    zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
    assert [graph.add("q/s", zeros), graph.add("q/s", zeros), graph.add("q/s", ones)] == ["q/s", "q/s", "q/s#2"]
    assert graph.add("other", zeros) == "other"
    assert [graph.add("c", ones, shared=True), graph.add("d", ones, shared=True)] == ["c", "c"]


def test_a_constant_read_only_inside_a_branch_is_kept() -> None:
    branch = helper.make_graph([helper.make_node("Neg", ["unused"], ["z"])], "branch", [], [])
    graph = editor()
    graph.finish([*graph.graph.node, helper.make_node("If", ["y"], [], then_branch=branch, else_branch=branch)])
    assert {tensor.name for tensor in graph.graph.initializer} == {"a", "unused"}


def test_bfloat16_constants() -> None:
    tensor = helper.make_tensor("b", TensorProto.BFLOAT16, [2], [1.5, -0.0])
    graph = GraphEditor(helper.make_graph([], "g", [], [], [tensor]))
    assert_same_bits(graph.tensor("b"), torch.tensor([1.5, -0.0], dtype=torch.bfloat16))
