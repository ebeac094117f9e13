"""Operations that compute the same from the same values."""

from __future__ import annotations

from fakequant.ir.attributes import items_to_text
from fakequant.ir.graph import Graph
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
