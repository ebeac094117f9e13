"""A graph: inputs, constants, operations in the order in which they run, outputs."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from fakequant.errors import GraphError
from fakequant.ir.attributes import items_to_text
from fakequant.ir.op import IROp
from fakequant.ir.table import infer, make_op, without_defaults
from fakequant.ir.types import IRType, TensorShape, TensorType

if TYPE_CHECKING:
    from fakequant.ir.compiler import CompiledGraph


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
        """The tensor as operations get it."""
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


@dataclass(frozen=True)
class Validity:
    """What is wrong with a graph, each with where; it is true if nothing is."""

    faults: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        return "\n".join(self.faults) or "valid"


class Graph:
    """Operations between values t0, t1, ..., each made once.

    Attributes:
        name: of the whole.
        inputs: by id, in the order in which `run` takes them.
        constants: by id.
        ops: in the order in which they run.
        outputs: ids of what `run` returns.

    Source: AiDotNet's IRGraph.

    >>> graph = Graph("example")
    >>> x = graph.add_input("x", IRType.Float32, (2, 3))
    >>> y = graph.add("ReLU", x)
    >>> graph.outputs = [graph.add("FakeQuantization", y, num_bits=4)]
    >>> print(graph)
    IR Graph: example
      Inputs:
        t0 = "x" : Float32 [2, 3]
      Constants (0):
      Operations (2):
        t1 = ReLU(t0) : Float32 [2, 3]
        t2 = FakeQuantization(t1) {num_bits=4} : Float32 [2, 3]
      Outputs: t2
    >>> graph.run(torch.tensor([[-1.0, 0.1, 0.2], [0.3, 0.5, 0.7]]))
    tensor([[0.0000, 0.1000, 0.2000],
            [0.3000, 0.5000, 0.7000]])
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
        """A name that no constant has: the given one, or that with a number."""
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
        """The declared type of a value, looked for from the end: most read what was made last."""
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

    def faults(self) -> list[str]:
        """All that is wrong, each with where; empty if the graph is valid."""
        from fakequant.ir.check import faults_of

        return list(faults_of(self))

    def validate(self) -> Validity:
        """Whether the graph is valid, and if not, what is wrong with it and where.

        >>> from fakequant.ir import IROp, TensorShape, TensorType
        >>> graph = Graph("example")
        >>> x = graph.add_input("x", IRType.Float32, (2, 3))
        >>> graph.ops = [IROp("Add", [1], [x, 7], [TensorType(IRType.Float32, TensorShape((2, 3)))])]
        >>> found = graph.validate()
        >>> bool(found)
        False
        >>> print(found)
        t1 = Add(t0, t7) : Float32 [2, 3]: reads t7, which nothing makes
        the graph has no outputs
        """
        return Validity(tuple(self.faults()))

    def check(self) -> Graph:
        """The graph itself, if it is valid.

        Raises:
            GraphError: it is not; names every fault.
        """
        if found := self.faults():
            raise GraphError(f"the graph {self.name!r} is not valid:\n" + "\n".join(f"  {fault}" for fault in found))
        return self

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

    def replaced(self, ops: Sequence[IROp], constants: dict[int, Constant] | None = None) -> Graph:
        """A graph with other operations, and constants if they are given."""
        graph = Graph(self.name)
        graph.inputs = dict(self.inputs)
        graph.constants = dict(self.constants if constants is None else constants)
        graph.ops = [op.copied() for op in ops]
        graph.outputs = list(self.outputs)
        return graph

    def copy(self) -> Graph:
        """A graph of its own with the same tensors."""
        return self.replaced(self.ops)

    def run(self, *inputs: Tensor, limit: int = 2**33) -> Any:
        """The outputs for some inputs: a tensor, or a tuple if there are several.

        For many calls take `to_torch` or `compile` once: this checks the graph every time, and sizes that only a run
        can tell before each operation.

        Args:
            inputs: in the order of the graph's inputs.
            limit: bytes that one result may have; give a small one to run a text that you do not know.

        Raises:
            GraphError: the graph is not valid, an input is not of the declared type, a result has more bytes than the
                limit, or an operation fails or makes another type than it declares; names it.
        """
        from fakequant.ir.execute import run

        return run(self, inputs, limit)

    def to_torch(self) -> fx.GraphModule:
        """The graph as a module of torch, with the constants as its parameters and buffers (the same tensors).

        Raises:
            GraphError: the graph is not valid.
        """
        from fakequant.ir.execute import to_torch

        return to_torch(self)

    def compile(self, *, exact: bool = True) -> CompiledGraph:
        """The graph as one compiled function, see `fakequant.ir.compiler.compile`."""
        from fakequant.ir.compiler import compile

        return compile(self, exact=exact)

    def backward(self) -> Graph:
        """The graph of the gradients, see `fakequant.ir.gradient.backward`."""
        from fakequant.ir.gradient import backward

        return backward(self)

    def to_dot(self) -> str:
        """The graph in the language of Graphviz."""
        from fakequant.ir.picture import to_dot

        return to_dot(self)

    def __str__(self) -> str:
        from fakequant.ir.text import to_text

        return to_text(self).rstrip("\n")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and str(self) == str(other)

    __hash__ = None  # type: ignore[assignment]  graphs can be changed; `hash` is that of the present one


def _names(ids: Sequence[int]) -> str:
    return ", ".join(f"t{id}" for id in ids)
