"""Every way in which a weight can change, and a layer that counts its quantizations."""

from typing import Any

import torch
from torch import nn

import fakequant as fq
from fakequant.nn import Kind, Quantizer
from fakequant.ops import direct
from fakequant.ops.dispatch import backends


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
