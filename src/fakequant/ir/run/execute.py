"""Graphs as modules of torch."""

from __future__ import annotations

import keyword
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

from fakequant.errors import GraphError
from fakequant.ir.fake_quantization import FakeQuantize
from fakequant.ir.op import Call, IROp, IRType, Parameter, Ref, Signature, TensorShape, TensorType
from fakequant.ir.ops import RECURRENT
from fakequant.ir.structure import Constant, GraphStructure, check, read_frozen
from fakequant.ir.table import ROWS, OperationRow, bound, faults, in_order, make_op, repeatable
from fakequant.numerics.spec import Arithmetic, QuantSpec
from fakequant.ops.relu import relu_later

_POOLS = ("MaxPool1d", "MaxPool2d", "MaxPool3d")
_RESHAPES = ("Reshape", "Flatten")


def lower(module: fx.GraphModule, graph: GraphStructure) -> None:
    """Have quantizers compute the ReLU before them, also over maxima and reshapes in between.

    A ReLU and a quantizer are one pass over memory instead of two, and after the maxima there are fewer elements.

    Args:
        module: of the graph, by `execute.to_torch`; it is changed.
        graph: says which parameters of quantizers are constant.
    """
    for node in list(module.graph.nodes):
        if node.op == "call_module":
            _take_relu(node, module, graph)
    module.recompile()


def _take_relu(node: fx.Node, module: fx.GraphModule, graph: GraphStructure) -> None:
    assert isinstance(node.target, str)
    quantizer = module.get_submodule(node.target)
    if not isinstance(quantizer, FakeQuantize) or not _has_constant_scale(node.meta["op"], graph):
        return
    relu = _relu_before(node, quantizer.spec)
    if relu is None:
        return
    quantizer.rectified = True
    if node.kwargs["x"] is relu:
        relu.replace_all_uses_with(relu.all_input_nodes[0])
        module.graph.erase_node(relu)
    else:
        relu.target = relu_later


def _has_constant_scale(op: IROp, graph: GraphStructure) -> bool:
    parameters = [graph.constants.get(id) for id in op.input_ids[1:]]
    return in_order(op) and bool(parameters) and all(p is not None and not p.trainable for p in parameters)


def _relu_before(quantizer: fx.Node, spec: QuantSpec) -> fx.Node | None:
    """The ReLU whose place the quantizer can take: nothing else reads what is in between. None if there is none."""
    value = quantizer.kwargs["x"]
    while isinstance(value, fx.Node) and len(value.users) == 1:
        op = value.meta.get("op")
        if op is None or not in_order(op):
            return None
        if op.op_type == "ReLU":
            return value
        if op.op_type not in _RESHAPES and not (op.op_type in _POOLS and _has_equal_zeros(spec) and not _pads(op)):
            return None
        value = value.args[0]
    return None


def _has_equal_zeros(spec: QuantSpec) -> bool:
    """Whether -0.0 and +0.0 are quantized to the same bits.

    The largest of -1.0 and -0.0 is +0.0 where they are rectified first, and -0.0 where they are not. No other maximum
    differs but those below zero, which are rectified then; and where it is not above zero, no gradient passes.
    """
    return spec.format.has_zero_point and spec.arithmetic is not Arithmetic.MULTIPLIER


def _pads(op: IROp) -> bool:
    """Whether there is padding: with dilation, a window may hold padding alone, and its maximum is -inf."""
    padding = op.attributes.get("padding", 0)
    return any(padding) if isinstance(padding, (list, tuple)) else bool(padding)


NAME = "Fused"


def fuse(ops: Sequence[IROp]) -> IROp:
    """One operation that is a chain of others; its last result is the only one.

    Args:
        ops: in their order; every result but the last is read within the chain only.
    """
    made = {id for op in ops for id in op.output_ids}
    inputs = list(dict.fromkeys(id for op in ops for id in op.input_ids if id not in made))
    local = {id: place for place, id in enumerate(inputs)}
    body: list[IROp] = []
    for op in ops:
        read = [local[id] for id in op.input_ids]
        local.update({id: len(local) + place for place, id in enumerate(op.output_ids)})
        body.append(op.copied([local[id] for id in op.output_ids], read))
    attributes: dict[str, Any] = {"name": "+".join(op.op_type for op in ops), "body": body}
    fused = make_op(NAME, inputs, attributes)
    fused.output_ids, fused.outputs = list(ops[-1].output_ids), list(ops[-1].outputs)
    fused.origin = ops[0].origin
    return fused


