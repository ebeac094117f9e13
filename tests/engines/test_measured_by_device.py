"""What measures a model measures the codes that its engine stores, where its arithmetic is known."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import fakequant as fq
from fakequant.cli.commands import app
from fakequant.nn import Mode
from fakequant.nn.device import plain

WITH_DEVICE = sorted({engine.name for engine in fq.known_engines().values() if engine.device is not None})
DIFFERS = "qnn"
"""The engine whose codes of this network are seen not to be those of the simulation; others differ in fewer."""
SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x).relu()
        return self.head((self.second(x) + x).relu().mean((2, 3)))

def model():
    torch.manual_seed(0)
    return Net().eval()

def calibration_batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, 8, 8, generator=generator) for _ in range(3)]

def evaluate(net):
    return net(calibration_batches()[1]).double().abs().sum().item()
"""
RECIPE: dict[str, Callable[..., object]] = {}
exec(SOURCE, RECIPE)
BATCHES: list[Tensor] = RECIPE["calibration_batches"]()  # type: ignore[assignment]


def net() -> nn.Module:
    return RECIPE["model"]()  # type: ignore[return-value]


def evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        return RECIPE["evaluate"](model)  # type: ignore[return-value]


def calibrated(target: str, batches: list[Tensor] = BATCHES) -> nn.Module:
    model = fq.prepare(net(), "int8_affine", batches[0], target=target)
    fq.calibrate(model, batches, progress=False, unseen="float")
    return model


def share(exact: Tensor, found: Tensor) -> float:
    exact, found = plain(exact).detach().double(), plain(found).detach().double()
    return float((found - exact).square().sum() / exact.square().sum())


def decibels(share: float) -> float:
    return -10 * math.log10(share)


@pytest.mark.parametrize("target", WITH_DEVICE)
def test_ratios_of_quantizers_are_those_of_the_stored_codes(target: str) -> None:
    """By hand: the exact result of the first convolution, and the codes that the engine stores of it."""
    model, x = calibrated(target), BATCHES[0]
    simulated = fq.layer_sqnr(model, [x], progress=False)
    found = fq.layer_sqnr(fq.set_execution(model, target), [x], progress=False)
    with torch.no_grad():
        exact = model.get_submodule("first")(x).relu()
        stored = model.get_submodule("second._input_quantizer")(exact)
    assert found["second._input_quantizer"] == pytest.approx(decibels(share(exact, stored)), rel=1e-9)
    assert found.keys() == simulated.keys()
    assert found["second._input_quantizer"] != simulated["second._input_quantizer"] or target != DIFFERS


@pytest.mark.parametrize("target", WITH_DEVICE)
def test_layers_alone_store_the_codes(target: str) -> None:
    """By hand: the last layer, whose output has a quantizer, too."""
    model, x = calibrated(target), BATCHES[0]
    alone = {found.layer: found.value for found in fq.sensitivity(model, [x], progress=False)}
    found = {found.layer: found.value for found in fq.sensitivity(fq.set_execution(model, target), [x], progress=False)}
    with torch.no_grad():
        for name, quantizer in fq.nn.quantizers(model).items():
            quantizer.mode = Mode.QUANTIZE if name.startswith("head.") else Mode.OFF
        assert found["head"] == pytest.approx(decibels(share(net()(x), model(x))), rel=1e-9)
    assert found["head"] != alone["head"] or target != DIFFERS


@pytest.mark.parametrize("target", WITH_DEVICE)
def test_reports_have_the_same_figures(target: str, tmp_path: Path) -> None:
    model = fq.set_execution(calibrated(target), target)
    page = fq.report(model, BATCHES[:1], tmp_path / "a.html", evaluate, progress=False, advise=False)
    shown = json.loads(page.with_suffix(".json").read_text())
    layers = {layer["name"]: layer for layer in shown["layers"]}
    ratios = fq.layer_sqnr(model, BATCHES[:1], progress=False)
    assert layers["second"]["input_sqnr"] == ratios["second._input_quantizer"]
    assert layers["head"]["alone"] == {s.layer: s.value for s in fq.sensitivity(model, BATCHES[:1])}["head"]
    assert shown["accuracy"][1]["value"] == evaluate(model)
    assert evaluate(model) != evaluate(fq.set_execution(model, "simulate")) or target != DIFFERS


@pytest.mark.parametrize("target", WITH_DEVICE)
def test_trials_of_a_target_are_judged_by_its_codes(target: str) -> None:
    """The second batch judges, the others calibrate."""
    model = calibrated(target, BATCHES[::2])
    wanted, simulated = net()(BATCHES[1]), share(net()(BATCHES[1]), model(BATCHES[1]))
    fq.set_execution(model, target)
    error, metric = share(wanted, model(BATCHES[1])), evaluate(model)
    ways = fq.ptq.Ways(["int8_affine"], steps=[None])
    compared = fq.compare(net(), BATCHES, ways, target=target, metric=evaluate, progress=False).best
    advised = fq.advise(
        net(), BATCHES, target=target, presets=["int8_affine"], floor=0.0, metric=evaluate, progress=False
    ).best.measured
    for row in (compared, advised):
        assert row.error == pytest.approx(error, rel=1e-9)
        assert row.metric == metric
    assert abs(error - simulated) > 1e-3 * error or target != DIFFERS


def test_comparisons_try_the_presets_of_their_target() -> None:
    rows = fq.compare(net(), BATCHES, target="qnn", progress=False).rows
    assert {row.preset for row in rows} == {"INT8_AFFINE"}


def test_the_command_line_measures_by_the_target(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(SOURCE)
    given = ["quantize", tmp_path / "recipe.py", "--out", tmp_path / "out", "--preset", "int8_affine", "-q"]
    figures = []
    for more in (["--target", "qnn"], ["--target", "qnn", "--execution", "auto"]):
        result = CliRunner().invoke(app, [*map(str, given), *more, "--overwrite"])
        assert result.exit_code == 0, result.output
        figures.append(json.loads((tmp_path / "out" / "results.json").read_text()))
    model = calibrated("qnn")
    assert figures[1]["accuracy"][1]["value"] == pytest.approx(evaluate(fq.set_execution(copy.deepcopy(model), "auto")))
    fq.set_execution(model, "qnn")
    assert figures[0]["accuracy"][1]["value"] == evaluate(model) != figures[1]["accuracy"][1]["value"]
    assert "Measured by the arithmetic of qnn." in figures[0]["summary"]
    layers = {layer["name"]: layer for layer in figures[0]["layers"]}
    assert layers["second"]["input_sqnr"] == fq.layer_sqnr(model, BATCHES, progress=False)["second._input_quantizer"]
