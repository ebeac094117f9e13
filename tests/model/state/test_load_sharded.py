"""Checkpoints are loaded into models that `fully_shard` shares out: each process keeps its part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.distributed import gathered, is_sharded
from fakequant.errors import CheckpointError, OutputError
from fakequant.model.state import checkpoint
from tests.support import ranks
from tests.support.bits import assert_same_bits
from tests.support.models import shared_out, two_layers, zeroed

pytestmark = ranks.needs_gloo


def batch(seed: int = 0) -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))


net = partial(two_layers, 32, 64, 31)
"""31 outputs, which two processes do not divide."""


def empty() -> nn.Sequential:
    return shared_out(zeroed(net()))


def parts(model: nn.Module) -> dict[str, Tensor]:
    return {name: getattr(value, "_local_tensor", value).clone() for name, value in model.state_dict().items()}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    first, second = parts(one), parts(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert_same_bits(value, second[name], name)
    assert_same_bits(one(batch()), other(batch()))


def loads(rank: int, folder: Path) -> None:
    for preset in ("int8", "int4_group32", "nvfp4"):
        model = fq.prepare(net(), preset)
        fq.calibrate(model, [batch()], group=False, progress=False)
        if preset == "int4_group32":  # codes that rounding to nearest does not give
            fq.ptq.improve(model, [batch(seed) for seed in range(3)], "fast", judge=[], group=False, progress=False)
        path = fq.save(model, folder / f"{preset}-{rank}")
        loaded = fq.load(empty(), path)
        assert is_sharded(next(loaded.parameters()))
        assert_same(loaded, shared_out(fq.load(net(), path)))
        for own, expected in zip(loaded.parameters(), model.parameters(), strict=True):
            assert_same_bits(gathered(own), expected)
        assert_same_bits(loaded(batch()), model(batch()))


def one_fails(rank: int, folder: Path) -> None:
    """A process that reads another checkpoint is heard by the other before a model changes."""
    other = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 31), nn.Linear(31, 2))
    path = fq.save(fq.prepare(other if rank else net(), "int8_weight_only"), folder / f"own-{rank}")
    model = empty()
    before = parts(model)
    message = "layers that the model lacks: 3" if rank else "rank 1 failed, .* lacks: 3"
    with pytest.raises(CheckpointError, match=message):
        fq.load(model, path)
    assert type(model[0]).__name__ == "FSDPLinear"
    after = parts(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def without_memory(rank: int, folder: Path) -> None:
    """Models on the meta device; rank 1 has no part of a weight with one row."""

    narrow = partial(two_layers, 32, 64, 1)
    for number, (make, preset, packed) in enumerate(
        ((net, "int8", False), (net, "nvfp4", True), (narrow, "int8", False))
    ):
        model = fq.prepare(make(), preset)
        fq.calibrate(model, [batch()], group=False, progress=False)
        path = fq.save(model, folder / f"meta-{number}-{rank}", packed=packed)
        with torch.device("meta"):
            fresh = make()
        loaded = fq.load(shared_out(fresh), path)
        assert not any(value.is_meta for value in parts(loaded).values())
        assert_same(loaded, shared_out(fq.load(make(), path)))
        # A save of it, to which both give their parts, has the same bytes.
        again = fq.save(loaded, folder / f"again-{number}-{rank}")
        files = [{one.name for one in where.glob("*.safetensors")} for where in (path, again)]
        assert packed or files[0] == files[1]


def learned_scales_are_refused(rank: int, folder: Path) -> None:
    model = fq.prepare(net(), "int8")
    fq.calibrate(model, [batch()], group=False, progress=False)
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    with pytest.raises(CheckpointError, match=r"learned scales, .*; load before fully_shard"):
        fq.load(empty(), fq.save(model, folder / f"learned-{rank}"))


def other_plans_and_files_are_heard(rank: int, folder: Path) -> None:
    """Both raise each error at once: other checkpoints, a missing or damaged file, other models to save."""
    began = time.monotonic()
    presets = "int8_weight_only", "nf4_weight_only"
    paths = [fq.save(fq.prepare(net(), preset), folder / f"{preset}-of-{rank}") for preset in presets]
    model = empty()
    before = parts(model)
    other = net()
    nn.init.ones_(other[0].bias)
    paths.append(fq.save(fq.prepare(other, presets[0]), folder / f"values-of-{rank}"))
    for path in (paths[rank], paths[2 * rank]):  # of another plan, and of other values alone
        with pytest.raises(CheckpointError, match="the processes read different checkpoints: rank 1"):
            fq.load(model, path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        fq.load(model, folder / "nowhere" if rank else paths[0])
    (file,) = paths[1].glob("*.safetensors")
    if rank == 0:
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256"):
        fq.load(model, paths[1])
    assert type(model[0]).__name__ == "FSDPLinear"
    assert all(torch.equal(value, before[name]) for name, value in parts(model).items())
    with pytest.raises(CheckpointError, match="the processes save different models: rank 1"):
        fq.save(fq.prepare(empty(), presets[rank]), folder / f"other-{rank}")
    (folder / f"a-file-{rank}").write_text("")
    with pytest.raises(OutputError if rank else CheckpointError, match=r"a-file-1"):
        fq.save(fq.prepare(empty(), "int8"), folder / ("a-file-1" if rank else "a-folder"))
    assert time.monotonic() - began < 30


def a_disk_is_full(rank: int, folder: Path) -> None:
    """One process cannot write the third part; the other hears it at the next tensor."""
    began, model, made = time.monotonic(), fq.prepare(empty(), "int8_weight_only"), checkpoint.file_content

    def content(*given: Any) -> Iterator[bytes | memoryview]:
        for number, part in enumerate(made(*given)):
            if number == 2 and rank == 1:
                raise OSError("no space left")
            yield part

    checkpoint.file_content = content  # type: ignore[assignment]
    try:
        with pytest.raises(OSError if rank else CheckpointError, match="no space left"):
            fq.save(model, folder / f"full-{rank}")
    finally:
        checkpoint.file_content = made
    assert not [*(folder / f"full-{rank}").glob("*")]
    assert time.monotonic() - began < 30


def test_two_processes(tmp_path: Path) -> None:
    ranks.run((loads, one_fails, without_memory, learned_scales_are_refused), tmp_path)


def test_an_error_of_one_process_is_raised_by_both(tmp_path: Path) -> None:
    ranks.run((other_plans_and_files_are_heard, a_disk_is_full), tmp_path)
