"""Values of attributes and their text, which is read back as the same value."""

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
        """The text, which `fakequant.ir.parse.parse_op` reads."""
        raise NotImplementedError


MAX_DEPTH = 32
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
    if isinstance(value, (list, tuple)) and depth < MAX_DEPTH:
        return f"[{', '.join(to_text(item, depth + 1) for item in value)}]"
    shown = "a list so deep" if isinstance(value, (list, tuple)) else "that integer" if isinstance(value, int) else None
    raise GraphError(
        f"an attribute cannot be {shown or repr(value)}; it is a number of at most {_MAX_DIGITS} digits, text, "
        f"dtype, device or a list of these, at most {MAX_DEPTH} deep"
    )


def items_to_text(attributes: dict[str, Any]) -> str:
    """All attributes in the order of their names, in braces; nothing if there are none."""
    if wrong := [name for name in attributes if not (isinstance(name, str) and _NAME.fullmatch(name))]:
        raise GraphError(f"an attribute cannot have the name {wrong[0]!r}; names are such as num_bits")
    items = ", ".join(f"{name}={to_text(value)}" for name, value in sorted(attributes.items()))
    return f" {{{items}}}" if items else ""


_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SPACES = re.compile(r"\s*")
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*") | (?P<call>(?:device|layout|memory_format)\([\w:]+\)) | %(?P<ref>\d+)
    | (?P<number>-?(?:inf|nan|\d+(?:\.\d+)?(?:e[+-]?\d+)?)\b) | (?P<word>[A-Za-z_]\w*) | (?P<sign>[\[\]{},=]))""",
    re.VERBOSE | re.ASCII,
)


class Reader:
    """Reads attributes from the front of a text, from place to place: a long line takes as long as its characters."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._depth = 0

    @property
    def rest(self) -> str:
        """The text that is not read yet."""
        return self._text[self._at :]

    def attributes(self) -> dict[str, Any]:
        """The attributes that `items_to_text` wrote; empty if the text does not begin with them.

        Raises:
            GraphError: the text begins like attributes but is not such.
        """
        found: dict[str, Any] = {}
        if not self._next_is("{"):
            return found
        self._expect("{")
        while not self._next_is("}"):
            if found:
                self._expect(",")
            # Not a token: "inf" is a number there.
            name = _NAME.match(self._text, self._after_spaces())
            if name is None or name[0] in found:
                raise GraphError(f"expected the name of an attribute, each once, at {self._shown()}")
            self._at = name.end()
            self._expect("=")
            found[name[0]] = self.value()
        self._expect("}")
        return found

    def value(self) -> Any:
        """The value that `to_text` wrote; lists come back as lists."""
        token = self._token()
        if token["sign"] == "[":
            return self._items()
        if token["string"]:
            return read_string(token["string"])
        if token["call"]:
            return _called(token["call"])
        if token["ref"]:
            return Ref(read_integer(token["ref"]))
        if token["number"]:
            number = token["number"]
            return read_integer(number) if re.fullmatch(r"-?\d+", number) else float(number)
        words = {"true": True, "false": False, "none": None}
        if token["word"] in words:
            return words[token["word"]]
        if token["word"] in IRType.__members__:
            return IRType[token["word"]].dtype
        raise GraphError(f"cannot read the value of an attribute at {self._shown(token.start())}")

    def _items(self) -> list[Any]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise GraphError(f"lists are more than {MAX_DEPTH} deep")
        items: list[Any] = []
        while not self._next_is("]"):
            if items:
                self._expect(",")
            items.append(self.value())
        self._expect("]")
        self._depth -= 1
        return items

    def _after_spaces(self) -> int:
        found = _SPACES.match(self._text, self._at)
        assert found is not None
        return found.end()

    def _shown(self, place: int | None = None) -> str:
        place = self._at if place is None else place
        return repr(self._text[place : place + 20].strip())

    def _next_is(self, sign: str) -> bool:
        return self._text.startswith(sign, self._after_spaces())

    def _expect(self, sign: str) -> None:
        if not self._next_is(sign):
            raise GraphError(f"expected {sign!r} at {self._shown()}")
        self._at = self._after_spaces() + len(sign)

    def _token(self) -> re.Match[str]:
        token = _TOKEN.match(self._text, self._at)
        if token is None:
            raise GraphError(f"cannot read {self._shown()}")
        self._at = token.end()
        return token


def read_integer(digits: str) -> int:
    """The integer that some digits are.

    Raises:
        GraphError: there are too many.
    """
    if len(digits) > _MAX_DIGITS:
        raise GraphError(f"a number has {len(digits)} digits, more than {_MAX_DIGITS}: {digits[:20]}...")
    return int(digits)


def read_string(text: str) -> str:
    """The text in quotes, written by the rules of JSON.

    Raises:
        GraphError: it is none.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise GraphError(f"cannot read the text {text}: {error}") from error


def _called(text: str) -> Any:
    kind, name = text[:-1].split("(")
    if kind == "device":
        try:
            return torch.device(name)
        except RuntimeError as error:
            raise GraphError(f"unknown device {name!r}: {error}") from error
    value = getattr(torch, name, None)
    if type(value).__name__ != kind:
        raise GraphError(f"unknown {kind} {name!r}")
    return value


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
