"""Checkpoints are loaded into models on the meta device, tensor by tensor: the bits of other models, no second copy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CheckpointError
from fakequant.model.state import applying, snapshots
from tests.support.bits import assert_same_bits
from tests.support.models import images, small_net, tied

PRESETS = ["int8", "int4_group32", "fp8", "nvfp4", "mxfp4", "gguf_q4_k"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 256), nn.LayerNorm(256)).eval()


def batch() -> Tensor:
    return torch.randn(4, 256, generator=torch.Generator().manual_seed(0))


def empty(make=net) -> nn.Module:
    with torch.device("meta"):
        return make()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert [*first] == [*second]
    for name, value in first.items():
        assert not value.is_meta
        assert_same_bits(value, second[name], name)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_model_without_memory_gets_the_bits_of_one_with_memory(preset: str, packed: bool, tmp_path: Path) -> None:
    model = fq.prepare(net(), preset)
    fq.calibrate(model, [batch()], progress=False)
    fq.save(model, tmp_path, packed=packed)
    loaded = fq.load(empty(), tmp_path)
    assert_same(loaded, fq.load(net(), tmp_path))
    assert_same_bits(loaded(batch()), model(batch()))


def test_learned_scales_convolutions_and_buffers_come_too(tmp_path: Path) -> None:
    model = fq.prepare(small_net(), "int8")
    fq.calibrate(model, [images()], progress=False)
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    fq.save(model, tmp_path)
    loaded = fq.load(empty(small_net), tmp_path)
    assert_same(loaded, model)
    assert all(one.requires_grad for one in loaded.parameters())
    assert_same_bits(loaded(images()), model(images()))


@pytest.mark.parametrize("given", ["snapshot", "delivered"])
def test_snapshots_and_files_of_others_come_too(given: str, tmp_path: Path) -> None:
    model = fq.prepare(net(), "fp8", skip=[])
    fq.calibrate(model, [batch()], progress=False)
    if given == "snapshot":
        loaded = fq.apply(empty(), fq.snapshot(model))
    else:
        fq.deliver(model, tmp_path, "compressed-tensors")
        loaded = fq.read(tmp_path, empty())
        assert_same(loaded, fq.read(tmp_path, net()))
        assert_same(fq.read(tmp_path, empty(), dequantize=True), fq.read(tmp_path, net(), dequantize=True))
    assert_same_bits(loaded(batch()), model(batch()))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = fq.prepare(tied(), "int8_weight_only")
    loaded: Any = fq.load(empty(tied), fq.save(model, tmp_path))
    assert loaded[1].weight is loaded[0].weight
    assert_same_bits(loaded(torch.arange(16)), model(torch.arange(16)))


class Rotary(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


class Vector(nn.Parameter):
    """A parameter of a class of its own."""


class Aliased(nn.Module):
    """Weights that share memory as parameters of their own, that view another one, and that lists and an LSTM hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.view = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = nn.Parameter(self.one.weight.detach())
        self.flat, self.vector = nn.Parameter(torch.randn(128)), Vector(torch.randn(8))
        self.view.weight = nn.Parameter(self.flat.detach()[32:96].view(8, 8).t())
        self.recurrent = nn.LSTM(8, 8)
        self.held = {"biases": [self.one.bias], "vector": self.vector}

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(self.view(self.other(self.one(x))) + self.held["biases"][0])[0] + self.held["vector"]


def test_tensors_share_memory_as_they_did_without_it(tmp_path: Path) -> None:
    model = fq.prepare(Aliased(), "int8_weight_only")
    loaded: Any = fq.load(empty(Aliased), fq.save(model, tmp_path))
    x = torch.randn(3, 2, 8)
    assert_same_bits(loaded(x), model(x))
    assert loaded.one.weight.data_ptr() == loaded.other.weight.data_ptr()
    assert loaded.view.weight.data_ptr() == loaded.flat.data_ptr() + 32 * 4
    assert loaded.view.weight.stride() == (1, 8)
    assert type(loaded.vector) is Vector
    assert loaded.held["biases"][0] is loaded.one.bias


