"""A byte-level language model and its data: the source text of Python's standard library, which every machine has."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.nn import MatMul

SEED = 0
CONTEXT = 128
BATCH = 16
LEARNING_RATE = 4e-3
_BYTES = 256
_HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Corpus:
    """Bytes [n] of the files to train on, and of those that are held out."""

    training: Tensor
    held_out: Tensor


def load_corpus(folder: Path | None = None) -> Corpus:
    """The `.py` files of a folder in the order of their names; every tenth is held out.

    Args:
        folder: by default that of the standard library; files in folders below it are left out.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    held_out = files[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    return Corpus(_read([f for f in files if f not in held_out]), _read(held_out))


def _read(files: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


class Attention(nn.Module):
    """Causal self-attention whose two products are modules, so that `prepare` can quantize them."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(features, 3 * features)
        self.scores, self.mix = MatMul(), MatMul()
        self.out = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, length, features]; the result has its shape."""
        n, length, features = x.shape
        split = self.to_qkv(x).view(n, length, 3, self.heads, features // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        scores = self.scores(q, k.transpose(-1, -2)) * (features // self.heads) ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out(self.mix(weights, v).transpose(1, 2).reshape(n, length, features))


class Block(nn.Module):
    """Attention, then two linear layers, each added to its normalised input."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.before_attention, self.before_linear = nn.LayerNorm(features), nn.LayerNorm(features)
        self.attention = Attention(features, heads)
        self.linear = nn.Sequential(nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.linear(self.before_linear(x))


class Transformer(nn.Module):
    """A decoder for bytes [n, length <= CONTEXT]; gives the logits of the next byte [n, length, 256]."""

    def __init__(self, features: int = 128, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_BYTES, features)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, features))
        self.blocks = nn.Sequential(*(Block(features, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(features)
        self.head = nn.Linear(features, _BYTES)
        # As small as the positions, which would drown in torch's default of 1.
        nn.init.normal_(self.bytes.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions[: text.shape[-1]]
        return self.head(self.norm(self.blocks(x)))


class Windows:
    """Random windows of a text as batches (bytes [16, CONTEXT], the bytes that follow them); new ones each time."""

    def __init__(self, text: Tensor, batches: int, seed: int = SEED) -> None:
        self.text, self.batches = text, batches
        self.random = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        windows = self.text.unfold(0, CONTEXT + 1, 1)
        for _ in range(self.batches):
            chosen = windows[torch.randint(len(windows), (BATCH,), generator=self.random)]
            yield chosen[:, :-1], chosen[:, 1:]


def loss(logits: Tensor, text: Tensor) -> Tensor:
    """Nats per byte: what training minimises and what is measured."""
    return F.cross_entropy(logits.flatten(0, -2), text.flatten())


def train(corpus: Corpus, steps: int) -> Transformer:
    """A float model, trained with one cycle of AdamW."""
    torch.manual_seed(SEED)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for text, following in Windows(corpus.training, steps):
        optimizer.zero_grad()
        loss(model(text), following).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def nats_per_byte(model: nn.Module, text: Tensor, windows: int = 512) -> float:
    """The loss on windows spread evenly over a text, the same for every model."""
    starts = torch.linspace(0, len(text) - CONTEXT - 1, windows).long()
    chosen = text.unfold(0, CONTEXT + 1, 1)[starts]
    parts = [loss(model(part[:, :-1]), part[:, 1:]) for part in chosen.split(BATCH)]
    return torch.stack(parts).double().mean().item()
