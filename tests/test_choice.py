"""The default method of calibration, and the choice of one by the output."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.calibration import DEFAULT_METHOD
from fakequant.errors import CalibrationError, ConfigError
from fakequant.model.choice import METHODS
from fakequant.ptq import Ways


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return fq.prepare(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), "int8")


def batches(power: int = 1) -> Iterator[Tensor]:
    for seed in range(8):
        yield torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)) ** power


def scales(model: nn.Module) -> dict[str, Tensor]:
    return {name: quantizer.scale for name, quantizer in fq.nn.quantizers(model).items()}


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(scale, scales(other)[name]) for name, scale in scales(one).items())


def test_one_default_everywhere() -> None:
    from fakequant.cli import commands

    for function in (fq.calibrate, fq.recalibrate, commands.quantize):
        assert inspect.signature(function).parameters["method"].default == DEFAULT_METHOD
    assert Ways().methods == (DEFAULT_METHOD,)
    assert METHODS[0] == DEFAULT_METHOD


@pytest.mark.parametrize("power", [1, 5])
def test_auto_takes_the_method_with_the_smallest_error_and_says_so(power: int, capsys) -> None:
    chosen = net()
    used = fq.calibrate(chosen, batches(power), "auto")
    said = capsys.readouterr().err
    held = [batch for number, batch in enumerate(batches(power)) if number % 4 == 1]
    errors = {}
    for method in METHODS:
        model = net()
        fq.calibrate(model, [batch for number, batch in enumerate(batches(power)) if number % 4 != 1], method)
        with torch.no_grad():
            quantized = torch.cat([model(x) for x in held])
            with fq.disabled(model):
                wanted = torch.cat([model(x) for x in held])
        errors[method] = float((quantized - wanted).double().square().sum() / wanted.double().square().sum())
    least = min(errors, key=errors.__getitem__)
    best = least if errors[least] < 0.95 * errors["mse"] else "mse"
    assert best == {1: "entropy", 5: "mse"}[power]
    assert f'method "auto" chose "{best}": error of the output {errors[best]:.2e}' in said
    assert "on 2 batches held back" in said
    assert {used[name].method for name in used if "input" in name} == {best}
    whole = net()
    fq.calibrate(whole, batches(power), best)
    assert same(chosen, whole)  # all batches make the ranges


def test_auto_with_one_batch_measures_on_it(capsys) -> None:
    model, whole = net(), net()
    batch = next(batches())
    fq.calibrate(model, [batch], "auto")
    fq.calibrate(whole, [batch])
    assert same(model, whole)
    assert "on 1 batches" in capsys.readouterr().err


def test_auto_has_nothing_to_choose_without_static_inputs(capsys) -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4)), "int8_weight_only")
    used = fq.calibrate(model, [torch.ones(1, 4)], "auto")
    assert list(used) == ["0._weight_quantizer"]
    assert capsys.readouterr().err == ""


def test_what_auto_refuses() -> None:
    with pytest.raises(ConfigError, match="takes no options, got percentile; name a method"):
        fq.calibrate(net(), batches(), "auto", percentile=99.0)

    class Picks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).argmax(1)

    model = nn.Sequential(nn.Linear(16, 16))
    fq.prepare(model, "int8")
    model.register_forward_hook(lambda _, args, y: y.argmax(1))
    with pytest.raises(CalibrationError, match="compares float outputs, and the model returns none"):
        fq.calibrate(model, batches(), "auto")
    assert not any(quantizer.calibrated for name, quantizer in fq.nn.quantizers(model).items() if "input" in name)
