"""Calibration is one step: all ranges are set, or nothing is changed."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.calibration import DEFAULT_METHOD
from fakequant.cli import commands
from fakequant.nn import Quantizer, quantizers
from fakequant.ptq.trial import METHODS

X = torch.linspace(-1, 1, 32).view(4, 8)


def test_one_default_everywhere() -> None:
    for function in (fq.calibrate, fq.recalibrate, commands.quantize):
        assert inspect.signature(function).parameters["method"].default == DEFAULT_METHOD
    assert fq.ptq.Ways().methods == (DEFAULT_METHOD,)
    assert METHODS[0] == DEFAULT_METHOD


class Idle(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x))


def prepared(state: str) -> Idle:
    torch.manual_seed(0)
    model = fq.prepare(Idle(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)), "int8")
    if state != "fresh":
        fq.calibrate(model, [X], forward=lambda model, x: nn.Sequential(*model)(x))
    if state == "learned":
        fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    return model.train()


def state_of(model: nn.Module) -> list[Any]:
    tensors = [(name, tensor.clone()) for name, tensor in model.state_dict().items()]
    rest = [(name, q.mode, q.calibrator, q.training, q.learned) for name, q in quantizers(model).items()]
    return [tensors, rest, [id(parameter) for parameter in model.parameters()]]


def same(one: list[Any], other: list[Any]) -> bool:
    (tensors, *rest), (others, *other_rest) = one, other
    names = [name for name, _ in tensors] == [name for name, _ in others]
    return (
        names and rest == other_rest and all(torch.equal(a, b) for (_, a), (_, b) in zip(tensors, others, strict=True))
    )


@pytest.mark.parametrize("state", ["fresh", "calibrated", "learned"])
@pytest.mark.parametrize("nth", range(4))
@pytest.mark.filterwarnings("ignore::fakequant.errors.CalibrationWarning")
def test_an_interrupt_between_two_ranges_changes_nothing(state, nth, monkeypatch):
    model, calls, set_qparams = prepared(state), [], Quantizer.set_qparams
    before = state_of(model)

    def interrupted(self, params):
        set_qparams(self, params)
        calls.append(self)
        if len(calls) == nth + 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Quantizer, "set_qparams", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fq.calibrate(model, [3 * X], unseen="float")
    assert same(state_of(model), before)
    monkeypatch.undo()
    fq.calibrate(model, [3 * X], unseen="float")
    assert not same(state_of(model), before)
    assert torch.isfinite(model(X)).all()


def test_calibrators_that_were_there_come_back():
    model = prepared("fresh")
    own = fq.calibration.make_calibrator("max", "int8")
    model[0]._input_quantizer.calibrator = own
    fq.calibrate(model, [X], pattern="[01]")
    assert model[0]._input_quantizer.calibrator is own
    assert model[1]._input_quantizer.calibrator is None


def test_batches_may_be_dicts_with_labels():
    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 2)

        def forward(self, x, labels=None):
            y = self.layer(x)
            return y if labels is None else nn.functional.mse_loss(y, labels)

    torch.manual_seed(0)
    model = fq.prepare(Labelled(), "int8")
    batch = {"x": X, "labels": torch.zeros(4, 2)}
    fq.calibrate(model, [batch], "max")
    assert set(batch) == {"x", "labels"}
    expected = fq.choose_qparams(X, model.layer._input_quantizer.spec).scale
    assert torch.equal(model.layer._input_quantizer.scale, expected)
