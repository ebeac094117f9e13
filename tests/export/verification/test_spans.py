"""What lies between quantizers: a wrong file is refused with the place named, a right file of a deep model passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

import fakequant as fq
from fakequant.report.data import checked_in
from tests.support.matrix import in_turn


class Pair(nn.Module):
    """Two inputs of one shape, and a sum around the last layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.tanh(self.a(x + 1)) - torch.tanh(self.b(2 * y))
        return z + self.c(z)


def pairs(count: int = 2) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(4, 16, generator=generator) for _ in range(2)) for _ in range(count)]  # type: ignore[misc]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    model = fq.prepare(Pair().eval(), "int8")
    fq.calibrate(model, pairs())
    return model, fq.export_onnx(model, pairs()[0], tmp_path_factory.mktemp("file") / "m.onnx").path


def swapped_inputs(graph: Any) -> None:
    for node in graph.node:
        node.input[:] = [{"x": "y", "y": "x"}.get(name, name) for name in node.input]


def constant_input(graph: Any) -> None:
    graph.initializer.append(numpy_helper.from_array(torch.zeros(4, 16).numpy(), "zeros"))
    for node in graph.node:
        node.input[:] = ["zeros" if name == "y" else name for name in node.input]


def dropped_residual(graph: Any) -> None:
    last = next(node for node in graph.node if graph.output[0].name in node.output)
    last.op_type = "Identity"
    del last.input[0]


def other_function(graph: Any) -> None:
    [node for node in graph.node if node.op_type == "Tanh"][-1].op_type = "Softsign"


def swapped_operands(graph: Any) -> None:
    node = next(node for node in graph.node if node.op_type == "Sub")
    node.input[0], node.input[1] = node.input[1], node.input[0]


FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "swapped_inputs": (swapped_inputs, "a._input_quantizer gets other values than in torch from y"),
    "constant_input": (constant_input, "No node reads the input y, on which the model depends"),
    "dropped_residual": (dropped_residual, "output gets other values than in torch from c._input_quantizer: they di"),
    "other_function": (
        other_function,
        "c._input_quantizer gets other values than in torch from a._input_quantizer, b._",
    ),
    "swapped_operands": (swapped_operands, "c._input_quantizer gets other values than in torch from a._input_quantize"),
}


@pytest.mark.parametrize(("change", "said"), FAULTS.values(), ids=FAULTS)
def test_a_fault_in_the_wiring_is_named(
    change: Callable[[Any], None], said: str, made: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    model, path = made
    assert fq.verify_onnx(path, model, pairs()).passed
    file = onnx.load(path)
    change(file.graph)
    onnx.save(file, tmp_path / "wrong.onnx")
    report = fq.verify_onnx(tmp_path / "wrong.onnx", model, pairs())
    assert all(row.exact for row in report.rows)
    assert not report.exact
    assert not report.passed
    assert said in report.faults[0]
    assert said in str(report)
    assert sum(bool(row.fault) for row in checked_in(report)) == len(report.faults)


class Shared(nn.Module):
    """One block that is called sixteen times, and carries what falls otherwise in a row to all rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(16):
            x = self.norm(x + x.roll(1 << i % 8, 0) + 4 * self.down(torch.sin(6 * self.up(x))))
        return x


class Loop(nn.Module):
    """A recurrent layer of many steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.LSTM(8, 16, batch_first=True, bidirectional=True), nn.Linear(32, 4)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.mul_(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0])


class Calls(nn.Module):
    """Quantizers that are functions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weight = fq.fake_quantize(layer.weight, "int8 per_channel(0)")
            x = torch.sin(3 * nn.functional.linear(fq.fake_quantize(x, "int8", scale=0.01), weight, layer.bias))
        return x


DEEP = {"shared": (Shared, (1024, 32)), "recurrent": (Loop, (256, 60, 8)), "functions": (Calls, (2048, 32))}


@pytest.mark.parametrize(("make", "shape"), DEEP.values(), ids=DEEP)
def test_a_deep_file_passes_although_codes_fall_otherwise(
    make: Callable[[], nn.Module], shape: tuple[int, ...], tmp_path: Path
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    model = make().eval()
    if make is not Calls:
        fq.prepare(model, "int8")
        fq.calibrate(model, [x])
    report = fq.verify_onnx(fq.export_onnx(model, x, tmp_path / "m.onnx").path, model, [x])
    assert report.outputs[0].steps is not None
    assert report.outputs[0].steps > 0.1
    assert report.exact
    assert report.passed


class Ends(nn.Module):
    """Outputs whose sizes or order depend on values."""

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.end = nn.Linear(16, 16), nn.Linear(16, 8), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.b(self.a(x).relu()))


ENDS: dict[str, Callable[[Tensor], Any]] = {
    "threshold": lambda z: z.flatten()[z.flatten() > 0.1],
    "nonzero": lambda z: (z, (z > 0.1).nonzero()),
    "largest": lambda z: z.topk(3, -1),
}


@pytest.mark.parametrize(("end", "preset"), [*in_turn(ENDS, ["int8", "int4"]), *in_turn(ENDS, ["int4", "int8"])])
def test_sizes_may_depend_on_values(end: str, preset: str, tmp_path: Path) -> None:
    xs = [torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    model = fq.prepare(Ends(ENDS[end]).eval(), preset)
    fq.calibrate(model, xs)
    assert fq.verify_onnx(fq.export_onnx(model, xs[0], tmp_path / "m.onnx").path, model, xs).exact


class Unused(nn.Module):
    """Calls a layer also for nothing, before and after the calls that count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            self.a(2 * x)
            x = torch.tanh(self.a(x))
        self.b(-x)
        return self.b(x)


