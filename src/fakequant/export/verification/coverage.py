"""Find the nodes of a file that quantize but belong to no quantizer of its record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fakequant.export.graph import inner_graphs
from fakequant.export.nodes import trt
from fakequant.export.record import Parameters, SiteRecord

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

_OPERATORS = frozenset(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"))


def uncovered_nodes(model: ModelProto, sites: Sequence[SiteRecord]) -> list[str]:
    """Return the names of the nodes that quantize or dequantize for no quantizer of the record, in graph order.

    The nodes of a quantizer lie between its result and its input tensor (or the codes of its weight).
    """
    nodes = list(model.graph.node)
    made_by = {output: index for index, node in enumerate(nodes) for output in node.output}
    covered: set[int] = set()
    for site in sites:
        ends = {site.x, site.codes}
        if site.parameters is Parameters.COMPUTED:
            ends |= {site.scale, site.zero_point}
        waiting = [site.y]
        while waiting:
            index = made_by.get(waiting.pop())
            if index is not None and index not in covered:
                covered.add(index)
                if nodes[index].op_type == "Scan":  # its body is the quantizer's, and what it gives is verified
                    continue
                waiting += [name for name in nodes[index].input if name not in ends]
    rest = [node for index, node in enumerate(nodes) if index not in covered]
    rest += [
        node
        for index, outer in enumerate(nodes)
        if index not in covered
        for graph in inner_graphs(outer)
        for node in _nodes(graph)
    ]
    rest += [node for function in model.functions for node in function.node]
    return [node.name or node.output[0] for node in rest if node.op_type in _OPERATORS or node.domain == trt.DOMAIN]


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """Yield the nodes of a graph and of the graphs inside it."""
    for node in graph.node:
        yield node
        for inner in inner_graphs(node):
            yield from _nodes(inner)
