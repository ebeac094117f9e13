"""Parts of a traced model that run in a mode of their own, as plain operations: without gradients or autocast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument

from fakequant.errors import GraphError

_GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def inline_regions(program: ExportedProgram, *, gradients: bool) -> None:
    """Replace every call of a part with a mode of its own by the operations of that part, in place.

    Where the program has gradients, a part without them reads detached tensors: no gradient passes, and kernels are
    chosen as where gradients are off. A part under autocast stays.

    Args:
        program: exported where gradients are enabled, so that each part that has a mode of its own is without them, or
            where they are not, and their modes say nothing.
        gradients: which of both.

    Raises:
        GraphError: a part has gradients where the model has none.
    """
    renamed: dict[str, str] = {}
    while regions := [
        node
        for node in program.graph.nodes
        if (node.target is _GRADIENTS or (node.target is _AUTOCAST and not node.args[2]))
    ]:
        for node in regions:
            renamed |= _inline(program.graph_module, node, gradients)
    for spec in program.graph_signature.output_specs:
        name = spec.arg.name if isinstance(spec.arg, TensorArgument) else ""
        while name in renamed:
            name = renamed[name]
        if isinstance(spec.arg, TensorArgument):
            spec.arg = replace(spec.arg, name=name)
    if renamed:
        program.graph_module.recompile()


def _inline(module: fx.GraphModule, node: fx.Node, gradients: bool) -> dict[str, str]:
    """The names of the results before and after."""
    is_mode = node.target is _GRADIENTS
    body, *inputs = cast("list[Any]", list(node.args[1 if is_mode else 4 :]))
    if is_mode and gradients and node.args[0]:
        raise GraphError("torch.enable_grad in a part of the model cannot be in a graph; compute that part outside")
    part: fx.GraphModule = getattr(module, body.target)
    graph = module.graph
    copies: dict[fx.Node, Any] = {}
    with graph.inserting_before(node):
        places = [place for place in part.graph.nodes if place.op == "placeholder"]
        for place, given in zip(places, inputs, strict=True):
            known = given.meta.get("val") if isinstance(given, fx.Node) else None
            if (
                is_mode
                and gradients
                and isinstance(known, Tensor)
                and (known.is_floating_point() or known.is_complex())
            ):
                given = graph.call_function(torch.ops.aten.detach.default, (given,))
                # The same memory, so that changes in place are seen.
                given.meta = {"val": known}
            copies[place] = given
        for inner in part.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            copies[inner] = graph.node_copy(inner, lambda n: copies[n])
            if inner.op == "get_attr":
                # The whole has what a part holds, such as a part of its own, under another name where its own is taken.
                name = str(inner.target)
                held = getattr(part, name)
                while getattr(module, name, held) is not held:
                    name += "_"
                setattr(module, name, held)
                copies[inner].target = name
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
    if not body.users:
        graph.erase_node(body)
        module.delete_submodule(str(body.target))
    return renamed
