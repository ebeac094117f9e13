"""`verify_delivery`: what a file lacks or adds is a row, and a program that fails is a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.delivery import DeliveryFormat, LoadedFile, Part
from fakequant.delivery.format import _added
from fakequant.model.state.snapshots import QuantizedState, snapshot

X = torch.linspace(-3, 3, 2 * 64).reshape(2, 64)
Change = Callable[[QuantizedState], QuantizedState]


def prepared(preset: str = "INT8") -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.LayerNorm(64)).eval()
    model = fq.prepare(net, preset)
    fq.calibrate(model, [X], progress=False)
    return model


class Changed(DeliveryFormat):
    """A file that holds a state after a change; its programs are those of a function."""

    name, suffix = "changed", ".changed"

    def __init__(self, change: Change, programs: Callable[[], Iterator[LoadedFile]] = lambda: iter(())) -> None:
        self.change, self.programs = change, programs

    def why_not(self, part: Part) -> str | None:
        return None

    def encode(self, state: QuantizedState, model: nn.Module, parts: Sequence[Part]) -> dict[str, bytes]:
        return {"model.changed": b""}

    def recognizes(self, path: Path) -> bool:
        return path.suffix == self.suffix

    def decode(self, path: Path, model: nn.Module) -> QuantizedState:
        return self.change(snapshot(model))

    def engines(self, path: Path, model: nn.Module) -> Iterator[LoadedFile]:
        return self.programs()


def without_tensors(*ends: str) -> Change:
    return lambda state: replace(
        state, tensors={name: state.tensors[name] for name in state.tensors if not name.endswith(ends)}
    )


def without_quantizers(attribute: str) -> Change:
    def change(state: QuantizedState) -> QuantizedState:
        layers = {
            path: replace(one, quantizers={key: held for key, held in one.quantizers.items() if key != attribute})
            for path, one in state.layers.items()
        }
        return replace(state, layers=layers)

    return change


def report_of(path: Path, monkeypatch: pytest.MonkeyPatch, format: Changed, batches: Any = None) -> Any:
    monkeypatch.setitem(_added, "changed", format)
    model = prepared()
    return fq.verify_delivery(fq.deliver(model, path, "changed"), model, batches)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (without_tensors(".bias"), {"0.bias", "1.bias", "2.bias", "3.bias"}),
        (without_tensors("running_mean", "running_var"), {"1.running_mean", "1.running_var"}),
        (without_tensors("3.weight"), {"3.weight"}),
        (without_tensors("0._input_quantizer.scale"), {"0._input_quantizer.scale"}),
        (without_quantizers("_input_quantizer"), {"0._input_quantizer", "2._input_quantizer"}),
        (lambda state: replace(state, tensors={**state.tensors, "4.bias": torch.ones(3)}), {"4.bias"}),
        (
            lambda state: replace(state, layers={**state.layers, "9": state.layers["0"]}),
            {"9._input_quantizer", "9._weight_quantizer"},
        ),
    ],
)
def test_what_file_or_model_has_alone_is_a_row(
    change: Change, names: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = report_of(tmp_path, monkeypatch, Changed(change))
    assert {row.quantizer for row in found.rows if not row.intact} == names
    assert str(found).count("only in the file, or only in the model") == len(names)
    assert "since the export" not in str(found)
    assert not found.exact
    assert not found.passed


def test_what_is_as_the_model_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert report_of(tmp_path, monkeypatch, Changed(lambda state: state)).passed


def broken() -> Iterator[LoadedFile]:
    raise OSError("no such kernel")


def second_broken() -> Iterator[LoadedFile]:
    yield LoadedFile("first 1.0")
    raise KeyError("quant_method")


class Values(dict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        raise RuntimeError("no values")


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no CPU")


@pytest.mark.parametrize(
    ("programs", "text"),
    [
        (broken, "Not loaded by a program of changed beside this package's reader: OSError: no such kernel"),
        (second_broken, "beside this package's reader, first 1.0: KeyError: 'quant_method'"),
        (lambda: iter([LoadedFile("one", Values({"0.weight": 1}))]), "not read by one: RuntimeError: no values"),
        (lambda: iter([LoadedFile("one", model=Fails())]), "Not run by one: NotImplementedError: no CPU"),
    ],
)
def test_a_program_that_fails_is_a_fault_beside_the_rows(
    programs: Callable[[], Iterator[LoadedFile]], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = report_of(tmp_path, monkeypatch, Changed(lambda state: state, programs), [X])
    assert found.exact
    assert not found.passed
    assert len(found.rows) == 4
    assert text in str(found)


def test_an_interruption_is_none_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> Iterator[LoadedFile]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report_of(tmp_path, monkeypatch, Changed(lambda state: state, stopped))


class Shifted(nn.Module):
    """The model on other inputs, with two of its 128 outputs shifted."""

    def __init__(self, model: nn.Module, shift: float) -> None:
        super().__init__()
        self.model, self.shift = model, shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x + 1) + self.shift * torch.eye(2, 64).roll(3, 1)


@contextmanager
def with_inputs_plus_one(model: nn.Module) -> Iterator[None]:
    hook = model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    yield
    hook.remove()


@pytest.mark.parametrize(("shift", "on_average", "passed"), [(0, False, True), (1, False, False), (1, True, True)])
def test_outputs_are_compared_as_a_program_computes_them(
    shift: float, on_average: bool, passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Shifted(prepared(), shift)
    engine = LoadedFile("one", model=made, as_it=with_inputs_plus_one, tolerance=0.1, on_average=on_average)
    found = report_of(tmp_path, monkeypatch, Changed(lambda state: state, lambda: iter([engine])), [X])
    assert found.passed is passed, str(found)
    assert found.outputs[0].max_abs == pytest.approx(shift)
