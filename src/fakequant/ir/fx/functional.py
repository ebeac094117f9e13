"""Changes in place, such as `relu_`, replaced by operators that return a new tensor."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

_CAT = torch.ops.aten.cat.default


def unite_types(graph: fx.Graph) -> None:
    """Take tensors without elements out of concatenations, and convert the others to the type of the result, in place.

    Rotary embeddings of a whole head leave a slice of length 0, which is concatenated; points of float coordinates get
    labels of integers.
    """
    for node in list(graph.nodes):
        if node.target is _CAT and isinstance(node.meta.get("val"), Tensor):
            given = node.args[0]
            # torch lets a tensor [0] be concatenated with any other: it counts for the type alone.
            kept = [one for one in given if not _is_empty(one.meta["val"])] or list(given)
            with graph.inserting_before(node):
                node.update_arg(0, [_of_type(one, node) for one in kept])


def _is_empty(value: Tensor) -> bool:
    """Whether a tensor has no elements; a length that depends on data (`nonzero`) counts as some."""
    return any(isinstance(size, int) and size == 0 for size in value.shape)


def _of_type(one: fx.Node, node: fx.Node) -> fx.Node:
    dtype = node.meta["val"].dtype
    value = one.meta["val"]
    if value.dtype == dtype:
        return one
    made = one.graph.call_function(torch.ops.aten.to.dtype, (one, dtype))
    made.meta = {**node.meta, "val": value.to(dtype)}
    return made


def remove_changes_in_place(graph: fx.Graph) -> bool:
    """Replace every operator that changes a tensor by the one that returns a new one.

    Returns:
        Whether that was possible; if not, because views of the same memory are about, nothing is replaced.
    """
    nodes = [node for node in graph.nodes if _changes_in_place(node)]
    if not all(_is_plain(node) for node in nodes):
        return False
    for node in nodes:
        _make_functional(node)
    return True


def _changes_in_place(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _is_plain(node: fx.Node) -> bool:
    """Whether an operator changes a tensor that no node before it gives a view of."""
    memory = _memory(node)
    if _functional(node) is None or memory is None:
        return False
    nodes = list(node.graph.nodes)
    made_by, *changes = [other for other in nodes[: nodes.index(node) + 1] if _memory(other) == memory]
    return made_by.op == "call_function" and all(_changes_in_place(other) for other in changes)


def _memory(node: fx.Node) -> int | None:
    """A key that is equal for tensors of the trace that share memory."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _functional(node: fx.Node) -> OpOverload | None:
    target = node.target
    assert isinstance(target, OpOverload)
    namespace, name = target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    found = None if packet is None or not name.endswith("_") else getattr(packet, target._overloadname, None)
    return found if isinstance(found, OpOverload) and not found._schema.is_mutable else None


def _make_functional(node: fx.Node) -> None:
    """Replace a change in place by a new tensor, which all later nodes read."""
    source, functional = node.args[0], _functional(node)
    assert isinstance(source, fx.Node)
    assert functional is not None
    node.target = functional
    after = False
    for other in node.graph.nodes:
        if after:
            other.replace_input_with(source, node)
        after = after or other is node
