"""Inputs that are zero in every calibration batch: calibration switches their quantizer off, and all else goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationWarning


class Silent(nn.Module):
    """A layer behind a dead ReLU, one that gets an input of zeros, and one that sees values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.behind, self.apart, self.last = (nn.Linear(8, 8) for _ in range(4))
        with torch.no_grad():
            self.first.weight.zero_()
            self.first.bias.fill_(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.behind(self.first(x).relu()) + self.apart(0 * x))


BATCHES = [torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
WORK: dict[str, Callable[[nn.Module, Path], Any]] = {
    "improve": lambda model, _: fq.ptq.improve(model, BATCHES, progress=False),
    "reconstruct": lambda model, _: fq.ptq.reconstruct(
        model, BATCHES, ["behind", "apart", "last"], iterations=4, progress=False
    ),
    "sensitivity": lambda model, _: fq.sensitivity(model, BATCHES, progress=False),
    "by a metric": lambda model, _: fq.sensitivity(model, [], lambda net: float(net(BATCHES[0]).square().mean())),
    "layer_sqnr": lambda model, _: fq.layer_sqnr(model, BATCHES),
    "report": lambda model, path: fq.report(model, BATCHES, path / "page.html"),
    "save": lambda model, path: fq.save(model, path / "saved"),
    "export": lambda model, path: fq.export_onnx(model, BATCHES[0], path / "model.onnx"),
}


@pytest.mark.parametrize("work", WORK)
def test_everything_goes_on_without_that_range(work: str, tmp_path: Path) -> None:
    model = fq.prepare(Silent(), "int8")
    with pytest.warns(CalibrationWarning, match="behind._input_quantizer, apart._input_quantizer"):
        fq.calibrate(model, BATCHES, progress=False)
    with warnings.catch_warnings(action="ignore"):
        found = WORK[work](model, tmp_path)
    assert bool(model(BATCHES[0]).isfinite().all())
    if work in ("sensitivity", "by a metric"):
        assert {one.layer for one in found} == {"first", "behind", "apart", "last"}
