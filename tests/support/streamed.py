"""A small model of blocks, in memory and on the meta device, and how both are improved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.streaming import improve_folder

WIDTH = 32


class Block(nn.Module):
    """Gets hidden states, a scale for all blocks, and an optional mask; gives a tuple as older decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor, scale: Tensor, *, keep: Tensor | None = None) -> tuple[Tensor, None]:
        y = self.down(torch.relu(self.up(self.norm(hidden)))) * scale
        return hidden + (y if keep is None else y * keep), None


class Decoder(nn.Module):
    def __init__(self, count: int = 3, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(count)])
        self.head = nn.Linear(WIDTH, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden, keep = self.embed(ids), (ids > 0).float()[..., None]
        scale = torch.tensor(0.7)
        for block in self.blocks:
            hidden = block(hidden, scale, keep=keep)[0]
        return self.head(hidden)


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(**options).eval()
    with torch.no_grad():
        model.embed.weight[:, 3] *= 20.0  # an outlier channel
    return model


def without_weights(model: Decoder) -> tuple[nn.Module, Callable[[str], Mapping[str, Tensor]]]:
    def load(path: str) -> Mapping[str, Tensor]:
        return model.get_submodule(path).state_dict()

    return copy.deepcopy(model).to("meta"), load


def batches(count: int = 5) -> list[Tensor]:
    """Token ids, with padding of 0."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 50, (2, 12), generator=generator) for _ in range(count)]


def whole(model: nn.Module, preset: Any, steps: Any, mask: Any = None) -> nn.Module:
    fq.prepare(model, preset)
    if any(not q.dynamic for q in fq.nn.quantizers(model).values() if q.kind is fq.nn.Kind.INPUT):
        fq.calibrate(model, batches(), mask=mask)
    fq.ptq.improve(model, batches(), steps, judge=[], mask=mask)
    return model


def streamed(
    model: Decoder, folder: Path, preset: Any, steps: Any, mask: Any = None, name: str = "compressed-tensors"
) -> Any:
    """What `improve_folder` gives for the model, one block in memory at a time."""
    empty, load = without_weights(model)
    return improve_folder(empty, folder, preset, batches(), steps, load=load, mask=mask, format=name)
