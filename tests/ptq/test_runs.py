"""How often `improve` and `reconstruct` run a model, by its own forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        q, k, v = (layer(self.norm(x)).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)),
        lambda: torch.randn(64, 16),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(288, 4)
        ),
        lambda: torch.randn(32, 3, 8, 8),
    ),
    "attention": (Attends, lambda: torch.randint(0, 20, (16, 12))),
}


def counted(net: str, number: int) -> tuple[nn.Module, list[Tensor], list[int]]:
    """A prepared net, batches, and what counts the calls of its forward."""
    torch.manual_seed(0)
    make, batch = NETS[net]
    model, runs = fq.prepare(make().eval(), "INT4_GROUP32"), [0]
    batches, own = [batch() for _ in range(number)], model.forward

    def forward(*args: Any) -> Any:
        runs[0] += 1
        return own(*args)

    model.forward = forward  # type: ignore[method-assign]
    return model, batches, runs


@pytest.mark.parametrize("number", [2, 4, 8])
@pytest.mark.parametrize("steps", ["fast", "best"])
@pytest.mark.parametrize("net", NETS)
def test_improve_runs_a_model_three_times_and_two_batches_once_more(net: str, steps: str, number: int) -> None:
    model, batches, runs = counted(net, number)
    found = fq.ptq.improve(model, batches, steps, progress=False)
    parts = sum(not row.note.startswith("no batch") for row in found.layers)  # run where all together do not help
    usual = 3 * number + 2 + 1 + 1  # the one that judges runs before the choices, too, and once more
    assert runs[0] in (usual, usual + parts)
    assert found.is_judged


def test_what_all_changes_lower_is_measured_once() -> None:
    model, batches, runs = counted("mlp", 8)
    found = fq.ptq.improve(model, batches, "fast", progress=False)
    assert found.remaining_error < 1
    assert runs[0] == 3 * 8 + 2 + 1 + 1
    assert [row.note for row in found.layers if row.note] == []


def test_without_a_judge_four_batches_measure() -> None:
    model, batches, runs = counted("mlp", 4)
    fq.ptq.improve(model, batches, "fast", judge=[], progress=False)
    assert runs[0] == 3 * 4 + 2 + 3 * 4 + 1


def test_without_drift_the_float_model_runs_on_what_judges_alone() -> None:
    model, batches, runs = counted("mlp", 8)
    found = fq.ptq.improve(model, batches, ["gptq"], progress=False)
    assert found.remaining_error < 1
    assert runs[0] == 8 + 2 + 7 + 3 + 1


def test_a_single_batch_measures_too_and_a_folder_runs_the_first_batch_once_more(tmp_path: Path) -> None:
    model, batches, runs = counted("mlp", 1)
    fq.ptq.improve(model, batches, "fast", progress=False)
    assert runs[0] == 3 + 1 + 3 + 1
    model, batches, runs = counted("mlp", 8)
    fq.ptq.improve(model, batches, "fast", checkpoint=tmp_path, progress=False)
    assert runs[0] == 3 * 8 + 2 + 1 + 2
