"""A small exported model, and what changes its file, for the tests of verification."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from fakequant.export import export_onnx
from fakequant.model import presets
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Config
from fakequant.model.prepare import prepare

INPUT, WEIGHT = "0._input_quantizer", "0._weight_quantizer"


def two_layers(config: Config = presets.INT8_AFFINE, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = prepare(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), config)
    calibrate(model, [torch.randn(16, 8)])
    return model.eval()


@cache
def exported() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        export_onnx(two_layers(), batch(1), path)
        return path.read_bytes()


def batch(seed: int = 2) -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))


def constant(model: Any, name: str) -> Any:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def rewrite(path: Path, change: Any) -> None:
    model = onnx.load(path)
    values = json.loads(model.metadata_props[0].value)
    change(values)
    model.metadata_props[0].value = json.dumps(values)
    onnx.save(model, path)
