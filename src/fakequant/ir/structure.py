"""The data of a graph: inputs, constants, operations in the order in which they run, outputs."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from fakequant.errors import GraphError
from fakequant.ir.op import IROp, IRType, TensorShape, TensorType, is_id, items_to_text
from fakequant.ir.table import faults, infer, make_op, without_defaults

GraphType = TypeVar("GraphType", bound="GraphStructure")
"""The class of a graph: a function that makes a graph from another makes it of the same class."""


@dataclass(frozen=True)
class Input:
    """An input of a graph."""

    name: str
    type: TensorType


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that the graph holds; one that requires grad is a parameter that training moves.

    Attributes:
        name: its own among the constants.
        tensor: its values.
        frozen: whether it was folded from parameters. Nothing moves it; but where grad mode is on, operations see it
            require grad as before, because torch chooses between the kernels of a product by that.
    """

    name: str
    tensor: Tensor
    frozen: bool = False

    @property
    def type(self) -> TensorType:
        """Its type."""
        return TensorType.of(self.tensor)

    @property
    def trainable(self) -> bool:
        """Whether training moves it."""
        return self.tensor.requires_grad

    @property
    def kind(self) -> str:
        """How text calls it: "parameter", "frozen" or "constant"."""
        return "parameter" if self.trainable else "frozen" if self.frozen else "constant"

    def read(self) -> Tensor:
        """The tensor that operations get."""
        return read_frozen(self.tensor) if self.frozen else self.tensor

    def digest(self) -> str:
        """SHA-256 over type, shape and every bit."""
        values = self.tensor.detach().cpu().contiguous().reshape(-1)
        found = hashlib.sha256(f"{self.tensor.dtype} {list(self.tensor.shape)}".encode())
        found.update(values.view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def read_frozen(tensor: Tensor) -> Tensor:
    """A tensor that requires grad where grad mode is on, without a path to what trains."""
    return tensor.detach().requires_grad_(torch.is_grad_enabled())


class GraphStructure:
    """The data of a `Graph`, without what can be done with the whole: run it, check it, write it as text.

    Modules that `Graph` calls take this class, so that they need not import `Graph`.

    Attributes:
        name: of the whole.
        inputs: by id, in the order in which `run` takes them.
        constants: by id.
        ops: in the order in which they run.
        outputs: ids of what `run` returns.
    """

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self.inputs: dict[int, Input] = {}
        self.constants: dict[int, Constant] = {}
        self.ops: list[IROp] = []
        self.outputs: list[int] = []

    def new_id(self) -> int:
        """An id that no value has."""
        made = [id for op in self.ops for id in op.output_ids if isinstance(id, int)]
        return max([-1, *self.inputs, *self.constants, *made]) + 1

    def add_input(self, name: str, type: IRType, shape: Sequence[int], id: int | None = None) -> int:
        """Add an input and return its id."""
        id = self.new_id() if id is None else id
        self.inputs[id] = Input(name, TensorType(type, TensorShape(shape)))
        return id

    def free_name(self, name: str) -> str:
        """A unique name for a constant: the given one, or the given one with a number."""
        taken = {constant.name for constant in self.constants.values()}
        return next(n for n in itertools.chain([name], (f"{name}.{i}" for i in itertools.count(1))) if n not in taken)

    def add_constant(self, name: str, tensor: Tensor, id: int | None = None) -> int:
        """Add a constant and return its id."""
        id = self.new_id() if id is None else id
        self.constants[id] = Constant(name, tensor)
        return id

    def add(self, op_type: str, *input_ids: int, **attributes: Any) -> int:
        """Add an operation with one result, whose type follows from its inputs, and return the result's id.

        Raises:
            GraphError: the inputs do not fit, or there is another number of results than one; use `add_all`.
        """
        made = self.add_all(op_type, *input_ids, **attributes)
        if len(made) != 1:
            raise GraphError(f"{self.ops.pop()}: makes {len(made)} values; use add_all")
        return made[0]

    def add_all(self, op_type: str, *input_ids: int, **attributes: Any) -> list[int]:
        """Add an operation and return the ids of all its results.

        Raises:
            GraphError: the inputs do not fit.
        """
        op = make_op(op_type, input_ids, attributes)
        types = [self._type(id) for id in input_ids]
        if missing := [id for id, type in zip(input_ids, types, strict=True) if type is None]:
            raise GraphError(f"{op_type}: reads {_names(missing)}, which nothing makes yet")
        inputs = [type for type in types if type is not None]
        first = self.new_id()
        try:
            op.outputs = list(infer(op, inputs))
        except GraphError as error:
            raise GraphError(f"{op_type}({_names(input_ids)}): {error}") from error
        op.output_ids = list(range(first, first + len(op.outputs)))
        if found := op.faults():
            raise GraphError(f"{op}: {found[0]}")
        self.ops.append(op)
        return op.output_ids

    def _type(self, id: int) -> TensorType | None:
        """The declared type of a value; the search starts at the end, because most operations read recent values."""
        for op in reversed(self.ops):
            if id in op.output_ids:
                return op.outputs[op.output_ids.index(id)]
        held = self.inputs.get(id) or self.constants.get(id)
        return None if held is None else held.type

    def types(self) -> dict[int, TensorType]:
        """The declared type of every value."""
        found = {id: value.type for id, value in (*self.inputs.items(), *self.constants.items())}
        for op in self.ops:
            found.update(zip(op.output_ids, op.outputs, strict=False))
        return found

    def producers(self) -> dict[int, IROp]:
        """The operation that makes each value."""
        return {id: op for op in self.ops for id in op.output_ids}

    def users(self) -> dict[int, list[IROp]]:
        """The operations that read each value, once for every time; outputs of the graph are not counted."""
        found: dict[int, list[IROp]] = {}
        for op in self.ops:
            for id in op.input_ids:
                found.setdefault(id, []).append(op)
        return found

    def hash(self, *, constants: bool = True) -> str:
        """SHA-256 of what the graph computes: types, operations with all attributes, and the bits of constants.

        Ids, names and whether a default is written do not count. Graphs with equal hashes give equal results.

        Args:
            constants: whether their bits count; otherwise only their types do.
        """
        places: dict[int, int] = {}
        lines = []
        for id, value in self.inputs.items():
            places[id] = len(places)
            lines.append(f"input {value.type}")
        for id, constant in self.constants.items():
            places[id] = len(places)
            bits = constant.digest() if constants else ""
            lines.append(f"constant {constant.type} {constant.kind} {bits}")
        for op in self.ops:
            read = [places.get(id, -1) for id in op.input_ids]
            for id in op.output_ids:
                places[id] = len(places)
            made = [places[id] for id in op.output_ids]
            types = ", ".join(map(str, op.outputs))
            lines.append(f"{made} = {op.op_type}{read}{items_to_text(without_defaults(op))} : {types}")
        lines.append(f"outputs {[places.get(id, -1) for id in self.outputs]}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def replaced(self: GraphType, ops: Sequence[IROp], constants: dict[int, Constant] | None = None) -> GraphType:
        """A graph with other operations, and constants if they are given."""
        graph = type(self)(self.name)
        graph.inputs = dict(self.inputs)
        graph.constants = dict(self.constants if constants is None else constants)
        graph.ops = [op.copied() for op in ops]
        graph.outputs = list(self.outputs)
        return graph

    def copy(self: GraphType) -> GraphType:
        """A graph of its own with the same tensors."""
        return self.replaced(self.ops)


def _names(ids: Sequence[int]) -> str:
    return ", ".join(f"t{id}" for id in ids)


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
