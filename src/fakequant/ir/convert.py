"""Convert torch.fx graphs to operations, and let quantizers of fx graphs also compute the ReLU before them.

Changes in place become new tensors, and each node an `IROp`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fakequant.errors import GraphError
from fakequant.ir import table
from fakequant.ir.op import IROp, IRType, Ref, TensorShape, TensorType, to_text
from fakequant.ir.ops import FakeQuantize
from fakequant.numerics.spec import Arithmetic, QuantSpec
from fakequant.ops.layout import relu_later

_FAKE_QUANTIZE = torch.ops.fakequant.fake_quantize.default
_CHOOSE_SCALE = torch.ops.fakequant.choose_scale.default
_DETACH = torch.ops.aten.detach.default
_CAT = torch.ops.aten.cat.default
_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def unite_types(graph: fx.Graph) -> None:
    """Remove empty tensors from concatenations, and convert the other tensors to the result's dtype, in place.

    Rotary embeddings of a whole head concatenate a slice of length 0; detectors concatenate float coordinates and
    integer labels.
    """
    for node in list(graph.nodes):
        if node.target is not _CAT or not isinstance(node.meta.get("val"), Tensor):
            continue
        # torch lets a tensor [0] be concatenated with any other: it counts for the type alone.
        # A length that depends on data (`nonzero`) counts as some elements.
        sizes = {part: [n for n in part.meta["val"].shape if isinstance(n, int)] for part in node.args[0]}
        parts = [part for part in node.args[0] if 0 not in sizes[part]] or list(node.args[0])
        dtype = node.meta["val"].dtype
        for place, part in enumerate(parts):
            value = part.meta["val"]
            if value.dtype != dtype:
                with graph.inserting_before(node):
                    parts[place] = graph.call_function(torch.ops.aten.to.dtype, (part, dtype))
                parts[place].meta = {**node.meta, "val": value.to(dtype)}
        node.update_arg(0, parts)


def remove_changes_in_place(graph: fx.Graph) -> bool:
    """Replace every in-place operator by the operator that returns a new tensor.

    torch's functionalization would also decompose batch normalization, and drop the modules that operations are from.

    Returns:
        Whether that was possible; if views share the memory, nothing is replaced.
    """
    nodes = list(graph.nodes)
    changes = [node for node in nodes if changes_in_place(node)]
    if not changes:
        return True  # the memory of sparse tensors cannot be compared
    memory: dict[fx.Node, int] = {}
    for node in nodes:
        if isinstance(value := node.meta.get("val"), Tensor):
            memory[node] = value.untyped_storage()._cdata
    for node in changes:
        # A change can be replaced if no earlier node makes a view of the changed tensor.
        if _functional(node) is None or node not in memory:
            return False
        made_by, *others = [n for n in nodes[: nodes.index(node) + 1] if memory.get(n) == memory[node]]
        if made_by.op != "call_function" or not all(changes_in_place(other) for other in others):
            return False
    for node in changes:
        source, functional = node.args[0], _functional(node)
        assert isinstance(source, fx.Node)
        assert functional is not None
        node.target = functional
        for later in nodes[nodes.index(node) + 1 :]:
            later.replace_input_with(source, node)
    return True


def changes_in_place(node: fx.Node) -> bool:
    """Whether a node calls an in-place operator."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _functional(node: fx.Node) -> OpOverload | None:
    target = node.target
    assert isinstance(target, OpOverload)
    namespace, name = target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    found = None if packet is None or not name.endswith("_") else getattr(packet, target._overloadname, None)
    return found if isinstance(found, OpOverload) and not found._schema.is_mutable else None