def test_calls_whose_results_are_not_used_are_not_missed(tmp_path: Path) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    model = fq.prepare(Unused().eval(), "int8")
    fq.calibrate(model, [x])
    path = fq.export_onnx(model, x, tmp_path / "m.onnx").path
    report = fq.verify_onnx(path, model, [x])
    assert report.exact
    assert [span.elements for span in report.spans] == [64] * 5
    file = onnx.load(path)
    [node for node in file.graph.node if node.op_type == "Tanh"][1].op_type = "Softsign"
    onnx.save(file, path)
    assert (
        "the model has no call whose tensor is that of a._input_quantizer" in fq.verify_onnx(path, model, [x]).faults[0]
    )


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compile": lambda model: torch.compile(model, backend="eager"),
    "parallel": nn.DataParallel,
    "averaged": torch.optim.swa_utils.AveragedModel,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_model_is_the_model(wrap: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    model = wrap(fq.prepare(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "int8"))
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    fq.calibrate(model, [x])
    path = fq.export_onnx(model, x, tmp_path / "m.onnx").path
    assert fq.verify_onnx(path, model).exact
    assert fq.verify_onnx(path, model, [x]).exact


def test_what_is_compared_leaves_the_model_as_it_was(made: tuple[nn.Module, Path]) -> None:
    model, path = made
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert fq.verify_onnx(path, model, pairs()).passed
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())


def test_without_a_finite_reference_nothing_is_said_of_deployment() -> None:
    report = fq.export.VerifyReport("f", "given", [fq.export.Row("q", "int8 per_tensor", "weight", 1)])
    x, lost = torch.ones(4), torch.full((4,), torch.nan)
    for rows, found in ((report.deployed, 2 * x), (report.noise, x)):
        fq.export.verdict.add_rows(rows, ["y"], [found], [lost], None)
    assert report.as_deployed is None
    assert report.passed
    assert "as deployed" not in str(report)


def test_a_constant_output_is_compared(tmp_path: Path) -> None:
    """A file whose output was made a constant of the example."""
    model = fq.prepare(nn.Sequential(nn.Linear(8, 8)), "int8")
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    fq.calibrate(model, [x])
    path = fq.export_onnx(model, x, tmp_path / "m.onnx").path
    file = onnx.load(path)
    last = next(node for node in file.graph.node if file.graph.output[0].name in node.output)
    file.graph.initializer.append(numpy_helper.from_array(model(x).detach().numpy(), "constant"))
    file.graph.node.append(helper.make_node("Identity", ["constant"], [*last.output]))
    last.output[0] = "unused"
    onnx.save(file, path)
    assert fq.verify_onnx(path, model, [x]).exact
    assert not fq.verify_onnx(path, model, [x, 2 * x]).exact


class Streaming(nn.Module):
    """A recurrence whose state begins at zero, which hides how it is read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)
        self.register_buffer("h", torch.zeros(1, 4))
        self.register_buffer("c", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.a(x + self.h)
        c = self.c * 0.5 + z[:1]
        self.h.copy_(torch.tanh(c))
        self.c.copy_(c)
        return z


def other_operation(old: str, new: str) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        next(node for node in graph.node if node.op_type == old).op_type = new

    return change


@pytest.mark.parametrize("change", [None, other_operation("Add", "Sub"), other_operation("Mul", "Div")])
def test_a_state_that_begins_at_zero_is_drawn(change: Callable[[Any], None] | None, tmp_path: Path) -> None:
    model, x = Streaming().eval(), torch.randn(1, 4)
    fq.calibrate(fq.prepare(model, "int8"), [x], progress=False)
    path = fq.export_onnx(model, x, tmp_path / "m.onnx").path
    if change is not None:
        proto = onnx.load(path)
        change(proto.graph)
        onnx.save(proto, path)
    before = [buffer.clone() for buffer in (model.h, model.c)]
    assert fq.verify_onnx(path, model).passed is (change is None)
    assert all(map(torch.equal, before, (model.h, model.c)))


class Writing(nn.Module):
    """Writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        return self.a(x.add_(1))


def test_a_forward_that_writes_into_its_input_leaves_batches_and_example_as_they_were(tmp_path: Path) -> None:
    """An input that it does not read was taken for one that it reads, and the report was of other numbers."""
    model, batch = Writing().eval(), (torch.randn(4, 4), torch.randn(4, 4))
    fq.calibrate(fq.prepare(model, "int8"), [batch], progress=False)
    before = [x.clone() for x in batch]
    path = fq.export_onnx(model, batch, tmp_path / "m.onnx").path
    report = fq.verify_onnx(path, model, [batch])
    assert (report.passed, report.as_deployed, report.unread) == (True, True, ["unused"])
    assert all(map(torch.equal, before, batch))
