"""Which nodes of a file quantize without a record that says so, so that nothing compares them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fakequant.export import trt
from fakequant.export.graph import inner_graphs
from fakequant.export.record import Parameters, SiteRecord

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

_OPERATORS = frozenset(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"))


def uncovered_nodes(model: ModelProto, sites: Sequence[SiteRecord]) -> list[str]:
    """Names of the nodes that quantize or dequantize for no quantizer of the record, in the order of the graph.

    A quantizer's nodes are those between its tensor, or the codes of its weight, and its result.
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
                waiting += [name for name in nodes[index].input if name not in ends]
    left = [node for index, node in enumerate(nodes) if index not in covered]
    left += [node for outer in nodes for graph in inner_graphs(outer) for node in _nodes(graph)]
    left += [node for function in model.functions for node in function.node]
    return [node.name or node.output[0] for node in left if node.op_type in _OPERATORS or node.domain == trt.DOMAIN]


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """The nodes of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for inner in inner_graphs(node):
            yield from _nodes(inner)
