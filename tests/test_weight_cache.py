"""Kept weights: the bits and gradients of fresh ones, whatever happens to the weight."""

import contextlib
import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import fakequant as fq
from fakequant.nn import Kind, Mode, Quantizer, cached_weights
from fakequant.ops import direct
from fakequant.ops.dispatch import backends
from tests.support.bits import assert_same_bits

SPECS = ["int8 per_channel(0)", "uint4 per_tensor", "float8_e4m3fn per_block(-1:4)", "int8 per_tensor identity"]


class Layer(nn.Module):
    def __init__(self, spec="int8 per_channel(0)", *, fixed=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))
        self.quantizer = Quantizer(spec, kind=Kind.WEIGHT)
        if fixed:
            # Narrower than the weight: the mask matters.
            self.quantizer.freeze(self.weight.detach() * 0.5)

    def forward(self):
        return self.quantizer(self.weight)


def recorded(monkeypatch, *names):
    """A list that gets the shape of every tensor that backends are given, in these of their methods."""
    shapes = []
    for backend in backends():
        monkeypatch.setattr(backend, "direct", lambda *_, **__: None)  # which would not be counted
    monkeypatch.setattr(direct, "_found", {})

    def recording(original):
        def call(x, *args, **kwargs):
            shapes.append(tuple(x.shape))
            return original(x, *args, **kwargs)

        return call

    for backend in backends():
        for name in names:
            monkeypatch.setattr(backend, name, recording(getattr(backend, name)))
    return shapes


@pytest.fixture
def quantized(monkeypatch):
    """The shapes of the tensors that a backend has quantized."""
    return recorded(monkeypatch, "fake_quantize", "fake_quantize_dynamic")


@torch.enable_grad()
def fresh(layer):
    """Values and gradient of the weight, quantized without a cache."""
    leaf = layer.weight.detach().clone().requires_grad_()
    clone = copy.deepcopy(layer.quantizer)
    assert clone._cache is None
    y = clone(leaf)
    (dx,) = torch.autograd.grad(y, leaf, torch.arange(1.0, y.numel() + 1).view_as(y).to(y.dtype))
    return y.detach(), dx


def cached(layer):
    y = layer()
    (dx,) = torch.autograd.grad(y, layer.weight, torch.arange(1.0, y.numel() + 1).view_as(y).to(y.dtype))
    return y.detach(), dx


def assert_fresh(layer):
    for got, wanted in zip(cached(layer), fresh(layer), strict=True):
        assert_same_bits(got, wanted)


def assert_made_once(layer, made):
    """made: a list that gets an entry whenever the weight is quantized."""
    wanted = fresh(layer)
    with cached_weights(layer):
        made.clear()
        for _ in range(3):
            for got, right in zip(cached(layer), wanted, strict=True):
                assert_same_bits(got, right)
            with torch.no_grad():
                assert_same_bits(layer(), wanted[0])
        assert len(made) == 1
    made.clear()
    for _ in range(2):
        layer()
    assert len(made) == 2


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("text", SPECS)
def test_a_weight_is_quantized_once_with_the_same_bits_and_gradients(text, fixed, quantized):
    assert_made_once(Layer(text, fixed=fixed), quantized)


def test_a_scale_that_is_brought_to_the_shape_of_the_groups_is_the_same_scale(quantized):
    layer = Layer("int8 per_tensor", fixed=False)
    layer.quantizer.set_range(fq.Range(torch.tensor([-1.0]), torch.tensor([1.0])))
    assert_made_once(layer, quantized)
    with cached_weights(layer):
        before = layer()
        layer.quantizer.scale *= 2
        assert not torch.equal(layer(), before)


def test_accumulated_gradients_are_those_of_fresh_weights():
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), "INT8")
    batches = [torch.randn(5, 8) for _ in range(4)]
    fq.calibrate(model, batches, progress=False)
    other = copy.deepcopy(model)
    for trained in (model, other):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5, momentum=0.9)
        with cached_weights(trained) if trained is model else torch.enable_grad():
            for _ in range(3):
                optimizer.zero_grad()
                for x in batches:
                    trained(x).square().mean().backward()
                optimizer.step()
    for got, wanted in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_bits(got.detach(), wanted.detach())


def _step(make):
    def change(layer):
        optimizer = make([layer.weight])
        layer().square().sum().backward()
        optimizer.step()

    return change


def _replace_memory_at_the_same_address(layer):
    """What was cached is freed, and the new values come to lie where the old ones were, if that can be."""
    address, made = layer.weight.data_ptr(), []
    layer.weight.data = torch.randn(6, 8)
    while len(made) < 100 and address not in [other.data_ptr() for other in made]:
        made.append(torch.randn(6, 8))
    layer.weight.data = made[-1]


