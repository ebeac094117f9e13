"""Checkpoints are loaded into models that `parallelize_module` shares out: each process reads its part alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fakequant as fq
from fakequant.distributed import gathered, is_sharded
from fakequant.errors import CheckpointError
from fakequant.model.state.snapshots import StoredTensors
from tests.support import ranks
from tests.support.bits import assert_same_bits
from tests.support.models import two_layers, zeroed

pytestmark = ranks.needs_gloo

SPECS = [
    "int8 per_tensor",
    "int8 per_channel(0)",
    "uint8 per_channel(1) asymmetric",
    "int4 per_block(-1:32)",
    "float8_e4m3fn per_block(0:16,-1:32)",
    "float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor",
    "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor",
]


def batch(seed: int = 0) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))


net = partial(two_layers, 64, 128, 64)


def shared_out(model: nn.Sequential) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def empty(make=net) -> nn.Module:
    with torch.device("meta"):
        return shared_out(make())


def zero() -> nn.Module:
    return shared_out(zeroed(net()))


def prepared(spec: str) -> nn.Module:
    model = fq.prepare(net(), fq.Config(fq.Rule(weight=spec)))
    fq.calibrate(model, group=False, progress=False)
    return model


def assert_gives(loaded: nn.Module, model: nn.Module) -> None:
    for (name, own), (_, expected) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert is_sharded(own) or "quantizer" in name or name == "2.bias"
        assert_same_bits(gathered(own), expected)
    kept, wanted = fq.snapshot(loaded).tensors, fq.snapshot(model).tensors
    assert {*kept} == {*wanted}
    for name in wanted:
        assert_same_bits(kept[name], wanted[name], name)


def every_granularity(rank: int, folder: Path) -> None:
    for number, spec in enumerate(SPECS):
        model = prepared(spec)
        right = shared_out(net())
        fq.prepare(right, fq.Config(fq.Rule(weight=spec)))
        fq.calibrate(right, progress=False)
        for packed in (False, True):
            path = fq.save(model, folder / f"{number}-{packed}-{rank}", packed=packed)
            plain = fq.load(net(), path)
            for start in (zero, empty):
                loaded = fq.load(start(), path)
                assert_gives(loaded, plain)
                assert_same_bits(loaded(batch()), right(batch()))


def codes_of_a_solver(rank: int, folder: Path) -> None:
    model = fq.prepare(net(), "int4_group32")
    fq.calibrate(model, [batch()], group=False, progress=False)
    fq.ptq.improve(model, [batch(seed) for seed in range(3)], "fast", judge=[], group=False, progress=False)
    for packed in (False, True):
        path = fq.save(model, folder / f"solver-{packed}-{rank}", packed=packed)
        loaded = fq.load(empty(), path)
        codes = loaded[0].weight_quantizer.fixed_codes
        assert codes is None or is_sharded(codes)
        assert_gives(loaded, fq.load(net(), path))


def learned_scales(rank: int, folder: Path) -> None:
    model = fq.prepare(net(), "int8")
    fq.calibrate(model, [batch()], group=False, progress=False)
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    loaded = fq.load(empty(), fq.save(model, folder / f"learned-{rank}"))
    assert_gives(loaded, model)
    loaded.train()(batch()).square().mean().backward()
    model.train()(batch()).square().mean().backward()
    for (name, own), (_, expected) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(gathered(own.grad), expected.grad, msg=name)


def a_process_reads_its_part(rank: int, folder: Path) -> None:
    path = fq.save(prepared("int8 per_channel(0)"), folder / f"part-{rank}")
    read: dict[str, int] = {}
    old = StoredTensors._read

    def counted(self: StoredTensors, name: str, region: object = None) -> Tensor:
        found = old(self, name, region)
        read[name] = read.get(name, 0) + found.numel()
        return found

    StoredTensors._read = counted  # type: ignore[method-assign]
    try:
        fq.load(empty(), path)
    finally:
        StoredTensors._read = old  # type: ignore[method-assign]
    assert read["0.weight"] == read["2.weight"] == 64 * 128 // 2
    assert read["0.bias"] == 128 // 2
    assert read["2.bias"] == 64


narrow = partial(two_layers, 64, 96, 64)
"""48 rows or 48 columns of a layer for each process."""


def borders_cut_blocks(rank: int, folder: Path) -> None:
    for spec, layer, axis in (("int4 per_block(-1:32)", "2", 1), ("int8 per_block(0:32,-1:32)", "0", 0)):
        model = fq.prepare(narrow(), fq.Config(fq.Rule(layer, weight=spec)))
        fq.calibrate(model, group=False, progress=False)
        path = fq.save(model, folder / f"cut-{layer}-{rank}")
        fresh = empty(narrow)
        with pytest.raises(CheckpointError, match=rf"^{layer}\._weight_quantizer: blocks of 32 .* 48 .* axis {axis}"):
            fq.load(fresh, path)
        assert all(parameter.is_meta for parameter in fresh.parameters())
        assert type(fresh[0]) is nn.Linear


def whole_inputs_are_needed(rank: int, folder: Path) -> None:
    model = fq.prepare(net(), "int4_group32")
    fq.calibrate(model, [batch()], group=False, progress=False)
    model[0].add_module("_input_transform", fq.nn.BlockHadamard(32))
    with pytest.raises(CheckpointError, match="layer 0 transforms its input and needs the whole input"):
        fq.load(empty(), fq.save(model, folder / f"rank-{rank}"))


def one_fails(rank: int, folder: Path) -> None:
    path = fq.save(prepared("int8 per_channel(0)"), folder / f"own-{rank}")
    for where in (path, folder / "nowhere"):
        if rank == 1 and where == path:
            next(path.glob("*.safetensors")).write_bytes(b"")
        model = zero()
        message = "truncated or damaged|holds no checkpoint" if rank or where != path else "rank 1 failed"
        with pytest.raises(CheckpointError, match=message):
            fq.load(model, where)
        assert type(model[0]) is nn.Linear
        assert not any(gathered(parameter).any() for parameter in model.parameters())


def test_two_processes(tmp_path: Path) -> None:
    works = (every_granularity, codes_of_a_solver, learned_scales, a_process_reads_its_part)
    ranks.run((*works, borders_cut_blocks, whole_inputs_are_needed, one_fails), tmp_path)
    assert not dist.is_initialized()
