"""Graphs as text that people read.

The text has every attribute, the digest of each constant, and the numbers of those with few elements, so that two
graphs with the same text compute the same.
"""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from fakequant.ir.attributes import to_text as value_to_text
from fakequant.ir.structure import Constant, GraphStructure

_INLINE = 4
"""The text holds the numbers of constants with at most this many elements."""


def to_text(graph: GraphStructure) -> str:
    """The text of a graph."""
    lines = [f"IR Graph: {_one_line(graph.name)}", "  Inputs:"]
    lines += [f"    t{id} = {json.dumps(value.name)} : {value.type}" for id, value in graph.inputs.items()]
    lines.append(f"  Constants ({len(graph.constants)}):")
    lines += [f"    {_constant_text(id, constant)}" for id, constant in graph.constants.items()]
    lines.append(f"  Operations ({len(graph.ops)}):")
    lines += [f"    {op.detailed()}{f'  # {_one_line(op.origin)}' if op.origin else ''}" for op in graph.ops]
    lines.append(f"  Outputs: {', '.join(f't{id}' for id in graph.outputs)}")
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    # What UTF-8 cannot write is written as its number.
    return " ".join(str(text).split()).encode("utf-8", "backslashreplace").decode()


def _constant_text(id: int, constant: Constant) -> str:
    values = _inline(constant.tensor)
    held = f"sha256:{constant.digest()[:32]}" if values is None else value_to_text(values)
    return f"t{id} = {constant.kind} {json.dumps(constant.name)} : {constant.type} = {held}"


def _inline(tensor: Tensor) -> list[Any] | None:
    """The numbers of a small tensor, row by row; None if it is large or its numbers do not determine every bit."""
    if tensor.numel() > _INLINE or tensor.is_complex():
        return None
    values = tensor.detach().cpu().reshape(-1).tolist()
    # A NaN has bits that its text does not tell.
    return None if any(value != value for value in values) else values
