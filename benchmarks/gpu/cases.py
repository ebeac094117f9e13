"""All cases that are timed on a GPU, and what each is timed beside. To time another: add a line here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from benchmarks import kinds
from benchmarks.cases import Entry, merged
from benchmarks.harness import ATEN, COMPILED, COPY, Case
from benchmarks.kinds import GROWTH, OTHERS, Kind
from benchmarks.limits import K, M
from benchmarks.peers import CALLS
from benchmarks.peers.measure import PeerCase
from benchmarks.training import FLOAT, Step
from examples.demo.text import Block
from tests.support.networks import ResidualBlock

from .observation import Observation

LARGEST = 64 * M
_SMALLER = (4 * K, 64 * K, M, 4 * M)
_BY_ATEN = (kinds.INT8_TENSOR, kinds.INT8_CHANNEL)
_HALVES = (torch.bfloat16, torch.float16)


def residual_network() -> nn.Module:
    """Four stages of two residual blocks each, 64 to 512 channels, for images [3, 64, 64]."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()]
    for channels, following in ((64, 128), (128, 256), (256, 512), (512, 0)):
        layers += [ResidualBlock(channels), ResidualBlock(channels)]
        layers += [nn.Conv2d(channels, following, 3, 2, 1)] if following else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


_MODELS = (
    Step("residual network of 20 convolutions, 64 images 64x64", residual_network, (64, 3, 64, 64)),
    Step("transformer's block with attention, 8 x 512 tokens", lambda: Block(1024, 16), (8, 512, 1024)),
)


def entries(device: str, largest: int = LARGEST) -> list[Entry]:
    """All cases on a device.

    Args:
        device: where.
        largest: elements of the large tensors.
    """
    of_tensors = merged([*_large(device, largest), *_small(device, largest), *_peers(device, largest)])
    return [*of_tensors, *_batches(device, largest), *_steps(device, largest)]


def _on(device: str, kind: Kind, elements: int, dtype: torch.dtype = torch.float32, *, backward: bool) -> Case:
    return replace(kind.case(elements, dtype, backward=backward), device=device)


def _large(device: str, elements: int) -> Iterable[Entry]:
    for backward in (False, True):
        for kind in (*GROWTH, kinds.MXFP8, *OTHERS):
            aten = (ATEN,) if kind in _BY_ATEN else ()
            yield Entry(_on(device, kind, elements, backward=backward), (COPY, *aten, COMPILED))
        for dtype in _HALVES:
            for kind in (*GROWTH, kinds.INT8_CHANNEL):
                aten = (ATEN,) if kind in _BY_ATEN else ()
                yield Entry(_on(device, kind, elements, dtype, backward=backward), (COPY, *aten))
    yield Entry(_on(device, kinds.LSQ, elements, backward=True), (COPY, ATEN))


def _small(device: str, largest: int) -> Iterable[Entry]:
    for elements in (size for size in _SMALLER if size < largest):
        for backward in (False, True):
            for kind in GROWTH:
                aten = (ATEN,) if kind in _BY_ATEN else ()
                yield Entry(_on(device, kind, elements, backward=backward), (COPY, *aten))
        yield Entry(_on(device, kinds.INT8_TENSOR, elements, backward=False), (COMPILED,))


def _peers(device: str, largest: int) -> Iterable[Entry]:
    for call in CALLS:
        for backward in call.kind.directions:
            case = PeerCase(call, largest, backward, device=device)
            yield Entry(case, (case.against,))


def _batches(device: str, largest: int) -> Iterable[Entry]:
    for dtype in (torch.float32, torch.bfloat16):
        for channels in (1, 256):
            yield Entry(Observation(largest, channels, dtype, device), (COPY,))


def _steps(device: str, largest: int) -> Iterable[Entry]:
    """Training steps; the batches of smaller runs have one example."""
    for model in _MODELS:
        shape = model.shape if largest == LARGEST else (1, *model.shape[1:])
        for compiled in (False, True):
            yield Entry(replace(model, shape=shape, compiled=compiled, device=device), (FLOAT,))
