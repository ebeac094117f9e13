"""The check of a graph: ids, order, names, types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from fakequant.errors import GraphError
from fakequant.ir.attributes import items_to_text
from fakequant.ir.op import IROp, is_id
from fakequant.ir.structure import Constant, GraphStructure, Input
from fakequant.ir.table import faults
from fakequant.ir.types import IRType, TensorType


@dataclass(frozen=True)
class Validity:
    """The faults of a graph, each with its place; true if there are none."""

    faults: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        return "\n".join(self.faults) or "valid"


def validate(graph: GraphStructure) -> Validity:
    """Whether a graph is valid, and if not, what is wrong with it and where."""
    return Validity(tuple(faults_of(graph)))


def check(graph: GraphStructure) -> None:
    """Raise unless a graph is valid.

    Raises:
        GraphError: it is not; names every fault.
    """
    if found := list(faults_of(graph)):
        raise GraphError(f"the graph {graph.name!r} is not valid:\n" + "\n".join(f"  {fault}" for fault in found))


def faults_of(graph: GraphStructure) -> Iterator[str]:
    """The faults of a graph, each with its place."""
    return _Checker(graph).faults()


class _Checker:
    """Goes through a graph once and reports every fault."""

    def __init__(self, graph: GraphStructure) -> None:
        self.graph = graph
        self.known: dict[int, TensorType] = {}
        self.made_by: dict[int, str] = {}
        self.later: dict[int, IROp] = {}
        # Operations that fit, by all but their ids: layers repeat, and asking torch takes 0.1 ms and more.
        self.fitting: set[object] = set()
        for op in graph.ops:
            if isinstance(op, IROp) and not op.faults():
                self.later.update((id, op) for id in op.output_ids if id not in self.later)

    def faults(self) -> Iterator[str]:
        graph = self.graph
        for id, value in graph.inputs.items():
            yield from self._input(id, value)
        for id, constant in graph.constants.items():
            yield from self._constant(id, constant)
        yield from _twice("input", [value.name for value in graph.inputs.values() if isinstance(value, Input)])
        yield from _twice("constant", [c.name for c in graph.constants.values() if isinstance(c, Constant)])
        for place, op in enumerate(graph.ops):
            yield from self._op(place, op)
        if not graph.outputs:
            yield "the graph has no outputs"
        for id in graph.outputs:
            yield from self._output(id)

    def _output(self, id: int) -> Iterator[str]:
        if not is_id(id):
            yield f"the output {id!r} is no integer >= 0"
        elif id not in self.known:
            yield f"the output t{id} is made by nothing"
        elif self.known[id].type in (IRType.Index, IRType.Missing):
            yield f"the output t{id} is {self.known[id].type.value}, which is no tensor"

    def _given(self, id: int, type: TensorType, what: str) -> Iterator[str]:
        if not is_id(id):
            yield f"{what} has the id {id!r}, which is no integer >= 0"
        if id in self.known:
            yield f"{what} has the id t{id}, which {self.made_by[id]} has already"
        if fault := type.fault():
            yield f"{what}: {fault}"
        elif type.type in (IRType.Index, IRType.Missing):
            yield f"{what} is {type.type.value}, which is no tensor"
        self.known[id], self.made_by[id] = type, what

    def _input(self, id: int, value: Input) -> Iterator[str]:
        if not isinstance(value, Input) or not isinstance(value.type, TensorType):
            yield f"the input {id!r} is {value!r}, and no Input of a TensorType"
            return
        yield from self._given(id, value.type, f"the input {value.name!r}")

    def _constant(self, id: int, constant: Constant) -> Iterator[str]:
        if not isinstance(constant, Constant) or not isinstance(constant.tensor, Tensor):
            yield f"the constant {id!r} is {constant!r}, and no Constant of a tensor"
            return
        what = f"the constant {constant.name!r}"
        if fault := _memory_fault(constant.tensor):
            yield f"{what} {fault}"
            return
        if constant.frozen and not constant.tensor.is_floating_point() and not constant.tensor.is_complex():
            yield f"{what} is frozen, but {constant.tensor.dtype} has no gradient"
        try:
            type = constant.type
        except GraphError as error:
            yield f"{what}: {error}"
            return
        yield from self._given(id, type, what)

    def _op(self, place: int, op: IROp) -> Iterator[str]:
        if not isinstance(op, IROp):
            yield f"operation {place} is {op!r}, and no IROp"
            return
        if own := op.faults():
            yield from (f"{_describe(place, op)}: {fault}" for fault in own)
            self._register(op)
            return
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
        if complete:
            yield from self._types(op)
        made: set[int] = set()
        for id in op.output_ids:
            if id in self.known or id in made:
                yield f"{op}: makes t{id}, which {self.made_by.get(id, 'it')} has made already"
            made.add(id)
        self._register(op)

    def _types(self, op: IROp) -> Iterator[str]:
        inputs = [self.known[id] for id in op.input_ids]
        key = (op.op_type, items_to_text(op.attributes), *map(str, inputs), "makes", *map(str, op.outputs))
        if key in self.fitting:
            return
        if found := faults(op, inputs):
            yield from (f"{op}: {fault}" for fault in found)
        else:
            self.fitting.add(key)

    def _register(self, op: IROp) -> None:
        """Note the results of an operation as known, so that one fault gives one message."""
        if isinstance(op.output_ids, list) and isinstance(op.outputs, list):
            for id, type in zip(op.output_ids, op.outputs, strict=False):
                if is_id(id) and isinstance(type, TensorType):
                    self.known[id], self.made_by[id] = type, f"the operation t{id}"


def _describe(place: int, op: IROp) -> str:
    """An operation as text; if it is malformed, its place and its type."""
    try:
        return str(op)
    except TypeError:
        return f"operation {place}, {op.op_type!r}"


def _memory_fault(tensor: Tensor) -> str | None:
    """Why a tensor cannot be read bit by bit; None if it can."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"is of layout {tensor.layout}, and a graph holds dense tensors"
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return "has no memory: it is a tensor of the meta device"
    if tensor.is_conj() or tensor.is_neg():
        return "is a view that conjugates or negates; call resolve_conj() or resolve_neg()"
    return None


def _twice(kind: str, names: Sequence[str]) -> Iterator[str]:
    texts = [name for name in names if isinstance(name, str) and name]
    yield from (
        f"the name {name!r} of the {kind} is empty or no text"
        for name in names
        if not isinstance(name, str) or not name
    )
    counts = Counter(texts)
    for name in counts:
        if not name.isascii() and _has_no_utf8(name):
            yield f"the name {name!r} of the {kind} has characters that UTF-8 cannot write"
        if (count := counts[name]) > 1:
            yield f"{count} {kind}s have the name {name!r}"


def _has_no_utf8(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
