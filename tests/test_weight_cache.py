"""Kept weights: the bits and gradients of fresh ones, whatever happens to the weight."""

import contextlib
import copy
import gc
import io
import pickle

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import fakequant as fq
from fakequant.nn import Mode, cached_weights
from tests.support.bits import assert_same_bits
from tests.support.weight_changes import (
    CHANGES,
    Layer,
    recorded,
)

SPECS = ["int8 per_channel(0)", "uint4 per_tensor", "float8_e4m3fn per_block(-1:4)", "int8 per_tensor identity"]


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
