"""Modules of this package in `torch.fx.symbolic_trace`: one call each, because their forward looks at tensors."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Proxy, Tracer


def as_leaf(module: nn.Module, *args: Any) -> Any:
    """The call of a module, recorded by the tracer of the proxies among its arguments.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), "INT8_WEIGHT_ONLY")
    >>> [str(node) for node in torch.fx.symbolic_trace(model).graph.nodes]
    ['input_1', '_0', '_1', 'output']
    """
    tracer = next(value.tracer for value in args if isinstance(value, Proxy))
    assert isinstance(tracer, Tracer), "other tracers hand out tensors"
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, {})
