"""Values of attributes and their text, which differs where values differ."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from fakequant.errors import GraphError
from fakequant.ir.types import IRType


@dataclass(frozen=True)
class Ref:
    """An input of the operation as a part of an attribute: `shape=[%1, 64]` is a size that the second input gives."""

    position: int

    def __str__(self) -> str:
        return f"%{self.position}"


class Quoted:
    """A value whose own text an attribute holds in quotes: an operation in the body of another one."""

    def detailed(self) -> str:
        """The text."""
        raise NotImplementedError


_MAX_DEPTH = 32
"""The deepest nesting of lists."""

_MAX_DIGITS = 1000


def references(value: Any) -> list[Ref]:
    """All inputs that an attribute's value names, in order."""
    if isinstance(value, Ref):
        return [value]
    return [ref for item in value for ref in references(item)] if isinstance(value, (list, tuple)) else []


def to_text(value: Any, depth: int = 0) -> str:
    """The text of an attribute's value, which is in `depth` lists.

    Raises:
        GraphError: a value that attributes cannot have.

    >>> to_text([1, 2.5, True, None, "a b", torch.float16, Ref(1), float("inf")])
    '[1, 2.5, true, none, "a b", Half, %1, inf]'
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) < 10**_MAX_DIGITS:
        return int.__repr__(value)
    if isinstance(value, Ref) and type(value.position) is int and value.position >= 0:
        return str(value)
    if isinstance(value, float):
        # A subclass, such as numpy's, is written as the number that it is.
        return float.__repr__(value)
    if isinstance(value, (str, Quoted)):
        return json.dumps(value if isinstance(value, str) else value.detailed())
    if isinstance(value, torch.dtype):
        return IRType.of(value).value
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return f"{type(value).__name__}({str(value).removeprefix('torch.')})"
    if isinstance(value, (list, tuple)) and depth < _MAX_DEPTH:
        return f"[{', '.join(to_text(item, depth + 1) for item in value)}]"
    shown = "a list so deep" if isinstance(value, (list, tuple)) else "that integer" if isinstance(value, int) else None
    raise GraphError(
        f"an attribute cannot be {shown or repr(value)}; it is a number of at most {_MAX_DIGITS} digits, text, "
        f"dtype, device or a list of these, at most {_MAX_DEPTH} deep"
    )


def items_to_text(attributes: dict[str, Any]) -> str:
    """All attributes in the order of their names, in braces; nothing if there are none."""
    if wrong := [name for name in attributes if not (isinstance(name, str) and _NAME.fullmatch(name))]:
        raise GraphError(f"an attribute cannot have the name {wrong[0]!r}; names are such as num_bits")
    items = ", ".join(f"{name}={to_text(value)}" for name, value in sorted(attributes.items()))
    return f" {{{items}}}" if items else ""


_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def same(a: Any, b: Any) -> bool:
    """Whether two values of attributes are the same, in type and sign of zero too; NaN is NaN.

    >>> same(1, 1.0), same(0.0, -0.0), same((1, 2), [1, 2])
    (False, False, True)
    """
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return type(a) is type(b) and a == b
