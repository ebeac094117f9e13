"""The data of a graph: inputs, constants, operations in the order in which they run, outputs."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fakequant.errors import GraphError
from fakequant.ir.attributes import items_to_text
from fakequant.ir.op import IROp
from fakequant.ir.table import infer, make_op, without_defaults
from fakequant.ir.types import IRType, TensorShape, TensorType

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
