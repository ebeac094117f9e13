"""Layers that multiply codes under torch.compile, autocast and DistributedDataParallel: the bits of the eager layer."""

import copy
import gc
import weakref

import pytest
import torch
import torch.multiprocessing as mp
from bits import assert_same_bits
from test_integer import hostile
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fakequant as fq
from fakequant.model.config import Config, Rule, TensorConfig
from fakequant.nn import MatMul
from fakequant.ops import convolutions, products


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.product = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), MatMul()

    def forward(self, x):
        return self.product(self.queries(x), self.keys(x).mT)


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5)), (6, 24)),
    "one_row": (lambda: nn.Sequential(nn.Linear(24, 16)), (24,)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3)), (2, 3, 7, 6)),
    "alike": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU(), nn.Conv1d(4, 4, 3, bias=False)), (2, 4, 9)),
    "one_image": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, groups=1)), (3, 7, 6)),
    "attention": (Attention, (2, 5, 8)),
}


def model(name, input="int8", *, dynamic=False, learn=""):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    weight = None if input is None else "int8 per_channel(0)"
    net = fq.prepare(
        make(), Config("test", (Rule("*", TensorConfig(input, dynamic=dynamic), weight, execution="auto"),))
    )
    x = hostile(*shape).clamp(-3, 3)
    fq.calibrate(net, [x], progress=False)
    for quantizer in net.modules():
        if isinstance(quantizer, fq.nn.Quantizer) and learn:
            quantizer.learn("lsq" if learn == "lsq_plus" and quantizer.spec.symmetric else learn)
    assert "is simulated" not in str(fq.summary(net))
    torch._dynamo.reset()
    return net, x * 1.5


def step(net, run, x, **context):
    net.zero_grad()
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=context.get("autocast", False)):
        y = run(x)
    y.float().square().sum().backward()
    return y.detach(), x.grad, {name: p.grad for name, p in net.named_parameters()}


def assert_equal_steps(found, wanted):
    assert_same_bits(found[0], wanted[0], "output")
    assert_same_bits(found[1], wanted[1], "input")
    for name, gradient in wanted[2].items():
        assert_same_bits(found[2][name], gradient, name)


@pytest.fixture
def counted(monkeypatch):
    """How often codes were multiplied."""
    calls = []

    def counting(original):
        return lambda *given: calls.append(1) or original(*given)

    for module, name in ((products, "linear"), (convolutions, "convolution"), (products, "matmul")):
        monkeypatch.setattr(module, name, counting(getattr(module, name)))
    return calls


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_models_have_the_bits_of_eager_ones(name, backend, counted):
    net, x = model(name)
    wanted = step(net, net, x)
    eager = len(counted)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(net, fullgraph=True, backend=counter)
    assert_equal_steps(step(net, compiled, x), wanted)
    assert (len(counted), counter.frame_count) == (2 * eager, 1)
    with torch.no_grad():
        assert_same_bits(compiled(x), wanted[0])
    assert len(counted) == 3 * eager


@pytest.mark.parametrize(
    "case", ["uint8", "int8 per_token", "lsq", "lsq_plus", "pact", "half", "autocast", "channels_last"]
)
def test_kinds_of_quantization_and_dtypes(case):
    name = "convolution" if case == "channels_last" else "linear"
    input = {"uint8": "uint8", "int8 per_token": "int8 per_token", "lsq_plus": "uint8"}.get(case, "int8")
    net, x = model(name, input, dynamic="token" in case, learn=case if case in fq.nn.learned_ranges() else "")
    if case == "half":
        net, x = net.to(torch.bfloat16), x.to(torch.bfloat16)
    if case == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    found, wanted = (step(net, run, x, autocast=case == "autocast") for run in (compiled, net))
    assert_equal_steps(found, wanted)
    assert found[0].stride() == wanted[0].stride()


@pytest.mark.parametrize("autocast", [False, True])
def test_nan_is_simulated_as_in_eager_mode(autocast):
    net, x = model("linear")
    x[1, 2] = torch.nan
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    found, wanted = (step(net, run, x, autocast=autocast) for run in (compiled, net))
    assert wanted[0][1].isnan().all()
    assert not wanted[0][0].isnan().any()
    assert_equal_steps(found, wanted)


def test_sums_that_may_leave_int32_are_simulated(monkeypatch):
    net, x = model("attention")
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr("fakequant.nn.integer_products._most", lambda *_: 7)
    monkeypatch.setattr(products, "matmul", lambda *_: pytest.fail("multiplied"))
    assert_equal_steps(step(net, compiled, x), step(net, net, x))


def test_what_changes_after_compilation_is_seen(counted):
    net, x = model("linear")
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")

    def check(multiplied):
        counted.clear()
        with torch.no_grad():
            found = compiled(x)
            assert len(counted) == multiplied
            assert_same_bits(found, net(x))

    check(2)
    net[0].weight.data.mul_(0.5)
    net[2]._input_quantizer.scale.mul_(1.5)
    check(2)
    fq.set_execution(net, "simulate", pattern="2")
    check(1)
    with fq.disabled(net):
        check(0)
    fq.set_execution(net, "auto")
    net[0]._input_quantizer.spec = fq.QuantSpec.parse("int4")
    check(2)


