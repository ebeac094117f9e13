"""Quantizers moved before operations that only move elements."""

from __future__ import annotations

from fakequant.ir.graph import Graph
from fakequant.ir.op import IROp
from fakequant.ir.table import ROWS, in_order
from fakequant.ir.types import TensorType
from fakequant.numerics.granularity import PerTensor
from fakequant.numerics.spec import QuantSpec, Rounding


class MoveFakeQuantize:
    """Moves a quantizer of one scale per tensor before reshapes and transposes, next to what made the elements.

    There it can be fused with that, or be found twice. A tensor has the same range and rounds to the same values in
    every order of its elements, unless rounding draws random numbers by position.
    """

    name = "fake quantization before reshapes"
    exact = True

    def run(self, graph: Graph) -> Graph:
        """A graph with every such quantizer as early as it can be."""
        moved = graph.copy()
        reshaped: dict[tuple[int, int], int] = {}
        while (pair := _next(moved)) is not None:
            _swap(moved, *pair, reshaped)
        return moved


def _next(graph: Graph) -> tuple[IROp, IROp] | None:
    """A quantizer and the movement before it, which nothing else reads."""
    producers, users = graph.producers(), graph.users()
    for op in graph.ops:
        before = producers.get(op.input_ids[0]) if op.input_ids else None
        if before is None or op.op_type != "FakeQuantize" or not _moves(before) or not _can_move(graph, op, before):
            continue
        if len(users[before.output_id]) == 1 and before.output_id not in graph.outputs:
            return op, before
    return None


def _moves(op: IROp) -> bool:
    return op.op_type in ROWS and ROWS[op.op_type].moves and in_order(op)


def _can_move(graph: Graph, op: IROp, movement: IROp) -> bool:
    if not in_order(op) or not all(id in graph.constants for id in op.input_ids[1:]):
        return False
    params = [graph.constants[id] for id in op.input_ids[1:]]
    rank = len(graph.types()[movement.input_ids[0]].shape)
    spec = QuantSpec.parse(op.attributes["spec"])
    # A parameter in another shape would be another parameter, which nothing trains.
    constant = all(c.tensor.dim() == rank or not (c.trainable or c.frozen) for c in params)
    return isinstance(spec.granularity, PerTensor) and spec.rounding is Rounding.NEAREST_EVEN and constant


def _swap(graph: Graph, quantizer: IROp, movement: IROp, reshaped: dict[tuple[int, int], int]) -> None:
    """Quantize first, then move; ids and places of the results stay.

    Args:
        graph: what is changed.
        quantizer: what is moved.
        movement: what it is moved before.
        reshaped: the constants made so far, by the one they were made of and their rank.
    """
    x = movement.input_ids[0]
    type = graph.types()[x]
    params = [_of_rank(graph, id, len(type.shape), reshaped) for id in quantizer.input_ids[1:]]
    first = quantizer.copied([movement.output_id], [x, *params])
    first.outputs = [TensorType(*type)]
    second = movement.copied(quantizer.output_ids, [movement.output_id, *movement.input_ids[1:]])
    second.outputs = list(quantizer.outputs)
    places = {id(movement): first, id(quantizer): second}
    # The quantizer's constants are made already; sizes that the movement reads were there before it.
    graph.ops = [places.get(id(op), op) for op in graph.ops]


def _of_rank(graph: Graph, id: int, rank: int, reshaped: dict[tuple[int, int], int]) -> int:
    """The one number of a constant in as many dimensions as the tensor has."""
    constant = graph.constants[id]
    if constant.tensor.dim() == rank:
        return id
    if (id, rank) not in reshaped:
        name = graph.free_name(f"{constant.name}.rank_{rank}")
        reshaped[id, rank] = graph.add_constant(name, constant.tensor.detach().reshape([1] * rank))
    return reshaped[id, rank]
