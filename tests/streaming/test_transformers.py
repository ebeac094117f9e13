"""Folders of transformers, whose weights stay in their shards, and files of other programs from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CheckpointError
from fakequant.streaming import improve_folder
from tests.support.language_models import language_model, llama, mixtral

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
GPTQ = ("ranges", "gptq", "drift")


def texts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 200, (2, 16), generator=generator)} for _ in range(3)]


SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
MODELS: dict[str, Any] = {
    "llama": lambda: llama(**SMALL),
    "tied": lambda: llama(tied=True, **SMALL),
    "bfloat16": lambda: llama(dtype=torch.bfloat16, **SMALL),
    "masks of layers": lambda: language_model("gemma3_text", **SMALL, head_dim=32),
    "experts": mixtral,
}


def same_weights(one: nn.Module, other: nn.Module) -> list[str]:
    first, second = dict(one.named_parameters()), dict(other.named_parameters())
    held = fq.snapshot(one).weights
    return [
        name
        for name, parameter in first.items()
        if not torch.equal(held[name].values() if name in held else parameter, second[name])
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODELS)
def test_a_file_has_the_weights_of_the_model_in_memory(kind: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    model = MODELS[kind]()
    model.save_pretrained(source, max_shard_size="100KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    found = improve_folder(source, target, "int4_group32", texts(), GPTQ)
    fq.prepare(model, "int4_group32")
    fq.ptq.improve(model, texts(), GPTQ, judge=[])
    assert same_weights(model, fq.read(target)) == []
    assert all(row.after <= row.before for row in found.layers)
    config = fq.delivery.folder.Folder(target).config
    assert config.get("use_cache", True) is True


@pytest.mark.filterwarnings("ignore")
def test_gguf_by_the_same_call(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    model = llama(vocab_size=256, intermediate_size=256)
    model.save_pretrained(tmp_path / "source")
    config = fq.Config("blocks", [fq.Rule("model.layers.*_proj", weight=fq.presets.GGUF_Q4_K.rules[0].weight)])
    improve_folder(tmp_path / "source", tmp_path / "model.gguf", config, texts(), GPTQ, format="gguf")
    fq.prepare(model, config)
    fq.ptq.improve(model, texts(), GPTQ, judge=[])
    values = fq.snapshot(model).weights["model.layers.1.mlp.down_proj.weight"].values()
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}["blk.1.ffn_down.weight"]
    assert held.tensor_type.name == "Q4_K"
    assert torch.equal(torch.from_numpy(gguf.quants.dequantize(held.data, held.tensor_type)), values)


@pytest.mark.parametrize("content", [None, "{}", '{"architectures": ["NoSuchModel"]}'])
def test_a_folder_of_something_else_is_refused(content: str | None, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    if content is not None:
        (tmp_path / "source" / "config.json").write_text(content)
    with pytest.raises(CheckpointError):
        improve_folder(tmp_path / "source", tmp_path / "target", "int4_group32", texts())


@pytest.mark.filterwarnings("ignore")
def test_a_folder_without_one_of_its_shards_is_refused(tmp_path: Path) -> None:
    llama(**SMALL).save_pretrained(tmp_path / "source", max_shard_size="100KB")
    shard = sorted((tmp_path / "source").glob("model-*.safetensors"))[-2]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"cannot be (opened|loaded)"):
        improve_folder(tmp_path / "source", tmp_path / "target", "int4_group32", texts(), GPTQ)
