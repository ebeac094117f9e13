"""Graphs as text that people read, and back; constants beside it in a safetensors file.

The text has every attribute, the digest of each constant, and the numbers of those with few elements, so that two
graphs with the same text compute the same.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.errors import GraphError
from fakequant.files import writable_folder, write_whole
from fakequant.ir.attributes import Reader
from fakequant.ir.attributes import to_text as value_to_text
from fakequant.ir.graph import Constant, Graph
from fakequant.ir.op import IROp
from fakequant.ir.table import make_op
from fakequant.ir.types import IRType, TensorShape, TensorType

_INLINE = 4
"""Constants of so many elements are written in the text."""


def to_text(graph: Graph) -> str:
    """The text of a graph; `parse` reads it."""
    lines = [f"IR Graph: {_one_line(graph.name)}", "  Inputs:"]
    lines += [f"    t{id} = {json.dumps(value.name)} : {value.type}" for id, value in graph.inputs.items()]
    lines.append(f"  Constants ({len(graph.constants)}):")
    lines += [f"    {_constant_text(id, constant)}" for id, constant in graph.constants.items()]
    lines.append(f"  Operations ({len(graph.ops)}):")
    lines += [f"    {op.detailed()}{f'  # {_one_line(op.origin)}' if op.origin else ''}" for op in graph.ops]
    lines.append(f"  Outputs: {', '.join(f't{id}' for id in graph.outputs)}")
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _constant_text(id: int, constant: Constant) -> str:
    values = _inline(constant.tensor)
    held = f"sha256:{constant.digest()[:32]}" if values is None else value_to_text(values)
    return f"t{id} = {constant.kind} {json.dumps(constant.name)} : {constant.type} = {held}"


def _inline(tensor: Tensor) -> list[Any] | None:
    """The numbers of a small tensor, row by row; None if it is large or numbers would not say every bit."""
    if tensor.numel() > _INLINE or tensor.is_complex():
        return None
    values = tensor.detach().cpu().reshape(-1).tolist()
    # A NaN has bits that its text does not tell.
    again = torch.tensor(Reader(value_to_text(values)).value(), dtype=tensor.dtype).reshape(tensor.shape)
    return values if Constant("", again).digest() == Constant("", tensor).digest() else None


_LINE = {
    "header": re.compile(r"IR Graph: (.*)"),
    "input": re.compile(r'    t(\d+) = ("(?:[^"\\]|\\.)*") : (.*)'),
    "constant": re.compile(
        r'    t(\d+) = (parameter|frozen|constant) ("(?:[^"\\]|\\.)*") : (.*) = (sha256:\w+|\[.*\])'
    ),
    "outputs": re.compile(r"  Outputs: ?(.*)"),
}
_OPERATION = re.compile(r'((?:[^"#]|"(?:[^"\\]|\\.)*")*?)(?:  # (.*))?')


def parse(text: str, tensors: Mapping[str, Tensor] | None = None) -> Graph:
    """The graph of a text.

    Args:
        text: as `to_text` writes it.
        tensors: the constants whose numbers are not in the text, by name.

    Raises:
        GraphError: the text is not one (names the line), or a constant is missing or another one.

    >>> graph = Graph("example")
    >>> graph.outputs = [graph.add("ReLU", graph.add_input("x", IRType.Float32, (2, -1)))]
    >>> parse(to_text(graph)) == graph
    True
    """
    graph = Graph()
    lines = text.rstrip("\n").split("\n")
    section: Callable[[str], None] | None = None
    readers = {
        "  Inputs:": lambda line: _read_input(graph, line),
        "  Constants": lambda line: _read_constant(graph, line, tensors or {}),
        "  Operations": lambda line: graph.ops.append(_read_operation(line)),
    }
    ended = False
    for number, line in enumerate(lines, start=1):
        try:
            if number == 1:
                graph.name = _match("header", line)[1]
            elif ended:
                raise GraphError("nothing may follow the outputs")
            elif start := next((key for key in readers if line.startswith(key)), None):
                section = readers[start]
            elif line.startswith("  Outputs:"):
                graph.outputs, ended = parse_ids(_match("outputs", line)[1]), True
            elif section is None:
                raise GraphError(f"expected '  Inputs:', got {line!r}")
            else:
                section(line)
        except GraphError as error:
            raise GraphError(f"line {number}: {error}") from error
    if not ended:
        raise GraphError(f"the text ends after {len(lines)} lines without its line of outputs")
    return graph


def _match(kind: str, line: str) -> re.Match[str]:
    found = _LINE[kind].fullmatch(line)
    if found is None:
        raise GraphError(f"cannot read {line.strip()[:60]!r} as the {kind} of a graph")
    return found


def _read_input(graph: Graph, line: str) -> None:
    found = _match("input", line)
    type = _one_type(found[3])
    _check_new(graph, int(found[1]))
    graph.add_input(json.loads(found[2]), type.type, type.shape, int(found[1]))


def _read_constant(graph: Graph, line: str, tensors: Mapping[str, Tensor]) -> None:
    found = _match("constant", line)
    id, name, type, held = int(found[1]), json.loads(found[3]), _one_type(found[4]), found[5]
    _check_new(graph, id)
    if held.startswith("["):
        values = Reader(held).value()
        try:
            tensor = torch.tensor(values, dtype=type.type.dtype).reshape(type.shape)
        except (RuntimeError, TypeError, ValueError) as error:
            raise GraphError(f"the numbers of {name!r} are not {type}: {error}") from error
    elif name not in tensors:
        raise GraphError(f"the constant {name!r} is not in the text and not among the tensors given")
    else:
        tensor = tensors[name].detach()
    constant = Constant(name, tensor, found[2] == "frozen")
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
    return op


def parse_op(text: str) -> IROp:
    """The operation of a text made by `detailed`.

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
        return op
    except ValueError as error:
        raise GraphError(f"cannot read the operation {text!r}: {error}") from error


