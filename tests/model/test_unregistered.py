"""Modules in plain containers are said once, by prepare and by save."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import CoverageWarning


@dataclass
class Parts:
    layer: nn.Module


@dataclass(slots=True)
class Slots:
    layer: nn.Module


class Held(nn.Module):
    def __init__(self, hold: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.first, self.held = nn.Linear(64, 64), None
        vars(self)["held"] = hold(nn.Linear(64, 64))


HOLDS: dict[str, Callable[[nn.Module], Any]] = {
    "held[0]": lambda layer: [layer],
    "held[1]": lambda layer: (3, layer),
    "held['a']": lambda layer: {"a": layer},
    "held['b'] ": lambda layer: UserDict(b=layer),
    "held[0] ": lambda layer: deque([layer]),
    "held[0]['x'][1]": lambda layer: [{"x": (0, nn.Sequential(layer))}],
    "held.layer": Parts,
    "held.layer ": Slots,
    "held[0].layer": lambda layer: [Parts(layer)],
    "held": lambda layer: layer,
}


@pytest.mark.parametrize("path", HOLDS)
def test_modules_in_plain_containers_are_said(path: str, tmp_path: Path) -> None:
    model, text = Held(HOLDS[path]), rf"not part of a model: {path.strip().replace('[', '.').replace(']', '.')} \("
    with pytest.warns(CoverageWarning, match=text):
        fq.prepare(model, "INT8_WEIGHT_ONLY")
    with pytest.warns(CoverageWarning, match=text):
        fq.save(model, tmp_path)


def test_quantized_modules_in_a_list_are_said(tmp_path: Path) -> None:
    """Blocks that are prepared one by one: the file has none of them."""
    model = Held(lambda layer: [fq.prepare(nn.Sequential(layer), "INT8_WEIGHT_ONLY")])
    with pytest.warns(CoverageWarning, match=r"held.0. \(Sequential\)"):
        fq.prepare(model, "INT8_WEIGHT_ONLY")
    with pytest.warns(CoverageWarning, match=r"prepare, save, load and state_dict do not see them"):
        fq.save(model, tmp_path)


class Child(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.layer, self.parent = nn.Linear(64, 64), [parent]


class Fine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.ModuleList([nn.Linear(64, 64)])
        self.order, self.names, self.acts = [self.a, *self.b], {"a": self.a}, [nn.ReLU()]
        self.child = Child(self)
        self.itself: list[Any] = []
        self.itself.append(self.itself)
        self.values = [torch.ones(2), "text", 3, Parts]


def test_what_is_registered_elsewhere_or_has_no_parameters_is_not_said(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="error"):
        model = fq.prepare(Fine(), "INT8_WEIGHT_ONLY")
        fq.save(model, tmp_path)
        fq.prepare(Fine().child, "INT8_WEIGHT_ONLY")


def prepared() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4))
    model = fq.prepare(net, "int8", skip=["3"])
    fq.calibrate(model, [torch.randn(4, 8)], progress=False)
    return model


LATER: dict[str, Callable[[nn.Sequential], object]] = {
    "4 (Linear)": lambda m: m.append(nn.Linear(4, 2)),
    "2 (Linear)": lambda m: m.__setitem__(2, nn.Linear(8, 8)),
    "0 (Linear)": lambda m: m.__setitem__(0, nn.Sequential(nn.Linear(8, 8), nn.ReLU())),
}


@pytest.mark.parametrize("name", LATER)
def test_layers_that_come_after_prepare_are_named(name: str, tmp_path: Path) -> None:
    """A new head, an appended layer, a branch that re-parameterization made."""
    looks: dict[str, Callable[[nn.Module], object]] = {
        "calibrate": lambda m: fq.calibrate(m, [torch.randn(4, 8)], progress=False),
        "save": lambda m: fq.save(m, tmp_path / "saved"),
        "export": lambda m: fq.export_onnx(m, torch.randn(4, 8), tmp_path / "model.onnx"),
        "summary": fq.summary,
        "sensitivity": lambda m: fq.sensitivity(m, [torch.randn(4, 8)], progress=False),
        "improve": lambda m: fq.ptq.improve(m, [torch.randn(4, 8)], "fast", progress=False),
    }
    for look in looks.values():
        model = prepared()
        LATER[name](model)
        with pytest.warns(CoverageWarning, match=rf"were added after fakequant.prepare are in float: {name[0]}"):
            look(model)


def test_the_cure_that_is_named_works_and_layers_left_on_purpose_are_not_named(tmp_path: Path) -> None:
    model: Any = prepared()
    LATER["4 (Linear)"](model)
    fq.prepare(model.get_submodule("4"), "int8")
    for change in (lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        changed = change(model)
        with warnings.catch_warnings(action="error", category=CoverageWarning):
            fq.calibrate(changed, [torch.randn(4, 8)], progress=False)
            fq.save(changed, tmp_path / "saved")
            torch.compile(changed)