def body_of(op: IROp) -> list[IROp]:
    """The operations of a fused one, whose values are t0, t1, ...: its inputs first. Copy them before a change.

    Raises:
        GraphError: its attribute is no list of operations.
    """
    body = op.attributes.get("body")
    if not isinstance(body, (list, tuple)) or not body or not all(isinstance(part, IROp) for part in body):
        raise GraphError(f"takes a list of operations as its body, got {body!r}")
    return list(body)


def _rule(call: Call) -> list[TensorType]:
    """The types of the last operation; all are checked like those of a graph."""
    known = dict(enumerate(call.inputs))
    body = body_of(call.op)
    for op in body:
        if missing := [id for id in op.input_ids if id not in known]:
            raise GraphError(f"in its body {op} reads t{missing[0]}, which nothing makes before")
        if op.op_type == NAME:
            raise GraphError(f"in its body is another {NAME}: {op}")
        if found := faults(op, [known[id] for id in op.input_ids]):
            raise GraphError(f"in its body {op}: {found[0]}")
        if twice := [id for id in op.output_ids if id in known]:
            raise GraphError(f"in its body {op} makes t{twice[0]}, which is there already")
        known.update(zip(op.output_ids, op.outputs, strict=True))
    return body[-1].outputs


def _draws(op: IROp) -> bool:
    return not all(repeatable(part) for part in body_of(op))


_PARAMETERS = (Parameter("tensors", "List[Tensor]"), Parameter("name", "str"), Parameter("body", "List[Operation]"))
ROWS[NAME] = OperationRow(NAME, (Signature(_PARAMETERS),), rule=_rule, draws=_draws)


def run(graph: GraphStructure, inputs: Sequence[Tensor]) -> Any:
    """See `Graph.run`."""
    module = to_torch(graph)
    check_inputs(graph, inputs)
    return _Checked(module).run(*inputs)


class _Checked(fx.Interpreter):
    """Runs a module node by node, and says which operation fails or makes another type than it declares."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        op = n.meta.get("op")
        if op is None:
            return super().run_node(n)
        try:
            result = super().run_node(n)
            _check_results(op, result)
        except Exception as error:  # whatever an operation raises; what the reader needs is which it was
            what = f"{op} of {op.origin}" if op.origin else str(op)
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise GraphError(f"{what}: {reason}") from error
        return result


def _check_results(op: IROp, result: Any) -> None:
    """Check that an operation made what it declares.

    Raises:
        GraphError: it did not.
    """
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    if len(results) != len(op.outputs):
        raise GraphError(f"made {len(results)} values, but {len(op.outputs)} are declared")
    for id, declared, made in zip(op.output_ids, op.outputs, results, strict=True):
        if declared.type is IRType.Missing:
            continue
        found = TensorType.of(made) if isinstance(made, Tensor) else TensorType(IRType.Index, TensorShape())
        if made is None or found.type is not declared.type or not declared.shape.matches(found.shape):
            raise GraphError(f"declares t{id} as {declared}, but made {None if made is None else found}")


def check_inputs(graph: GraphStructure, inputs: Sequence[Tensor]) -> None:
    """Check that a graph can run on some inputs.

    Raises:
        GraphError: another number of them, or one of another type than declared.
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


def to_torch(graph: GraphStructure, *, lifted: bool = False) -> fx.GraphModule:
    """See `Graph.to_torch`.

    Args:
        graph: what to build.
        lifted: whether the constants are further inputs of the module instead of its parameters and buffers.
    """
    check(graph)
    return _Builder(graph, lifted).module()


