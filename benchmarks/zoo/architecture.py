"""What a row of the matrix is made of: a model with random weights in a tiny configuration, and two batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, list[Any]]
"""A model and two batches, as `fakequant.calibrate` takes them."""


@dataclass(frozen=True)
class Architecture:
    """One row of the matrix.

    Args:
        name: the library and the model.
        build: makes the model and two batches; called after the seed is set.
    """

    name: str
    build: Callable[[], Built]


def images(size: int, count: int = 2, channels: int = 3) -> Tensor:
    """Random images [count, channels, size, size]."""
    return torch.randn(count, channels, size, size)


def tokens(length: int = 16, count: int = 2, vocabulary: int = 96) -> Tensor:
    """Random token ids [count, length]; the first ids are those of special tokens."""
    return torch.randint(4, vocabulary, (count, length))
