"""A run of `improve` that was ended goes on from its folder, and ends with the same bits."""

from __future__ import annotations

import copy
import hashlib
import importlib
import io
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant import files
from fakequant.errors import CheckpointError, ConfigError
from fakequant.ptq.stream import Stream
from tests.support.bits import assert_same_state, unchanged
from tests.support.changes import CHANGES, FACTORS, Scaled

improving = importlib.import_module("fakequant.ptq.improvement")
collecting = importlib.import_module("fakequant.ptq.collector")
CONFIGS = {
    "int4 inputs": fq.Config("test", (fq.Rule(input="int4", weight="int4 per_channel(0)"),)),
    "uint8 inputs": fq.Config("test", (fq.Rule(input="uint8 asymmetric", weight="int3 per_block(-1:8,pad)"),)),
    "nvfp4": fq.Config("test", (fq.Rule(weight="float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor"),)),
}
QUICK = ["gptq", "bias"]
OUTPUT = "another output in float, from another attribute of the model, inputs= or forward="


class Net(nn.Module):
    """Two layers that read one tensor, whose channels differ, a layer that is called twice, and one after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.one, self.other = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.twice, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.norm.weight[3] *= 60
            self.one.weight[:, 3] /= 60
            self.other.weight[:, 3] /= 60

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y = self.one(x).relu() + self.other(x)
        return self.last(self.twice(self.twice(y).tanh()))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 16, generator=generator) for _ in range(4)]


def prepared(config: str = "int4 inputs") -> nn.Module:
    model = fq.prepare(Net(), CONFIGS[config])
    fq.calibrate(model, batches(), progress=False)
    return model


def improved(model: nn.Module, folder: Path | None, steps: Any = QUICK) -> Any:
    return fq.ptq.improve(model, batches(), steps, checkpoint=folder, progress=False)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers for which something is chosen."""
    names, choose = list[str](), collecting.choose

    def counted(name: str, *rest: Any) -> Any:
        names.append(name)
        return choose(name, *rest)

    monkeypatch.setattr(collecting, "choose", counted)
    return names


@pytest.mark.parametrize(
    ("config", "steps"),
    [("int4 inputs", "best"), ("uint8 inputs", ["rotate", "gptq", "bias"]), ("nvfp4", "fast")],
)
def test_an_ended_run_goes_on(config: str, steps: Any, tmp_path: Path, chosen: list[str], monkeypatch: Any) -> None:
    whole, model = prepared(config), prepared(config)
    rows = improved(whole, None, steps)
    order = list(chosen)
    assert order == ["one", "other", "twice", "last"]
    replaced, renames = os.replace, []

    def cut_off(*names: Any) -> None:
        renames.append(names)
        if len(renames) == 3:
            raise KeyboardInterrupt
        replaced(*names)

    monkeypatch.setattr(files.os, "replace", cut_off)
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        improved(model, tmp_path, steps)
    chosen.clear()
    found = improved(model, tmp_path, steps)
    assert chosen == ["twice", "last"]
    assert_same_state(model, whole)
    assert str(found) == str(rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{number:05}.layer" for number in range(4)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": "fast"}, "another list of steps"),
        ({"batches": [x + 1 for x in batches()]}, "another set of batches"),
        ({"batches": batches()[:3], "steps": ["gptq"]}, "another set of batches and another list of steps"),
        ({"mask": lambda x: torch.ones(16, 1, dtype=torch.bool)}, "another mask"),
        ({"model": "uint8 inputs"}, "another model"),
        ({"forward": lambda model, x: model(2 * x)}, OUTPUT),
        ({"inputs": lambda x: 2 * x}, OUTPUT),
    ],
)
def test_another_run_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    improved(prepared(), tmp_path)
    model = prepared(given.pop("model", "int4 inputs"))
    said = f"holds a run of improve with {message}; call improve as in that run"
    with unchanged(model), pytest.raises(CheckpointError, match=said):
        fq.ptq.improve(model, **{"batches": batches(), "steps": QUICK, **given}, checkpoint=tmp_path, progress=False)


def scaled() -> nn.Module:
    model = fq.prepare(Scaled(Net()), CONFIGS["int4 inputs"])
    fq.calibrate(model, batches(), progress=False)
    return model


@pytest.mark.parametrize("change", [*CHANGES, "a global value that it reads"])
def test_a_model_that_differs_in_no_tensor_of_its_state_is_another_one(
    change: str, tmp_path: Path, monkeypatch: Any
) -> None:
    improved(scaled(), tmp_path)
    improved(scaled(), tmp_path)  # the same run
    model = scaled()
    if change in CHANGES:
        CHANGES[change](model)
    else:
        monkeypatch.setitem(FACTORS, "module", 2.0)
    with pytest.raises(CheckpointError, match=f"a run of improve with {OUTPUT};"):
        improved(model, tmp_path)


def test_a_model_that_draws_numbers_is_the_same_one(tmp_path: Path, chosen: list[str]) -> None:
    model = scaled()
    model.function = lambda x: x + torch.rand_like(x)
    improved(copy.deepcopy(model), tmp_path)
    chosen.clear()
    improved(model, tmp_path)
    assert chosen == []


