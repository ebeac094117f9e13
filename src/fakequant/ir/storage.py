"""Graphs in files: a text file, and a safetensors file with the constants that the text leaves out."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from fakequant.errors import GraphError, OutputError
from fakequant.files import locked, writable_file, write_in_order
from fakequant.ir.attributes import read_string
from fakequant.ir.graph import Graph
from fakequant.ir.parse import parse
from fakequant.ir.text import inline, to_text


def save(graph: Graph, path: str | os.PathLike[str]) -> Path:
    """Write a graph as text, and the constants that the text leaves out to a file next to it.

    That file is named by its content, and the last line of the text names it. The text is replaced last and in one
    step, so that it is either the old graph or the new one, whatever interrupts; then the file of the old text is
    removed. Strides are not kept: constants come back row by row.

    Raises:
        GraphError: the graph is not valid.
        OutputError: the file cannot be written, or the path ends like that of a file of constants.

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
    if target.suffix == _SUFFIX:
        raise OutputError(f"cannot write the text of a graph to {target}: {_SUFFIX} is for constants; call it .txt")
    writable_file(target)
    held = {c.name: c.tensor.detach().cpu() for c in graph.constants.values() if inline(c.tensor) is None}
    # Cloned, because safetensors refuses tensors that share memory.
    rows = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in held.items()}
    text, files = to_text(graph), {}
    if rows:
        data = to_bytes({_key(name): _real(tensor) for name, tensor in rows.items()})
        name = f"{target.name}.{hashlib.sha256(data).hexdigest()[:16]}{_SUFFIX}"
        text, files = f"{text}{_CONSTANTS}{json.dumps(name)}\n", {target.with_name(name): data}
    with locked(target.parent) as alone:
        before = _named_file(target)
        write_in_order({**files, target: text.encode()})
        if alone and before is not None and before not in files:
            with suppress(OSError):
                before.unlink()
    return target


_SUFFIX = ".safetensors"
_CONSTANTS = "  Constants in: "


def _split(text: str) -> tuple[str, str | None]:
    """The text of a graph, and the name of the file of its constants where the last line of the text says one.

    Raises:
        GraphError: the last line cannot be read.
    """
    start = text.rfind("\n", 0, -1) + 1
    if not text.startswith(_CONSTANTS, start):
        return text, None
    said = text[start + len(_CONSTANTS) :].strip()
    name = read_string(said) if said.startswith('"') else ""
    if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
        raise GraphError(f"{said[:80]} is no name of a file in the folder of the text")
    return text[:start], name


def _named_file(path: Path) -> Path | None:
    """The file of constants that a text names; None where there is none, or one whose name `save` does not make."""
    try:
        name = _split(path.read_bytes().decode())[1]
    except (OSError, UnicodeDecodeError, GraphError):
        return None
    own = rf"{re.escape(path.name)}\.[0-9a-f]{{16}}{re.escape(_SUFFIX)}"
    return None if name is None or not re.fullmatch(own, name) else path.with_name(name)


def _key(name: str) -> str:
    """The name in a safetensors file, which keeps `__metadata__` for itself."""
    return f"{name}_" if name.startswith("__metadata__") else name


def _name(key: str) -> str:
    return key[:-1] if key.startswith("__metadata__") else key


def _real(tensor: Tensor) -> Tensor:
    """A tensor as safetensors can hold it: without complex128, of which it has the two parts."""
    return torch.view_as_real(tensor) if tensor.dtype is torch.complex128 else tensor


def load(path: str | os.PathLike[str], tensors: Mapping[str, Tensor] | None = None) -> Graph:
    """Read a graph that `save` wrote.

    Args:
        path: of the text. The text must end with a line break, as `save` wrote it: one that was cut has none.
        tensors: the constants by name; by default those of the file next to it that the text names. A text that names
            none, as of earlier versions, has them in a file of its own name with `.safetensors` at the end.

    Raises:
        GraphError: a file is missing or damaged, or they do not belong together.
    """
    target = Path(path)
    try:
        text, held = _read(target) if tensors is None else (_split(_text_of(target))[0], tensors)
        return parse(text, held).check()
    except GraphError as error:
        raise GraphError(f"{target}: {error}") from error


def _text_of(path: Path) -> str:
    try:
        text = path.read_bytes().decode().replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        raise GraphError(f"cannot read the graph: {error}") from error
    if not text.endswith("\n"):
        raise GraphError("the text was cut: its last line has no end")
    return text


def _read(path: Path) -> tuple[str, dict[str, Tensor]]:
    """The text of a graph and its constants, also while other processes save: they may remove a file in between."""
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    text = _text_of(path)
    while True:
        graph, name = _split(text)
        beside = path.with_name(name or path.name + _SUFFIX)
        try:
            held = from_bytes(beside.read_bytes())
            # Cloned, because a file does not align them to 64 bytes, and kernels round by the alignment of rows.
            return graph, {_name(key): tensor.clone() for key, tensor in held.items()}
        except FileNotFoundError as error:
            before, text = text, _text_of(path)
            if text == before and name is None:
                return graph, {}
            if text == before:
                raise GraphError(f"cannot read the graph with its constants {beside.name}: {error}") from error
        except (OSError, SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
            raise GraphError(f"cannot read the graph with its constants {beside.name}: {error}") from error
