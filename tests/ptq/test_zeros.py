"""Zeros of a weight that are a structure stay zeros, and are said to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq

STRUCTURES = {
    "2:4": lambda w: w * (w.abs().unflatten(1, (-1, 4)).argsort(-1).argsort(-1) > 1).flatten(1),
    "rows": lambda w: w * (torch.arange(len(w)) % 2)[:, None],
    "blocks": lambda w: w * torch.kron(torch.rand(len(w) // 8, w.shape[1] // 8).gt(0.5), torch.ones(8, 8)),
}


def pruned(structure: str, preset: str, batches: list[Tensor]) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(STRUCTURES[structure](layer.weight))
    fq.prepare(model.eval(), preset)
    fq.calibrate(model, batches, progress=False)
    return model, [model[place].weight == 0 for place in (0, 2)]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    ("preset", "steps"),
    [("int8", "best"), ("int4_group32", "fast"), ("int4_group32", ["adaround"]), ("nvfp4_weight_only", "best")],
)
def test_zeros_that_are_a_structure_stay(structure: str, preset: str, steps: Any) -> None:
    batches = [torch.randn(64, 32, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    model, zeros = pruned(structure, preset, batches)
    found = fq.ptq.improve(model, batches, steps, judge=[], progress=False)
    for place, before in zip((0, 2), zeros, strict=True):
        assert bool((model[place].weight[before] == 0).all())
    assert sum("its zeros stay" in remark for row in found.layers for remark in row.remarks) == 2
    assert found.remaining_error < 1
