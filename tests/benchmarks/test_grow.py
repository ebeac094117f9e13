"""No function does more work for each layer of a larger model: lines are counted, nothing is timed."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from benchmarks import grow
from fakequant.model.engine import known_engines
from tests.support.lines import lines_of

FEW, MANY = 4, 16
FEWEST = 200
"""Lines below which a function is not looked at: a first call fills tables."""


class Mixed(nn.Module):
    """A block with all that `prepare` looks for: a functional weight, a product of inputs, a join and two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.a, self.b = nn.Parameter(torch.randn(8, 16)), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(torch.cat([x, torch.relu(self.a(x))], -1), self.weight)
        return torch.softmax(y @ x.mT, -1) @ self.b(x) + self.a(x)


def mixed(blocks: int) -> nn.Sequential:
    return nn.Sequential(*(Mixed() for _ in range(blocks)))


def convolutions(blocks: int) -> nn.Module:
    return nn.Sequential(*(grow.ConvBlock(8) for _ in range(blocks))).eval()


def prepared_convolutions(blocks: int) -> nn.Module:
    return fq.prepare(convolutions(blocks), "int8_weight_only")


def tied(blocks: int) -> nn.Module:
    """Each weight has two names in the model."""
    layers = [nn.Linear(32, 32) for _ in range(blocks)]
    for layer in layers[1::2]:
        layer.weight = layers[0].weight
    return fq.prepare(nn.Sequential(*layers), "nvfp4_weight_only")


def calibrated(blocks: int) -> nn.Module:
    model = fq.prepare(mixed(blocks), "int8", X, target="onnxruntime")
    fq.calibrate(model, [X], method="max", progress=False)
    return model


def weight_only(blocks: int) -> nn.Module:
    """Weights of 4 bits alone."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(blocks)]
    return fq.prepare(nn.Sequential(*layers), "int4_weight_only")


def per_layer(model: nn.Module) -> nn.Module:
    rules = {f"{i}.a": "int4_weight_only" for i in range(len(list(model.children())))}
    return fq.prepare(model, "int8", skip=[name.replace("a", "b") for name in rules], rules=rules)


X, IMAGES = torch.randn(4, 8, 8), torch.randn(4, 8, 16)
CALLS: dict[str, tuple[Callable[[int], nn.Module], Callable[[nn.Module, Path], object]]] = {
    **{
        f"prepare for {target}": (mixed, lambda model, _, target=target: fq.prepare(model, "int8", X, target=target))
        for target in [name for name, engine in known_engines().items() if engine.placement is not None]
    },
    "prepare with a rule for each layer": (mixed, lambda model, _: per_layer(model)),
    "fuse_batch_norm": (convolutions, lambda model, _: fq.fuse_batch_norm(model, IMAGES)),
    "fold_batch_norm": (prepared_convolutions, lambda model, _: fq.qat.fold_batch_norm(model, IMAGES)),
    "save": (calibrated, lambda model, folder: fq.save(model, folder / "model")),
    "save packed, weights with two names": (tied, lambda model, folder: fq.save(model, folder / "model", packed=True)),
    "summary": (calibrated, lambda model, _: fq.summary(model, X)),
    "layer_sqnr": (calibrated, lambda model, _: fq.layer_sqnr(model, [X], progress=False)),
    "set_scales": (calibrated, lambda model, _: fq.qat.set_scales(model, fq.qat.Scales.LEARNED)),
    "improve": (weight_only, lambda model, _: fq.ptq.improve(model, X.split(4, 1), "fast", progress=False)),
    "reconstruct": (weight_only, lambda model, _: fq.ptq.reconstruct(model, [X], iterations=1, progress=False)),
}
SWITCHES = ("restore.py", "off", "modes")
"""A file and functions whose loops turn the quantizers of the float model off beside each layer: a few stores each."""


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_work_grows_in_proportion_to_the_layers(name: str, tmp_path: Path) -> None:
    make, call = CALLS[name]
    found = []
    for blocks in (FEW, MANY):
        (folder := tmp_path / str(blocks)).mkdir()
        model = copy.deepcopy(make(blocks))
        found.append(lines_of(lambda model=model, folder=folder: call(model, folder)))
    few, many = found
    square = (MANY / FEW) ** 1.5
    assert not {
        code: (few[code], count)
        for code, count in many.items()
        if count > FEWEST and count > square * few[code] and {*re.split(r"[/: ]", code)}.isdisjoint(SWITCHES)
    }


def test_an_exponent_is_that_between_the_two_largest_sizes() -> None:
    row: dict[str, float | str] = {"8": 9.0, "32": 5.0, "128": 1.0, "512": 16.0}
    assert grow.exponent(row) == 2
    assert grow.exponent({**row, "512": "ConfigError: no"}) is None


def test_what_grows_too_fast_or_fails_is_named() -> None:
    rows: dict[str, dict[str, float | str]] = {
        "linear": {"128": 1.0, "512": 4.9},
        "square": {"128": 1.0, "512": 16.0},
        "fails": {"128": 1.0, "512": "ConfigError: no"},
    }
    assert grow.too_fast(rows) == ["square", "fails"]
    text = grow.table(rows, {"processor": "CPU", "torch": "2", "commit": "abc"})
    assert "| square |  |  | 1 | 16 | 2.00 |  |" in text
    assert "| fails |  |  | 1 | ConfigError | - |  |" in text
