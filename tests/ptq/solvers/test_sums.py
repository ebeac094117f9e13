"""Sums over rows are whole whenever they are asked for, also between rows."""

from __future__ import annotations

import pytest
import torch

from fakequant.ptq.solvers import sums as sums_module
from fakequant.ptq.solvers.problem import mean_of_diagonal, ordered
from fakequant.ptq.solvers.sums import InputSums


def test_both_halves_of_the_moments_follow_rows_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums_module, "_PANEL", 1)  # several panels
    sums, rows = InputSums(), torch.randint(-8, 8, (2, 30, 300)).float()
    sums.add(rows[:, :10])
    assert torch.equal(sums.moments, sums.moments.mT)
    shared = sums.with_drift(None)
    sums.add(rows[:, 10:])
    exact = rows.double().mT @ rows.double()
    assert torch.equal(sums.moments, exact)
    assert torch.equal(shared.moments, exact)  # not copied


def test_moments_in_order_have_the_upper_half_alone() -> None:
    moments = torch.randn(300, 300, dtype=torch.float64)
    moments = moments @ moments.T
    order, unit = torch.randperm(300), mean_of_diagonal(moments)
    assert torch.equal(ordered(moments, unit, order).triu(), (moments[order][:, order] / unit).float().triu())
