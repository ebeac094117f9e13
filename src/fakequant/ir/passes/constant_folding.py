"""Operations on constants, computed once."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from fakequant.errors import GraphError
from fakequant.ir.graph import Graph
from fakequant.ir.op import IROp, IRType
from fakequant.ir.structure import Constant, Input, read_frozen
from fakequant.ir.table import repeatable

log = logging.getLogger("fakequant.ir")


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
        found = graph.replaced(graph.ops)
        constants, ops = found.constants, []
        for op in graph.ops:
            results = _results(op, constants) if self._foldable(op, constants) else None
            if results is None:
                ops.append(op.copied())
            else:
                constants.update({i: Constant(found.free_name(c.name), c.tensor, c.frozen) for i, c in results.items()})
        used = {id for op in ops for id in op.input_ids} | set(graph.outputs)
        found.ops = ops
        found.constants = {id: c for id, c in constants.items() if id in used or id in graph.constants}
        return found

    def _foldable(self, op: IROp, constants: dict[int, Constant]) -> bool:
        if not all(id in constants and (self.parameters or not constants[id].trainable) for id in op.input_ids):
            return False
        types = [type for type in op.outputs if type.type is not IRType.Missing]
        small = all(type.type is not IRType.Index and 0 < type.shape.element_count <= self.limit for type in types)
        return small and repeatable(op)


def _results(op: IROp, constants: dict[int, Constant]) -> dict[int, Constant] | None:
    """The results of an operation as constants; None if their bits depend on grad mode, or a run does not compute them.

    Strides are kept, and how memory is aligned, because kernels sum by both.
    """
    alone = Graph()
    alone.inputs = {id: Input(f"t{id}", constants[id].type) for id in op.input_ids}
    alone.ops = [op]
    made = [id for id, type in zip(op.output_ids, op.outputs, strict=True) if type.type is not IRType.Missing]
    alone.outputs = made
    given = [constants[id] for id in alone.inputs]
    found = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            try:
                results = alone.run(*(read_frozen(c.tensor) if c.trainable or c.frozen else c.tensor for c in given))
            except GraphError as error:
                log.debug("%s stays: %s", op, error)
                return None
        found.append(results if isinstance(results, tuple) else (results,))
    without, graded = found
    if not all(_same(a, b) for a, b in zip(without, graded, strict=True)):
        return None
    return {
        id: Constant(f"folded.t{id}", _own_memory(a), b.requires_grad)
        for id, a, b in zip(made, without, graded, strict=True)
    }


def _same(a: Tensor, b: Tensor) -> bool:
    return a.stride() == b.stride() and Constant("", a).digest() == Constant("", b).digest()


def _own_memory(tensor: Tensor) -> Tensor:
    """A copy with the same strides, as far from a boundary of 64 bytes: no view of a parameter that training moves."""
    tensor = tensor.detach()
    shift = tensor.data_ptr() % 64 // tensor.element_size()
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.new_empty(shift + span)
    memory[shift:].copy_(tensor.as_strided((span,), (1,)))
    return memory.as_strided(tensor.shape, tensor.stride(), shift)
