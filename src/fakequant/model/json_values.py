"""Values that were read from JSON, checked: what is there, where it is, and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Enum)


class UnexpectedValue(Exception):
    """A value that is not what is expected at its place."""


def keys_of(values: Any, place: str, *keys: str) -> list[Any]:
    """The values of an object's keys, in the order asked for."""
    if not isinstance(values, dict):
        raise UnexpectedValue(f"{place} is {values!r:.80}, not an object")
    if missing := [key for key in keys if key not in values]:
        raise UnexpectedValue(f"{place} lacks {', '.join(missing)}")
    return [values[key] for key in keys]


def mapping_of(values: Any, place: str, read: Callable[[Any, str], T]) -> dict[str, T]:
    """An object with every value read by a function of the value and its place."""
    if not isinstance(values, dict):
        raise UnexpectedValue(f"{place} is {values!r:.80}, not an object")
    return {key: read(value, f"{place}.{key}") for key, value in values.items()}


def texts(values: Any, place: str) -> list[str]:
    """A list of texts."""
    if not isinstance(values, list):
        raise UnexpectedValue(f"{place} is {values!r:.80}, not a list")
    return [text(value, f"{place}[{index}]") for index, value in enumerate(values)]


def text(value: Any, place: str) -> str:
    """A text."""
    if not isinstance(value, str):
        raise UnexpectedValue(f"{place} is {value!r:.80}, not a text")
    return value


def number(value: Any, place: str) -> int:
    """A whole number of at least 0."""
    if type(value) is not int or value < 0:
        raise UnexpectedValue(f"{place} is {value!r:.80}, not a number of at least 0")
    return value


def member(value: Any, place: str, kind: type[E]) -> E:
    """The member of an enumeration that has this value."""
    known = {member.value: member for member in kind}
    if not isinstance(value, str) or value not in known:
        raise UnexpectedValue(f"{place} is {value!r:.80}, which is none of {', '.join(known)}")
    return known[value]
