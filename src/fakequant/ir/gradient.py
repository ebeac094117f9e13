"""The graph of the gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fakequant.errors import GraphError
from fakequant.ir.check import check
from fakequant.ir.fake_quantization import set_opaque
from fakequant.ir.fx.convert import Converter, needed
from fakequant.ir.fx.functional import remove_changes_in_place
from fakequant.ir.ops.products import RECURRENT
from fakequant.ir.run.execute import to_torch
from fakequant.ir.structure import GraphStructure, GraphType
from fakequant.ir.types import TensorType

_SUFFIX = " backward"
"""The end of the names of graphs of gradients. torch's trace detaches what they keep of the forward."""


def backward(graph: GraphType) -> GraphType:
    """The graph that computes the gradients of a graph, by torch's own formulas.

    Its inputs are those of the graph and the gradient of every output. Its outputs are the gradients of the
    floating-point inputs and then of the trainable constants, in their order; one that depends on nothing is zeros.
    The forward is computed again. Every quantizer passes gradients as its specification says.

    Raises:
        GraphError: the graph is not valid, has dynamic dimensions, an output without a gradient or a whole recurrent
            layer, or is a graph of gradients itself.

    >>> from fakequant.ir import Graph, IRType
    >>> graph = Graph("example")
    >>> x = graph.add_input("x", IRType.Float32, (2,))
    >>> graph.outputs = [graph.add("FakeQuantize", x, graph.add_constant("s", torch.ones(1)), spec="int4")]
    >>> backward(graph).run(torch.tensor([0.7, -9.0]), torch.tensor([1.0, 1.0]))
    tensor([1., 0.])
    """
    check(graph)
    types = graph.types()
    if dynamic := [id for id, type in types.items() if type.shape.dynamic]:
        raise GraphError(f"t{dynamic[0]} has a dynamic dimension {types[dynamic[0]]}; capture it with static shapes")
    if whole := [id for id in graph.outputs if not types[id].type.floating]:
        raise GraphError(f"the output t{whole[0]} is {types[whole[0]]}, which has no gradient")
    if graph.name.endswith(_SUFFIX) and any(value.name == _gradient(0) for value in graph.inputs.values()):
        raise GraphError(f"{graph.name!r} is a graph of gradients, and gradients of gradients are not recorded")
    if recurrent := [op for op in graph.ops if op.op_type.startswith(RECURRENT)]:
        raise GraphError(
            f"{recurrent[0]}: the gradient of a whole recurrent layer cannot be in a graph; run it by graph.run or "
            "graph.to_torch and call backward of torch, or write the layer as a loop of nn.LSTMCell or nn.GRUCell"
        )
    wanted = [id for id, value in graph.inputs.items() if value.type.type.floating]
    wanted += [id for id, constant in graph.constants.items() if constant.trainable]
    if not wanted:
        raise GraphError("no input is a floating-point tensor and no constant is trainable: there is no gradient")
    given = [*graph.inputs, *graph.constants]
    traced = _traced(graph, [given.index(id) for id in wanted])
    nodes = list(traced.graph.nodes)
    results = list(nodes[-1].args[0])
    result = type(graph)(f"{graph.name}{_SUFFIX}")
    result.inputs = dict(graph.inputs)
    for place, id in enumerate(graph.outputs):
        name = _free(_gradient(place), [value.name for value in result.inputs.values()])
        result.add_input(name, *types[id], id=max([*given, *result.inputs]) + 1)
    places = [*graph.inputs, *graph.constants, *list(result.inputs)[len(graph.inputs) :]]
    live = needed(nodes, results)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    ids = dict(zip(placeholders, places, strict=True))
    used = {ids[node] for node in placeholders if node in live}
    result.constants = {id: constant for id, constant in graph.constants.items() if id in used}
    converter = Converter(result, ids)
    for node in nodes:
        if node in live and node.op == "call_function":
            converter.add(node)
    converter.finish(results)
    return result


def _traced(graph: GraphStructure, wanted: list[int]) -> torch.fx.GraphModule:
    """Forward and backward as one fx graph of inputs, constants and gradients of the outputs."""
    module = to_torch(graph, lifted=True)
    set_opaque(module, True)
    types = graph.types()
    count = len(graph.inputs) + len(graph.constants)
    frozen = [len(graph.inputs) + i for i, constant in enumerate(graph.constants.values()) if constant.frozen]

    def gradients(*tensors: Tensor) -> list[Tensor]:
        leaves = [
            t.detach().requires_grad_() if i in wanted or i in frozen else t for i, t in enumerate(tensors[:count])
        ]
        with torch.enable_grad():
            results = module(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        moved = [i for i, result in enumerate(results) if result.requires_grad]
        sources = [leaves[i] for i in wanted]
        if not moved:
            return [torch.zeros_like(source) for source in sources]
        given = [tensors[count + i] for i in moved]
        found = torch.autograd.grad([results[i] for i in moved], sources, given, allow_unused=True)
        return [torch.zeros_like(s) if g is None else g for s, g in zip(sources, found, strict=True)]

    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [_like(value.type) for value in graph.inputs.values()]
        constants = [torch.empty_like(constant.tensor.detach()) for constant in graph.constants.values()]
        outputs = [_like(types[id]) for id in graph.outputs]
        given = (*inputs, *constants, *outputs)
        traced = make_fx(gradients)(*given)
        # Gradients of parts are added to views of zeros; torch's functionalization writes that without views.
        if not remove_changes_in_place(traced.graph):
            traced = make_fx(torch.func.functionalize(traced, remove="mutations"))(*given)
        return traced


def _gradient(place: int) -> str:
    return f"gradient_{place}"


def _free(name: str, taken: list[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _like(type: TensorType) -> Tensor:
    return torch.empty(type.shape, dtype=type.type.dtype)
