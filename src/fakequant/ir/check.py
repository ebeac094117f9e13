"""What can be wrong with a graph: ids, order, names, types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fakequant.errors import GraphError
from fakequant.ir.graph import Constant, Graph
from fakequant.ir.op import IROp
from fakequant.ir.table import faults
from fakequant.ir.types import IRType, TensorType


def faults_of(graph: Graph) -> Iterator[str]:
    """All that is wrong with a graph, each with where."""
    return _Checker(graph).faults()


class _Checker:
    """Goes through a graph once and tells what is wrong."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[int, TensorType] = {}
        self.made_by: dict[int, str] = {}
        self.later: dict[int, IROp] = {}
        for op in graph.ops:
            for id in op.output_ids:
                self.later.setdefault(id, op)

    def faults(self) -> Iterator[str]:
        graph = self.graph
        for id, value in graph.inputs.items():
            yield from self._given(id, value.type, f"the input {value.name!r}")
        for id, constant in graph.constants.items():
            yield from self._constant(id, constant)
        for kind, names in (("input", graph.inputs.values()), ("constant", graph.constants.values())):
            yield from _twice(kind, [value.name for value in names])
        for op in graph.ops:
            yield from self._op(op)
        if not graph.outputs:
            yield "the graph has no outputs"
        for id in graph.outputs:
            if id not in self.known:
                yield f"the output t{id} is made by nothing"
            elif self.known[id].type in (IRType.Index, IRType.Missing):
                yield f"the output t{id} is {self.known[id].type.value}, which is no tensor"

    def _given(self, id: int, type: TensorType, what: str) -> Iterator[str]:
        if isinstance(id, bool) or not isinstance(id, int) or id < 0:
            yield f"{what} has the id {id!r}, which is no integer >= 0"
        if id in self.known:
            yield f"{what} has the id t{id}, which {self.made_by[id]} has already"
        if fault := type.fault():
            yield f"{what}: {fault}"
        elif type.type in (IRType.Index, IRType.Missing):
            yield f"{what} is {type.type.value}, which is no tensor"
        self.known[id], self.made_by[id] = type, what

    def _constant(self, id: int, constant: Constant) -> Iterator[str]:
        what = f"the constant {constant.name!r}"
        try:
            type = constant.type
        except GraphError as error:
            yield f"{what}: {error}"
            return
        yield from self._given(id, type, what)

    def _op(self, op: IROp) -> Iterator[str]:
        complete = True
        for id in op.input_ids:
            if id in self.known:
                continue
            complete = False
            if id in op.output_ids:
                yield f"{op}: reads t{id}, which it makes itself: a cycle"
            elif id in self.later:
                yield f"{op}: reads t{id}, which is made only later, by {self.later[id]}: wrong order or a cycle"
            else:
                yield f"{op}: reads t{id}, which nothing makes"
        found = faults(op, [self.known[id] for id in op.input_ids]) if complete else op.faults()
        yield from (f"{op}: {fault}" for fault in found)
        for place, id in enumerate(op.output_ids):
            if id in self.known or id in op.output_ids[:place]:
                yield f"{op}: makes t{id}, which {self.made_by.get(id, 'it')} has made already"
            if place < len(op.outputs):
                self.known[id] = op.outputs[place]
            self.made_by[id] = f"the operation {op}"


def _twice(kind: str, names: Sequence[str]) -> Iterator[str]:
    for name in dict.fromkeys(names):
        if not name or not isinstance(name, str):
            yield f"the name {name!r} of the {kind} is empty or no text"
        elif names.count(name) > 1:
            yield f"{names.count(name)} {kind}s have the name {name!r}"
