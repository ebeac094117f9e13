"""Which layers a run calls, and which weights it reads without calling their layer."""

from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.model.run import recorded
from fakequant.model.run.outputs import record, watching
from fakequant.model.run.recorded import modules_called
from fakequant.nn.quantized.layers import QuantizedLayer

X = torch.linspace(-1, 1, 32).view(4, 8)


class Reader(nn.Module):
    """Uses the weight of `read` without calling it, in a way of choice; calls `called`."""

    def __init__(self, use) -> None:
        super().__init__()
        self.read = nn.Linear(8, 8)
        self.called = nn.Linear(8, 8)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.called(self.use(x, self.read))


READS = {
    "linear": lambda x, layer: F.linear(x, layer.weight, layer.bias),
    "by-name": lambda x, layer: F.linear(input=x, weight=layer.weight),
    "matmul": lambda x, layer: x @ layer.weight.T,
    "joined": lambda x, layer: F.linear(x, torch.cat([layer.weight, layer.weight]))[:, :8],
    "detached": lambda x, layer: F.linear(x, layer.weight.detach()),
}
GLANCES = {
    "dtype": lambda x, layer: x.to(layer.weight.dtype),
    "device": lambda x, layer: x.to(layer.weight.device),
    "shape": lambda x, layer: x * layer.weight.shape[0] * layer.weight.size(1) * layer.weight.dim(),
    "called": lambda x, layer: layer(x),
}


def weight_readers(model, run):
    """The readers of weights by both recordings, which agree."""
    found = recorded.weight_readers(model, record(model, run))
    with watching(model) as recording:
        run()
    assert recorded.weight_readers(model, recording) == found
    return found


def layers_called(model, run):
    return {m for m in modules_called(model, record(model, run)) if isinstance(m, QuantizedLayer)}


def prepared(use) -> nn.Sequential:
    return fq.prepare(nn.Sequential(Reader(use)), "int8_weight_only").eval()


@pytest.mark.parametrize("use", READS.values(), ids=READS)
def test_a_weight_that_is_used_without_its_layer_has_a_reader(use):
    model = prepared(use)
    assert weight_readers(model, lambda: model(X)) == {model[0].read: "0"}
    assert layers_called(model, lambda: model(X)) == {model[0].called}


@pytest.mark.parametrize("use", GLANCES.values(), ids=GLANCES)
def test_what_does_not_use_the_weight_is_no_reader(use):
    model = prepared(use)
    assert weight_readers(model, lambda: model(X)) == {}


def test_a_layer_may_use_the_weight_that_it_shares():
    model = fq.prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "int8_weight_only")
    model[1].weight = model[0].weight
    assert weight_readers(model, lambda: model[0](X)) == {}


def test_no_hook_stays_behind():
    model = prepared(READS["linear"])
    for run in (lambda: model(X), lambda: model(X[:, :3])):
        for watch in (layers_called, weight_readers):
            with suppress(RuntimeError):  # of the second run, whose shapes do not fit
                watch(model, run)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_outputs_pass_through():
    model = prepared(READS["linear"])
    expected = model(X)
    with watching(model):
        assert torch.equal(model(X), expected)


def test_a_compiled_model_is_seen_as_written():
    model = prepared(READS["linear"])
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    assert layers_called(compiled, lambda: compiled(X)) == {model[0].called}
    assert list(weight_readers(compiled, lambda: compiled(X))) == [model[0].read]
