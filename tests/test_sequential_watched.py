"""Sequential that joins ReLUs with quantizers, where somebody watches modules, replaced one, or keeps its output."""

import copy

import pytest
import torch
from bits import assert_same_bits
from test_sequential import apart, assert_same, made
from torch import nn

import fakequant as fq
from fakequant.nn.sequential import takes_relu


@pytest.mark.parametrize("execution", ["simulate", "auto"])
@pytest.mark.parametrize("path", ["1", "2", "2._input_quantizer"])
@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_see_what_they_saw(path, register, execution):
    model, x = made(execution=execution)
    seen = {}
    for one in (model, apart(model)):
        found = seen[one] = []
        getattr(one.get_submodule(path), register)(lambda module, *tensors, to=found: to.append(tensors))
        one(x.clone().requires_grad_()).sum().backward()
    ours, theirs = (torch.utils._pytree.tree_leaves(found) for found in seen.values())
    assert len(ours) == len(theirs)
    assert ours or (execution == "auto" and "quantizer" in path)  # quantizers of products of codes are not called
    for got, wanted in zip(ours, theirs, strict=True):
        assert_same_bits(got, wanted)


def test_global_hooks_see_every_module():
    model, x = made()
    seen = []
    with torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, y: seen.append(module)):
        model(x)
    assert model[1] in seen
    assert model[2]._input_quantizer in seen


@pytest.mark.parametrize("path", ["1", "2"])
def test_another_forward_is_called(path):
    model, x = made()
    module = model.get_submodule(path)
    module.forward = lambda x, forward=module.forward: forward(x) + 1.0
    with torch.no_grad():
        assert_same_bits(model(x), model[2](model[1](model[0](x))))


def test_another_quantizer_is_called():
    class Own(fq.nn.Quantizer):
        def forward(self, x):
            return super().forward(x) + 1.0

    model, x = made()
    model[2]._input_quantizer.__class__ = Own
    assert_same(model, x)
    model[2]._input_quantizer = nn.Identity()
    assert_same(model, x)


def test_a_compiled_layer_is_called():
    model, x = made()
    calls = []
    model[2].compile(backend=lambda graph, inputs: calls.append(graph) or graph.forward)
    with torch.no_grad():
        model(x)
    assert calls


def test_other_relus_run():
    class Shifted(nn.ReLU):
        def forward(self, input):
            return super().forward(input) + 1.0

    model, x = made()
    model[1] = Shifted()
    assert_same(model, x)


class KeepsOutput(nn.BatchNorm1d):
    """Somebody else has what a ReLU in place changes."""

    def forward(self, input):
        self.kept = super().forward(input)
        return self.kept


def test_a_relu_in_place_after_a_layer_that_keeps_its_output():
    model = nn.Sequential(nn.Linear(6, 8), KeepsOutput(8), nn.ReLU(inplace=True), nn.Linear(8, 5))
    fq.calibrate(fq.prepare(model, fq.presets.INT8), [torch.randn(4, 6)], progress=False)
    inner = nn.Sequential(nn.Linear(6, 8))
    outer = fq.prepare(nn.Sequential(inner, nn.ReLU(inplace=True), nn.Linear(8, 5)), fq.presets.INT8)
    fq.calibrate(outer, [torch.randn(4, 6)], progress=False)
    kept = []
    inner[0].register_forward_hook(lambda module, inputs, y: kept.append(y))
    patched = copy.deepcopy(model)
    patched[1] = nn.BatchNorm1d(8)
    patched[1].forward = lambda x, forward=patched[1].forward: kept.append(forward(x)) or kept[-1]
    with torch.no_grad():
        for one in (model, outer, patched):
            one(torch.randn(4, 6))
    assert model[1].kept.min() == 0
    assert [y.min().item() for y in kept] == [0, 0]


def test_a_layer_with_a_forward_of_its_own_gets_the_result():
    class Own(type(made()[0][2])):
        def forward(self, input):
            assert input.min() >= 0
            return super().forward(input)

    model, x = made()
    model[2].__class__ = Own
    assert not takes_relu(model[2])
    assert_same(model, x)


def test_relus_in_place_change_what_others_see():
    model = fq.prepare(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3), nn.ReLU(inplace=True)), fq.presets.INT8)
    fq.calibrate(model, [torch.randn(4, 6)], progress=False)
    x = torch.randn(4, 6)
    rectified = torch.relu(x)
    with torch.no_grad():
        model(x)
    assert_same_bits(x, rectified)


def test_a_hook_keeps_what_a_relu_in_place_changes():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 5))
    fq.calibrate(fq.prepare(model, fq.presets.INT8), [torch.randn(4, 6)], progress=False)
    kept = []
    model[0].register_forward_hook(lambda module, inputs, y: kept.append(y))
    with torch.no_grad():
        model(torch.randn(4, 6))
    assert kept[0].min() == 0
