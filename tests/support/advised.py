"""Small models, their inputs, and what is advised for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.data.batches import Batches, KeptBatches
from fakequant.ptq.next_step import AdviceContext, next_step
from fakequant.ptq.trial import NextStep


def run(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def rows(seed: int) -> Tensor:
    """Inputs [32, 16] whose columns differ in size by 100."""
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(seed)) @ torch.diag(torch.logspace(-1, 1, 16))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def deep(blocks: int) -> nn.Module:
    layers = [nn.Linear(16, 16) for _ in range(blocks)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight)
    return nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in layers))


def given(batches: Iterable[Any]) -> KeptBatches:
    """Batches as a report keeps them."""
    return Batches(batches, "report", forward=run).kept()


def tried_on(model: nn.Module, batches: list[Tensor], *worst: str) -> NextStep:
    advice = next_step(model, given(batches), AdviceContext(worst=worst))
    assert advice is not None
    return advice
