"""Parts of a model that run without gradients, such as rotary embeddings under `torch.no_grad`, as plain operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument

from fakequant.errors import GraphError

_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled


def inline_grad_modes(program: ExportedProgram) -> None:
    """Replace every call of a part without gradients by the operations of that part, in place.

    The part reads detached tensors: no gradient passes, and kernels are chosen as where gradients are off.

    Args:
        program: exported where gradients are enabled, so that each part that has a mode of its own is without them.

    Raises:
        GraphError: a part has gradients where the model has none.
    """
    renamed: dict[str, str] = {}
    for node in list(program.graph.nodes):
        if node.target is _REGION:
            renamed |= _inline(program.graph_module, node)
    for spec in program.graph_signature.output_specs:
        if isinstance(spec.arg, TensorArgument):
            spec.arg = replace(spec.arg, name=renamed.get(spec.arg.name, spec.arg.name))
    if renamed:
        program.graph_module.recompile()


def _inline(module: fx.GraphModule, node: fx.Node) -> dict[str, str]:
    """The names of the results before and after."""
    enabled, body, *inputs = cast("list[Any]", list(node.args))
    if enabled:
        raise GraphError("torch.enable_grad in a part of the model cannot be in a graph; compute that part outside")
    part: fx.GraphModule = getattr(module, body.target)
    graph = module.graph
    copies: dict[fx.Node, Any] = {}
    with graph.inserting_before(node):
        places = [place for place in part.graph.nodes if place.op == "placeholder"]
        for place, given in zip(places, inputs, strict=True):
            copies[place] = _detached(graph, given)
        for inner in part.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            copies[inner] = graph.node_copy(inner, lambda n: copies[n])
            if inner.op == "get_attr":
                copies[inner].target = _hold(module, str(inner.target), getattr(part, str(inner.target)))
    # What the part returns as it got it keeps its gradient.
    results = cast("list[fx.Node]", part.graph.output_node().args[0])
    given_back = dict(zip(places, inputs, strict=True))
    renamed = {}
    for user in list(node.users):
        result = results[cast("int", user.args[1])]
        value = given_back[result] if result in given_back else copies[result]
        renamed[user.name] = value.name
        user.replace_all_uses_with(value)
        graph.erase_node(user)
    graph.erase_node(node)
    return renamed


def _detached(graph: fx.Graph, value: Any) -> Any:
    known = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(known, Tensor) or not (known.is_floating_point() or known.is_complex()):
        return value
    node = graph.call_function(torch.ops.aten.detach.default, (value,))
    # The same memory, so that changes in place are seen.
    node.meta = {"val": known}
    return node


def _hold(module: fx.GraphModule, name: str, held: Any) -> str:
    """Let the whole have what a part holds, such as a part of its own, and return its name there."""
    while getattr(module, name, held) is not held:
        name += "_"
    setattr(module, name, held)
    return name
