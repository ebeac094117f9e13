"""Graphs as pictures: the text that Graphviz draws, and SVG that needs nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from fakequant.ir.op import IROp
from fakequant.ir.structure import GraphStructure

_WIDTH, _HEIGHT, _GAP, _STEP = 7.2, 34, 18, 62
"""Pixels: width of a character, height of a box, gap between boxes of a row, distance of rows."""


class _Node(NamedTuple):
    """A box: what it shows, what kind it is, and the boxes before it."""

    title: str
    note: str
    kind: str
    before: list[int]


def _nodes(graph: GraphStructure) -> Iterator[_Node]:
    """Inputs, operations and outputs, each after those before it; constants are left out."""
    places: dict[int, int] = {}
    types, count = graph.types(), 0
    for id, value in graph.inputs.items():
        places[id], count = count, count + 1
        yield _Node(value.name, str(value.type), "input", [])
    for op in graph.ops:
        before = list(dict.fromkeys(places[id] for id in op.input_ids if id in places))
        yield _Node(_title(op), _note(op), _kind(op), before)
        places.update(dict.fromkeys(op.output_ids, count))
        count += 1
    for place, id in enumerate(graph.outputs):
        yield _Node(f"output {place}", str(types[id]), "output", [places[id]] if id in places else [])


def _title(op: IROp) -> str:
    name = str(op.attributes.get("name", op.op_type)) if op.op_type == "Fused" else op.op_type
    return name.removeprefix("aten.").removesuffix(".default")


def _note(op: IROp) -> str:
    if op.op_type == "FakeQuantize":
        return str(op.attributes["spec"])
    if op.op_type == "FakeQuantization":
        return f"{op.attributes.get('num_bits', 8)} bits"
    return ", ".join(map(str, op.outputs[:1]))


def _kind(op: IROp) -> str:
    quantizes = op.op_type in ("FakeQuantize", "FakeQuantization") or "FakeQuant" in _title(op)
    return "quantizer" if quantizes else "operation"


def to_dot(graph: GraphStructure) -> str:
    """The graph in the language of Graphviz.

    >>> from fakequant.ir import Graph, IRType
    >>> graph = Graph("example")
    >>> graph.outputs = [graph.add("ReLU", graph.add_input("x", IRType.Float32, (2, 3)))]
    >>> print(to_dot(graph))
    digraph "example" {
      node [shape=box, style=filled, fillcolor=white]
      n0 [label="x\\nFloat32 [2, 3]", fillcolor=lightgrey]
      n1 [label="ReLU\\nFloat32 [2, 3]"]
      n2 [label="output 0\\nFloat32 [2, 3]", fillcolor=lightgrey]
      n0 -> n1
      n1 -> n2
    }
    """
    colours = {"quantizer": "gold", "input": "lightgrey", "output": "lightgrey"}
    nodes = list(_nodes(graph))
    lines = [f"digraph {_quoted(graph.name)} {{", "  node [shape=box, style=filled, fillcolor=white]"]
    for place, node in enumerate(nodes):
        colour = f", fillcolor={colours[node.kind]}" if node.kind in colours else ""
        lines.append(f"  n{place} [label={_quoted(f'{node.title}{chr(10)}{node.note}')}{colour}]")
    lines += [f"  n{start} -> n{place}" for place, node in enumerate(nodes) for start in node.before]
    return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    """A text in the quotes of Graphviz, which reads UTF-8."""
    return json.dumps(_printable(text), ensure_ascii=False)


def _printable(text: str) -> str:
    """A text with a mark in the place of characters that neither XML nor UTF-8 has."""
    return "".join(c if c == "\n" or (c.isprintable() and not "\ud800" <= c <= "\udfff") else "\ufffd" for c in text)


def to_svg(graph: GraphStructure) -> str:
    """The graph as an SVG element of an HTML page, from top to bottom, quantizers filled, in the page's colours.

    >>> from fakequant.ir import Graph, IRType
    >>> graph = Graph("example")
    >>> graph.outputs = [graph.add("ReLU", graph.add_input("x", IRType.Float32, (2, 3)))]
    >>> to_svg(graph).count("<rect")
    3
    """
    nodes = [node._replace(title=_printable(node.title), note=_printable(node.note)) for node in _nodes(graph)]
    rows: list[int] = []
    for node in nodes:
        rows.append(max((rows[before] + 1 for before in node.before), default=0))
    places, width, height = _laid_out(nodes, rows)
    parts = [
        f'<line x1="{places[start][0]:.0f}" y1="{places[start][1] + _HEIGHT}" x2="{places[end][0]:.0f}" '
        f'y2="{places[end][1]}" stroke="currentColor" stroke-opacity="0.4"/>'
        for end, node in enumerate(nodes)
        for start in node.before
    ]
    parts += [_box(node, *place) for node, place in zip(nodes, places, strict=True)]
    return (
        f'<svg width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="monospace" font-size="11" role="img" '
        f'aria-label="graph of {escape(_printable(graph.name))}">{"".join(parts)}</svg>'
    )


def _size(node: _Node) -> float:
    return _WIDTH * max(len(node.title), len(node.note)) + 12


def _laid_out(nodes: list[_Node], rows: list[int]) -> tuple[list[tuple[float, int]], float, int]:
    """Top centre of every box, and width and height of the whole."""
    by_row: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        by_row.setdefault(row, []).append(place)
    centres: dict[int, float] = {}
    wide = max((sum(_size(nodes[i]) + _GAP for i in row) for row in by_row.values()), default=0.0) + _GAP
    for row in sorted(by_row):
        # Below the middle of what it reads, as far as its neighbours leave room.
        wished = {i: _mean([centres[b] for b in nodes[i].before], wide / 2) for i in by_row[row]}
        x = float(_GAP)
        left = sum(_size(nodes[i]) + _GAP for i in by_row[row])
        for i in sorted(by_row[row], key=wished.__getitem__):
            half = _size(nodes[i]) / 2
            x = max(x, min(wished[i] - half, wide - left))
            centres[i] = x + half
            x += 2 * half + _GAP
            left -= 2 * half + _GAP
    return [(centres[i], rows[i] * _STEP + 8) for i in range(len(nodes))], wide, (max(rows, default=-1) + 1) * _STEP


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _box(node: _Node, x: float, y: int) -> str:
    width = _size(node)
    fill = {"quantizer": "#e6b800", "operation": "none"}.get(node.kind, "currentColor")
    return (
        f'<rect x="{x - width / 2:.0f}" y="{y}" width="{width:.0f}" height="{_HEIGHT}" rx="4" fill="{fill}" '
        'fill-opacity="0.25" stroke="currentColor"/>'
        f'<text x="{x:.0f}" y="{y + 14}" text-anchor="middle" fill="currentColor">{escape(node.title)}</text>'
        f'<text x="{x:.0f}" y="{y + 28}" text-anchor="middle" fill="currentColor" fill-opacity="0.7">'
        f"{escape(node.note)}</text>"
    )
