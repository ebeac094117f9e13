"""Models that were trained on a lattice: the loss of the file is that of the simulation, in all bits."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import fakequant as fq
from tests.support.language_models import language_model

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:the file has no tokenizer", "ignore:compressed-tensors")
IDS = torch.arange(64).reshape(2, 32) * 5 % 320


def net() -> nn.Module:
    return language_model("llama", num_hidden_layers=1)


def loss(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS, labels=IDS).loss


def trained(preset: str, scales: str) -> nn.Module:
    """A model after five steps, with scales that follow the weights, stay, or are learned."""
    model = fq.prepare(net(), preset, skip=[] if preset.startswith("GGUF") else ["lm_head", "model.embed_tokens"])
    if scales != "follow":
        fq.calibrate(model, [{"input_ids": IDS}], progress=False)
    if scales == "learned":
        fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    before = copy.deepcopy([*model.parameters()])
    optimizer, losses = torch.optim.Adam(model.train().parameters(), 1e-3), []
    for _ in range(5):
        found = loss(model)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    if scales == "learned":
        fq.qat.set_scales(model, fq.qat.Scales.FIXED)
    return model.eval()


def change_a_byte(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-1000] ^= 0x11
    file.write_bytes(raw)


@pytest.mark.parametrize(
    ("preset", "format", "scales"),
    [
        *((f"GGUF_{kind}", "gguf", "follow") for kind in ("Q4_K", "Q2_K", "Q6_K", "Q4_0")),
        *((f"GGUF_{kind}", "gguf", "stay") for kind in ("Q4_K", "Q2_K")),
        *(("INT4_GROUP32", "compressed-tensors", scales) for scales in ("learned", "follow", "stay")),
    ],
)
@torch.no_grad()
def test_the_loss_of_the_file_is_that_of_the_simulation(preset: str, format: str, scales: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf" if format == "gguf" else "compressed_tensors")
    with torch.enable_grad():
        model = trained(preset, scales)
    path = fq.deliver(model, tmp_path, format)
    options = {"gguf_file": path.name} if format == "gguf" else {}
    if format != "gguf":
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)

    def losses() -> list[float]:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options).eval()
        return [float(loss(fq.read(path, net()))), float(loss(loaded))]

    simulated = float(loss(model))
    assert [found - simulated for found in losses()] == [0.0, 0.0]
    change_a_byte(path if format == "gguf" else path / "model.safetensors")
    assert 0.0 not in [found - simulated for found in losses()]