@dataclass
class Example:
    """A batch that torch does not look into."""

    x: Tensor


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        (Tensor.numpy, torch.from_numpy),
        (Example, lambda batch: batch.x),
        (lambda x: (x, 2 * x), 0),
        (lambda x: (x, 2 * x), lambda batch: batch[0]),
    ],
)
def test_batches_of_any_kind_are_compared(kind: Any, inputs: Any, tmp_path: Path, chosen: list[str]) -> None:
    def run(batches: list[Any], inputs: Any = inputs) -> nn.Module:
        fq.ptq.improve(model := prepared(), batches, QUICK, inputs=inputs, checkpoint=tmp_path, progress=False)
        return model

    first = run([kind(x) for x in batches()])
    chosen.clear()
    assert_same_state(run([kind(x.clone()) for x in batches()]), first)
    assert chosen == []
    with pytest.raises(CheckpointError, match="a run of improve with another set of batches;"):
        run([kind(x + 1) for x in batches()])
    with pytest.raises(CheckpointError, match=f"a run of improve with {OUTPUT};"):
        run([kind(x) for x in batches()], lambda batch: batches()[1])


def test_batches_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    given = [{"x": x, "from": open(__file__)} for x in batches()]  # noqa: SIM115
    wanted = (
        "in a batch, a TextIOWrapper cannot be compared between two runs; give tensors, arrays, numbers and "
        "texts, or leave out the folder or file"
    )
    with pytest.raises(ConfigError, match=wanted):
        fq.ptq.improve(prepared(), given, QUICK, inputs=lambda b: b["x"], checkpoint=tmp_path, progress=False)
    fq.ptq.improve(prepared(), given, QUICK, inputs=lambda b: b["x"], progress=False)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    improved(prepared(), tmp_path)
    path = tmp_path / "00002.layer"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    model = prepared()
    said = "00002.layer is damaged; remove it, and the weights of its layer are chosen anew"
    with unchanged(model), pytest.raises(CheckpointError, match=said):
        improved(model, tmp_path)
    path.unlink()
    improved(model, tmp_path)
    improved(whole := prepared(), None)
    assert_same_state(model, whole)


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(hashlib.sha256(content).digest() + content)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("values", torch.ones(3), r"is damaged: values of shape \[3\] for a weight of \[16, 16\]; remove it"),
        ("values", None, "is damaged: .*; remove it"),
        ("result", {"layer": 1}, "is damaged: result.layer is 1, not a text; remove it"),
        ("left", torch.ones(2), "is damaged: left is tensor.*, not an object; remove it"),
        ("bias", torch.ones(3), "is damaged: the change of a bias has another shape than the bias; remove it"),
        ("params", [], "is damaged: .*; remove it"),
        ("name", None, "holds the layer None in place of one"),
        ("run", None, r"is not a file of a chosen layer \(\w+\); pass another folder"),
        (None, b"", r"is not a file of a chosen layer \(\w+\); pass another folder"),
        (None, b"PK", r"is not a file of a chosen layer \(\w+\); pass another folder"),
    ],
)
def test_a_file_of_another_content_is_refused(key: str | None, value: Any, message: str, tmp_path: Path) -> None:
    """With the digest of its content."""
    improved(prepared(), tmp_path)
    path, buffer = tmp_path / "00000.layer", io.BytesIO()
    if key is not None:
        torch.save({**torch.load(io.BytesIO(path.read_bytes()[32:]), weights_only=True), key: value}, buffer)
    _put(path, value if key is None else buffer.getvalue())
    model = prepared()
    with unchanged(model), pytest.raises(CheckpointError, match=f"00000.layer {message}"):
        improved(model, tmp_path)


KILLED = f"""
import os, signal, sys
from pathlib import Path
from fakequant import files
import {__name__} as test
written, count = files._temporary, []
def temporary(*given):
    count.append(given)
    if len(count) == 3:
        os.write(os.open(given[0] / ".fakequant-0123456789abcdef.tmp", os.O_CREAT | os.O_WRONLY), b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return written(*given)
files._temporary = temporary
test.improved(test.prepared(), Path(sys.argv[1]))
"""


def test_a_kill_amid_a_file_leaves_the_others(tmp_path: Path, chosen: list[str]) -> None:
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=root, check=False, timeout=120)
    assert run.returncode == -signal.SIGKILL
    model = prepared()
    improved(model, tmp_path)
    assert chosen == ["twice", "last"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{number:05}.layer" for number in range(4)]
    improved(whole := prepared(), None)
    assert_same_state(model, whole)


@pytest.mark.parametrize(
    ("owner", "where", "error"),
    [
        (collecting.Collector, "choose_input", KeyboardInterrupt),
        (collecting.Collector, "sums", RuntimeError),
        (collecting, "choose", KeyboardInterrupt),
        (improving, "write", KeyboardInterrupt),
        (improving.FloatTwin, "keep", KeyboardInterrupt),
        (improving.ChosenLayersFolder, "put", KeyboardInterrupt),
        (Stream, "advance", KeyboardInterrupt),
    ],
)
def test_an_error_in_every_part_leaves_the_model(
    owner: Any, where: str, error: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    calls, own = list[Any](), getattr(owner, where)

    def raising(*given: Any, **named: Any) -> Any:
        calls.append(given)
        result = own(*given, **named)
        if len(calls) == 3:
            raise error("in the third layer")
        return result

    monkeypatch.setattr(owner, where, raising)
    model = prepared()
    with unchanged(model), pytest.raises(error):
        improved(model, tmp_path)
    assert model.training
    assert not model.one._forward_pre_hooks
