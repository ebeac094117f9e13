"""Checkpoints are loaded into models that `fully_shard` shares out: each process keeps its part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fakequant as fq
from fakequant.distributed import is_sharded, whole
from fakequant.errors import CalibrationError, CheckpointError
from tests.support import ranks
from tests.support.bits import assert_same_bits

pytestmark = ranks.needs_gloo


def batch(seed: int = 0) -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))


def net() -> nn.Sequential:
    """31 outputs, which two processes do not divide."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 31)).eval()


def shared_out(model: nn.Sequential) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (2,))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model


def empty() -> nn.Sequential:
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return shared_out(model)


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
            assert_same_bits(whole(own), expected)
        assert_same_bits(loaded(batch()), model(batch()))


def one_fails(rank: int, folder: Path) -> None:
    """A process that reads another checkpoint is heard by the other before a model changes."""
    other = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 31), nn.Linear(31, 2))
    path = fq.save(fq.prepare(other if rank else net(), "int8_weight_only"), folder / f"own-{rank}")
    model = empty()
    before = parts(model)
    with pytest.raises(
        Exception, match="layers that the model lacks: 3" if rank else "rank 1 failed, .* lacks: 3"
    ) as error:
        fq.load(model, path)
    assert isinstance(error.value, CheckpointError if rank else CalibrationError)
    assert type(model[0]).__name__ == "FSDPLinear"
    after = parts(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_two_processes(tmp_path: Path) -> None:
    ranks.run((loads, one_fails), tmp_path)
