"""Models made of what torch itself has: recurrence, attention, transposed convolutions, shared and computed weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from .architecture import Architecture, Built, images, tokens


class _Language(nn.Module):
    """Embedding, recurrence, output; the output has the weight of the embedding if it is tied."""

    def __init__(self, recurrence: Callable[..., nn.RNNBase], tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 32)
        self.recurrence = recurrence(32, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 96)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.recurrence(self.embedding(ids))[0])


class _SequenceToSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.transformer(source, target))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0])


class _UNet(nn.Module):
    """Down, attention by einsum over the positions, up, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.norm, self.qkv = nn.GroupNorm(4, 32), nn.Conv2d(32, 96, 1)
        self.up, self.last = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.first(x))
        inner = self.down(first)
        query, key, value = self.qkv(self.norm(inner)).flatten(2).chunk(3, dim=1)
        scores = torch.einsum("bcq,bck->bqk", query, key).div(32**0.5).softmax(-1)
        inner = inner + torch.einsum("bqk,bck->bcq", scores, value).view_as(inner)
        return self.last(torch.cat([self.up(inner), first], 1))


class _Shared(nn.Module):
    """One layer called twice, a bag of embeddings and a bilinear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.layer = nn.EmbeddingBag(96, 16), nn.Linear(16, 16)
        self.both, self.head = nn.Bilinear(16, 16, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bag(ids)
        y = self.layer(torch.relu(self.layer(x)))
        return self.head(self.both(x, y))


def _generator() -> Built:
    model = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4), nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh()
    )
    return model, [images(1, 4, 16), images(1, 4, 16)]


def _encoder() -> Built:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2), [torch.randn(2, 8, 32) for _ in range(2)]


def _language(recurrence: Callable[..., nn.RNNBase], tied: bool = False) -> Callable[[], Built]:
    return lambda: (_Language(recurrence, tied), [tokens(), tokens()])


def _computed(compute: Callable[[nn.Module], object]) -> Callable[[], Built]:
    """A discriminator whose convolutions compute their weights at every call."""

    def build() -> Built:
        layers = nn.Conv2d(3, 16, 4, 2, 1), nn.Conv2d(16, 32, 4, 2, 1), nn.Linear(32 * 16, 1)
        for layer in layers[:2]:
            compute(layer)
        model = nn.Sequential(layers[0], nn.LeakyReLU(0.2), layers[1], nn.LeakyReLU(0.2), nn.Flatten(), layers[2])
        return model, [images(16, 4), images(16, 4)]

    return build


def _pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.5)


ARCHITECTURES = [
    Architecture("nn LSTM", _language(nn.LSTM)),
    Architecture("nn GRU tied", _language(nn.GRU, tied=True)),
    Architecture("nn Transformer", lambda: (_SequenceToSequence(), [(torch.randn(2, 8, 32),) * 2 for _ in range(2)])),
    Architecture("nn TransformerEncoder", _encoder),
    Architecture("nn MultiheadAttention", lambda: (_Attention(), [torch.randn(2, 8, 32) for _ in range(2)])),
    Architecture("nn GAN generator", _generator),
    Architecture("nn UNet", lambda: (_UNet(), [images(16), images(16)])),
    Architecture("nn shared, Bilinear, EmbeddingBag", lambda: (_Shared(), [tokens(), tokens()])),
    Architecture("nn weight_norm, parametrized", _computed(parametrizations.weight_norm)),
    Architecture("nn spectral_norm, parametrized", _computed(parametrizations.spectral_norm)),
    Architecture("nn weight_norm, hooks", _computed(torch.nn.utils.weight_norm)),
    Architecture("nn spectral_norm, hooks", _computed(torch.nn.utils.spectral_norm)),
    Architecture("nn pruned", _computed(_pruned)),
]
