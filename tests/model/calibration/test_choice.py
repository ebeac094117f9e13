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
from fakequant.model.calibration.calibrate import METHODS
from fakequant.ptq import Ways


def net() -> nn.Sequential:
    """A model that does not read the first feature."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model[0].weight.data[:, 0] = 0.0
    return fq.prepare(model, "int8")


def batches(first: float = 1.0) -> Iterator[Tensor]:
    """Batches whose first element alone is so large: ranges need not hold it."""
    for seed in range(8):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))
        x[0, 0] = first
        yield x


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


@pytest.mark.parametrize("first", [50.0, 200.0])
def test_auto_takes_the_method_with_the_smallest_error_and_says_so(first: float, capsys) -> None:
    chosen = net()
    used = fq.calibrate(chosen, batches(first), "auto")
    said = capsys.readouterr().err
    held = [batch for number, batch in enumerate(batches(first)) if number % 4 == 1]
    errors = {}
    for method in METHODS:
        model = net()
        fq.calibrate(model, [batch for number, batch in enumerate(batches(first)) if number % 4 != 1], method)
        with torch.no_grad():
            quantized = torch.cat([model(x) for x in held])
            with fq.disabled(model):
                wanted = torch.cat([model(x) for x in held])
        errors[method] = float((quantized - wanted).double().square().sum() / wanted.double().square().sum())
    least = min(errors, key=errors.__getitem__)
    best = least if errors[least] < 0.9 * errors["mse"] else "mse"
    assert best == {50.0: "entropy", 200.0: "mse"}[first]
    assert f'method "auto" chose "{best}": error of the output {errors[best]:.2e}' in said
    assert "on 2 batches held back" in said
    assert {used[name].method for name in used if "input" in name} == {best}
    whole = net()
    fq.calibrate(whole, batches(first), best)
    assert same(chosen, whole)  # all batches make the ranges


def test_auto_chooses_by_the_tokens_that_count(capsys) -> None:
    """What the mask leaves out does not judge: a token with a large error is as good as none."""
    model, generator = net(), torch.Generator().manual_seed(3)
    given = [{"x": torch.randn(4, 6, 16, generator=generator), "mask": torch.ones(4, 6).bool()} for _ in range(6)]
    said = []
    for padded in (False, True):
        for batch in given if padded else ():
            batch["x"][:, 4:] *= 50.0
            batch["mask"][:, 4:] = False
        batches = given if padded else [{name: value[:, :4] for name, value in batch.items()} for batch in given]
        fq.calibrate(model, batches, "auto", forward=lambda model, batch: model(batch["x"]), mask="mask")
        said.append(capsys.readouterr().err)
    assert "error of the output" in said[0]
    assert said[1] == said[0]


def test_auto_with_one_batch_measures_on_it(capsys) -> None:
    model, whole = net(), net()
    batch = next(batches(200.0))
    fq.calibrate(model, [batch], "auto")
    fq.calibrate(whole, [batch])
    assert same(model, whole)
    assert "on 1 batch held back" in capsys.readouterr().err


def test_auto_has_nothing_to_choose_without_static_inputs(capsys) -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4)), "int8_weight_only")
    used = fq.calibrate(model, [torch.ones(1, 4)], "auto")
    assert list(used) == ["0._weight_quantizer"]
    assert capsys.readouterr().err == ""


def test_what_auto_refuses() -> None:
    with pytest.raises(ConfigError, match="takes no options, got percentile; name a method"):
        fq.calibrate(net(), batches(), "auto", percentile=99.0)

    model = nn.Sequential(nn.Linear(16, 16))
    fq.prepare(model, "int8")
    model.register_forward_hook(lambda _, args, y: y.argmax(1))
    with pytest.raises(CalibrationError, match="compares float outputs, and the model returns none"):
        fq.calibrate(model, batches(), "auto")
    assert not any(quantizer.calibrated for name, quantizer in fq.nn.quantizers(model).items() if "input" in name)
