"""Under torch.compile the definition fuses with its neighbours, breaks no graph and serves every scale."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config, metrics
from torch._inductor.utils import run_and_get_code

import fakequant as fq
from fakequant.nn import Quantizer, quantizers
from tests.support.bits import assert_same_bits
from tests.support.matrix import full, sweep


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    metrics.reset()


# Ties and one ulp beside, both zeros, subnormals, what is no ordinary number.
def hostile(scale):
    ties = torch.arange(-140.0, 140.0) + 0.5
    at = torch.cat([ties, torch.arange(-140.0, 140.0)]) * scale
    beside = [torch.nextafter(at, torch.full_like(at, end)) for end in (torch.inf, -torch.inf)]
    odd = [0.0, -0.0, 1e-45, -1e-45, 1e-39, -1e-39, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38]
    return torch.cat([at, *beside, torch.tensor(odd)])


def with_gradient(function, x):
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    dy = torch.linspace(-2.0, 2.0, y.numel()).view_as(y).to(y.dtype)
    dy.view(-1)[::7], dy.view(-1)[3::11] = torch.nan, torch.inf
    (dx,) = torch.autograd.grad(y, leaf, dy)
    return y.detach(), dx


@sweep("text", full(["int8", "float8_e4m3fn per_channel(0)"]), full(["int8"]))
def test_one_kernel_for_activation_and_quantization_forward_and_one_backward(text):
    spec = fq.QuantSpec.parse(text)
    scale = torch.full(spec.granularity.group_shape((3, 571)), 0.3)

    def function(x):
        # Products and sums beside it, which contracted to one rounding would give other codes.
        return fq.fake_quantize(torch.relu(x * 1.1 + 0.7), spec, scale=scale) * 1.1 + 0.7

    x = hostile(0.3).repeat(2)[: 3 * 571].view(3, 571)
    with config.patch(force_disable_caches=True):
        compiled = torch.compile(function, fullgraph=True)
        with torch.no_grad():
            assert_same_bits(compiled(x), function(x))
        assert metrics.generated_kernel_count == 1
        metrics.reset()
        (y, dx), code = run_and_get_code(with_gradient, compiled, x)
    assert metrics.generated_kernel_count == 2
    assert not any("bool*" in text for text in code), "a mask is written and read as bool"
    wanted_y, wanted_dx = with_gradient(function, x)
    assert_same_bits(y, wanted_y)
    assert_same_bits(dx, wanted_dx)


def test_a_prepared_model_is_one_graph_with_the_eager_bits():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5))
    batches = [torch.randn(4, 3, 6, 6) for _ in range(2)]
    fq.calibrate(fq.prepare(model, "INT8"), batches, progress=False)
    explained = torch._dynamo.explain(model)(batches[0])
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    found = {}
    for name, function in (("eager", model), ("compiled", torch.compile(model, fullgraph=True, backend="aot_eager"))):
        model.zero_grad()
        y = function(batches[0])
        y.square().sum().backward()
        found[name] = [y.detach(), *(copy.copy(p.grad) for p in model.parameters())]
    for got, wanted in zip(found["compiled"], found["eager"], strict=True):
        assert_same_bits(got, wanted)


def test_no_compilation_when_scales_change():
    model = fq.prepare(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), "INT8")
    batches = [torch.randn(4, 8) for _ in range(2)]
    fq.calibrate(model, batches, progress=False)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for factor in (1.0, 0.5, 3.0):
            for quantizer in quantizers(model).values():
                quantizer.set_qparams(fq.QParams(quantizer.scale * factor))
            optimizer.zero_grad()
            y = compiled(batches[0])
            assert_same_bits(y.detach(), model(batches[0]).detach())
            y.square().sum().backward()
            optimizer.step()
        fq.calibrate(model, [x * 5 for x in batches], "mse", progress=False)
        assert_same_bits(compiled(batches[1]).detach(), model(batches[1]).detach())
    assert counters["stats"]["unique_graphs"] == 1


def test_no_compilation_when_a_learned_scale_moves():
    quantizer = Quantizer("int8")
    quantizer.set_range(fq.Range(torch.tensor([-1.0]), torch.tensor([1.0])))
    quantizer.learn("lsq")
    (step,) = quantizer.parameters()
    compiled, x = torch.compile(quantizer, backend="aot_eager"), torch.randn(64)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            wanted = torch.autograd.grad(quantizer(x).sum(), step)
            got = torch.autograd.grad(compiled(x).sum(), step)
            assert_same_bits(got[0], wanted[0])
            with torch.no_grad():
                step.mul_(1.3)
