"""DTensors, of tensor parallelism: the bits of plain tensors, on a mesh of this one process."""

import copy
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fakequant as fq
from fakequant.errors import ConfigError
from tests.support.bits import assert_same_bits
from tests.support.pages import blocks, printed

PAGE = Path(__file__).parents[2] / "docs" / "execution.md"

# One of every family of formats and of scales.
SPECS = [
    "int8",
    "uint8 per_token",
    "int4 per_channel(0) reciprocal",
    "int8 per_tensor multiplier",
    "float8_e4m3fn",
    "float8_e5m2fnuz per_channel(1)",
    "float6_e2m3fn",
    "float8_e4m3fn per_block(-1:32) scale=float8_e8m0fnu:even",
    "int8 per_block(-1:32) scale=float8_e8m0fnu:ceil",
    "float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor",
    "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor",
]
PLACEMENTS = [Replicate(), Shard(0), Shard(1)]


@pytest.fixture(scope="module")
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def x():
    return torch.randn(8, 64)


def whole(y):
    assert isinstance(y, DTensor)
    return y.full_tensor()


@pytest.mark.parametrize("given", [False, True], ids=["dynamic", "parameters"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_values_codes_and_gradients_are_those_of_plain_tensors(mesh, x, spec, placement, given):
    params = fq.choose_qparams(x, spec)
    options = {"scale": params.scale, "zero_point": params.zero_point} if given else {}  # plain, on every process
    found, right = (
        distribute_tensor(x, mesh, [placement]).requires_grad_(not given),
        x.clone().requires_grad_(not given),
    )
    values = [fq.fake_quantize(one, spec, **options) for one in (found, right)]
    assert_same_bits(whole(values[0]), values[1])
    codes, params = fq.quantize(found.detach(), spec, **options)
    right_codes, right_params = fq.quantize(x, spec, **options)
    assert_same_bits(whole(codes).view(torch.uint8), right_codes.view(torch.uint8))
    if not given:
        assert_same_bits(whole(fq.dequantize(codes, params, spec)), fq.dequantize(right_codes, right_params, spec))
        for y in values:
            y.square().sum().backward()
        assert_same_bits(whole(found.grad), right.grad)


@pytest.mark.parametrize("spec", SPECS)
def test_the_gradient_of_a_scale_is_that_of_plain_tensors(mesh, x, spec):
    params = fq.choose_qparams(x, spec)
    replicated = [Replicate()]
    right, found = (params.scale.clone().requires_grad_() for _ in range(2))
    found = distribute_tensor(params.scale, mesh, replicated).requires_grad_()
    zero_point = params.zero_point
    fq.fake_quantize(x, spec, scale=right, zero_point=zero_point).square().sum().backward()
    zero_point = None if zero_point is None else distribute_tensor(zero_point, mesh, replicated)
    y = fq.fake_quantize(distribute_tensor(x, mesh, replicated), spec, scale=found, zero_point=zero_point)
    y.square().sum().backward()
    assert right.grad is not None
    assert_same_bits(whole(found.grad), right.grad)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))


PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
PRESETS = ["INT8", "FP8", "INT4_GROUP32", "MXFP8", "MXFP4", "NVFP4"]


@pytest.mark.parametrize("preset", PRESETS)
def test_layers_that_were_parallelized_before_prepare_give_what_plain_ones_give(mesh, x, preset):
    config = getattr(fq.presets, preset)
    right = fq.prepare(network(), config)
    model = fq.prepare(parallelize_module(network(), mesh, PLAN), config)
    for one in (right, model):
        fq.calibrate(one, [x])
    assert_same_bits(model(x), right(x))


def test_the_block_of_the_page_about_tensor_parallelism_runs(mesh, x):
    (block,) = (block for block in blocks(PAGE.read_text()) if "parallelize_module(" in block.code)
    up, down = nn.Linear(64, 32), nn.Linear(32, 16)
    right = fq.prepare(nn.Sequential(OrderedDict(up=copy.deepcopy(up), down=copy.deepcopy(down))), fq.presets.MXFP8)
    names = {**globals(), "model": nn.Sequential(OrderedDict(up=up, down=down)), "mesh": mesh, "batches": [x]}
    printed(block.code, names, PAGE, block.line)
    assert_same_bits(names["model"](x), right(x))


@pytest.mark.parametrize("preset", PRESETS)
def test_prepared_layers_can_be_parallelized_by_columns(mesh, x, preset):
    right, model = (fq.prepare(network(), getattr(fq.presets, preset)) for _ in range(2))
    for one in (right, model):
        fq.calibrate(one, [x])
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": ColwiseParallel()})
    assert_same_bits(model(x), right(x))


def test_prepared_layers_that_cannot_be_parallelized_by_rows_say_what_to_do(mesh):
    model = fq.prepare(network(), fq.presets.INT8)
    with pytest.raises(fq.FakeQuantError, match="call parallelize_module on the float model first"):
        parallelize_module(model, mesh, PLAN)
    quantizer = model[0]._input_quantizer
    assert not hasattr(quantizer, "weight")
    with pytest.raises(AttributeError, match="no attribute 'wieght'"):
        getattr(quantizer, "wieght")  # noqa: B009


@pytest.mark.parametrize("spec", ["int8 per_channel(0)", "int8 per_channel(0) stochastic"])
def test_fixed_codes_of_sharded_weights_serve_where_quantizing_gives_them(mesh, x, spec, tmp_path):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32))

    model = fq.prepare(net(), fq.Config(fq.Rule(weight=spec))).eval()
    fq.calibrate(model)
    codes = torch.randint(-128, 128, (32, 64), dtype=torch.int8)
    quantizer = model[0].weight_quantizer
    quantizer.fix_codes(codes, model[0].weight)
    expected = model(x)
    parallelize_module(model.to("cpu"), mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    if "stochastic" in spec:
        with pytest.raises(ConfigError, match=r"0\._weight_quantizer: .* cannot quantize a tensor that is sharded"):
            model(x)
        return
    assert_same_bits(model(x), expected)
    again = fq.load(net(), fq.save(model, tmp_path))
    assert_same_bits(again[0].weight_quantizer.fixed_codes, codes)
    with pytest.raises(ConfigError, match="its weight is sharded"):
        quantizer.fix_codes(codes, model[0].weight)
