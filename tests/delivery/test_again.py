"""What is written, read and written again has the same bytes, in every format that is written, by every preset."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.delivery import DeliveryFormat, delivery_formats
from fakequant.errors import ExportError
from fakequant.model.presets import presets
from tests.support.language_models import language_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WRITTEN = {name: one for name, one in delivery_formats().items() if one.writes}
HELD = {"compressed-tensors": "INT4_GROUP32", "gguf": "GGUF_Q4_K", "torchao": "INT8_WEIGHT_ONLY", "mlx": "MLX_MXFP4"}


def net(format: DeliveryFormat, dtype: torch.dtype) -> nn.Module:
    """A model with a row and a block of zeros, one that is nearly zero, and large values."""
    if format.suffix:
        pytest.importorskip(format.packages[0])
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(256, 96), nn.ReLU(), nn.Linear(96, 256, bias=False))
    model = language_model("llama", num_hidden_layers=1) if format.suffix else layers
    with torch.no_grad():
        for weight in (one for one in model.parameters() if one.dim() > 1):
            weight[1], weight[2, :32], weight[3, 32:64], weight[4, 5] = 0, 0, 1e-7, 100
    return model.to(dtype)


def content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("preset", presets())
@pytest.mark.parametrize("format", WRITTEN)
def test_written_and_read_and_written_again(format: str, preset: str, dtype: torch.dtype, tmp_path: Path) -> None:
    own = WRITTEN[format]
    model = fq.prepare(net(own, dtype), preset, skip=[])
    try:
        path = fq.deliver(model, tmp_path / "one", format)
    except ExportError:
        assert preset != HELD.get(format)
        return
    again = fq.read(path, net(own, dtype))
    assert content(fq.deliver(again, tmp_path / "two", format)) == content(path)
