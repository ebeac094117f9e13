"""Graphs as modules of torch."""

from __future__ import annotations

import keyword
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from fakequant.errors import GraphError
from fakequant.ir.attributes import Ref
from fakequant.ir.check import check
from fakequant.ir.op import IROp
from fakequant.ir.run.fused import NAME, body_of
from fakequant.ir.structure import Constant, GraphStructure, read_frozen
from fakequant.ir.table import bound
from fakequant.ir.types import IRType, TensorShape, TensorType


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
