"""File formats that others add: what they store comes back, and damaged files are named."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CheckpointError
from fakequant.model.state import snapshots

X = torch.linspace(-2, 2, 32).reshape(4, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.w = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.linear(self.layer(x).relu(), self.w)


def encode(state: fq.QuantizedState) -> dict[str, Any]:
    weights = {name: dict(vars(state.weights[name])) for name in state.weights}
    weights = {name: own | {"spec": str(own["spec"])} for name, own in weights.items()}
    buffer = io.BytesIO()
    torch.save({"weights": weights, "tensors": {name: state.tensors[name] for name in state.others}}, buffer)
    return {"all.pt": buffer.getvalue(), "plan.json": json.dumps(state.plan).encode()}


def decode(files: Any) -> fq.QuantizedState:
    held = torch.load(io.BytesIO(files["all.pt"]))
    weights = {
        name: fq.WeightCodes(**own | {"spec": fq.QuantSpec.parse(own["spec"])}) for name, own in held["weights"].items()
    }
    return fq.QuantizedState.from_plan(json.loads(files["plan.json"]), held["tensors"], weights)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[nn.Module, Path]]:
    fq.register_codec("own", encode, decode)
    model = fq.prepare(Net().eval(), "int8", X, target="onnxruntime")
    fq.calibrate(model, [X])
    fq.save(model, tmp_path, format="own")
    yield model, tmp_path
    del snapshots._codecs["own"]


def test_a_format_of_another_gives_the_same_bits(saved: tuple[nn.Module, Path]) -> None:
    model, folder = saved
    assert torch.equal(fq.load(Net().eval(), folder, format="own")(X), model(X))


def _cut(folder: Path) -> None:
    (folder / "all.pt").write_bytes((folder / "all.pt").read_bytes()[:-500])


def _without(*keys: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        plan = json.loads((folder / "plan.json").read_bytes())
        held = plan
        for key in keys[:-1]:
            held = held[key]
        del held[keys[-1]]
        (folder / "plan.json").write_text(json.dumps(plan))

    return change


def _changed(weight: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        held = torch.load(folder / "all.pt")
        held["weights"][weight].update(values)
        torch.save(held, folder / "all.pt")

    return change


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (_cut, "is not in the format own, or it is damaged: its decode raised"),
    "empty": (
        lambda folder: (folder / "all.pt").write_bytes(b""),
        "is not in the format own, or it is damaged: its decode raised",
    ),
    "no JSON": (lambda folder: (folder / "plan.json").write_bytes(b"{"), "its decode raised JSONDecodeError"),
    "no scale": (_changed("w", scale=None), "codes of w have no scale"),
    "a file less": (lambda folder: (folder / "all.pt").unlink(), "all.pt"),
    "no layers": (_without("layers"), "the quantizer layer._weight_quantizer, which the checkpoint lacks"),
    "no sites": (_without("sites"), r"names the quantizer .*_sites.linear_0.weight"),
    "another format": (_changed("w", spec="int3 per_nothing"), "its decode raised SpecError"),
    "another quantizer": (
        _changed("w", quantizers=("nope",)),
        "w names the quantizer nope, which",
    ),
    "another shape": (_changed("w", codes=torch.zeros(8, 4, dtype=torch.int8)), "codes of w"),
    "codes out of range": (_changed("w", codes=torch.full((8, 8), 3.0)), "codes of w"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named_and_change_nothing(saved: tuple[nn.Module, Path], damage: str) -> None:
    change, message = DAMAGES[damage]
    change(saved[1])
    model = Net().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        fq.load(model, saved[1], format="own")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model.layer) is nn.Linear


@pytest.mark.parametrize("count", [2, 3])
def test_processes_that_gather_tensors_make_them_together(count: int, tmp_path: Path) -> None:
    """A lock around the work would make each of them wait for the other."""
    together, errors = Barrier(count, timeout=20), list[BaseException]()

    def make() -> Tensor:
        together.wait()
        return torch.ones(4)

    def write() -> None:
        try:
            snapshots.write_folder(
                tmp_path, {"t.safetensors": {"x": fq.LazyTensor((4,), torch.float32, make)}, "plan.json": b"{}"}
            )
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=write) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert {path.name for path in tmp_path.iterdir()} == {"t.safetensors", "plan.json"}