def needed(nodes: Sequence[fx.Node], results: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes on which results depend, and nodes that draw random numbers: without them later draws would differ.

    Checks and unread values are left out.
    """
    tag = torch.Tag.nondeterministic_seeded
    found = {*results, *(n for n in nodes if isinstance(n.target, OpOverload) and tag in n.target.tags)}
    for node in reversed(nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return found


def operations(
    nodes: Iterable[fx.Node], results: Sequence[fx.Node], ids: dict[fx.Node, int]
) -> tuple[list[IROp], list[int]]:
    """Convert nodes to operations; returns the operations, and the ids of the results.

    Args:
        nodes: the nodes in order; nodes with an id are skipped.
        results: the nodes whose ids are returned.
        ids: the ids of placeholders; every node is added.

    Raises:
        GraphError: a node that cannot be in a graph; the message names it and its module.
    """
    ops: list[IROp] = []
    lists: dict[fx.Node, list[int]] = {}
    free = max(ids.values(), default=-1) + 1
    for node in nodes:
        if node in ids or node.op == "output":
            continue
        if node.target is operator.getitem:
            source, place = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(place, int)
            ids[node] = lists[source][place]
            continue
        try:
            op = _operation(node, ids)
        except GraphError as error:
            where = f"{path}: " if (path := _origin(node)) else ""
            raise GraphError(f"{where}{table.shown_target(node.target)}: {error}") from error
        op.output_ids = list(range(free, free + len(op.outputs)))
        free += len(op.outputs)
        ops.append(op)
        if isinstance(node.meta["val"], (tuple, list)):
            lists[node] = op.output_ids
        else:
            ids[node] = op.output_id
    outputs = [ids[node] for node in results]
    # Operations that made a scale that is implied now are left out.
    wanted, kept = set(outputs), []
    for op in reversed(ops):
        if op.op_type not in ("Detach", "ChooseScale") or wanted.intersection(op.output_ids):
            wanted.update(op.input_ids)
            kept.append(op)
    return kept[::-1], outputs


def _operation(node: fx.Node, ids: dict[fx.Node, int]) -> IROp:
    """The operation for a node, without output ids."""
    if node.op != "call_function":
        users = ", ".join(str(user.target) for user in node.users)
        if "autocast" in users:
            raise GraphError(
                "computes a part of the model under torch.autocast, which a graph cannot express; capture "
                "the model without autocast, converted to one type, such as by model.bfloat16()"
            )
        raise GraphError(
            f"{users or node.op} runs a part of the model as a separate graph (control flow, or a change of "
            "grad mode such as torch.no_grad), which cannot be in a graph; compute that part outside"
        )
    op, inputs = (_quantizer if node.target is _FAKE_QUANTIZE else _by_table)(node)
    value = node.meta["val"]
    op.input_ids, op.origin = [ids[source] for source in inputs], _origin(node)
    op.outputs = [table.type_of(part) for part in (value if isinstance(value, (tuple, list)) else [value])]
    schema = getattr(node.target, "_schema", None)
    if isinstance(value, (tuple, list)):
        # Where torch's schema counts the results, its shape rules contradict each other for unread ones.
        all_read = schema is None or len(schema.returns) == 1
        read: list[Any] = [user.args[1] for user in node.users if user.target is operator.getitem and user.users]
        for place, type in enumerate(op.outputs):
            if 0 in type.shape or not (all_read or place in read):
                op.outputs[place] = TensorType(IRType.Missing, TensorShape())
    return op


def _origin(node: fx.Node) -> str:
    """The path of the module that made a node, "" for the model."""
    stack = node.meta.get("nn_module_stack") or {}
    return [path for path, _ in stack.values()][-1] if stack else ""


def _by_table(node: fx.Node) -> tuple[IROp, list[fx.Node]]:
    """The operation for a node of an operator in the table, and its input nodes."""
    # A view needs the strides of the trace, which a real tensor may not have.
    target = torch.ops.aten.reshape.default if node.target in _RESHAPES else node.target
    name = table.name_of(target)
    row = table.find_row(name)
    signature = next(s for s in row.signatures if s.target is target)
    arguments = dict(zip((p.name for p in signature.parameters), node.args, strict=False)) | dict(node.kwargs)
    inputs: list[fx.Node] = []
    bound = {key: _with_refs(value, inputs) for key, value in arguments.items()}
    types = [table.type_of(source.meta["val"]) for source in inputs]
    tensors = {p.name for p in signature.parameters if p.kind is not table.ArgumentKind.VALUE}
    # As little as says the same arguments: no tensor, the lists of tensors, or all by name.
    for named in ((), (table.ArgumentKind.TENSORS,), (table.ArgumentKind.TENSORS, table.ArgumentKind.TENSOR)):
        op = table.make_op(name, range(len(inputs)), _attributes(signature, bound, named))
        try:
            found = table.bind(op, (signature,), types).arguments
        except GraphError:
            continue
        if found == {k: v for k, v in bound.items() if k in op.attributes or (k in tensors and v is not None)}:
            break
    if table.bind(op, row.signatures, types).signature is not signature:
        op.attributes["overload"] = signature.name
    return op, inputs


def _with_refs(value: Any, inputs: list[fx.Node]) -> Any:
    """A value in which a `Ref` replaces every node; the nodes are appended to `inputs`."""
    if isinstance(value, fx.Node):
        if value.target is operator.getitem and 0 in table.type_of(value.meta["val"]).shape:
            return None  # an empty part of a result, which batch normalisation in eval mode saves for its gradient
        inputs.append(value)
        return Ref(len(inputs) - 1)
    return [_with_refs(item, inputs) for item in value] if isinstance(value, (list, tuple)) else value


def _attributes(
    signature: table.Signature, bound: dict[str, Any], named: Sequence[table.ArgumentKind]
) -> dict[str, Any]:
    """The arguments that become attributes: all except defaults and tensors that inputs fill in order."""
    found: dict[str, Any] = {}
    tensors = [p.name for p in signature.parameters if p.kind is not table.ArgumentKind.VALUE and p.name in bound]
    last = max((i for i, name in enumerate(tensors) if isinstance(bound[name], (Ref, list))), default=-1)
    for parameter in signature.parameters:
        name = parameter.name
        if name not in bound:
            continue
        value = bound[name]
        if parameter.kind is table.ArgumentKind.VALUE:
            if parameter.required or to_text(value) != to_text(parameter.default):
                found[name] = value
        elif value is None:
            # A tensor that is left out before one that is given must be named, or that would take its place.
            if parameter.required or tensors.index(name) < last:
                found[name] = None
        elif parameter.kind in named or not (isinstance(value, Ref) or (isinstance(value, list) and None not in value)):
            found[name] = value
    return found


def _quantizer(node: fx.Node) -> tuple[IROp, list[fx.Node]]:
    """The operation for a quantizing node; without a scale if the scale comes from the range of x."""
    names = ("x", "scale", "zero_point", "spec", "seed")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    x, scale = given["x"], given.get("scale")
    if isinstance(scale, fx.Node) and scale.target is _CHOOSE_SCALE and scale.args[1] == given["spec"]:
        source = scale.args[0]
        if isinstance(source, fx.Node) and source.target is _DETACH and source is not x:
            source = source.args[0]
        if source is x:
            given["scale"] = None
    tensors = {name: given.get(name) for name in ("x", "scale", "zero_point", "seed")}
    attributes = {"spec": given["spec"]}
    # Tensors that are missing before a tensor that is present.
    *_, last = (place for place, value in enumerate(tensors.values()) if value is not None)
    attributes |= {name: None for name in list(tensors)[:last] if tensors[name] is None}
    return table.make_op("FakeQuantize", (), attributes), [
        node for node in tensors.values() if isinstance(node, fx.Node)
    ]


_POOLS = ("MaxPool1d", "MaxPool2d", "MaxPool3d")
_RESHAPES = ("Reshape", "Flatten")


def lower(module: fx.GraphModule) -> None:
    """Make quantizers with constant scales compute the ReLU before them, also across maxima and reshapes, in place.

    A ReLU and a quantizer are one pass over memory instead of two, and after the maxima there are fewer elements.

    Args:
        module: the module of a graph, with the constants as inputs; it is changed.
    """
    for node in list(module.graph.nodes):
        quantizer = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(quantizer, FakeQuantize) or not table.in_order(node.meta["op"]):
            continue
        parameters = [value.meta.get("constant") for name, value in node.kwargs.items() if name != "x"]
        if not parameters or any(constant is None or constant.trainable for constant in parameters):
            continue
        relu = _relu_before(node, quantizer.spec)
        if relu is None:
            continue
        quantizer.rectified = True
        if node.kwargs["x"] is relu:
            relu.replace_all_uses_with(relu.all_input_nodes[0])
            module.graph.erase_node(relu)
        else:
            relu.target = relu_later
    module.recompile()


def _relu_before(quantizer: fx.Node, spec: QuantSpec) -> fx.Node | None:
    """The ReLU that a quantizer can compute, because no other node reads the values between the two; else None."""
    # The maximum of -1.0 and -0.0 is +0.0 if the ReLU comes first, and -0.0 if the maximum does. Other maxima differ
    # only below zero, where the later ReLU gives 0, too; and where a maximum is not above zero, no gradient passes.
    equal_zeros = spec.format.has_zero_point and spec.arithmetic is not Arithmetic.MULTIPLIER
    value = quantizer.kwargs["x"]
    while isinstance(value, fx.Node) and len(value.users) == 1:
        op = value.meta.get("op")
        if op is None or not table.in_order(op):
            return None
        if op.op_type == "ReLU":
            return value
        # With dilation, a window may hold padding alone, and its maximum is -inf.
        padding = op.attributes.get("padding", 0)
        pads = any(padding) if isinstance(padding, (list, tuple)) else bool(padding)
        if op.op_type not in _RESHAPES and not (op.op_type in _POOLS and equal_zeros and not pads):
            return None
        value = value.args[0]
    return None