def parse_ids(text: str) -> list[int]:
    """The ids in "t0, t1"; none in an empty text."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    for word in words:
        if not (word.startswith("t") and word[1:].isdecimal()):
            raise GraphError(f"expected the name of a value such as t0, got {word!r}")
    return [int(word[1:]) for word in words]


def parse_types(text: str) -> list[TensorType]:
    """The types in "Float32 [3, 4], Int64 scalar"."""
    found = []
    rest = text.strip()
    while rest:
        name, _, rest = rest.partition(" ")
        if name not in IRType.__members__:
            raise GraphError(f"unknown type {name!r}; known are {', '.join(IRType.__members__)}")
        rest = rest.lstrip()
        if rest.startswith("["):
            inner, closed, rest = rest[1:].partition("]")
            words = [word.strip() for word in inner.split(",")]
            if not closed or not all(word == "?" or word.isdecimal() for word in words):
                raise GraphError(f"cannot read the shape [{inner}]; it is such as [2, ?, 4] or scalar")
            shape = TensorShape(-1 if word == "?" else int(word) for word in words)
        else:
            word, _, rest = rest.partition(",")
            if word.strip() != "scalar":
                raise GraphError(f"expected a shape such as [2, ?, 4] or scalar, got {word.strip()!r}")
            shape, rest = TensorShape(), f",{rest}" if rest else ""
        found.append(TensorType(IRType[name], shape))
        rest = rest.strip()
        if rest and not rest.startswith(","):
            raise GraphError(f"expected ',' between types at {rest[:20]!r}")
        rest = rest[1:].strip()
    return found


def save(graph: Graph, path: str | os.PathLike[str]) -> Path:
    """Write a graph as text, and beside it, with the suffix `.safetensors`, the constants that are not in the text.

    Strides are not kept: constants come back row by row.

    Raises:
        GraphError: the graph is not valid.
        OutputError: the folder cannot be written.

    >>> import tempfile
    >>> graph = Graph("example")
    >>> graph.outputs = [graph.add("ReLU", graph.add_constant("w", torch.randn(3, 10)))]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load(save(graph, folder + "/example.txt")) == graph
    True
    """
    from safetensors.torch import save as to_bytes

    graph.check()
    target = Path(path)
    writable_folder(target.parent)
    held = {c.name: c.tensor.detach().cpu() for c in graph.constants.values() if _inline(c.tensor) is None}
    # Cloned, because safetensors refuses tensors that share memory.
    data = to_bytes({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in held.items()})
    write_whole(target.with_suffix(".safetensors"), data)
    write_whole(target, to_text(graph).encode())
    return target


def load(path: str | os.PathLike[str], tensors: Mapping[str, Tensor] | None = None) -> Graph:
    """Read a graph that `save` wrote.

    Args:
        path: of the text.
        tensors: the constants by name; by default those of the file beside it.

    Raises:
        GraphError: a file is missing or damaged, or they do not belong together.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    target = Path(path)
    beside = target.with_suffix(".safetensors")
    try:
        text = target.read_text()
        tensors = load_file(beside) if tensors is None else tensors
    except (OSError, UnicodeDecodeError, SafetensorError) as error:
        raise GraphError(f"cannot read the graph {target} with its constants {beside.name}: {error}") from error
    try:
        return parse(text, tensors).check()
    except GraphError as error:
        raise GraphError(f"{target}: {error}") from error