class WritesData(torch.optim.Optimizer):
    """As many optimizers outside of torch do: through `.data`, which leaves no trace in the version."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-0.3)


CHANGES = {
    "sgd": _step(lambda p: torch.optim.SGD(p, lr=0.3)),
    "sgd foreach": _step(lambda p: torch.optim.SGD(p, lr=0.3, foreach=True)),
    "sgd fused": _step(lambda p: torch.optim.SGD(p, lr=0.3, fused=True)),
    "adam fused": _step(lambda p: torch.optim.Adam(p, lr=0.3, fused=True)),
    "optimizer through data": _step(WritesData),
    "in place": lambda layer: torch.no_grad()(layer.weight.mul_)(0.3),
    "in place, detached": lambda layer: layer.weight.detach().mul_(0.3),
    "in place, one row": lambda layer: layer.weight.detach()[2].zero_(),
    "in place, inference mode": lambda layer: torch.inference_mode()(layer.weight.mul_)(0.3),
    "copy_": lambda layer: torch.no_grad()(layer.weight.copy_)(torch.randn(6, 8)),
    "data": lambda layer: setattr(layer.weight, "data", torch.randn(6, 8)),
    "data, again and again": _replace_memory_at_the_same_address,
    "data, transposed": lambda layer: setattr(layer.weight, "data", torch.randn(8, 6).T),
    "vector_to_parameters": lambda layer: nn.utils.vector_to_parameters(torch.randn(48), [layer.weight]),
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(6, 8))),
    "load_state_dict": lambda layer: layer.load_state_dict(Layer().state_dict()),
    "load_state_dict, assigned": lambda layer: layer.load_state_dict(Layer().state_dict(), assign=True),
    "half": lambda layer: layer.half(),
    "double": lambda layer: layer.double(),
    "bfloat16": lambda layer: layer.to(torch.bfloat16),
    "range": lambda layer: layer.quantizer.set_range(fq.Range(torch.full((6, 1), -0.7), torch.full((6, 1), 0.3))),
    "scale in place": lambda layer: layer.quantizer.scale.mul_(1.5),
    "reset": lambda layer: layer.quantizer.reset(),
    "specification": lambda layer: setattr(layer.quantizer, "spec", fq.QuantSpec("int4", fq.PerChannel(0))),
    "learned": lambda layer: layer.quantizer.learn("lsq"),
    "normalised": lambda layer: nn.init.orthogonal_(layer.weight),
}


def assert_change_is_seen(layer, change, *, graph):
    with cached_weights(layer):
        before, _ = cached(layer)
        CHANGES[change](layer)
        if change != "learned":
            now, _ = fresh(layer)
            assert now.dtype != before.dtype or not torch.equal(now, before), "nothing changed: the case shows nothing"
        if graph:
            assert_fresh(layer)
        with torch.no_grad():
            assert_same_bits(layer(), fresh(layer)[0])
        assert_fresh(layer)


@pytest.mark.parametrize("graph", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change, graph):
    torch.manual_seed(1)
    assert_change_is_seen(Layer(), change, graph=graph)


def test_what_is_given_out_may_be_written_to():
    layer = Layer()
    with cached_weights(layer), torch.no_grad():
        layer().zero_()
        assert_same_bits(layer(), fresh(layer)[0])


def test_a_graph_is_a_new_one_each_time():
    layer = Layer()
    wanted = fresh(layer)[1]
    with cached_weights(layer):
        layer()
        with torch.no_grad():
            assert not layer().requires_grad
            layer().requires_grad_()
            assert not layer().requires_grad
        for _ in range(2):  # the first backward frees its graph
            assert_same_bits(cached(layer)[1], wanted)
        (dx,) = torch.autograd.grad(layer(), layer.weight, torch.ones(6, 8, requires_grad=True), create_graph=True)
        assert dx.requires_grad


def test_inference_mode_keeps_plain_tensors():
    layer = Layer()
    with cached_weights(layer):
        with torch.inference_mode():
            y = layer()
        assert_same_bits(y.clone(), fresh(layer)[0])
        assert_fresh(layer)


def test_nothing_is_kept_of_tensors_made_in_inference_mode():
    with torch.inference_mode():
        layer = Layer(fixed=False)
        with cached_weights(layer):
            layer()
            layer.weight.mul_(0.3)
            assert_same_bits(layer(), copy.deepcopy(layer.quantizer)(layer.weight))


def test_other_modes_and_stochastic_rounding_are_not_kept():
    layer = Layer("int8 per_channel(0) stochastic")
    with cached_weights(layer), torch.no_grad():
        assert not torch.equal(layer(), layer())
        layer.quantizer.mode = Mode.OFF
        assert layer() is layer.weight


def test_function_transforms_and_compilers_are_not_served():
    layer = Layer()
    wanted, _ = fresh(layer)
    with cached_weights(layer):
        layer()
        result = torch.func.functional_call(layer, {"weight": layer.weight.detach() * 0.3})
        assert_same_bits(result, copy.deepcopy(layer.quantizer)(layer.weight.detach() * 0.3))
        rows = torch.func.vmap(lambda shift: torch.func.functional_call(layer, {"weight": layer.weight + shift}))(
            torch.tensor([0.0, 0.25])
        )
        assert_same_bits(rows[0].detach(), wanted)
        assert not torch.equal(rows[1], rows[0])
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            assert_same_bits(compiled().detach(), fresh(layer)[0])
            layer.weight.data.mul_(0.3)  # without a trace
        exported = torch.export.export(layer, ()).module()
        assert_same_bits(exported().detach(), fresh(layer)[0])


def test_copies_and_pickles_have_no_cache():
    layer = Layer()
    with cached_weights(layer):
        layer()
        saved = io.BytesIO()
        torch.save(layer, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
            assert other.quantizer._cache is None
        assert set(layer.state_dict()) == {"weight", "quantizer.scale"}
    assert layer.quantizer._cache is None


def test_contexts_nest_and_end():
    layer = Layer()
    with cached_weights(layer):
        with cached_weights(layer):
            assert_fresh(layer)
        assert layer.quantizer._cache is not None
        with pytest.raises(fq.FakeQuantError), cached_weights(layer):
            layer.quantizer.set_range(fq.Range(torch.ones(6, 1), torch.zeros(6, 1)))
        assert_fresh(layer)
    assert layer.quantizer._cache is None


def test_data_distributed_parallel(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        layer = Layer()
        wrapped = nn.parallel.DistributedDataParallel(layer)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.3)
        with cached_weights(wrapped):
            for _ in range(3):
                optimizer.zero_grad()
                with wrapped.no_sync():
                    wrapped().square().sum().backward()
                wrapped().square().sum().backward()
                optimizer.step()
                assert_same_bits(wrapped().detach(), fresh(layer)[0])
    finally:
        # The last reference to the group must be Python's own, which ends its threads without the GIL.
        wrapped = optimizer = None
        gc.collect()
        torch.distributed.destroy_process_group()


def _network():
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), "INT8")
    batches = torch.randn(4, 6, 8)
    fq.calibrate(model, list(batches), progress=False)
    return model, batches


def _steps_of_a_rank(rank, folder):
    """Three steps of a model with kept weights and of one without; what each of them gives in every forward."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    given = {}
    for kept in (True, False):
        model, batches = _network()
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5, momentum=0.9)
        outputs = []
        with cached_weights(wrapped) if kept else contextlib.nullcontext():
            for _ in range(3):
                optimizer.zero_grad()
                with wrapped.no_sync():  # the second forward of a step is given what the first has kept
                    wrapped(batches[rank]).square().mean().backward()
                outputs.append(wrapped(batches[2 + rank]))
                outputs[-1].square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                outputs.append(wrapped(batches[0]))
        given[kept] = [y.detach() for y in outputs], model.state_dict()
        # The last reference to the group must be Python's own, which ends its threads without the GIL.
        del wrapped, optimizer, outputs
        gc.collect()
    torch.save(given, f"{folder}/given{rank}")
    torch.distributed.destroy_process_group()


def test_two_ranks_see_each_others_steps(tmp_path):
    mp.start_processes(_steps_of_a_rank, (str(tmp_path),), nprocs=2, start_method="spawn")
    given = [torch.load(tmp_path / f"given{rank}") for rank in range(2)]
    for of_rank in given:
        (outputs, state), (fresh_outputs, fresh_state) = of_rank[True], of_rank[False]
        for got, wanted in zip(outputs, fresh_outputs, strict=True):
            assert_same_bits(got, wanted)
        for name, value in fresh_state.items():
            assert_same_bits(state[name], value, name)
    # After the last step both ranks were given the same batch.
    assert_same_bits(given[0][True][0][-1], given[1][True][0][-1])
    start = _network()[0].state_dict()
    for name, value in given[0][True][1].items():
        assert_same_bits(given[1][True][1][name], value, name)
        assert not name.endswith("weight") or not torch.equal(value, start[name]), "no step was made"


def test_what_leaves_no_trace_is_what_the_documentation_says():
    layer = Layer()
    with cached_weights(layer), torch.no_grad():
        before = layer()
        layer.weight.data.mul_(0.3)
        assert_same_bits(layer(), before)
    assert_same_bits(layer().detach(), fresh(layer)[0])
