"""Prepared models in torch.jit.trace and torch.fx, and what torch.onnx.export says of them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fakequant as fq
from fakequant.nn.quantized.layers import QuantizedLayer
from tests.support.bits import assert_same_bits


class Pairs(nn.Module):
    """Layers of every kind: pairs, an embedding, a transposed convolution, pooling, a quantizer called by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.MaxPool1d(2), nn.ConvTranspose1d(8, 4, 2))
        self.add, self.matmul, self.embed = fq.nn.Add(), fq.nn.MatMul(), nn.Embedding(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        places = self.embed(torch.arange(4))
        return self.add(self.matmul(places, y), y)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {"mlp": (mlp, (3, 8)), "pairs": (Pairs, (2, 3, 14))}
PRESETS = ["INT8", "INT8_PER_TOKEN", "INT8_AFFINE", "FP8", "NVFP4"]


def jit_trace(model: nn.Module, x: Tensor) -> Any:
    return torch.jit.trace(model, x)


def prepared(name: str, preset: str = "INT8") -> tuple[nn.Module, Tensor]:
    make, shape = MODELS[name]
    x = torch.randn(shape)
    model = fq.prepare(make().eval(), preset)
    fq.calibrate(model, [x], progress=False)
    return model, x


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", MODELS)
def test_a_jit_trace_has_the_same_bits(name: str, preset: str) -> None:
    model, x = prepared(name, preset)
    with warnings.catch_warnings():
        # Scales of zero points that follow from the tensor are found by torch's operations.
        warnings.simplefilter("error" if preset in ("INT8", "FP8") else "default", torch.jit.TracerWarning)
        traced = jit_trace(model, x)
    other = torch.randn_like(x) * 2
    assert_same_bits(traced(other), model(other))


@pytest.mark.parametrize("execution", ["auto", "simulate"])
def test_a_jit_trace_of_layers_that_multiply_codes(execution: str) -> None:
    model, x = prepared("mlp")
    fq.set_execution(model, execution)
    traced = jit_trace(model, x)
    with torch.no_grad():
        assert_same_bits(traced(x * 2), fq.set_execution(model, "simulate")(x * 2))


def test_a_saved_jit_trace_loads_with_fakequant(tmp_path: Path) -> None:
    model, x = prepared("mlp")
    torch.jit.save(jit_trace(model, x), tmp_path / "m.pt")
    torch.save(x, tmp_path / "x.pt")
    code = "import torch, fakequant; m = torch.jit.load('m.pt'); torch.save(m(torch.load('x.pt') * 2).detach(), 'y.pt')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=tmp_path)
    assert_same_bits(torch.load(tmp_path / "y.pt"), model(x * 2).detach())


def test_gradients_go_through_a_jit_trace() -> None:
    model, x = prepared("mlp")
    traced = jit_trace(model, x)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    traced(x).square().sum().backward()
    found = [parameter.grad for parameter in traced.parameters() if parameter.grad is not None]
    for grad, right in zip(found, expected, strict=True):
        assert_same_bits(grad, right)


def test_an_own_call_in_a_jit_trace() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fq.fake_quantize(x, "int8 per_channel(0)", scale=torch.tensor([0.1, 0.2])) + fq.fake_quantize(
                x, "int4"
            )

    x = torch.randn(2, 5)
    traced = jit_trace(Own(), x)
    assert_same_bits(traced(x * 3), Own()(x * 3))


def test_tensorboard_draws_a_prepared_model(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    model, x = prepared("mlp")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        writer.add_graph(model, x)
    assert any(path.stat().st_size > 500 for path in tmp_path.iterdir())


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", MODELS)
def test_symbolic_trace_has_one_call_per_quantized_layer(name: str, preset: str) -> None:
    model, x = prepared(name, preset)
    traced = fx.symbolic_trace(model)
    called = {node.target for node in traced.graph.nodes if node.op == "call_module"}
    layers = {path for path, layer in model.named_modules() if isinstance(layer, QuantizedLayer) and path != "embed"}
    assert layers <= called
    assert_same_bits(traced(x * 2), model(x * 2))
    assert traced.code


def test_a_quantizer_called_by_hand_is_one_call() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quantizer = fq.nn.Quantizer("int8 per_channel(1)", dynamic=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.quantizer(x) + 1

    traced = fx.symbolic_trace(Own())
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "call_function", "output"]
    x = torch.randn(2, 5)
    assert_same_bits(traced(x), Own()(x))


def test_tables_of_shapes_by_fx() -> None:
    from torch.fx.passes.shape_prop import ShapeProp

    model, x = prepared("pairs")
    traced = fx.symbolic_trace(model)
    ShapeProp(traced).propagate(x)
    assert all("tensor_meta" in node.meta for node in traced.graph.nodes if node.op == "call_module")


@pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based ONNX export:DeprecationWarning")
@pytest.mark.parametrize("dynamo", [False, True])
def test_torch_onnx_export_points_to_ours(dynamo: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model, x = prepared("mlp")
    with pytest.raises(Exception, match=r"call fakequant\.export_onnx\(model, example, path\) instead"):
        torch.onnx.export(model, (x,), tmp_path / "m.onnx", dynamo=dynamo, verbose=False)
    assert fq.export_onnx(model, x, tmp_path / "m.onnx").quantizers