CHANGES = {
    "stride": (0, "stride", (2, 1), (1, 2)),
    "padding": (0, "padding", (0, 2), (0, 0)),
    "dilation": (0, "dilation", (1, 2), (2, 1)),
    "same": (2, "padding", "same", (2, 2)),
    "reflect": (0, "padding_mode", "reflect", "circular"),
    "format": (0, "spec", *map(fq.QuantSpec.parse, ("int4", "int[-128,100]"))),
    "gradient": (2, "spec", *map(fq.QuantSpec.parse, ("int8 per_tensor identity", "int4 per_tensor clip"))),
}


@pytest.mark.parametrize(("change", "dynamic"), [*((change, None) for change in CHANGES), ("stride", True)])
def test_a_change_of_what_is_no_tensor_is_compiled_anew(change, dynamic):
    net, x = model("convolution")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, fullgraph=True, backend=counter, dynamic=dynamic)
    i, attribute, *values = CHANGES[change]
    changed = net[i]._input_quantizer if attribute == "spec" else net[i]
    wanted = step(net, net, x)
    assert_equal_steps(step(net, compiled, x), wanted)
    for times, value in enumerate(values, 2):
        before = wanted
        setattr(changed, attribute, value)
        wanted = step(net, net, x)
        assert not all(map(torch.equal, wanted[:2], before[:2])), "nothing changed: the case shows nothing"
        assert_equal_steps(step(net, compiled, x), wanted)
        assert counter.frame_count == times


@pytest.fixture
def packed(monkeypatch):
    """Weak references to what was packed, and to the codes that it was made of."""
    convolutions.convolution_unavailable("cpu")  # which packs once per process
    found, pack = [], convolutions.PackedWeight

    def packing(codes, *given):
        made = pack(codes, *given)
        found.append((weakref.ref(codes), weakref.ref(made)))
        return made

    monkeypatch.setattr(convolutions, "PackedWeight", packing)
    return found


def compiled_twins(name):
    net, x = model(name)
    nets = [net, copy.deepcopy(net)]
    return nets, [torch.compile(one, fullgraph=True, backend="aot_eager") for one in nets], x


@torch.no_grad()
def test_weights_are_packed_once_also_where_layers_are_named_alike(packed):
    nets, compiled, x = compiled_twins("convolution")
    nets[1][0].weight.mul_(-0.5)
    for _ in range(3):
        found = [run(x) for run in compiled]
    assert len(packed) == 4
    for net, y in zip(nets, found, strict=True):
        assert_same_bits(y, net(x))


@torch.no_grad()
def test_one_weight_of_two_layers_is_packed_for_each(packed):
    net, x = model("alike")
    net[2].weight, net[2].stride = net[0].weight, (2,)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        found = compiled(x)
    assert len(packed) == 2
    assert_same_bits(found, net(x))


@torch.no_grad()
@pytest.mark.parametrize("change", ["in place", "through data", "memory", "parameter"])
def test_a_changed_weight_is_packed_anew(change, packed):
    net, x = model("convolution")
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    compiled(x)
    weight = net[0].weight
    values = weight * -0.5
    changes = {
        "in place": lambda: weight.copy_(values),
        "through data": lambda: weight.data.copy_(values),
        "memory": lambda: setattr(weight, "data", values),
        "parameter": lambda: setattr(net[0], "weight", nn.Parameter(values)),
    }
    changes[change]()
    found = compiled(x)
    assert len(packed) == 3
    assert_same_bits(found, net(x))


def test_nothing_is_kept_of_a_model_that_is_gone(packed):
    nets, compiled, x = compiled_twins("convolution")
    for net, run in zip(nets, compiled, strict=True):
        step(net, run, x)
    assert len(packed) == 4
    assert all(made() is not None for _, made in packed)
    del nets, compiled, net, run
    gc.collect()
    assert [reference() for pair in packed for reference in pair] == [None] * 8


def test_shapes_that_change():
    net, x = model("linear")
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (6, 5, 3, 9):
        given = x.repeat(2, 1)[:rows]
        assert_equal_steps(step(net, compiled, given), step(net, net, given))


def test_exporters_see_the_simulated_model():
    net, x = model("linear")
    graph = torch.export.export(net, (x,)).graph
    names = {str(node.target) for node in graph.nodes}
    assert not any("product" in name for name in names)
    assert any("fake_quantize" in name for name in names)


def test_copies_compile_and_train_apart():
    net, x = model("convolution")
    copied = copy.deepcopy(net)
    compiled = torch.compile(copied, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        copied[0].weight.mul_(-0.5)
        assert_same_bits(compiled(x), copied(x))
        assert not torch.equal(compiled(x), net(x))


def _train(rank, processes, folder, results):
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous{processes}"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=processes)
    net, x = model("linear", learn="lsq")
    wrapped = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for i in range(3):
        optimizer.zero_grad()
        wrapped(x[rank::processes] * (i + 1)).square().sum().backward()
        optimizer.step()
    torch.save(net.state_dict(), f"{folder}/{results}{rank}")
    # The last reference to the group must be Python's own, which ends its threads without the GIL.
    del wrapped, optimizer
    gc.collect()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("processes", [1, 2])
def test_data_distributed_parallel(processes, tmp_path):
    mp.start_processes(_train, (processes, str(tmp_path), "state"), nprocs=processes, start_method="spawn")
    states = [torch.load(tmp_path / f"state{rank}") for rank in range(processes)]
    net, x = model("linear", learn="lsq")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for i in range(3):
        gradients = [step(net, net, x[rank::processes] * (i + 1))[2] for rank in range(processes)]
        for name, p in net.named_parameters():
            p.grad = sum(g[name] for g in gradients) / processes
        optimizer.step()
    for state in states:
        for name, value in net.state_dict().items():
            assert_same_bits(state[name], value, name)
