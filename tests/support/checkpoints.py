"""Checkpoints that are damaged on purpose, and models that must not have changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

State = list[Any]


def state_of(model: nn.Module) -> State:
    """All that `load` may change of a model: classes, attributes, tensors by identity and by value."""
    modules = [
        (name, type(module), {key: value for key, value in vars(module).items() if not isinstance(value, dict)})
        for name, module in model.named_modules()
    ]
    tensors = [(name, tensor, tensor.detach().clone()) for name, tensor in model.state_dict(keep_vars=True).items()]
    return [modules, tensors]


def assert_as_before(model: nn.Module, before: State) -> None:
    modules, tensors = state_of(model)
    assert modules == before[0]
    assert [name for name, *_ in tensors] == [name for name, *_ in before[1]]
    for (name, now, value), (_, then, old) in zip(tensors, before[1], strict=True):
        assert now is then, name
        assert torch.equal(value.view(torch.uint8), old.view(torch.uint8)) if value.dim() else value == old, name


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "fakequant.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    manifest = json.loads((folder / "fakequant.json").read_text())
    tensors = load_file(folder / manifest["tensors"]["file"])
    change(tensors)
    put_tensors(folder, to_bytes(tensors))


def put_tensors(folder: Path, data: bytes) -> None:
    """Give a checkpoint other bytes for a tensor file, with a manifest that fits them."""
    digest = hashlib.sha256(data).hexdigest()
    file = f"model-{digest[:16]}.safetensors"
    (folder / file).write_bytes(data)
    new = {"file": file, "sha256": digest, "bytes": len(data)}
    change_manifest(folder, lambda manifest: manifest.update(tensors=new))
