"""A byte-level language model and its data: the source text of Python's standard library, which every machine has."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from fakequant.data.batches import track
from fakequant.nn import MatMul

SEED = 0
CONTEXT = 128
BATCH = 16
FEATURES = 32
LEARNING_RATE = 6e-3
_BYTES = 256


@dataclass(frozen=True)
class Corpus:
    """Bytes [n] of three sets of files: to train on, to choose settings by, and to report."""

    training: Tensor
    development: Tensor
    held_out: Tensor


def load_corpus(folder: Path | None = None) -> Corpus:
    """The `.py` files of a folder in the order of their names; about a tenth each for development and held out.

    The part of a file depends only on its name, so a new file in another version of Python does not move the others.

    Args:
        folder: by default that of the standard library; files in folders below it are left out.

    Raises:
        ValueError: too few files, so that a part has none.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    parts: dict[str, list[Path]] = {name: [] for name in ("training", "development", "held_out")}
    for file in sorted(folder.glob("*.py")):
        parts[_part(file.name)].append(file)
    empty = [name for name, files in parts.items() if not files]
    if empty:
        raise ValueError(f"{folder} has no .py file for {', '.join(empty)}; give a folder with more files")
    return Corpus(**{name: _read(files) for name, files in parts.items()})


def _part(name: str) -> str:
    return {0: "development", 1: "held_out"}.get(zlib.crc32(name.encode()) % 10, "training")


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

    def __init__(self, features: int = FEATURES, heads: int = 2, blocks: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_BYTES, features)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, features))
        self.blocks = nn.Sequential(*(Block(features, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(features)
        self.head = nn.Linear(features, _BYTES)
        # torch's default standard deviation of 1 would dominate the position embeddings.
        nn.init.normal_(self.bytes.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions[: text.shape[-1]]
        return self.head(self.norm(self.blocks(x)))


class Windows:
    """Random windows of a text as batches (bytes [16, CONTEXT], the next bytes); each iteration draws new windows."""

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


class Taught:
    """Windows with the logits of a teacher [16, CONTEXT, 256] instead of the next bytes."""

    def __init__(self, windows: Windows, teacher: nn.Module) -> None:
        self.windows, self.teacher = windows, teacher

    def __len__(self) -> int:
        return len(self.windows)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for text, _ in self.windows:
            with torch.no_grad():
                logits = self.teacher(text)
            yield text, logits


def divergence(logits: Tensor, taught: Tensor) -> Tensor:
    """Nats per byte between the distribution of a teacher and that of a model, from the logits of both.

    Source: Hinton et al., Distilling the Knowledge in a Neural Network, arXiv 1503.02531, at temperature 1; as the loss
    of quantization-aware training: Liu et al., LLM-QAT, arXiv 2305.17888.
    """
    learned, target = (part.flatten(0, -2).log_softmax(-1) for part in (logits, taught))
    return F.kl_div(learned, target, reduction="batchmean", log_target=True)


def loss(logits: Tensor, text: Tensor) -> Tensor:
    """Return the cross entropy in nats per byte, the loss of training and the metric."""
    return F.cross_entropy(logits.flatten(0, -2), text.flatten())


def train(corpus: Corpus, steps: int, features: int = FEATURES, seed: int = SEED) -> Transformer:
    """A float model, trained with one cycle of AdamW that ends at a learning rate of nearly zero."""
    torch.manual_seed(seed)
    model = Transformer(features)
    optimizer = adamw(model.parameters(), LEARNING_RATE)
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    fit(model, Windows(corpus.training, steps, seed), optimizer, rates)
    return model


def adamw(parameters: Iterable[nn.Parameter], learning_rate: float = 1.0) -> torch.optim.Optimizer:
    """Return the optimizer of all training here; the default rate of 1.0 is for a schedule that multiplies it."""
    return torch.optim.AdamW(parameters, learning_rate, betas=(0.9, 0.98))


def fit(model: nn.Module, windows: Windows, optimizer: torch.optim.Optimizer, rates: LRScheduler) -> None:
    """Train a model in place, one step per batch of windows; left in eval mode."""
    model.train()
    for text, following in track(windows, "training", len(windows), None):
        optimizer.zero_grad()
        loss(model(text), following).backward()
        optimizer.step()
        rates.step()
    model.eval()


@torch.no_grad()
def nats_per_byte(model: nn.Module, text: Tensor, windows: int = 512) -> float:
    """The loss on windows spread evenly over a text, the same for every model."""
    starts = torch.linspace(0, len(text) - CONTEXT - 1, windows).long()
    chosen = text.unfold(0, CONTEXT + 1, 1)[starts]
    parts = [loss(model(part[:, :-1]), part[:, 1:]) for part in chosen.split(BATCH)]
    return torch.stack(parts).double().mean().item()