class Lost(Aliased):
    def __init__(self) -> None:
        super().__init__()
        self.held["tables"] = [torch.ones(3)]


class Unsaved(Aliased):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shared", self.flat.detach()[:16], persistent=False)
        self.register_buffer("own", torch.ones(2), persistent=False)


def test_attributes_and_views_that_nothing_fills_are_named(tmp_path: Path) -> None:
    fq.save(fq.prepare(Aliased(), "int8_weight_only"), tmp_path)
    for make, message in ((Lost, "in the attributes held; build"), (Unsaved, r"the checkpoint lacks own; build")):
        model = empty(make)
        with pytest.raises(CheckpointError, match=message):
            fq.load(model, tmp_path)
        assert type(model.one) is nn.Linear
        assert model.held["biases"][0] is model.one.bias
        assert all(one.is_meta for one in (*model.parameters(), *model.recurrent._flat_weights))


def test_tensors_that_no_file_holds_are_named_before_anything_changes(tmp_path: Path) -> None:
    fq.save(fq.prepare(Rotary(), "int8_weight_only"), tmp_path)
    model = empty(Rotary)
    before = {**model.state_dict(keep_vars=True)}
    with pytest.raises(
        CheckpointError, match=r"the checkpoint lacks angles; build these tensors on a device before load"
    ):
        fq.load(model, tmp_path)
    assert type(model[0]) is nn.Linear
    assert all(model.state_dict(keep_vars=True)[name] is one for name, one in before.items())
    wide = empty(Rotary)
    wide[0] = nn.Linear(4, 5, device="meta")
    with pytest.raises(CheckpointError, match=r"lacks angles; .*; 0.weight has shape \[4, 4\] there and \[5, 4\] in"):
        fq.load(wide, tmp_path)
    model.angles = torch.arange(4.0)
    assert not any(one.is_meta for one in fq.load(model, tmp_path).parameters())
    with torch.device("meta"), pytest.raises(CheckpointError, match="load is called in a context of the meta device"):
        fq.load(nn.Sequential(nn.Linear(4, 4)), tmp_path)


def test_a_failure_takes_the_memory_away_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fq.save(fq.prepare(net(), "int8_weight_only"), tmp_path)
    model = empty()

    def refuse(*_: object) -> None:
        raise ZeroDivisionError("of its own")

    monkeypatch.setattr(type(model[2]), "_load_from_state_dict", refuse)
    with pytest.raises(ZeroDivisionError, match="of its own"):
        fq.load(model, tmp_path)
    assert all(one.is_meta for one in model.parameters())
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("packed", [False, True])
def test_a_hook_writes_into_values_of_its_own(packed: bool, tmp_path: Path) -> None:
    model = fq.prepare(net(), "int8_weight_only")
    bias = model[0].bias.detach().clone()

    def change(_: nn.Module, state: dict[str, Tensor], *__: object) -> None:
        state["0.bias"][:2].zero_()
        state["0.bias"] = state["0.bias"] + 1

    hooked = [empty(), net()]
    for one in hooked:
        one[0].register_load_state_dict_pre_hook(change)
    loaded = [fq.apply(hooked[0], fq.snapshot(model)), fq.load(hooked[1], fq.save(model, tmp_path, packed=packed))]
    for one in loaded:
        assert_same_bits(one[0].bias[:2], torch.ones(2))
        assert_same_bits(one[0].bias[2:], bias[2:] + 1)
    assert_same_bits(model[0].bias, bias)


def test_a_dtype_that_does_not_fit_is_said_before_the_model_changes(tmp_path: Path, monkeypatch) -> None:
    fq.save(fq.prepare(net(), "int8_weight_only"), tmp_path)
    model = empty()
    model[3].bias = nn.Parameter(model[3].bias.to(torch.int32), requires_grad=False)
    monkeypatch.setattr(applying, "give_memory", None)
    with pytest.raises(CheckpointError, match=r"3.bias is stored as torch.float32, but the model has torch.int32"):
        fq.load(model, tmp_path)


