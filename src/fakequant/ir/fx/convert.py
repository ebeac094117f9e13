"""Convert graphs of torch.fx to graphs of operations."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fakequant.errors import GraphError
from fakequant.ir.op import DYNAMIC, ArgumentKind, IROp, IRType, Ref, Signature, TensorShape, TensorType, bind, same
from fakequant.ir.structure import GraphStructure, check
from fakequant.ir.table import find_row, make_op, name_of, shown_target

_FAKE_QUANTIZE = torch.ops.fakequant.fake_quantize.default
_CHOOSE_SCALE = torch.ops.fakequant.choose_scale.default
_DETACH = torch.ops.aten.detach.default


_MISSING = TensorType(IRType.Missing, TensorShape())


_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def type_of(value: Any) -> TensorType:
    """The type of a node's result, from the metadata that torch gives.

    Raises:
        GraphError: a graph cannot hold it.
    """
    if value is None:
        return _MISSING
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return TensorType(IRType.Index, TensorShape())
    if not isinstance(value, Tensor):
        raise GraphError(f"its result is a {type(value).__name__}, and a graph holds tensors and sizes")
    if value.layout != torch.strided:
        raise GraphError(f"its result is a tensor of layout {value.layout}, and a graph holds dense ones")
    return TensorType(IRType.of(value.dtype), TensorShape(n if isinstance(n, int) else DYNAMIC for n in value.shape))


def needed(nodes: Sequence[fx.Node], results: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that some results depend on, and those that draw random numbers, so that later ones draw the same.

    Checks and unread values are left out.
    """
    found = {*results, *(node for node in nodes if _draws(node))}
    for node in reversed(nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return found


def _draws(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


class Converter:
    """Adds the nodes of an fx graph to a graph of ours.

    Args:
        graph: gets the operations.
        ids: the values that placeholders stand for; grows by every node.
    """

    def __init__(self, graph: GraphStructure, ids: dict[fx.Node, int]) -> None:
        self.graph = graph
        self.ids = ids
        self._lists: dict[fx.Node, list[int]] = {}
        self._next = graph.new_id()

    def add(self, node: fx.Node) -> None:
        """Add the operation of a node.

        Raises:
            GraphError: it cannot be in a graph; names it and where it comes from.
        """
        try:
            if node.op != "call_function":
                users = ", ".join(str(user.target) for user in node.users)
                if "autocast" in users:
                    raise GraphError(
                        "computes a part of the model under torch.autocast, which a graph cannot say; capture it "
                        "without, converted to one type such as by model.bfloat16()"
                    )
                raise GraphError(
                    f"{users or node.op} runs a part of the model as a graph of its own (control flow, or a change of "
                    "grad mode such as torch.no_grad), which cannot be in a graph; compute that part outside"
                )
            if node.target is operator.getitem:
                source, place = node.args
                assert isinstance(source, fx.Node)
                assert isinstance(place, int)
                self.ids[node] = self._lists[source][place]
            elif node.target is _FAKE_QUANTIZE:
                self._append(node, *_quantizer(node))
            else:
                self._append(node, *_operation(node))
        except GraphError as error:
            raise GraphError(f"{_where(node)}{shown_target(node.target)}: {error}") from error

    def finish(self, results: Sequence[fx.Node]) -> None:
        """Set the outputs, remove operations that made a scale that is now implied, and check the graph."""
        self.graph.outputs = [self.ids[node] for node in results]
        wanted = set(self.graph.outputs)
        kept = []
        for op in reversed(self.graph.ops):
            if op.op_type not in ("Detach", "ChooseScale") or wanted.intersection(op.output_ids):
                wanted.update(op.input_ids)
                kept.append(op)
        self.graph.ops = kept[::-1]
        check(self.graph)

    def _append(self, node: fx.Node, op: IROp, inputs: Sequence[fx.Node]) -> None:
        value = node.meta["val"]
        many = isinstance(value, (tuple, list))
        op.input_ids = [self.ids[source] for source in inputs]
        op.outputs = [type_of(part) for part in (value if many else [value])]
        if many:
            read = _read(node)
            op.outputs = [t if i in read and 0 not in t.shape else _MISSING for i, t in enumerate(op.outputs)]
        op.output_ids = list(range(self._next, self._next + len(op.outputs)))
        op.origin = origin(node)
        self._next += len(op.outputs)
        self.graph.ops.append(op)
        if many:
            self._lists[node] = op.output_ids
        else:
            self.ids[node] = op.output_id


def _read(node: fx.Node) -> set[int]:
    """The places of the results that are read; for unread ones torch's shape rules contradict each other."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or len(schema.returns) == 1:
        return set(range(len(node.meta["val"])))
    places: list[Any] = [user.args[1] for user in node.users if user.target is operator.getitem and user.users]
    return set(places)


def _operation(node: fx.Node) -> tuple[IROp, list[fx.Node]]:
    """The operation of a node and the nodes that are its inputs."""
    # A view needs the strides of the trace, which a real tensor may not have.
    target = torch.ops.aten.reshape.default if node.target in _RESHAPES else node.target
    name = name_of(target)
    row = find_row(name)
    signature = next(s for s in row.signatures if s.target is target)
    arguments = dict(zip((p.name for p in signature.parameters), node.args, strict=False)) | dict(node.kwargs)
    inputs: list[fx.Node] = []
    bound = {key: _with_refs(value, inputs) for key, value in arguments.items()}
    types = [type_of(source.meta["val"]) for source in inputs]
    # As little as says the same arguments: no tensor, the lists of tensors, or all by name.
    for named in ((), (ArgumentKind.TENSORS,), (ArgumentKind.TENSORS, ArgumentKind.TENSOR)):
        op = make_op(name, range(len(inputs)), _attributes(signature, bound, named))
        if _means(op, signature, bound, types):
            break
    if bind(op, row.signatures, types).signature is not signature:
        op.attributes["overload"] = signature.name
    return op, inputs


def _with_refs(value: Any, inputs: list[fx.Node]) -> Any:
    """A value with a `Ref` for every node in it, which is added to the inputs."""
    if isinstance(value, fx.Node):
        if value.target is operator.getitem and 0 in type_of(value.meta["val"]).shape:
            return None  # an empty part of a result, which batch normalisation in eval mode saves for its gradient
        inputs.append(value)
        return Ref(len(inputs) - 1)
    return [_with_refs(item, inputs) for item in value] if isinstance(value, (list, tuple)) else value


def _attributes(signature: Signature, bound: dict[str, Any], named: Sequence[ArgumentKind]) -> dict[str, Any]:
    """The arguments that become attributes: all except defaults and unnamed tensors."""
    found: dict[str, Any] = {}
    tensors = [p.name for p in signature.parameters if p.kind is not ArgumentKind.VALUE and p.name in bound]
    last = max((i for i, name in enumerate(tensors) if isinstance(bound[name], (Ref, list))), default=-1)
    for parameter in signature.parameters:
        name = parameter.name
        if name not in bound:
            continue
        value = bound[name]
        if parameter.kind is ArgumentKind.VALUE:
            if parameter.required or not same(value, parameter.default):
                found[name] = value
        elif value is None:
            # A tensor that is left out before one that is given must be named, or that would take its place.
            if parameter.required or tensors.index(name) < last:
                found[name] = None
        elif parameter.kind in named or not (isinstance(value, Ref) or (isinstance(value, list) and None not in value)):
            found[name] = value
    return found


def _means(op: IROp, signature: Signature, bound: dict[str, Any], types: Sequence[TensorType]) -> bool:
    """Whether an operation has exactly these arguments, apart from defaults."""
    try:
        found = bind(op, (signature,), types).arguments
    except GraphError:
        return False
    tensors = {p.name for p in signature.parameters if p.kind is not ArgumentKind.VALUE}
    expected = {k: v for k, v in bound.items() if k in op.attributes or (k in tensors and v is not None)}
    return found == expected


def _quantizer(node: fx.Node) -> tuple[IROp, list[fx.Node]]:
    """The operation of a quantizing node; it takes no scale if that comes from its own input."""
    names = ("x", "scale", "zero_point", "spec", "seed")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if _is_range_of(given.get("scale"), given["x"], given["spec"]):
        given["scale"] = None
    tensors = {name: given.get(name) for name in ("x", "scale", "zero_point", "seed")}
    inputs = [value for value in tensors.values() if isinstance(value, fx.Node)]
    attributes = {"spec": given["spec"]}
    # Those left out before one that is given.
    *_, last = (place for place, value in enumerate(tensors.values()) if value is not None)
    attributes |= {name: None for name in list(tensors)[:last] if tensors[name] is None}
    return make_op("FakeQuantize", (), attributes), inputs


def _is_range_of(scale: Any, x: Any, spec: Any) -> bool:
    if not isinstance(scale, fx.Node) or scale.target is not _CHOOSE_SCALE or scale.args[1] != spec:
        return False
    source = scale.args[0]
    if isinstance(source, fx.Node) and source.target is _DETACH and source is not x:
        source = source.args[0]
    return source is x


def origin(node: fx.Node) -> str:
    """The path of the module that made a node, "" for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    return [path for path, _ in stack.values()][-1] if stack else ""


def _where(node: fx.Node) -> str:
    return f"{path}: " if (path := origin(node)) else ""
