"""What a shared scale rounds to nothing is named, with its largest value and the step."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationWarning


class Tail(nn.Module):
    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.box, self.score, self.join = nn.Linear(8, 8), nn.Linear(8, 8), join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.box(x) * 640.0, self.score(x).sigmoid())


def said(model: nn.Module, x: Tensor, **how: Any) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as told:
        fq.prepare(model.eval(), example=x, **how)
        fq.calibrate(model, [x, 0.5 * x], progress=False)
    return [str(one.message) for one in told if issubclass(one.category, CalibrationWarning)]


@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "qnn"])
@pytest.mark.parametrize(
    ("join", "where"),
    [
        (lambda box, score: torch.cat([box, score], 1), "input_1 of _sites.cat_0"),
        (lambda box, score: torch.stack([box, score]), "input_1 of _sites.stack_0"),
        (lambda box, score: torch.cat([torch.cat([score, score]), torch.cat([box, box])]), "input_0 of _sites.cat_2"),
    ],
)
def test_an_operand_beside_a_large_one(join: Any, where: str, target: str) -> None:
    if target == "onnxruntime" and "stack" in where:
        pytest.skip("each operand of a stack has its own scale there")
    lines = said(Tail(join), torch.randn(16, 8), config="int8", target=target)
    found = next(one for one in lines if "become 0" in one)
    assert re.search(rf"{re.escape(where)} \(largest 0\.\d+, step \d", found)


@pytest.mark.parametrize(
    ("layer", "x", "where"),
    [
        (nn.Linear(4, 4), torch.rand(32, 4) * torch.tensor([1000.0, 1, 1, 1000]), "channel 1, 2 of the input of 0"),
        (nn.Conv1d(3, 4, 1), torch.rand(8, 3, 5) * torch.tensor([[1.0], [1000], [1000]]), "channel 0 of the input of"),
        (nn.Conv2d(2, 4, 1), torch.rand(8, 2, 5, 5) * torch.tensor([[[1000.0]], [[0.5]]]), "channel 1 of the input of"),
    ],
)
def test_channels_of_what_the_model_gets(layer: nn.Module, x: Tensor, where: str) -> None:
    (line,) = said(nn.Sequential(layer, nn.ReLU()), x, config="int8")
    assert where in line


def test_usual_models_are_not_named() -> None:
    x = torch.randn(16, 8)
    assert said(Tail(lambda box, score: torch.cat([box / 640.0, score], 1)), x, config="int8", target="openvino") == []
    assert said(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), x, config="int8") == []


@pytest.mark.parametrize(("small", "named"), [(0.5, True), (0.51, False)])
def test_half_a_step_becomes_0_and_is_named(small: float, named: bool) -> None:
    x = torch.tensor([[127.0, small]])
    model = fq.prepare(nn.Sequential(nn.Linear(2, 2)), "int8", x)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fq.calibrate(model, [x], method="max", progress=False)
    assert float(model[0]._input_quantizer.scale) == 1.0
    assert bool(model[0]._input_quantizer(x)[0, 1] == 0) is named
    assert any("become 0" in str(one.message) for one in told) is named
