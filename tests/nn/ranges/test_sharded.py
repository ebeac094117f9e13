"""Layers that `parallelize_module` shared out over two processes: the bits of one, or an error that says why."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fakequant as fq
from fakequant.distributed import gathered, is_sharded, parallel_group
from fakequant.errors import ConfigError, NoWeightError
from fakequant.nn.quantized.layers import QuantizedLayer
from tests.support import ranks
from tests.support.bits import assert_same_bits

pytestmark = ranks.needs_gloo

LEARNED, EPOCH = fq.qat.Scales.LEARNED, fq.qat.Scales.EPOCH
# One of every granularity, of scales of scales, and of arithmetic that DTensors take another way.
SPECS = [
    "int8",
    "uint8 reciprocal",
    "int8 per_channel(0)",
    "int8 per_channel(1)",
    "int8 per_token",
    "int4 per_block(-1:16)",
    "int4 per_block(0:8)",
    "int8 per_block(0:8,1:16)",
    "float4_e2m1fn per_block(-1:16) scale=float8_e8m0fnu:floor",
    "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor",
    "int8 per_block(-1:16) q8_0",
    "int8 per_channel(0) multiplier",
]
PRESETS = ["GGUF_Q4_0", "GGUF_Q4_K", "GGUF_Q6_K", "GGUF_Q8_0", "NVFP4_FOUR_OVER_SIX", "FP8_BLOCK", "BITNET", "MXFP8"]
PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}


class Net(nn.Module):
    def __init__(self, width: int = 96, features: int = 64, middle: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(features, width)
        self.middle = nn.Identity() if middle is None else middle
        self.down = nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(torch.relu(self.up(x))))


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add = fq.nn.Add()

    def forward(self, x: Tensor) -> Tensor:
        return self.add(x, x)


def batch(features: int = 64) -> Tensor:
    return torch.randn(16, features, generator=torch.Generator().manual_seed(1))


def in_parts(layer: Any, x: Tensor) -> Tensor:
    """What `RowwiseParallel` computes: each process its share of the sum and of the bias."""
    is_quantized = isinstance(layer, QuantizedLayer)
    x, weight = (layer.quantized_input(x), layer.quantized_weight()) if is_quantized else (x, layer.weight)
    halves = zip(x.chunk(2, -1), weight.chunk(2, 1), strict=True)
    one, other = (F.linear(a, b, layer.bias / 2) for a, b in halves)
    return one + other


def alone(net: Net, config: Any, x: Tensor, **how: Any) -> Net:
    """The model in one process, whose last product is the sum of the two shares."""
    model = fq.prepare(net, config)
    model.down.forward = types.MethodType(in_parts, model.down)  # type: ignore[method-assign]
    fq.calibrate(model, [x], group=False, progress=False, **how)
    return model


def shared_out(net: Any, config: Any, x: Tensor, mesh: DeviceMesh, plan: Any = None, **how: Any) -> Any:
    plan = plan or {name: style() for name, style in PLAN.items()}
    model = fq.prepare(parallelize_module(net, mesh, plan), config)
    fq.calibrate(model, [x], progress=False, **how)
    return model


def assert_same(model: nn.Module, expected: nn.Module, x: Tensor) -> None:
    """Same ranges and results to the bit; gradients up to the order of torch's own sums."""
    pairs = zip(fq.nn.quantizers(model).values(), fq.nn.quantizers(expected).values(), strict=True)
    for one, other in pairs:
        assert (one.scale is None) is (other.scale is None), one.name
        if one.scale is not None and other.scale is not None:
            assert_same_bits(gathered(one.scale), other.scale)
    for training in (True, False):
        assert_same_bits(model.train(training)(x), expected.train(training)(x))
    for one in (model, expected):
        one.train()(x).square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert one.grad is not None, name
        torch.testing.assert_close(gathered(one.grad), other.grad, rtol=1e-4, atol=1e-5, msg=name)


def rules(spec: str) -> list[fq.Config]:
    dynamic = fq.TensorConfig(spec, dynamic=True)
    tensors = ({"weight": spec}, {"input": spec}, {"input": dynamic}, {"output": spec}, {"output": dynamic})
    return [fq.Config("one", (fq.Rule(layers=("Linear",), **given),)) for given in tensors]


def granularities(rank: int, folder: Path) -> None:
    mesh, x = init_device_mesh("cpu", (2,)), batch()
    for spec in SPECS:
        for config in rules(spec):
            assert_same(shared_out(Net(), config, x, mesh), alone(Net(), config, x), x)


