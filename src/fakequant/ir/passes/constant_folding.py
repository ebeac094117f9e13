"""Operations on constants, computed once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fakequant.ir.execute import to_torch
from fakequant.ir.graph import Constant, Graph, Input
from fakequant.ir.op import IROp
from fakequant.ir.table import repeatable
from fakequant.ir.types import IRType


@dataclass(frozen=True)
class FoldConstants:
    """Replaces operations on constants, fake-quantized weights among them, by their results, bit for bit.

    Args:
        limit: results of more elements are computed at every run, so that a mask of ones does not become megabytes.
        parameters: whether trainable constants are folded too; training cannot move them any more then.
    """

    limit: int = 10_000_000
    parameters: bool = True
    name = "constant folding"
    exact = True

    def run(self, graph: Graph) -> Graph:
        """A graph in which they are constants."""
        constants = dict(graph.constants)
        ops = []
        for op in graph.ops:
            if self._foldable(op, constants):
                constants.update(_results(op, constants))
            else:
                ops.append(op)
        used = {id for op in ops for id in op.input_ids} | set(graph.outputs)
        kept = {id: c for id, c in constants.items() if id in used or id in graph.constants}
        return graph.replaced(ops, kept)

    def _foldable(self, op: IROp, constants: dict[int, Constant]) -> bool:
        if not all(id in constants and (self.parameters or not constants[id].trainable) for id in op.input_ids):
            return False
        types = [type for type in op.outputs if type.type is not IRType.Missing]
        small = all(type.type is not IRType.Index and 0 < type.shape.element_count <= self.limit for type in types)
        return small and repeatable(op)


def _results(op: IROp, constants: dict[int, Constant]) -> dict[int, Constant]:
    """The results of an operation as constants."""
    alone = Graph()
    alone.inputs = {id: Input(f"t{id}", constants[id].type) for id in op.input_ids}
    alone.ops = [op]
    made = [id for id, type in zip(op.output_ids, op.outputs, strict=True) if type.type is not IRType.Missing]
    alone.outputs = made
    with torch.no_grad():
        found = to_torch(alone)(*(constants[id].tensor.detach() for id in alone.inputs))
    results = found if isinstance(found, tuple) else (found,)
    return {id: Constant(f"folded.t{id}", result) for id, result in zip(made, results, strict=True)}
