"""The traced graph: one node per quantizer, with its path; nothing on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import UserError

import fakequant as fq
from fakequant.errors import ExportError
from fakequant.export import trace as trace_module
from fakequant.export.trace import module_path, path_of, sites, to_onnx, trace
from fakequant.nn import Quantizer


class Shared(nn.Module):
    """A quantizer called twice on one tensor, and a call without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"quantizer": Quantizer("int8")})
        quantizer = self.inner["quantizer"]
        assert isinstance(quantizer, Quantizer)
        quantizer.set_qparams(fq.QParams(torch.full((1, 1), 0.1)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner["quantizer"](x) + self.inner["quantizer"](x)
        return fq.fake_quantize(y, "uint4 per_token")


def test_sites_and_onnx_nodes_keep_path_and_specification(capfd: pytest.CaptureFixture[str]) -> None:
    program = trace(Shared(), (torch.ones(3, 4),), {}, ({0: "rows"},))
    found = sites(program)
    expected = [("inner.quantizer", "int8 per_tensor"), ("inner.quantizer", "int8 per_tensor"), ("", "uint4 per_token")]
    assert [(site.path, str(site.spec)) for site in found] == expected
    assert [site.needs for site in found] == [18, 18, 21]
    model = to_onnx(program, 21, ({0: "rows"},), ["given"], ["output"])
    nodes = [node for node in model.graph.node if node.op_type == "FakeQuantize"]
    paths = [path_of({entry.key: entry.value for entry in node.metadata_props}) for node in nodes]
    assert paths == [path for path, _ in expected]
    (given,) = model.graph.input
    assert (given.name, given.type.tensor_type.shape.dim[0].dim_param) == ("given", "rows")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("layers.slice(None, 2, None).1.norm", "layers.1.norm"),
        ("layers.slice(1, None, None).0", "layers.1"),
        ("layers.slice(-2, None, None).1", "layers.3"),
        ("layers.slice(None, None, -1).0.norm", "layers.3.norm"),
        ("layers.slice(1, None, None).slice(None, None, 2).1", "layers.3"),
        ("layers.2", "layers.2"),
        ("steps.slice(1, None, None).1", "steps.1"),
        ("", ""),
    ],
)
def test_the_path_of_a_module_in_a_slice_is_its_own(path: str, expected: str) -> None:
    model = nn.ModuleDict(
        {"layers": nn.ModuleList(nn.ReLU() for _ in range(4)), "steps": nn.Sequential(*[nn.ReLU()] * 3)}
    )
    assert module_path(model, path) == expected


class OneSize(nn.Module):
    """Takes six rows alone, which torch.export finds out after it marked the axis."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(3, 2, 4)


@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x,), lambda x: {"x": x}], ids=["tensor", "tuple", "dict"])
def test_a_refused_dynamic_export_leaves_the_example_as_it_was(form: Any, tmp_path: Path) -> None:
    x = torch.randn(6, 4)
    model = fq.prepare(OneSize(), "INT8")
    fq.calibrate(model, [x])
    example = form(x)
    shapes = {"x": {0: "batch"}} if isinstance(example, dict) else ({0: "batch"},)
    with pytest.raises(UserError, match="Constraints violated"):
        fq.export_onnx(model, example, tmp_path / "m.onnx", dynamic_shapes=shapes)
    assert vars(x) == {}
    assert fq.verify_onnx(fq.export_onnx(model, example, tmp_path / "m.onnx").path, model, [x]).exact


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) + self.layers[1](x)


UNNAMED = {
    "layers": (lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), None),
    "functions": (Summed, "onnxruntime"),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), None),
}


@pytest.mark.parametrize(("make", "target"), UNNAMED.values(), ids=UNNAMED)
def test_quantizers_have_their_paths_where_torch_loses_them(
    make: Any, target: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for layers that a forward calls through several plain lists."""
    traced = trace_module.traced_program

    def lost(*args: Any, **kwargs: Any) -> Any:
        program = traced(*args, **kwargs)
        for node in program.graph.nodes:
            if "nn_module_stack" in node.meta:
                node.meta["nn_module_stack"] = {"": ("", ""), "x": ("_input_quantizer", "")}
        return program

    monkeypatch.setattr(trace_module, "traced_program", lost)
    x = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))
    model = fq.prepare(make().eval(), "int8", x, **({"target": target} if target else {}))
    fq.calibrate(model, [x])
    report = fq.export_onnx(model, x, tmp_path / "m.onnx")
    assert {one.quantizer for one in report.quantizers} == {*fq.nn.quantizers(model)}
    assert fq.verify_onnx(report.path, model, [x]).exact
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_quantizer_without_a_module_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Calls(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fq.fake_quantize(x, "int8", scale=0.1)

    found = trace_module.scope_of
    monkeypatch.setattr(trace_module, "scope_of", lambda node: "lost" + found(node))
    with pytest.raises(
        ExportError, match=r"finds quantizers at lost.*, but the model has no modules there; put the modules"
    ):
        fq.export_onnx(nn.Sequential(Calls()), torch.ones(2), tmp_path / "m.onnx")