def test_a_file_that_another_save_replaces_meanwhile_is_read_to_its_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(snapshots, "_MAPPED", 0)  # mapped anew before each tensor
    model = fq.prepare(net(), "int8_weight_only")
    fq.calibrate(model, progress=False)
    fq.save(model, tmp_path)
    state, _ = fq.model.state.checkpoint.read(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
        path.write_bytes(b"of another")
    assert_same(fq.apply(empty(), state), model)


def test_a_file_that_another_save_removes_while_it_is_opened_is_read_anew(tmp_path: Path, monkeypatch) -> None:
    model = fq.prepare(net(), "int8_weight_only")
    fq.calibrate(model, progress=False)
    fq.save(model, tmp_path)
    plain = torch.UntypedStorage.from_file

    def saves_meanwhile(path: str, *options: Any, **more: Any) -> Any:
        """Of safetensors, which has the file open, and opens it again for torch."""
        monkeypatch.setattr(torch.UntypedStorage, "from_file", plain)
        model[0].weight.data.mul_(2)
        fq.calibrate(model, progress=False)
        fq.save(model, tmp_path)
        Path(path).unlink(missing_ok=True)
        return plain(path, *options, **more)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", saves_meanwhile)
    assert_same(fq.load(empty(), tmp_path), model)


PEAK = """
import sys, torch, fakequant as fq
from torch import nn
def high():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:")) * 1024
def load(folder, count):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(count)))
    return fq.load(model, folder)
load(sys.argv[1], 1)
before = high()
model = load(sys.argv[2], 64)
print(high() - before - sum(one.nbytes for one in model.state_dict().values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells the peak of a process")
def test_a_load_needs_no_second_copy(tmp_path: Path) -> None:
    folders = [tmp_path / "small", tmp_path / "large"]
    for folder, count in zip(folders, (1, 64), strict=True):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(count)))
        fq.save(fq.prepare(model, "int8_weight_only"), folder)
    beyond = int(subprocess.run([sys.executable, "-c", PEAK, *folders], check=True, capture_output=True).stdout)
    assert beyond < 100 << 20, f"{beyond >> 20} MiB beyond the model's own 256"


class Keeping(nn.Module):
    """A module that keeps what it is given, and writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(256, 64), nn.LayerNorm(64)
        self.extra, self.kept = torch.ones(64), torch.zeros(64)

    def get_extra_state(self) -> Tensor:
        return self.extra

    def set_extra_state(self, state: Tensor) -> None:
        self.extra = state

    def _load_from_state_dict(self, state_dict, prefix, *arguments) -> None:
        state_dict[f"{prefix}norm.weight"][0] = 3.0
        state_dict[f"{prefix}norm.weight"].sum()
        self.kept = state_dict[f"{prefix}fc.bias"]
        super()._load_from_state_dict(state_dict, prefix, *arguments)


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_what_a_module_keeps_of_a_file_is_a_tensor_of_its_own(packed: bool, on_meta: bool, tmp_path: Path) -> None:
    model = fq.prepare(nn.Sequential(Keeping()), "int8_weight_only")
    fq.save(model, tmp_path, packed=packed)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    loaded: Any = fq.load(empty(lambda: nn.Sequential(Keeping())) if on_meta else nn.Sequential(Keeping()), tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    with open(file, "r+b") as content:
        content.seek(-512, 2)
        content.write(bytes(512))
    assert type(loaded[0].extra) is type(loaded[0].kept) is Tensor
    assert_same_bits(loaded[0].extra, torch.ones(64))
    assert_same_bits(loaded[0].kept, plain["0.fc.bias"])
    assert loaded[0].norm.weight[0] == 3.0
    assert_same_bits(loaded[0].norm.weight[1:], torch.ones(63))
