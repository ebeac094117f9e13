"""Graphs from the text that `text.py` writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fakequant.errors import GraphError
from fakequant.ir.attributes import Reader, read_integer, read_string
from fakequant.ir.fused import NAME as FUSED
from fakequant.ir.graph import Graph
from fakequant.ir.op import IROp
from fakequant.ir.permitted import check_permitted
from fakequant.ir.structure import Constant
from fakequant.ir.table import make_op
from fakequant.ir.types import IRType, TensorShape, TensorType

_LINE = {
    "header": re.compile(r"IR Graph: (.*)"),
    "input": re.compile(r'    t([0-9]+) = ("(?:[^"\\]|\\.)*") : (.*)'),
    "constant": re.compile(
        r'    t([0-9]+) = (parameter|frozen|constant) ("(?:[^"\\]|\\.)*") : (.*) = (sha256:\w+|\[.*\])'
    ),
    "outputs": re.compile(r"  Outputs: ?(.*)"),
    "section": re.compile(r"  (Constants|Operations) \(([0-9]+)\):"),
}
_OPERATION = re.compile(r'((?:[^"#]|"(?:[^"\\]|\\.)*")*?)(?:  # (.*))?')


def parse(text: str, tensors: Mapping[str, Tensor] | None = None) -> Graph:
    """The graph of a text.

    Args:
        text: as `to_text` writes it.
        tensors: the constants whose numbers are not in the text, by name.

    Raises:
        GraphError: the text is not one (names the line), lacks some of its lines, calls an operator that texts may not
            call, or a constant is missing or another one. A line of outputs that was cut is noticed by `load` alone.

    >>> graph = Graph("example")
    >>> graph.outputs = [graph.add("ReLU", graph.add_input("x", IRType.Float32, (2, -1)))]
    >>> parse(str(graph)) == graph
    True
    """
    graph = Graph()
    lines = text.rstrip("\n").split("\n")
    section: Callable[[str], None] | None = None
    readers = {
        "Inputs": lambda line: _read_input(graph, line),
        "Constants": lambda line: _read_constant(graph, line, tensors or {}),
        "Operations": lambda line: graph.ops.append(_read_operation(line)),
    }
    counts: dict[str, int] = {}
    ended = False
    for number, line in enumerate(lines, start=1):
        try:
            if number == 1:
                graph.name = _match("header", line)[1]
            elif ended:
                raise GraphError("nothing may follow the outputs")
            elif line == "  Inputs:":
                section = readers["Inputs"]
            elif line.startswith(("  Constants", "  Operations")):
                found = _match("section", line)
                section, counts[found[1]] = readers[found[1]], read_integer(found[2])
            elif line.startswith("  Outputs:"):
                graph.outputs, ended = parse_ids(_match("outputs", line)[1]), True
                _check_counts(graph, counts)
            elif section is None:
                raise GraphError(f"expected '  Inputs:', got {line!r}")
            else:
                section(line)
        except GraphError as error:
            raise GraphError(f"line {number}: {error}") from error
    if not ended:
        raise GraphError(f"the text ends after {len(lines)} lines without its line of outputs")
    return graph


def _check_counts(graph: Graph, counts: dict[str, int]) -> None:
    for what, held in (("Constants", len(graph.constants)), ("Operations", len(graph.ops))):
        if counts.get(what) != held:
            said = f"{counts[what]} {what.lower()}" if what in counts else f"no number of {what.lower()}"
            raise GraphError(f"the text says {said}, but has {held}: lines are missing or added")


def _match(kind: str, line: str) -> re.Match[str]:
    found = _LINE[kind].fullmatch(line)
    if found is None:
        raise GraphError(f"cannot read {line.strip()[:60]!r} as the {kind} of a graph")
    return found


def _read_input(graph: Graph, line: str) -> None:
    found = _match("input", line)
    id, type = read_integer(found[1]), _one_type(found[3])
    _check_new(graph, id)
    graph.add_input(read_string(found[2]), type.type, type.shape, id)


def _read_constant(graph: Graph, line: str, tensors: Mapping[str, Tensor]) -> None:
    found = _match("constant", line)
    id, name, type, held = read_integer(found[1]), read_string(found[3]), _one_type(found[4]), found[5]
    _check_new(graph, id)
    if held.startswith("["):
        values = Reader(held).value()
        try:
            tensor = torch.tensor(values, dtype=type.type.dtype).reshape(type.shape)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise GraphError(f"the numbers of {name!r} are not {type}: {error}") from error
    elif name not in tensors:
        raise GraphError(f"the constant {name!r} is not in the text and not among the tensors given")
    else:
        tensor = tensors[name].detach()
        if type.type is IRType.Complex and tensor.dtype is torch.float64 and tensor.shape == (*type.shape, 2):
            tensor = torch.view_as_complex(tensor)
    if found[2] != "constant" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise GraphError(f"the {found[2]} {name!r} is {type}, and only real or complex numbers have gradients")
    constant = Constant(name, tensor, found[2] == "frozen")
    if constant.type != type:
        raise GraphError(f"the constant {name!r} is {constant.type}, but the text says {type}")
    if held.startswith("sha256:") and held != f"sha256:{constant.digest()[:32]}":
        raise GraphError(f"the constant {name!r} is another one than that of the text: its digest differs")
    graph.constants[id] = Constant(name, nn.Parameter(tensor)) if found[2] == "parameter" else constant


def _check_new(graph: Graph, id: int) -> None:
    if id in graph.inputs or id in graph.constants:
        raise GraphError(f"t{id} is there already")


def _one_type(text: str) -> TensorType:
    types = parse_types(text)
    if len(types) != 1:
        raise GraphError(f"expected one type, got {text!r}")
    return types[0]


def _read_operation(line: str) -> IROp:
    found = _OPERATION.fullmatch(line.strip())
    if found is None:
        raise GraphError(f"cannot read the operation {line.strip()[:60]!r}")
    op = parse_op(found[1])
    op.origin = found[2] or ""
    _check_permitted(op)
    return op


def _check_permitted(op: IROp) -> None:
    """Raise if a text may not have an operation, or one in its body."""
    check_permitted(op.op_type)
    body = op.attributes.get("body")
    for part in body if isinstance(body, list) else ():
        if isinstance(part, IROp):
            _check_permitted(part)


def parse_op(text: str) -> IROp:
    """The operation in a text that `IROp.detailed` made.

    Raises:
        GraphError: the text is not one.

    >>> parse_op("t2 = Concat(t0, t1) {dim=1} : Float32 [3, 8]").attributes
    {'dim': 1}
    """
    try:
        made, rest = text.split(" = ", 1)
        op_type, rest = rest.split("(", 1)
        read, rest = rest.split(")", 1)
        reader = Reader(rest)
        attributes = reader.attributes()
        types = reader.rest.strip()
        if not types.startswith(":"):
            raise ValueError(f"expected ': Type shape' at {types[:20]!r}")
        op = make_op(op_type.strip(), parse_ids(read), attributes)
        op.output_ids, op.outputs = parse_ids(made), parse_types(types[1:])
        body = attributes.get("body")
        if op.op_type == FUSED and isinstance(body, list):
            op.attributes["body"] = [parse_op(line) if isinstance(line, str) else line for line in body]
        return op
    except ValueError as error:
        raise GraphError(f"cannot read the operation {text[:200]!r}: {error}") from error


def parse_ids(text: str) -> list[int]:
    """The ids in "t0, t1"; none in an empty text."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    for word in words:
        if not re.fullmatch(r"t[0-9]+", word):
            raise GraphError(f"expected the name of a value such as t0, got {word!r}")
    return [read_integer(word[1:]) for word in words]


