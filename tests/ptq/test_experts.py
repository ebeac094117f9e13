"""Layers that get a part of the rows: experts to which values are routed that quantizing changes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from tests.support.kept import error_left
from tests.support.loops import batches


class Experts(nn.Module):
    """Routes each token to one of several layers; `calls_all`: layers that get no tokens are called, too."""

    def __init__(self, count: int = 4, *, calls_all: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate = nn.Linear(16, 16), nn.Linear(16, count)
        self.experts, self.last = nn.ModuleList(nn.Linear(16, 16) for _ in range(count)), nn.Linear(16, 4)
        self.calls_all = calls_all

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        chosen, y = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if len(rows) or self.calls_all:
                y.index_add_(0, rows, expert(x[rows]))
        return self.last(x + y)


class Half(nn.Module):
    """Gives each of two layers half of the rows, in the order of their first value."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        parts = x[x[:, 0].argsort()].chunk(2)
        return self.last(torch.cat([layer(part) for layer, part in zip(self.experts, parts, strict=True)]))


class Unreached(Experts):
    """The last layer never gets a token."""

    def __init__(self) -> None:
        super().__init__(calls_all=True)
        with torch.no_grad():
            self.gate.bias[-1] = -1e9


@pytest.mark.parametrize("size", [32, 3])  # with 3 tokens, some experts get none in float or quantized
def test_experts_that_get_other_tokens_in_float_get_no_drift(size: int) -> None:
    model = fq.prepare(Experts(), "INT4_WEIGHT_ONLY")
    given = [x[:size] for x in batches(32)]
    found = fq.ptq.improve(model, given, "fast", progress=False)
    said = "rows of its input differ too much from those in" if size == 32 else "on: the float model calls other layers"
    assert any("experts." in note and said in note for note in found.notes)
    assert found.before is not None
    assert found.after is not None
    assert found.after < found.before or (size == 3 and found.after == found.before)  # few rows may choose nothing


def test_as_many_rows_in_another_order_are_no_drift() -> None:
    found = fq.ptq.improve(fq.prepare(Half(), "INT4_WEIGHT_ONLY"), batches(8), "fast", progress=False)
    said = [note for note in found.notes if "differ too much from those in" in note]
    assert len(said) == 1
    assert {"experts.0", "experts.1"} <= set(said[0].partition(":")[0].split(", "))


@pytest.mark.parametrize("size", [32, 3])
@pytest.mark.parametrize("calls_all", [True, False])
def test_experts_learn_by_their_own_inputs(size: int, calls_all: bool) -> None:
    given = [x[:size] for x in batches(32)]

    def learn(model: nn.Module) -> None:
        found = fq.ptq.reconstruct(model, given, iterations=60, judge=[], progress=False)
        assert any("learn the output of the float block for quantized inputs" in note for note in found.notes)
        assert all(math.isfinite(layer.after) for layer in found.layers)

    assert error_left(Experts(calls_all=calls_all), "INT4_WEIGHT_ONLY", given, learn) < 1


@pytest.mark.parametrize("preset", ["INT4_WEIGHT_ONLY", "INT8"])
@pytest.mark.parametrize("work", ["fast", "best", "reconstruct"])
def test_a_layer_that_gets_empty_inputs_alone_stays_as_it_is(preset: str, work: str) -> None:
    model, given = fq.prepare(Unreached(), preset), batches(8)
    fq.calibrate(model, given, progress=False, unseen="float")
    weight = copy.deepcopy(model.experts[-1].weight)
    if work == "reconstruct":
        found = fq.ptq.reconstruct(model, given, iterations=20, judge=[], progress=False)
    else:
        found = fq.ptq.improve(model, given, work, judge=[], progress=False)
    notes = {layer.layer: layer.note for layer in found.layers}
    if preset == "INT4_WEIGHT_ONLY":  # with an input that was not seen, the layer is in float
        assert notes["experts.3"] == "no batch that chooses weights reaches it"
    assert torch.equal(weight, model.experts[-1].weight)
