"""Portable files with float8 load in ONNX Runtime with its default options, and give the same bits as without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from tests.support.matrix import full, in_turn, sweep

onnxruntime = pytest.importorskip("onnxruntime")

PRESETS = ["FP8", "FP8_E5M2"]


class Attention(nn.Module):
    """Quantizers before and after operations that only move values, which optimisations move quantizers over."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.scores, self.mix, self.add = fq.nn.MatMul(), fq.nn.MatMul(), fq.nn.Add()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = self.mix(self.scores(q, k.transpose(-1, -2)).softmax(-1), v)
        return self.add(x, self.out(mixed.transpose(1, 2).flatten(2)))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.ConvTranspose2d(8, 8, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (mlp, (3, 16)),
    "mlp_3d": (mlp, (2, 3, 16)),
    "cnn": (cnn, (2, 3, 16, 16)),
    "attention": (lambda: nn.Sequential(Attention(), Attention()), (2, 5, 16)),
}


def written(name: str, preset: str, folder: Path, **options: Any) -> tuple[nn.Module, Tensor, Path]:
    make, shape = MODELS[name]
    x = torch.randn(shape)
    model = fq.prepare(make().eval(), preset)
    fq.calibrate(model, [x])
    fq.export_onnx(model, x, folder / "m.onnx", **options)
    return model, x * 3, folder / "m.onnx"


@sweep("name, preset", full(MODELS, PRESETS), in_turn(MODELS, PRESETS))
def test_default_options(name: str, preset: str, tmp_path: Path) -> None:
    dynamic_shapes = ({0: "batch"},) if preset == "FP8" else None
    model, x, path = written(name, preset, tmp_path, dynamic_shapes=dynamic_shapes)
    report = fq.verify_onnx(path, model, [x])
    assert report.exact
    assert report.optimised_error is None
    # The optimisations leave out no ReLU and fuse nothing.
    assert [row.differing for row in report.optimised] == [0]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("style", ["standard", "trt"])
def test_other_styles_have_nothing_between(style: str, tmp_path: Path) -> None:
    import onnx

    _, _, path = written("mlp", "FP8", tmp_path, style=style)
    nodes = [node.op_type for node in onnx.load(path).graph.node]
    assert "Sum" not in nodes
    assert nodes.count("DequantizeLinear") == 4


def test_zeros_of_both_signs_nan_and_inf(tmp_path: Path) -> None:
    class Quantized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fq.fake_quantize(x, "float8_e4m3fn", scale=0.5)

    x = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-30, -1e-30, 1.0])
    fq.export_onnx(Quantized(), x, tmp_path / "m.onnx")
    report = fq.verify_onnx(tmp_path / "m.onnx", Quantized(), [x])
    assert report.exact
    assert [row.differing for row in report.optimised] == [0]


def test_a_file_that_does_not_load_says_what_does(tmp_path: Path) -> None:
    """The standard style has nothing between, and ONNX Runtime 1.31 fuses float8 into kernels that it lacks."""
    model, x, path = written("mlp", "FP8", tmp_path, style="standard")
    report = fq.verify_onnx(path, model, [x])
    assert report.exact
    if report.optimised_error is not None:
        assert report.optimised_error.startswith("ONNX Runtime cannot load it: ")
        assert report.optimised_error in str(report)
        assert "SessionOptions.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL" in str(report)
