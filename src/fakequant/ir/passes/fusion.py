"""A product, its bias, its activation and the quantizer after it, fused into one operation."""

from __future__ import annotations

from fakequant.ir.graph import Graph
from fakequant.ir.op import IROp, items_to_text
from fakequant.ir.run.execute import fuse
from fakequant.ir.structure import Constant
from fakequant.ir.table import repeatable


class MergeCommonSubexpressions:
    """Keeps the first of equal operations on equal inputs, and of equal constants; random ones are never equal."""

    name = "common subexpressions"
    exact = True

    def run(self, graph: Graph) -> Graph:
        """A graph in which each is computed once."""
        names: dict[int, int] = {}
        constants: dict[int, Constant] = {}
        known: dict[object, int] = {}
        for id, constant in graph.constants.items():
            names[id] = known.setdefault(_same_tensor(constant), id)
            if names[id] == id:
                constants[id] = constant
        made: dict[object, list[int]] = {}
        ops = []
        for op in graph.ops:
            read = [names.get(id, id) for id in op.input_ids]
            key = (op.op_type, items_to_text(op.attributes), tuple(read), tuple(map(str, op.outputs)))
            first = made.setdefault(key, op.output_ids) if repeatable(op) else op.output_ids
            if first is op.output_ids:
                ops.append(op.copied(input_ids=read))
            names.update(zip(op.output_ids, first, strict=True))
        merged = graph.replaced(ops, constants)
        merged.outputs = [names.get(id, id) for id in graph.outputs]
        return merged


def _same_tensor(constant: Constant) -> object:
    # Two parameters of equal values are moved apart by training; strides decide how the next operation sums.
    if constant.trainable:
        return id(constant.tensor)
    return constant.digest(), constant.frozen, constant.tensor.stride(), constant.tensor.device


class RemoveDeadCode:
    """Removes what no output depends on; inputs stay, and so does what draws random numbers."""

    name = "dead code"
    exact = True

    def run(self, graph: Graph) -> Graph:
        """A graph without them."""
        wanted = set(graph.outputs)
        kept = []
        for op in reversed(graph.ops):
            if wanted.intersection(op.output_ids) or not repeatable(op):
                kept.append(op)
                wanted.update(op.input_ids)
        constants = {id: constant for id, constant in graph.constants.items() if id in wanted}
        return graph.replaced(kept[::-1], constants)


_PRODUCTS = ("Linear", "MatMul", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
_ACTIVATIONS = (
    *("ReLU", "GELU", "SiLU", "Sigmoid", "Tanh", "LeakyReLU", "ELU"),
    *("HardSwish", "HardSigmoid", "HardTanh", "Clamp"),
)
_ORDER = (("BatchNorm",), ("Add",), _ACTIVATIONS, ("FakeQuantize", "FakeQuantization"))
"""The operations that may follow a product, each at most once and in this order."""


class FuseOperations:
    """Makes a product and what follows it one operation, where nothing else reads what is in between.

    The kernels and their order stay, and so does every bit. The graph gets shorter and shows what an engine computes as
    one operation.
    """

    name = "fusion"
    exact = True

    def run(self, graph: Graph) -> Graph:
        """A graph with the fused operations."""
        users = graph.users()
        chains = {id(chain[-1]): chain for op in graph.ops if len(chain := _chain(graph, users, op)) > 1}
        inner = {id(op) for chain in chains.values() for op in chain[:-1]}
        ops = []
        for op in graph.ops:
            if id(op) in chains:
                ops.append(fuse(chains[id(op)]))
            elif id(op) not in inner:
                ops.append(op)
        return graph.replaced(ops)


def _chain(graph: Graph, users: dict[int, list[IROp]], first: IROp) -> list[IROp]:
    """A product and what can be fused with it."""
    if first.op_type not in _PRODUCTS:
        return []
    chain, place = [first], 0
    while True:
        made = chain[-1].output_id
        readers = users.get(made, [])
        if len(readers) != 1 or made in graph.outputs or readers[0].input_ids[0] != made:
            return chain
        kinds = [i for i in range(place, len(_ORDER)) if readers[0].op_type in _ORDER[i]]
        if not kinds or not all(_known(graph, id, made) for id in readers[0].input_ids):
            return chain
        place = kinds[0] + 1
        chain.append(readers[0])


def _known(graph: Graph, id: int, made: int) -> bool:
    """Whether an input is the chain itself, or a constant, which is there before the chain begins."""
    return id == made or id in graph.constants
