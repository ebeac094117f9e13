"""The examples on which a report measures each layer alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.data.batches import run_batch
from fakequant.report import measure
from fakequant.report.measure import first_examples


def test_layers_alone_are_measured_on_as_many_examples_as_they_need(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = fq.prepare(nn.Sequential(nn.Linear(8, 4096)), "int8"), torch.randn(64, 8)
    fq.calibrate(model, [batch])
    part, said = first_examples(model, batch, model(batch), run_batch)
    assert torch.equal(part, batch[:16])
    assert said == "Each layer is measured alone on 16 of the 64 examples of the first batch."
    found = measure(model, [batch, batch])
    assert (found.alone_on, found.layers[0].alone) == (said, fq.sensitivity(model, [batch[:16]])[0].value)
    assert said in fq.report(model, [batch], tmp_path / "r.html").read_text()


class _Fixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(64, 4096)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (nn.Sequential(nn.Identity()), torch.ones(64, 8)),  # few values of the output
        (_Fixed(), torch.ones(64, 4096)),  # the number of rows is fixed
        (nn.Flatten(0), torch.ones(64, 4096)),  # outputs have no rows
        (nn.Bilinear(2, 2, 4096), (torch.ones(64, 2), torch.ones(64, 2), "text")),  # not only tensors
    ],
)
def test_other_batches_are_left_whole(model: nn.Module, batch: object) -> None:
    run = (lambda model, batch: model(*batch[:2])) if isinstance(batch, tuple) else run_batch
    part, said = first_examples(model, batch, run(model, batch), run)
    assert part is batch
    assert said == "Each layer is measured alone on the whole first batch."