def parse_types(text: str) -> list[TensorType]:
    """The types in "Float32 [3, 4], Int64 scalar"."""
    found = []
    place, end = 0, len(text)
    while (space := _SPACES.match(text, place)) is not None and space.end() < end:
        if found and text[space.end()] != ",":
            raise GraphError(f"expected ',' between types at {text[space.end() : space.end() + 20]!r}")
        type = _TYPE.match(text, space.end() + bool(found))
        if type is None or type[1] not in IRType.__members__:
            name = text[space.end() + bool(found) :].split()[:1] or [""]
            raise GraphError(f"unknown type {name[0][:20]!r}; known are {', '.join(IRType.__members__)}")
        found.append(TensorType(IRType[type[1]], _shape(type[2].strip())))
        place = type.end()
    return found


_SPACES = re.compile(r"\s*")
_TYPE = re.compile(r"\s*(\w*)\s*(\[[^\]]*\]?|[^,]*)", re.ASCII)


def _shape(text: str) -> TensorShape:
    if text == "scalar":
        return TensorShape()
    words = [word.strip() for word in text[1:-1].split(",")]
    if text.startswith("[") and text.endswith("]") and all(re.fullmatch(r"\?|[0-9]+", word) for word in words):
        return TensorShape(-1 if word == "?" else read_integer(word) for word in words)
    raise GraphError(f"cannot read the shape {text[:60]}; it is such as [2, ?, 4] or scalar")