def presets(rank: int, folder: Path) -> None:
    mesh, x = init_device_mesh("cpu", (2,)), batch(256)
    for name in PRESETS:
        config = getattr(fq.presets, name)
        model, expected = shared_out(Net(512, 256), config, x, mesh), alone(Net(512, 256), config, x)
        assert_same(model, expected, x)
        again = fq.load(Net(512, 256), fq.save(model, folder / f"{name}{rank}")).eval()
        again.down.forward = types.MethodType(in_parts, again.down)
        assert_same_bits(again(x), expected.eval()(x))
    for method in ("max", "percentile", "entropy"):
        given = fq.presets.INT8, x
        assert_same(
            shared_out(Net(512, 256), *given, mesh, method=method), alone(Net(512, 256), *given, method=method), x
        )


def borders(rank: int, folder: Path) -> None:
    mesh, x = init_device_mesh("cpu", (2,)), batch()
    text = (
        r"down\._{}_quantizer: blocks of 32 do not divide the 48 values of a process: axis 1 has 96, which 2 processes"
    )
    for tensor in ("weight", "input"):
        for dynamic in (False, True):
            given = {tensor: fq.TensorConfig("int4 per_block(-1:32)", dynamic=dynamic)}
            config = fq.Config("one", (fq.Rule("down", **given),))
            with pytest.raises(ConfigError, match=text.format(tensor)):
                shared_out(Net(), config, x, mesh)(x)
    with pytest.raises(ConfigError, match=r"up\._weight_quantizer: blocks of 32 .* axis 0 has 96"):
        shared_out(Net(), fq.Config("tiles", (fq.Rule("up", weight="int8 per_block(0:32,1:32)"),)), x, mesh)
    with pytest.raises(ConfigError, match=r"down\._weight_quantizer: super-blocks of 256 do not divide the 384 values"):
        shared_out(Net(768), fq.Config("k", (fq.Rule("down", fq.presets.GGUF_Q4_K),)), x, mesh)
    for spec in ("int8 stochastic", "nf4 per_block(-1:16)"):
        with pytest.raises(ConfigError, match=r"_weight_quantizer: .* cannot quantize a tensor that is sharded"):
            shared_out(Net(), fq.Config("one", (fq.Rule(layers=("Linear",), weight=spec),)), x, mesh)
    with pytest.raises(ConfigError, match=r"parallelize_module split layers over processes, .*group=False would give"):
        shared_out(Net(), "int8", x, mesh, group=False)


def uneven(rank: int, folder: Path) -> None:
    """`RowwiseParallel` takes parts that are plain tensors for equal ones."""
    mesh, x = init_device_mesh("cpu", (2,)), batch()
    with pytest.raises(ConfigError, match=r"down\._input_quantizer: the parts of .* would be \[16, 9[68]\] here"):
        shared_out(Net(97), "int8", x, mesh)
    one = Replicate()
    plan = {"up": ColwiseParallel(output_layouts=one), "down": RowwiseParallel(input_layouts=one)}
    assert_same(shared_out(Net(97), "int8", x, mesh, plan), alone(Net(97), "int8", x), x)


class Scaled(Tensor):
    """A type of a user."""


def parts_of_other_types(rank: int, folder: Path) -> None:
    """A collective of torch hands out a type of its own; its parts are parts, too."""
    mesh, x = init_device_mesh("cpu", (2,)), batch()
    plan = {"0.up": ColwiseParallel(), "0.down": RowwiseParallel(output_layouts=Shard(-1))}
    for as_scaled in (False, True):
        for given in (rules("int8")[2], rules("int8 per_token")[2], rules("int8 per_channel(-1)")[1]):
            model = nn.Sequential(Net(), Doubled())
            if as_scaled:
                model[1].register_forward_pre_hook(lambda _, given: (given[0] + 0.0).as_subclass(Scaled))
            config = fq.Config("add", (replace(given.rules[0], layers=("Add",)),))
            with pytest.raises(ConfigError, match=r"1\.add\._\w+_quantizer: parallelize_module split the layers"):
                shared_out(model, config, x, mesh, plan)(x)