class _Builder:
    """Writes the fx graph of a valid graph."""

    def __init__(self, graph: GraphStructure, lifted: bool) -> None:
        self.quantizers = "quantizers"
        while any(constant.name.split(".")[0] == self.quantizers for constant in graph.constants.values()):
            self.quantizers += "_"
        self.graph, self.lifted = graph, lifted
        self.root = nn.Module()
        self.fx = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        self.types = graph.types()
        self.free = graph.new_id()

    def module(self) -> fx.GraphModule:
        for id, value in self.graph.inputs.items():
            self.nodes[id] = self.fx.placeholder(f"t{id}")
            self.nodes[id].meta["input"] = value.name
        for id, constant in self.graph.constants.items():
            if self.lifted:
                self.nodes[id] = self.fx.placeholder(f"t{id}")
            else:
                self.nodes[id] = self.fx.get_attr(_hold(self.root, constant))
                if constant.frozen:
                    self.nodes[id] = self.fx.call_function(read_frozen, (self.nodes[id],))
        self._add(self.graph.ops)
        results = [self.nodes[id] for id in self.graph.outputs]
        self.fx.output(results[0] if len(results) == 1 else tuple(results))
        return fx.GraphModule(self.root, self.fx, "Graph")

    def _add(self, ops: Iterable[IROp]) -> None:
        for op in ops:
            if op.op_type == NAME:
                self._add(self._body(op))
                continue
            inputs = [self.types[id] for id in op.input_ids]
            row, call = bound(op, inputs)
            values = [self.nodes[id] for id in op.input_ids]
            if row.module is not None:
                path = f"{self.quantizers}.t{op.output_id}"
                _submodule(self.root, self.quantizers).add_module(f"t{op.output_id}", row.module(call))
                refs = {name: value for name, value in call.arguments.items() if isinstance(value, Ref)}
                tensors: dict[str, Any] = {name: values[ref.position] for name, ref in refs.items()}
                node = self.fx.call_module(path, (), tensors)
            else:
                assert call.signature.target is not None
                args, kwargs = call.filled(values)
                node = self.fx.call_function(call.signature.target, args, kwargs)
            self._name(op, node)

    def _body(self, fused: IROp) -> list[IROp]:
        """The operations of a fused one between values of the graph."""
        body = body_of(fused)
        # Inner values are read by nothing else; they get ids that no value of the graph has.
        ids = dict(enumerate(fused.input_ids)) | dict(zip(body[-1].output_ids, fused.output_ids, strict=True))
        for op in body[:-1]:
            for local in op.output_ids:
                ids[local] = self.free
                self.free += 1
        ops = [op.copied([ids[id] for id in op.output_ids], [ids[id] for id in op.input_ids]) for op in body]
        for op in ops:
            op.origin = fused.origin
            self.types.update(zip(op.output_ids, op.outputs, strict=True))
        return ops

    def _name(self, op: IROp, node: fx.Node) -> None:
        node.meta["origin"], node.meta["op"] = op.origin, op
        if len(op.output_ids) == 1 and not _makes_a_list(node):
            self.nodes[op.output_id] = node
            return
        for place, id in enumerate(op.output_ids):
            self.nodes[id] = self.fx.call_function(operator.getitem, (node, place))


