"""How far the results of an engine are from the simulation's, and which distance is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import ExportError
from fakequant.export.engine_file import EngineFile, compared, steps_of

FILE = EngineFile(Path("m.pte"), "Engine 1.0", 1234, {"aten.mean": 2, "aten.exp": 1})


def test_a_description_names_the_distance_and_what_is_left() -> None:
    expected = torch.arange(8).reshape(2, 4) * 0.5
    found = expected.clone()
    found[1, 3] += 0.5
    file = compared(FILE, [expected], [found], [0.5])
    assert str(file).splitlines() == [
        "m.pte: 1,234 bytes, Engine 1.0",
        "run on the example: output 0: 1 of 8 differ, at most by 0.5, 1 steps, 21.5 dB, arg-max equal in 100.00%",
        "outside of its integer kernels: aten.mean (2), aten.exp",
    ]
    assert json.loads(json.dumps(file.to_dict()))["outputs"][0]["differing"] == 1


@pytest.mark.parametrize("found", [torch.zeros(4), torch.full((4,), torch.nan), torch.tensor([1.0, 2.0, 3.0, 9.0])])
def test_another_result_is_an_error(found: torch.Tensor) -> None:
    with pytest.raises(ExportError, match=r"Engine 1\.0 computes something else .* nothing was written"):
        compared(FILE, [torch.arange(1.0, 5)], [found], [None])


def test_other_shapes_are_an_error() -> None:
    with pytest.raises(ExportError, match=r"shapes \[\[3\]\], but the model returns \[\[4\]\]"):
        compared(FILE, [torch.zeros(4)], [torch.zeros(3)], [None])
    with pytest.raises(ExportError, match=r"shapes \[\], but"):
        compared(FILE, [torch.zeros(4)], [], [None])


def test_zeros_that_are_equal_are_no_error() -> None:
    assert compared(FILE, [torch.zeros(4)], [torch.zeros(4)], [None]).outputs[0].differing == 0


def test_steps_are_those_of_the_quantizers_of_the_results() -> None:
    x = torch.randn(4, 8)
    model = fq.prepare(nn.Sequential(nn.Linear(8, 4)).eval(), "INT8_AFFINE", x, target="xnnpack")
    fq.calibrate(model, [x], progress=False)
    scale = fq.nn.quantizers(model)["0._output_quantizer"].scale
    assert scale is not None
    assert steps_of(fq.export_pt2e(model, x)) == [scale.item()]
    model = fq.prepare(nn.Sequential(nn.Linear(8, 4)).eval(), "INT8_WEIGHT_ONLY")
    assert steps_of(fq.export_pt2e(model, x)) == [None]
