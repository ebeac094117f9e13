"""Fixing the scale of the tensor for inputs with dynamic scales of blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.delivery import fix_global_scales
from fakequant.errors import CalibrationError

BATCHES = [torch.full((2, 32), 1.0), torch.full((3, 32), -2.0)]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, is_second: bool = False) -> torch.Tensor:
        return self.two(x) if is_second else self.one(x)


def test_the_largest_magnitude_of_all_batches_counts() -> None:
    model = fq.prepare(Branches(), "nvfp4", skip=[])
    fix_global_scales(model, BATCHES, forward=lambda m, x: (m(x), m(x / 4, is_second=True)))
    assert torch.equal(model.one.input_quantizer.global_scale, torch.tensor([448 * 6 / 2.0]))
    assert torch.equal(model.two.input_quantizer.global_scale, torch.tensor([448 * 6 / 0.5]))


def test_a_layer_that_no_batch_reaches_is_named_and_nothing_changes() -> None:
    model = fq.prepare(Branches(), "nvfp4", skip=[])
    with pytest.raises(CalibrationError, match=r"no batch has values other than 0 for two\._input_quantizer"):
        fix_global_scales(model, BATCHES)
    assert model.one.input_quantizer.global_scale is None
    assert not model.one.input_quantizer._forward_pre_hooks


def test_a_model_without_such_inputs_is_refused() -> None:
    with pytest.raises(CalibrationError, match="no dynamic inputs under one scale of the tensor"):
        fix_global_scales(fq.prepare(Branches(), "int8_per_token", skip=[]), BATCHES)
