"""A graph: its data, and methods that build, check, print, run, compile and differentiate it."""

from __future__ import annotations

import hashlib
import itertools
import json
import keyword
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fakequant.errors import GraphError
from fakequant.ir.convert import changes_in_place, lower, needed, operations
from fakequant.ir.op import IROp, IRType, Ref, TensorShape, TensorType, is_id, items_to_text
from fakequant.ir.op import to_text as value_to_text
from fakequant.ir.ops import FUSED, RECURRENT, FakeQuantize, body_of
from fakequant.ir.table import bound, faults, infer, make_op, repeatable, type_of


@dataclass(frozen=True)
class Input:
    """An input of a graph."""

    name: str
    type: TensorType


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor in a graph; a constant that requires grad is a parameter that training changes.

    Attributes:
        name: unique among the constants.
        tensor: the values.
        frozen: whether training does not change the constant, because it was folded from parameters. In grad mode it
            is read with requires_grad set, as the parameters were, because torch chooses kernels of products by it.
    """

    name: str
    tensor: Tensor
    frozen: bool = False

    @property
    def type(self) -> TensorType:
        """The type and shape of the tensor."""
        return TensorType.of(self.tensor)

    @property
    def trainable(self) -> bool:
        """Whether training changes the constant."""
        return self.tensor.requires_grad

    @property
    def kind(self) -> str:
        """The word for the constant in the graph's text: "parameter", "frozen" or "constant"."""
        return "parameter" if self.trainable else "frozen" if self.frozen else "constant"

    def read(self) -> Tensor:
        """The tensor that operations get: in grad mode, a frozen constant is read with requires_grad set."""
        return read_frozen(self.tensor) if self.frozen else self.tensor

    def digest(self) -> str:
        """The SHA-256 of dtype, shape and every bit of the tensor."""
        values = self.tensor.detach().cpu().contiguous().reshape(-1)
        found = hashlib.sha256(f"{self.tensor.dtype} {list(self.tensor.shape)}".encode())
        found.update(values.view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def read_frozen(tensor: Tensor) -> Tensor:
    """A detached tensor that requires grad in grad mode; no gradient reaches the original tensor."""
    return tensor.detach().requires_grad_(torch.is_grad_enabled())


@dataclass(frozen=True)
class Validity:
    """Whether a graph is valid, as a truth value; `faults` lists its faults, each with its place."""

    faults: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        return "\n".join(self.faults) or "valid"


class Graph:
    """Operations on values t0, t1, ...; each value is an input, a constant, or the result of one operation.

    Attributes:
        name: the name of the graph.
        inputs: the inputs by id, in the order in which `run` takes them.
        constants: the constants by id.
        ops: the operations in the order in which they run.
        outputs: the ids of the values that `run` returns.

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
        """A new id, which no value of the graph has."""
        made = [id for op in self.ops for id in op.output_ids if isinstance(id, int)]
        return max([-1, *self.inputs, *self.constants, *made]) + 1

    def add_input(self, name: str, type: IRType, shape: Sequence[int], id: int | None = None) -> int:
        """Add an input and return its id."""
        id = self.new_id() if id is None else id
        self.inputs[id] = Input(name, TensorType(type, TensorShape(shape)))
        return id

    def free_name(self, name: str) -> str:
        """A unique name for a constant: `name`, or `name` with a number."""
        taken = {constant.name for constant in self.constants.values()}
        return next(n for n in itertools.chain([name], (f"{name}.{i}" for i in itertools.count(1))) if n not in taken)

    def add_constant(self, name: str, tensor: Tensor, id: int | None = None) -> int:
        """Add a constant and return its id."""
        id = self.new_id() if id is None else id
        self.constants[id] = Constant(name, tensor)
        return id

    def add(self, op_type: str, *input_ids: int, **attributes: Any) -> int:
        """Add an operation with one result, whose type follows from its inputs; returns the result's id.

        Raises:
            GraphError: the inputs do not fit, or the operation has several results; use `add_all`.
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
        types: list[TensorType] = []
        for id in input_ids:
            # From the end, because most operations read recent values.
            made_by = next((op for op in reversed(self.ops) if id in op.output_ids), None)
            held = self.inputs.get(id) or self.constants.get(id)
            if made_by is None and held is None:
                raise GraphError(f"{op_type}: reads t{id}, which nothing makes yet")
            types += [made_by.outputs[made_by.output_ids.index(id)]] if made_by else [held.type] if held else []
        try:
            op.outputs = list(infer(op, types))
        except GraphError as error:
            raise GraphError(f"{op_type}({', '.join(f't{id}' for id in input_ids)}): {error}") from error
        first = self.new_id()
        op.output_ids = list(range(first, first + len(op.outputs)))
        if found := op.faults():
            raise GraphError(f"{op}: {found[0]}")
        self.ops.append(op)
        return op.output_ids

    def types(self) -> dict[int, TensorType]:
        """The type of every value, as declared, by id."""
        found = {id: value.type for id, value in (*self.inputs.items(), *self.constants.items())}
        for op in self.ops:
            found.update(zip(op.output_ids, op.outputs, strict=False))
        return found

    def producers(self) -> dict[int, IROp]:
        """The operation that makes each value, by id."""
        return {id: op for op in self.ops for id in op.output_ids}

    def users(self) -> dict[int, list[IROp]]:
        """The operations that read each value, listed once for every time they read it; outputs do not count."""
        found: dict[int, list[IROp]] = {}
        for op in self.ops:
            for id in op.input_ids:
                found.setdefault(id, []).append(op)
        return found

    def replaced(self, ops: Sequence[IROp], constants: dict[int, Constant] | None = None) -> Graph:
        """A copy of the graph with other operations, and with other constants if they are not None."""
        graph = Graph(self.name)
        graph.inputs = dict(self.inputs)
        graph.constants = dict(self.constants if constants is None else constants)
        graph.ops = [op.copied() for op in ops]
        graph.outputs = list(self.outputs)
        return graph

    def copy(self) -> Graph:
        """A copy of the graph that shares the tensors of the constants."""
        return self.replaced(self.ops)

    def faults(self) -> list[str]:
        """List the faults of the graph, each with its place; [] if the graph is valid."""
        return list(_Checker(self).faults())

    def validate(self) -> Validity:
        """Whether the graph is valid; the result's text lists all faults with their places.

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
        """Return the graph if it is valid.

        Raises:
            GraphError: the graph is not valid; the message lists every fault.
        """
        if found := self.faults():
            raise GraphError(f"the graph {self.name!r} is not valid:\n" + "\n".join(f"  {fault}" for fault in found))
        return self

    def run(self, *inputs: Tensor) -> Any:
        """The outputs for some inputs: one tensor, or a tuple of tensors.

        For many calls use `to_torch` or `compile` once: `run` checks the graph at each call, and each result.

        Args:
            inputs: the tensors, in the order of the graph's inputs.

        Raises:
            GraphError: the graph is not valid, an input is not of the declared type, or an operation fails or makes
                another type than it declares; the message names it.
        """
        module = to_torch(self)
        _check_inputs(self, inputs)
        return _Checked(module).run(*inputs)

    def to_torch(self) -> fx.GraphModule:
        """The graph as a torch module, whose parameters and buffers are the constants (the same tensors).

        Raises:
            GraphError: the graph is not valid.
        """
        return to_torch(self)

    def compile(self, *, exact: bool = True) -> CompiledGraph:
        """The graph as one compiled function, see `fakequant.ir.graph.compile`."""
        return compile(self, exact=exact)

    def backward(self) -> Graph:
        """The graph of the gradients, see `fakequant.ir.graph.backward`."""
        return backward(self)

    def __str__(self) -> str:
        return to_text(self).rstrip("\n")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and str(self) == str(other)

    __hash__ = None  # type: ignore[assignment]  graphs can be changed


_INLINE = 4
"""Constants of at most this many elements are written out as numbers in the text."""


def to_text(graph: Graph) -> str:
    """The text of a graph: every attribute, and the digest or the few numbers of each constant.

    Graphs with the same text compute the same.
    """
    lines = [f"IR Graph: {_one_line(graph.name)}", "  Inputs:"]
    lines += [f"    t{id} = {json.dumps(value.name)} : {value.type}" for id, value in graph.inputs.items()]
    lines.append(f"  Constants ({len(graph.constants)}):")
    for id, constant in graph.constants.items():
        text = f"sha256:{constant.digest()[:32]}"
        if constant.tensor.numel() <= _INLINE and not constant.tensor.is_complex():
            values = constant.tensor.detach().cpu().reshape(-1).tolist()
            # A NaN has bits that its text does not tell.
            text = value_to_text(values) if all(value == value for value in values) else text
        lines.append(f"    t{id} = {constant.kind} {json.dumps(constant.name)} : {constant.type} = {text}")
    lines.append(f"  Operations ({len(graph.ops)}):")
    lines += [f"    {op.detailed()}{f'  # {_one_line(op.origin)}' if op.origin else ''}" for op in graph.ops]
    lines.append(f"  Outputs: {', '.join(f't{id}' for id in graph.outputs)}")
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    # Characters that UTF-8 cannot encode are written as numbers.
    return " ".join(str(text).split()).encode("utf-8", "backslashreplace").decode()


class _Checker:
    """Checks a graph in one pass, and reports every fault."""

    def __init__(self, graph: Graph) -> None:
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
        for id, value in self.graph.inputs.items():
            if not isinstance(value, Input) or not isinstance(value.type, TensorType):
                yield f"the input {id!r} is {value!r}, but must be an Input of a TensorType"
            else:
                yield from self._given(id, value.type, f"the input {value.name!r}")
        for id, constant in self.graph.constants.items():
            yield from self._constant(id, constant)
        yield from _wrong_names("input", [v.name for v in self.graph.inputs.values() if isinstance(v, Input)])
        yield from _wrong_names("constant", [c.name for c in self.graph.constants.values() if isinstance(c, Constant)])
        for place, op in enumerate(self.graph.ops):
            if not isinstance(op, IROp):
                yield f"operation {place} is {op!r}, but must be an IROp"
                continue
            yield from self._op(place, op)
            # The results are known whatever is wrong, so that one fault gives one message.
            if isinstance(op.output_ids, list) and isinstance(op.outputs, list):
                for id, type in zip(op.output_ids, op.outputs, strict=False):
                    if is_id(id) and isinstance(type, TensorType):
                        self.known[id], self.made_by[id] = type, f"the operation t{id}"
        if not self.graph.outputs:
            yield "the graph has no outputs"
        for id in self.graph.outputs:
            if not is_id(id):
                yield f"the output {id!r} is not an integer >= 0"
            elif id not in self.known:
                yield f"the output t{id} is made by nothing"
            elif self.known[id].type in (IRType.Index, IRType.Missing):
                yield f"the output t{id} is {self.known[id].type.value}, which is not a tensor"

    def _given(self, id: int, type: TensorType, what: str) -> Iterator[str]:
        """The faults of an input or a constant."""
        if not is_id(id):
            yield f"{what} has the id {id!r}, which is not an integer >= 0"
        if id in self.known:
            yield f"{what} has the id t{id}, which {self.made_by[id]} has already"
        if fault := type.fault():
            yield f"{what}: {fault}"
        elif type.type in (IRType.Index, IRType.Missing):
            yield f"{what} is {type.type.value}, which is not a tensor"
        self.known[id], self.made_by[id] = type, what

    def _constant(self, id: int, constant: Constant) -> Iterator[str]:
        if not isinstance(constant, Constant) or not isinstance(constant.tensor, Tensor):
            yield f"the constant {id!r} is {constant!r}, but must be a Constant of a tensor"
            return
        what, tensor = f"the constant {constant.name!r}", constant.tensor
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            yield f"{what} is of layout {tensor.layout}, and a graph holds dense tensors"
        elif tensor.is_meta or isinstance(tensor, FakeTensor):
            yield f"{what} has no memory: it is a tensor of the meta device"
        elif tensor.is_conj() or tensor.is_neg():
            yield f"{what} is a view that conjugates or negates; call resolve_conj() or resolve_neg()"
        else:
            if constant.frozen and not tensor.is_floating_point() and not tensor.is_complex():
                yield f"{what} is frozen, but {tensor.dtype} has no gradient"
            try:
                type = constant.type
            except GraphError as error:
                yield f"{what}: {error}"
            else:
                yield from self._given(id, type, what)

    def _op(self, place: int, op: IROp) -> Iterator[str]:
        if found := op.faults():
            try:
                shown = str(op)
            except TypeError:
                shown = f"operation {place}, {op.op_type!r}"
            yield from (f"{shown}: {fault}" for fault in found)
            return
        unknown = [id for id in op.input_ids if id not in self.known]
        for id in unknown:
            if id in op.output_ids:
                yield f"{op}: reads t{id}, which it makes itself: a cycle"
            elif id in self.later:
                yield f"{op}: reads t{id}, which is made only later, by {self.later[id]}: wrong order or a cycle"
            else:
                yield f"{op}: reads t{id}, which nothing makes"
        if not unknown:
            inputs = [self.known[id] for id in op.input_ids]
            key = (op.op_type, items_to_text(op.attributes), *map(str, inputs), "makes", *map(str, op.outputs))
            if key not in self.fitting:
                found = faults(op, inputs)
                yield from (f"{op}: {fault}" for fault in found)
                if not found:
                    self.fitting.add(key)
        made: set[int] = set()
        for id in op.output_ids:
            if id in self.known or id in made:
                yield f"{op}: makes t{id}, which {self.made_by.get(id, 'it')} has made already"
            made.add(id)


def _wrong_names(kind: str, names: Sequence[object]) -> Iterator[str]:
    texts = Counter(name for name in names if isinstance(name, str) and name)
    for name in names:
        if not isinstance(name, str) or not name:
            yield f"the name {name!r} of the {kind} is empty or not a text"
    for name, count in texts.items():
        if any("\ud800" <= character <= "\udfff" for character in name):
            yield f"the name {name!r} of the {kind} has characters that UTF-8 cannot write"
        if count > 1:
            yield f"{count} {kind}s have the name {name!r}"


class _Checked(fx.Interpreter):
    """Runs a module node by node; errors name the operation that fails, or has another type than declared."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        op = n.meta.get("op")
        if op is None:
            return super().run_node(n)
        try:
            result = super().run_node(n)
            results = list(result) if isinstance(result, (tuple, list)) else [result]
            if len(results) != len(op.outputs):
                raise GraphError(f"made {len(results)} values, but {len(op.outputs)} are declared")
            for id, declared, made in zip(op.output_ids, op.outputs, results, strict=True):
                found = type_of(made)
                fits = found.type is declared.type and declared.shape.matches(found.shape)
                if not fits and declared.type is not IRType.Missing:
                    raise GraphError(f"declares t{id} as {declared}, but computes {None if made is None else found}")
        except Exception as error:  # whatever an operation raises; what the reader needs is which it was
            what = f"{op} of {op.origin}" if op.origin else str(op)
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise GraphError(f"{what}: {reason}") from error
        return result


def _check_inputs(graph: Graph, inputs: Sequence[Tensor]) -> None:
    """Check that a graph can run on these inputs.

    Raises:
        GraphError: the number of inputs or the type of one is not as declared.
    """
    declared = list(graph.inputs.values())
    if len(inputs) != len(declared):
        raise GraphError(f"the graph {graph.name!r} takes {len(declared)} inputs, got {len(inputs)}")
    for value, given in zip(declared, inputs, strict=True):
        if not isinstance(given, Tensor):
            raise GraphError(f"the input {value.name!r} must be a tensor, got {type(given).__name__}")
        found = TensorType.of(given)
        if found.type is not value.type.type or not value.type.shape.matches(found.shape):
            raise GraphError(f"the input {value.name!r} must be {value.type}, got {found}")


def to_torch(graph: Graph, *, lifted: bool = False) -> fx.GraphModule:
    """See `Graph.to_torch`.

    Args:
        graph: the graph, which is checked.
        lifted: whether the constants are further inputs of the module instead of its parameters and buffers.
    """
    graph.check()
    made = fx.Graph()
    nodes = {id: made.placeholder(f"t{id}") for id in graph.inputs}
    attributes: dict[str, Any] = {}
    names = [constant.name for constant in graph.constants.values()]
    folders = {name[:place] for name in names for place, character in enumerate(name) if character == "."}
    for id, constant in graph.constants.items():
        name, (first, *inner) = constant.name, (parts := constant.name.split("."))
        valid = all((p.isidentifier() and not keyword.iskeyword(p)) or (p.isascii() and p.isdecimal()) for p in parts)
        taken = hasattr(_ROOT, first) or any(hasattr(_INNER, part) for part in inner)
        path = name if valid and not taken and name not in folders and first != "constants" else f"constants.t{id}"
        if lifted:
            nodes[id] = made.placeholder(f"t{id}")
        else:
            attributes[path] = constant.tensor
            nodes[id] = made.get_attr(path)
            if constant.frozen:
                nodes[id] = made.call_function(read_frozen, (nodes[id],))
        nodes[id].meta["constant"] = constant
    folder = "quantizers"
    while any(path.split(".")[0] == folder for path in attributes):
        folder += "_"
    types = graph.types()
    for op in _without_fusion(graph):
        row, call = bound(op, [types[id] for id in op.input_ids])
        values = [nodes[id] for id in op.input_ids]
        target = call.signature.target
        if row.module is not None:
            path = f"{folder}.t{op.output_id}"
            attributes[path] = row.module(call)
            refs = {name: value for name, value in call.arguments.items() if isinstance(value, Ref)}
            node = made.call_module(path, (), {name: values[ref.position] for name, ref in refs.items()})
        else:
            assert target is not None
            node = made.call_function(target, *call.filled(values))
        node.meta["op"] = op
        types.update(zip(op.output_ids, op.outputs, strict=True))
        schema = getattr(target, "_schema", None)
        is_list = schema is not None and (len(schema.returns) > 1 or "List" in str(schema.returns[0].type))
        if is_list or len(op.output_ids) > 1:
            parts = enumerate(op.output_ids)
            nodes.update({id: made.call_function(operator.getitem, (node, place)) for place, id in parts})
        else:
            nodes[op.output_id] = node
    results = [nodes[id] for id in graph.outputs]
    made.output(results[0] if len(results) == 1 else tuple(results))
    return fx.GraphModule(attributes, made, "Graph")


_ROOT, _INNER = fx.GraphModule(nn.Module(), fx.Graph()), nn.Module()
"""Modules whose attribute names, such as `graph` and `training`, constants must not have."""


def _without_fusion(graph: Graph) -> Iterator[IROp]:
    """The operations of a graph, with fused operations replaced by their parts."""
    free = graph.new_id()
    for fused in graph.ops:
        if fused.op_type != FUSED:
            yield fused
            continue
        body = body_of(fused)
        # Inner values are read by nothing else; they get ids that no value of the graph has.
        ids = dict(enumerate(fused.input_ids)) | dict(zip(body[-1].output_ids, fused.output_ids, strict=True))
        for op in body:
            for local in op.output_ids:
                if local not in ids:
                    ids[local] = free
                    free += 1
            part = op.copied([ids[id] for id in op.output_ids], [ids[id] for id in op.input_ids])
            part.origin = fused.origin
            yield part


class CompiledGraph:
    """A graph as one function that contains its constants.

    The constants are read at every call, so that training steps take effect.
    """

    def __init__(self, graph: Graph, function: Callable[..., Any]) -> None:
        self.graph = graph
        self._function = function

    def __call__(self, *inputs: Tensor) -> Any:
        """The outputs for some inputs, as from `Graph.run`."""
        _check_inputs(self.graph, inputs)
        results = self._function(*inputs, *(constant.read() for constant in self.graph.constants.values()))
        count = len(self.graph.outputs)
        return results if isinstance(results, Tensor) else results[0] if count == 1 else results[:count]

    def parameters(self) -> Iterator[Tensor]:
        """The constants that training changes."""
        return (constant.tensor for constant in self.graph.constants.values() if constant.trainable)


def compile(graph: Graph, *, exact: bool = True) -> CompiledGraph:
    """Compile a graph to one function, with a backward pass.

    Args:
        graph: the graph, which is checked and copied.
        exact: whether every bit of outputs and gradients must be that of `Graph.run`. Then the function is a sequence
            of calls of torch's and this package's kernels, without modules in between; a ReLU and the quantizer after
            it are one kernel. Otherwise Inductor generates code, which fuses more, takes seconds to minutes to compile,
            and rounds sums, exponentials and products differently; a different last bit may change a code by one.

    Returns:
        A function of the graph's inputs.

    Raises:
        GraphError: the graph is not valid, or exact is false and the graph has an operation that torch.compile cannot
            record: a whole recurrent layer such as nn.LSTM.

    >>> graph = Graph("example")
    >>> x = graph.add_input("x", IRType.Float32, (2,))
    >>> graph.outputs = [graph.add("FakeQuantization", x, num_bits=4, scale=0.5)]
    >>> compile(graph)(torch.tensor([0.7, -9.0]))
    tensor([ 0.5000, -4.0000])
    """
    kept = graph.copy()
    if exact:
        module = to_torch(kept, lifted=True)
        lower(module)
        return CompiledGraph(kept, module.forward)
    graph.check()
    if recurrent := [op for op in graph.ops if op.op_type.startswith(RECURRENT)]:
        raise GraphError(
            f"{recurrent[0]}{f' of {recurrent[0].origin}' if recurrent[0].origin else ''}: torch.compile cannot record "
            "a whole recurrent layer; compile with exact=True, or write the layer as a loop of nn.LSTMCell or "
            "nn.GRUCell"
        )
    # Compilers drop what draws random numbers if no output reads it, and later operations would draw other numbers.
    drawn = graph.copy()
    read = set(graph.outputs)
    for op in reversed(graph.ops):
        if not read.intersection(op.output_ids):
            if repeatable(op):
                continue
            drawn.outputs.append(drawn.add("Detach", op.output_id))
        read.update(op.input_ids)
    return CompiledGraph(
        kept, _ByInductor(to_torch(drawn, lifted=True), any(t.shape.dynamic for t in graph.types().values()))
    )


class _ByInductor:
    """A module compiled by Inductor; compiled again when torch reaches its limit of variants."""

    def __init__(self, module: fx.GraphModule, dynamic: bool) -> None:
        self.module, self.dynamic = module, dynamic or None
        self._compile()

    def _compile(self) -> None:
        # The limit belongs to the code of the module, which is written anew.
        module = fx.GraphModule(self.module, self.module.graph)
        self.function = torch.compile(module, fullgraph=True, backend="inductor", dynamic=self.dynamic)

    def __call__(self, *args: Tensor) -> Any:
        try:
            return self.function(*args)
        except FailOnRecompileLimitHit:
            self._compile()
            return self.function(*args)
        except Unsupported as error:
            raise GraphError(
                f"torch.compile cannot record the graph: {str(error).splitlines()[0]}; call graph.to_torch() without it"
            ) from error


# The end of the names of graphs of gradients. torch's trace detaches what they keep of the forward.
_SUFFIX = " backward"


def backward(graph: Graph) -> Graph:
    """The graph that computes the gradients of a graph, by torch's formulas.

    Its inputs are the inputs of the graph and the gradient of every output. Its outputs are the gradients of the
    floating-point inputs, then of the trainable constants, in order; they are 0 where no output depends on them. The
    forward is computed again. Every quantizer passes gradients as its specification says.

    Raises:
        GraphError: the graph is not valid, has dynamic dimensions, an output without a gradient or a whole recurrent
            layer, or is a graph of gradients itself.

    >>> graph = Graph("example")
    >>> x = graph.add_input("x", IRType.Float32, (2,))
    >>> graph.outputs = [graph.add("FakeQuantize", x, graph.add_constant("s", torch.ones(1)), spec="int4")]
    >>> backward(graph).run(torch.tensor([0.7, -9.0]), torch.tensor([1.0, 1.0]))
    tensor([1., 0.])
    """
    graph.check()
    types = graph.types()
    if dynamic := [id for id, type in types.items() if type.shape.dynamic]:
        raise GraphError(f"t{dynamic[0]} has a dynamic dimension {types[dynamic[0]]}; capture it with static shapes")
    if whole := [id for id in graph.outputs if not types[id].type.floating]:
        raise GraphError(f"the output t{whole[0]} is {types[whole[0]]}, which has no gradient")
    if graph.name.endswith(_SUFFIX) and any(value.name == "gradient_0" for value in graph.inputs.values()):
        raise GraphError(f"{graph.name!r} is a graph of gradients, and gradients of gradients are not recorded")
    if recurrent := [op for op in graph.ops if op.op_type.startswith(RECURRENT)]:
        raise GraphError(
            f"{recurrent[0]}: the gradient of a whole recurrent layer cannot be in a graph; run it by graph.run or "
            "graph.to_torch and call backward of torch, or write the layer as a loop of nn.LSTMCell or nn.GRUCell"
        )
    wanted = [id for id, value in graph.inputs.items() if value.type.type.floating]
    wanted += [id for id, constant in graph.constants.items() if constant.trainable]
    if not wanted:
        raise GraphError("no input is a floating-point tensor and no constant is trainable: there is no gradient")
    places = [*graph.inputs, *graph.constants]
    traced = _traced(graph, [places.index(id) for id in wanted])
    result = Graph(f"{graph.name}{_SUFFIX}")
    result.inputs = dict(graph.inputs)
    for place, id in enumerate(graph.outputs):
        name = f"gradient_{place}"
        while any(value.name == name for value in result.inputs.values()):
            name += "_"
        places.append(result.add_input(name, *types[id], id=max(places) + 1))
    nodes = list(traced.graph.nodes)
    results = list(nodes[-1].args[0])
    live = needed(nodes, results)
    ids = dict(zip((node for node in nodes if node.op == "placeholder"), places, strict=True))
    used = {id for node, id in ids.items() if node in live}
    result.constants = {id: constant for id, constant in graph.constants.items() if id in used}
    result.ops, result.outputs = operations([node for node in nodes if node in live], results, ids)
    return result.check()


def _traced(graph: Graph, wanted: Sequence[int]) -> fx.GraphModule:
    """Trace forward and backward as one fx graph of inputs, constants and gradients of the outputs.

    Args:
        graph: the graph.
        wanted: the indices of inputs and constants whose gradients are the outputs.
    """
    module = to_torch(graph, lifted=True)
    for part in module.modules():
        if isinstance(part, FakeQuantize):
            part.opaque = True
    constants = list(graph.constants.values())
    count = len(graph.inputs) + len(constants)
    tracked = {*wanted, *(len(graph.inputs) + i for i, constant in enumerate(constants) if constant.frozen)}

    def gradients(*tensors: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() if i in tracked else t for i, t in enumerate(tensors[:count])]
        with torch.enable_grad():
            results = module(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        moved = [i for i, result in enumerate(results) if result.requires_grad]
        sources = [leaves[i] for i in wanted]
        if not moved:
            return [torch.zeros_like(source) for source in sources]
        given = [tensors[count + i] for i in moved]
        found = torch.autograd.grad([results[i] for i in moved], sources, given, allow_unused=True)
        return [torch.zeros_like(s) if g is None else g for s, g in zip(sources, found, strict=True)]

    types = graph.types()
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty(types[id].shape, dtype=types[id].type.dtype, device="cpu") for id in graph.inputs]
        given += [torch.empty_like(constant.tensor.detach()) for constant in constants]
        given += [torch.empty(types[id].shape, dtype=types[id].type.dtype, device="cpu") for id in graph.outputs]
        traced = make_fx(gradients)(*given)
        # Gradients of parts are added to views of zeros; torch's functionalization writes that without views.
        if any(changes_in_place(node) for node in traced.graph.nodes):
            traced = make_fx(torch.func.functionalize(traced, remove="mutations"))(*given)
        return traced