def plain_parts(rank: int, folder: Path) -> None:
    """Between the layers a process has the part of a tensor, and nothing about the tensor tells."""
    mesh, x = init_device_mesh("cpu", (2,)), batch()

    def config(spec: str, *, dynamic: bool = False) -> fq.Config:
        return fq.Config("add", (fq.Rule(layers=("Add",), input=fq.TensorConfig(spec, dynamic=dynamic)),))

    for fits in (config("int8"), config("uint8"), config("int4 per_block(-1:16)", dynamic=True)):
        given = Net(middle=Doubled()), fits, x
        assert_same(shared_out(*given, mesh), alone(Net(middle=Doubled()), *given[1:]), x)
    nvfp4 = "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor"
    for spec, dynamic in (("int8", True), ("int8 per_token", True), (nvfp4, True), ("int8 per_channel(-1)", False)):
        with pytest.raises(
            ConfigError, match=r"middle\.add\._\w+_quantizer: parallelize_module split the layers .* \[16, 48\]"
        ):
            shared_out(Net(middle=Doubled()), config(spec, dynamic=dynamic), x, mesh)(x)
    model = shared_out(Net(middle=Doubled()), config("int8"), x, mesh)
    fq.qat.set_scales(model, LEARNED)
    with pytest.raises(ConfigError, match="each process has a part"):
        model(x)
    # Zeros are equal by chance, and the same tensor in both processes is quantized as in one.
    model = fq.prepare(
        parallelize_module(Net(middle=Doubled()), mesh, {"up": ColwiseParallel()}), config("int8", dynamic=True)
    )
    model.middle(torch.zeros(2, 2))
    with pytest.raises(ConfigError, match="each process has a part"):
        model.middle(x + rank)
    same = fq.prepare(Net(middle=Doubled()), config("int8", dynamic=True))
    assert_same_bits(model.middle(x), same.middle(x))


def learned(rank: int, folder: Path) -> None:
    mesh, x = init_device_mesh("cpu", (2,)), batch()
    for preset, methods in (("int8", ("lsq", "lsq_plus", "pact", "tqt")), ("int8_affine", ("lsq_plus",))):
        for method in methods:
            models = shared_out(Net(), preset, x, mesh), alone(Net(), preset, x)
            for model in models:
                fq.qat.set_scales(model, LEARNED, method)
            assert_same(*models, x)
            optimizers = [torch.optim.SGD(model.parameters(), 1e-4) for model in models]
            for optimizer in optimizers:
                optimizer.step()
            losses = [model(x).square().mean() for model in models]
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0.0)
    models = shared_out(Net(), "int8", x, mesh), alone(Net(), "int8", x)
    for model in models:
        fq.qat.set_scales(model, EPOCH)
    assert_same(*models, x)


def other_orders(rank: int, folder: Path) -> None:
    mesh, x = init_device_mesh("cpu", (2,)), batch()
    model = fq.prepare(Net(), "int8")
    fq.calibrate(model, [x], group=False, progress=False)
    expected = model(x)
    parallelize_module(model, mesh, {"up": ColwiseParallel(output_layouts=Replicate())})
    assert_same_bits(model(x), expected)
    # The quantizers of what comes behind such a layer know of it, too.
    late = fq.prepare(Net(middle=Doubled()), fq.Config("a", (fq.Rule(input=fq.TensorConfig("int8", dynamic=True)),)))
    parallelize_module(late, mesh, {"up": ColwiseParallel()})
    with pytest.raises(ConfigError, match=r"middle\.add\._\w+_quantizer: parallelize_module split the layers"):
        late(x)
    path = fq.save(alone(Net(), "int8", x), folder / f"alone{rank}")
    model = fq.load(parallelize_module(Net(), mesh, {name: style() for name, style in PLAN.items()}), path)
    assert_same(model, alone(Net(), "int8", x), x)
    for plan in ({"down": RowwiseParallel()}, {"up": ColwiseParallel()}):
        model = fq.prepare(Net(), "int8")
        fq.calibrate(model, [x], group=False, progress=False)
        fq.qat.set_scales(model, LEARNED)
        with pytest.raises(NoWeightError, match="parallelize_module on the float model first"):
            parallelize_module(model, mesh, plan)


def with_fully_shard(rank: int, folder: Path) -> None:
    """A mesh with an axis for data, of one process here, and one for the layers."""
    mesh, x = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "layers")), batch()
    config = rules("int8 per_token")[2]
    expected = alone(Net(), config, x)
    styles = {name: style() for name, style in PLAN.items()}
    for is_last in (True, False):
        model = parallelize_module(Net(), mesh["layers"], styles)
        if is_last:
            fq.prepare(model, config)
        for module in (model.up, model.down, model):
            fully_shard(module, mesh=mesh["data"])
        if not is_last:
            fq.prepare(model, config)
        fq.calibrate(model, [x], group=dist.group.WORLD, progress=False)
        assert is_sharded(model.up.weight)
        assert parallel_group(model) is not None
        assert_same_bits(model(x), expected(x))
    only = nn.Sequential(nn.Linear(8, 8))
    assert parallel_group(only) is None
    assert parallel_group(fully_shard(only, mesh=init_device_mesh("cpu", (2,)))) is None
    copies = nn.Sequential(nn.Linear(8, 8))
    assert parallel_group(fully_shard(copies, mesh=mesh)) is None


def test_two_processes(tmp_path: Path) -> None:
    works = (borders, uneven, parts_of_other_types, plain_parts, learned, other_orders, with_fully_shard)
    ranks.run(works, tmp_path)


def test_every_granularity_in_two_processes(tmp_path: Path) -> None:
    ranks.run((granularities, presets), tmp_path)
