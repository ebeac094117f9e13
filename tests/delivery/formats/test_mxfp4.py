"""MXFP4 of GPT-OSS: the values are those of transformers' own conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fakequant as fq
from fakequant.errors import CheckpointError
from tests.support.language_models import language_model

pytest.importorskip("transformers", reason="transformers is not installed")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 32, "num_local_experts": 3, "num_experts_per_tok": 2}
STACK = "model.layers.0.mlp.experts."


def folder(path: Path) -> tuple[Path, Any]:
    """A folder with random codes, in the names of the hub, and the model in float whose other tensors it has."""
    net = language_model("gpt_oss", **SIZES)
    net.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    made = torch.Generator().manual_seed(0)
    for name in ("gate_up_proj", "down_proj"):
        experts, columns, rows = tensors.pop(f"{STACK}{name}").shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=made, dtype=torch.uint8)
        scale = torch.randint(110, 128, (experts, rows, columns // 32), generator=made, dtype=torch.uint8)
        tensors |= {f"{STACK}{name}_blocks": blocks, f"{STACK}{name}_scales": scale}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    said = json.loads((path / "config.json").read_text())
    said["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (path / "config.json").write_text(json.dumps(said))
    return path, net


def test_values_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    path, net = folder(tmp_path)
    model: Any = fq.read(path)
    tensors, weights = load_file(path / "model.safetensors"), fq.snapshot(model).weights
    assert {*weights} == {f"{STACK}gate_up_proj", f"{STACK}down_proj"}
    for name, weight in weights.items():
        theirs = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=torch.float32)
        assert torch.equal(weight.values(), theirs)
        net.get_parameter(name).data.copy_(theirs)
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, net(ids).logits)


def changed(end: str, change: Any) -> Any:
    def apply(tensors: dict[str, Tensor]) -> None:
        tensors[f"{STACK}{end}"] = change(tensors[f"{STACK}{end}"])

    return apply


DAMAGE: dict[str, tuple[Any, str]] = {
    "no scales": (lambda x: x.pop(f"{STACK}down_proj_scales"), "lacks .*down_proj_scales"),
    "no blocks": (lambda x: x.pop(f"{STACK}down_proj_blocks"), "lacks .*down_proj_blocks"),
    "an expert less": (
        changed("down_proj_blocks", lambda x: x[1:]),
        r"is .* of shape \[2, 64, 3, 16\]",
    ),
    "another type": (changed("gate_up_proj_scales", lambda x: x.view(torch.int8)), "gate_up_proj_scales is torch.int8"),
    "no number": (changed("gate_up_proj_scales", lambda x: x.fill_(255)), "holds codes that stand for no number"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_folders_are_refused(name: str, tmp_path: Path) -> None:
    path, net = folder(tmp_path)
    change, message = DAMAGE[name]
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({key: one.contiguous() for key, one in tensors.items()}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        fq.read(path, net)
