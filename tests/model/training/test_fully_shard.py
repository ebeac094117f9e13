"""Layers whose class torch has swapped: by fully_shard, by a parametrization, by both."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn

import fakequant as fq
from fakequant.errors import CoverageWarning
from fakequant.nn.quantized.layers import QuantizedLayer, QuantLinear
from tests.support.bits import assert_same_bits

X = torch.linspace(-1, 1, 24).view(6, 4)


@pytest.fixture
def shard() -> Iterator[Callable[[nn.Module], nn.Module]]:
    if not distributed.is_gloo_available():
        pytest.skip("needs gloo")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda module: fully_shard(module, mesh=mesh)
    distributed.destroy_process_group()


def net(*, normed: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    if normed:
        nn.utils.parametrizations.weight_norm(model[0])
    return model


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("normed", [False, True], ids=["sharded", "parametrized and sharded"])
def test_sharded_layers_are_quantized_as_others(
    normed: bool, shard: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    alone, model = net(normed=normed), net(normed=normed)
    for module in (model[0], model[2], model):
        shard(module)
    with warnings.catch_warnings(action="error", category=CoverageWarning):
        for one in (alone, model):
            fq.prepare(one, "int8")
    assert all(isinstance(model[i], QuantLinear) for i in (0, 2))
    fq.calibrate(alone, [X])
    fq.calibrate(model, [X])
    assert_same_bits(model(X), alone(X))
    for one in (alone, model):
        one(X).sum().backward()
    for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert_same_bits(whole(got.grad), whole(expected.grad))
    restored = fq.load(net(normed=normed), fq.save(model, tmp_path))
    assert_same_bits(restored(X), alone(X))


def test_rules_name_sharded_layers_by_their_own_class(shard: Callable[[nn.Module], nn.Module]) -> None:
    model = net()
    shard(model[0])
    fq.prepare(model, fq.Config("first", (fq.Rule(layers="Linear", weight="int8"), fq.Rule("2"))))
    assert isinstance(model[0], QuantizedLayer)
    assert not isinstance(model[2], QuantizedLayer)


def test_sharded_layers_that_compute_something_else_are_named(shard: Callable[[nn.Module], nn.Module]) -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(Scaled(4, 8), nn.Linear(8, 2))
    shard(model[0])
    with pytest.warns(CoverageWarning, match=r"stays in float: Scaled \(1: its own forward\)"):
        fq.prepare(model, "int8")


def test_a_parametrization_of_a_sharded_layer_is_taken_away_again(shard: Callable[[nn.Module], nn.Module]) -> None:
    model = net()
    shard(model[2])
    nn.utils.parametrizations.weight_norm(model[0])
    fq.prepare(model, "int8")
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is QuantLinear
