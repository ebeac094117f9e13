"""Concatenations as torch allows them, and graphs do not: of empty tensors, and of several types."""

from __future__ import annotations

import torch
from torch import Tensor, fx

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
