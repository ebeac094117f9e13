"""Blocks that pass on hidden states alone are chosen one after the other; models with other blocks are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError, ExportError
from fakequant.streaming import improve_folder
from tests.support.streamed import Block, Decoder, batches, decoder, streamed, whole, without_weights

pytest.importorskip("safetensors", reason="safetensors is not installed")


def shares(self: Any, ids: Tensor) -> Tensor:
    """Its blocks after the first one get what the first one gave."""
    hidden, scale = self.embed(ids), torch.ones(())
    for block in self.blocks:
        hidden = block(hidden, scale)[0]
        scale = hidden.mean()
    return self.head(hidden)


def between(self: Any, ids: Tensor) -> Tensor:
    hidden = self.embed(ids)
    for block in self.blocks:
        hidden = hidden + block(hidden, torch.ones(()))[0]
    return hidden


def number(self: Any, ids: Tensor) -> Tensor:
    hidden = self.embed(ids)
    for block in self.blocks:
        hidden = block(hidden, float(hidden.abs().max()))[0]
    return hidden


def cache(self: Any, ids: Tensor) -> Tensor:
    hidden, kept = self.embed(ids), dict[str, Tensor]()
    for block in self.blocks:
        hidden = block(hidden, kept)[0]
    return hidden


def pair(self: Any, ids: Tensor) -> Tensor:
    hidden = self.embed(ids)
    for block in self.blocks:
        hidden, _ = block(hidden, torch.ones(()))
    return hidden


def in_order(*places: int) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for place in places:
            hidden = self.blocks[place](hidden, torch.ones(()))[0]
        return hidden

    return forward


def of(forward: Callable[[Any, Tensor], Tensor]) -> Decoder:
    model = decoder()
    model.__class__ = type("Own", (Decoder,), {"forward": forward})
    return model


HEAD = fq.Config("head", [fq.Rule("head", weight="int8 per_channel(0)")])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": of(shares)}, ConfigError, "argument of blocks.1, besides the hidden states, depends on"),
        ({"model": of(between)}, ConfigError, "blocks.1 does not get the output of blocks.0"),
        ({"model": of(in_order(0, 1, 2, 0, 1, 2))}, ConfigError, "calls its blocks in the order .0, 1, 2, 0, 1, 2."),
        ({"model": of(number)}, ConfigError, "argument of blocks.1, besides the hidden states, depends on"),
        ({"model": of(cache)}, ConfigError, "gets a dict, which may keep values"),
        ({"model": of(pair)}, ConfigError, "does not run with its blocks replaced, .*improve it in memory"),
        ({"model": of(in_order(2, 1, 0))}, ConfigError, "calls its blocks in the order .2, 1, 0."),
        ({"steps": ["smooth", "gptq"]}, ConfigError, "'smooth' puts a transform"),
        ({"preset": "GGUF_Q4_0"}, ExportError, "compressed-tensors cannot hold .*blocks.0.down"),
        ({"preset": HEAD}, ConfigError, "nothing is quantized in the blocks"),
    ],
    ids=["shares", "between", "twice", "number", "cache", "pair", "order", "smooth", "format", "nothing"],
)
def test_what_cannot_be_done_is_refused_before_the_work(
    change: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    own = {"model": decoder(), "preset": "int4_group32", "steps": "fast"} | change
    with pytest.raises(error, match=f"(?s){message}"):
        streamed(own["model"], tmp_path / "out", own["preset"], own["steps"])
    assert not [*tmp_path.iterdir()]


def named(self: Any, ids: Tensor) -> Tensor:
    """Its blocks get another float tensor before the hidden states, by names alone."""
    hidden = self.embed(ids)
    for block in self.blocks:
        hidden = block(scale=torch.ones(2, 12, 1) * 0.5, hidden=hidden)[0]
    return self.head(hidden)


class InPlace(Block):
    def forward(self, hidden: Tensor, scale: Tensor, *, keep: Tensor | None = None) -> tuple[Tensor, None]:
        hidden += self.down(torch.relu(self.up(hidden))) * scale
        return hidden, None


@pytest.mark.parametrize("kind", ["named", "in place", "float blocks"])
def test_blocks_of_other_kinds(kind: str, tmp_path: Path) -> None:
    def made() -> Decoder:
        model = of(named) if kind == "named" else decoder()
        for block in model.blocks if kind == "in place" else ():
            block.__class__ = InPlace
        return model

    preset = "int4_group32"
    if kind == "float blocks":  # before a quantized one, and before the quantized head
        preset = fq.presets.INT4_GROUP32.with_rule(fq.Rule("blocks.[02].*"))
    streamed(made(), tmp_path, preset, "fast")
    expected, found = whole(made(), preset, ["ranges", "gptq", "drift", "bias"]), fq.read(tmp_path, made())
    first, second = fq.snapshot(expected).weights, fq.snapshot(found).weights
    assert [name for name in second if not torch.equal(first[name].codes, second[name].codes)] == []
    assert len(second) == (3 if kind == "float blocks" else 7)


@pytest.mark.parametrize("name", ["layers", "", ["blocks"], nn.Linear(2, 2)], ids=str)
def test_other_names_of_blocks_are_refused_with_those_that_there_are(name: Any, tmp_path: Path) -> None:
    empty, load = without_weights(decoder())
    with pytest.raises(ConfigError, match=r"for blocks=; its lists are 'blocks'$"):
        improve_folder(empty, tmp_path, "int4_group32", batches(), load=load, blocks=name)
