"""The files of a checkpoint: which stay, which go, and what other processes see meanwhile."""

import itertools
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import CheckpointError
from fakequant.model.state import checkpoint
from fakequant.model.state.checkpoint import load, remove_checkpoint, save
from tests.support.crashes import every_death
from tests.support.models import images, small_net


def model_of(value: float) -> nn.Module:
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4)), "int8_weight_only")
    with torch.no_grad():
        model[0].weight.fill_(value)
        model[0].bias.fill_(value)
    return model


def value_in(folder: Path) -> float:
    return load(nn.Sequential(nn.Linear(4, 4)), folder)[0].weight[0, 0].item()


def tensor_files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("model-*.safetensors")}


def test_files_of_others_stay(tmp_path: Path) -> None:
    names = {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model-0123456789abcdef.safetensors",
    }
    for name in names:
        (tmp_path / name).write_bytes(b"precious")
    for value in range(4):
        save(model_of(value), tmp_path)
    assert names < tensor_files(tmp_path)
    assert all((tmp_path / name).read_bytes() == b"precious" for name in names)


def test_a_manifest_cannot_have_files_of_others_deleted(tmp_path: Path) -> None:
    precious = tmp_path / "model-00001-of-00002.safetensors"
    precious.write_bytes(b"precious")
    (tmp_path / "other.txt").write_bytes(b"precious")
    for previous in (precious.name, "other.txt", "../other.txt", 3, None):
        save(model_of(1.0), tmp_path)
        path = tmp_path / "fakequant.json"
        path.write_text(path.read_text().replace('"previous": null', f'"previous": {previous!r}'.replace("'", '"')))
        save(model_of(2.0), tmp_path)
    assert precious.exists()
    assert (tmp_path / "other.txt").exists()


def test_the_tensors_before_are_kept_until_the_next_save(tmp_path: Path) -> None:
    met = []
    for value in (1.0, 2.0, 2.0, 3.0):
        save(model_of(value), tmp_path)
        met.append(tensor_files(tmp_path))
    assert [len(files) for files in met] == [1, 2, 2, 2]
    assert met[0] < met[1] == met[2]
    assert not met[0] & met[3]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """A file of tensors whose manifest never came; one of the user has another digest than its name says."""
    save(model_of(1.0), tmp_path)
    (tmp_path / "model-0123456789abcdef.safetensors").write_bytes(b"precious")
    child = os.fork()
    if not child:
        own = os.replace
        os.replace = lambda one, other: own(one, other) or os._exit(9)
        save(model_of(2.0), tmp_path)
        os._exit(0)
    assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 9
    assert (value_in(tmp_path), len(tensor_files(tmp_path))) == (1.0, 3)
    save(model_of(3.0), tmp_path)
    assert (value_in(tmp_path), len(tensor_files(tmp_path))) == (3.0, 3)  # that of before is kept for readers
    remove_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model-0123456789abcdef.safetensors"]


def test_a_save_that_dies_leaves_the_old_model_or_the_new_one(tmp_path: Path) -> None:
    values = itertools.cycle((1.0, 2.0, 3.0))
    now = {"old": next(values), "new": 0.0}

    def prepare() -> None:
        save(model_of(now["old"]), tmp_path)
        now["new"] = next(values)

    def check() -> None:
        found = value_in(tmp_path)
        assert found in (now["old"], now["new"])
        now["old"] = found

    assert every_death(prepare, lambda: save(model_of(now["new"]), tmp_path), check) >= 6
    save(model_of(9.0), tmp_path)
    assert value_in(tmp_path) == 9.0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_save_between_the_two_files_of_another_leaves_a_model(tmp_path: Path, monkeypatch) -> None:
    whole = checkpoint.write_in_order

    def another_first(files) -> None:
        monkeypatch.setattr(checkpoint, "write_in_order", whole)
        monkeypatch.setattr(checkpoint, "locked", lambda _: nullcontext(False))
        (first, data), (last, manifest) = files.items()
        whole({first: data})
        save(model_of(2.0), tmp_path)  # as of a process on a file system without locks
        whole({last: manifest})

    save(model_of(0.0), tmp_path)
    monkeypatch.setattr(checkpoint, "write_in_order", another_first)
    save(model_of(1.0), tmp_path)
    assert value_in(tmp_path) == 1.0


@pytest.mark.parametrize("saves", [1, 3])
def test_load_reads_the_manifest_again_when_its_tensors_are_gone(tmp_path: Path, monkeypatch, saves: int) -> None:
    save(model_of(0.0), tmp_path)
    read, left, saving = checkpoint.read_manifest, list(range(1, saves + 1)), False

    def before_others_save(folder):
        nonlocal saving
        manifest = read(folder)
        if left and not saving:
            value, saving = left.pop(0), True
            for step in (0.25, 0.5, 0.0):  # until the file that the manifest names is gone
                save(model_of(value + step), tmp_path)
            saving = False
        return manifest

    monkeypatch.setattr(checkpoint, "read_manifest", before_others_save)
    assert value_in(tmp_path) == saves


def test_a_file_that_is_gone_for_good_is_said_once(tmp_path: Path) -> None:
    save(model_of(0.0), tmp_path)
    next(tmp_path.glob("model-*")).unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*model-\w+\.safetensors: .*; save the model again"):
        value_in(tmp_path)


def test_a_file_of_another_size_is_not_read(tmp_path: Path, monkeypatch) -> None:
    save(model_of(0.0), tmp_path)
    with next(tmp_path.glob("model-*")).open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(CheckpointError, match=r"truncated or damaged: 1099511627776 bytes instead of"):
        value_in(tmp_path)


def test_a_checkpoint_of_an_earlier_version_loads_and_is_replaced(tmp_path: Path) -> None:
    model = fq.prepare(small_net(), "int8")
    fq.calibrate(model, [images()])
    save(model, tmp_path / "now")
    shutil.copytree(tmp_path / "now", tmp_path / "then")
    path = tmp_path / "then" / "fakequant.json"
    lines = path.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if '"versions"' in line)
    end = next(i for i in range(start, len(lines)) if "}" in lines[i])
    kept = [line for i, line in enumerate(lines) if not start <= i <= end and '"previous"' not in line]
    path.write_text("\n".join(kept))
    assert torch.equal(load(small_net(), tmp_path / "then")(images()), model(images()))
    save(model_of(1.0), tmp_path / "then")
    assert len(tensor_files(tmp_path / "then")) == 2