def _makes_a_list(node: fx.Node) -> bool:
    """Whether an operator's result is a list or tuple even if that has one element."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and (len(schema.returns) > 1 or "List" in str(schema.returns[0].type))


_TAKEN = {*dir(fx.GraphModule(nn.Module(), fx.Graph()))}
"""The attributes that every module of torch.fx has, such as `graph` and `code`."""


def _submodule(root: nn.Module, name: str) -> nn.Module:
    if name not in root._modules:
        root.add_module(name, nn.Module())
    found = root._modules[name]
    assert found is not None
    return found


def _hold(root: nn.Module, constant: Constant) -> str:
    """Make a constant a parameter or buffer at the path that its name says, and return the path."""
    *folders, leaf = constant.name.split(".")
    parts = (*folders, leaf)
    if not _is_free(root, folders) or not all(map(_is_name, parts)) or parts[0] in _TAKEN:
        folders, leaf = ["constants"], "c_" + "".join(c if c.isascii() and c.isalnum() else "_" for c in constant.name)
    place = root
    for folder in folders:
        place = _submodule(place, folder)
    while hasattr(place, leaf):
        leaf += "_"
    tensor = constant.tensor
    if isinstance(tensor, nn.Parameter):
        place.register_parameter(leaf, tensor)
    else:
        place.register_buffer(leaf, tensor)
    return ".".join((*folders, leaf))


def _is_name(part: str) -> bool:
    return (part.isidentifier() and not keyword.iskeyword(part)) or (part.isascii() and part.isdecimal())


def _is_free(root: nn.Module, folders: Sequence[str]) -> bool:
    """Whether modules of these names can be nested in the root."""
    place: nn.Module | None = root
    for folder in folders:
        if place is None or (hasattr(place, folder) and folder not in place._modules):
            return place is None
        place = place._modules.get(folder, nn.Module())
    return True


_LIMIT = 64
"""The most structures to keep; the least recently used one goes first."""


class CacheInfo(NamedTuple):
    """Hits, misses and size of the cache of compiled structures."""

    hits: int
    misses: int
    size: int


class _Cache:
    """Compiled functions by the hash of the structure; constants are arguments, so that they need no place in it."""

    def __init__(self) -> None:
        self.functions: OrderedDict[tuple[str, bool], Callable[..., Any]] = OrderedDict()
        self.hits = self.misses = 0

    def find(self, graph: GraphStructure, exact: bool) -> Callable[..., Any]:
        key = graph.hash(constants=False), exact
        if key in self.functions:
            self.hits += 1
        else:
            self.misses += 1
            self.functions[key] = _compiled(graph, exact)
            if len(self.functions) > _LIMIT:
                self.functions.popitem(last=False)
        self.functions.move_to_end(key)
        return self.functions[key]


_cache = _Cache()


class CompiledGraph:
    """A graph as one function, with its constants bound to it.

    It reads the constants at every call: a training step that moves the parameters moves the function.
    """

    def __init__(self, graph: GraphStructure, function: Callable[..., Any]) -> None:
        self.graph = graph
        self._function = function

    def __call__(self, *inputs: Tensor) -> Any:
        """The outputs for some inputs, as `Graph.run` gives them."""
        check_inputs(self.graph, inputs)
        results = self._function(*inputs, *(constant.read() for constant in self.graph.constants.values()))
        count = len(self.graph.outputs)
        return results if isinstance(results, Tensor) else results[0] if count == 1 else results[:count]

    def parameters(self) -> Iterator[Tensor]:
        """The constants that training moves."""
        return (constant.tensor for constant in self.graph.constants.values() if constant.trainable)


def compile(graph: GraphStructure, *, exact: bool = True) -> CompiledGraph:
    """A graph as one function, forward and backward.

    Args:
        graph: what to compile; it is checked, and copied.
        exact: whether every bit of outputs and gradients must be that of `Graph.run`. Then the function is a sequence
            of torch's own kernels and of this package's, without the modules in between, and takes those that are
            fastest: a ReLU and the quantizer after it are one. Otherwise torch.compile has Inductor generate code,
            which fuses more, takes seconds to minutes to compile, and rounds sums, exponentials and products in its
            own way; a last bit that differs there may move a code by one.

    Returns:
        A function of the graph's inputs. Graphs of equal `hash(constants=False)` share what was compiled; the constants
        are arguments of it, so that no graph can get those of another.

    Raises:
        GraphError: the graph is not valid, or exact is false and it has an operation that torch.compile cannot record:
            a whole recurrent layer such as nn.LSTM.

    >>> from fakequant.ir import Graph, IRType
    >>> graph = Graph("example")
    >>> x = graph.add_input("x", IRType.Float32, (2,))
    >>> graph.outputs = [graph.add("FakeQuantization", x, num_bits=4, scale=0.5)]
    >>> compile(graph)(torch.tensor([0.7, -9.0]))
    tensor([ 0.5000, -4.0000])
    """
    check(graph)
    for op in graph.ops:
        if op.op_type.startswith(RECURRENT) and not exact:
            raise GraphError(
                f"{op}{f' of {op.origin}' if op.origin else ''}: torch.compile cannot record a whole recurrent layer; "
                "compile with exact=True, or write the layer as a loop of nn.LSTMCell or nn.GRUCell"
            )
    return CompiledGraph(graph.copy(), _cache.find(graph, exact))


class _Function:
    """A module compiled by torch.compile, again where torch has too many variants of it for other strides and modes."""

    def __init__(self, module: fx.GraphModule, **options: Any) -> None:
        self.module, self.options = module, options
        self._compile()

    def _compile(self) -> None:
        # The limit belongs to the code of the module, which is written anew.
        self.function = torch.compile(fx.GraphModule(self.module, self.module.graph), **self.options)

    def __call__(self, *args: Tensor) -> Any:
        try:
            return self.function(*args)
        except FailOnRecompileLimitHit:
            self._compile()
            return self.function(*args)
        except Unsupported as error:
            raise GraphError(
                f"torch.compile cannot record the graph; graph.to_torch() computes it: {str(error).splitlines()[0]}"
            ) from error


def _compiled(graph: GraphStructure, exact: bool) -> Callable[..., Any]:
    if exact:
        module = to_torch(graph, lifted=True)
        lower(module, graph)
        return module.forward
    module = to_torch(_with_unread_draws(graph), lifted=True)
    dynamic = any(type.shape.dynamic for type in graph.types().values())
    return _Function(module, fullgraph=True, backend="inductor", dynamic=dynamic or None)


def _with_unread_draws(graph: GraphStructure) -> GraphStructure:
    """A graph with further outputs: what draws random numbers though nothing reads it.

    Compilers drop what is no output, and later operations would draw other numbers.
    """
    kept = graph.copy()
    read = set(graph.outputs)
    for op in reversed(graph.ops):
        if read.intersection(op.output_ids):
            read.update(op.input_ids)
        elif not repeatable(op):
            kept.outputs.append(kept.add("Detach", op.output_id))
            read.update(op.input_ids)
    return kept


def cache_info() -> CacheInfo:
    """The hits, misses and size of the cache of compiled structures."""
    return CacheInfo(_cache.hits, _cache.misses, len(_cache.functions))


def clear_cache() -> None:
    """Remove every compiled structure from the cache."""
    global _cache
    _cache = _Cache()
