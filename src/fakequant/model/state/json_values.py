"""Values that were read from JSON, checked: what is there, where it is, and what was expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
E = TypeVar("E", bound=Enum)
Natural = Annotated[int, "of at least 0"]
"""A whole number of at least 0, as the type of a field."""
ALWAYS = {"always": True}
"""Metadata of a field that `plain_of` writes even where it has its default."""


class UnexpectedValue(ValueError):
    """A value that is not what is expected at its place."""


def keys_of(values: Any, place: str, *keys: str) -> list[Any]:
    """The values of an object's keys, in the order asked for."""
    if not isinstance(values, dict):
        raise UnexpectedValue(f"{place or 'it'} is {values!r:.80}, not an object")
    if missing := [key for key in keys if key not in values]:
        raise UnexpectedValue(f"{place or 'it'} lacks {', '.join(missing)}")
    return [values[key] for key in keys]


def mapping_of(values: Any, place: str, read: Callable[[Any, str], T]) -> dict[str, T]:
    """An object with every value read by a function of the value and its place."""
    if not isinstance(values, dict):
        raise UnexpectedValue(f"{place} is {values!r:.80}, not an object")
    return {key: read(value, f"{place}.{key}") for key, value in values.items()}


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


def value_of(value: Any, place: str, kind: Any) -> Any:
    """A value of a type: a dataclass, or a text, number or None, or a list, tuple or mapping of such.

    Floats may be the texts "inf", "-inf" and "nan", because JSON has none. The keys of a mapping may be names of an
    enumeration, a value that of its member. A class with a method `parse` is read from a text.

    >>> value_of({"a": [1, "inf"]}, "values", Mapping[str, Sequence[float]])
    {'a': [1.0, inf]}
    """
    origin, kinds = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and not hasattr(kind, "parse"):
        return _dataclass_of(value, place, kind)
    if origin is UnionType:
        return None if value is None else value_of(value, place, next(one for one in kinds if one is not NoneType))
    if origin in (Sequence, list, tuple):
        expected = "a list" if origin is not tuple else f"a list of {len(kinds)}"
        if not isinstance(value, list) or (origin is tuple and len(value) != len(kinds)):
            raise UnexpectedValue(f"{place} is {value!r:.80}, not {expected}")
        own = kinds if origin is tuple else kinds * len(value)
        found = [value_of(item, f"{place}[{n}]", k) for n, (item, k) in enumerate(zip(value, own, strict=True))]
        return tuple(found) if origin is tuple else found
    if origin in (Mapping, dict):
        read = mapping_of(value, place, lambda item, where: value_of(item, where, kinds[1]))
        if kinds[0] is str:
            return read
        if unknown := sorted(set(read) - set(kinds[0].__members__)):
            raise UnexpectedValue(f"{place} has {unknown[0]!r:.80}, which is none of {', '.join(kinds[0].__members__)}")
        return {kinds[0][key]: item for key, item in read.items()}
    return _plain_of(value, place, kind)


def plain_of(value: Any) -> Any:
    """The value for JSON that `value_of` reads; fields that have their default are left out, see `ALWAYS`.

    >>> plain_of([{"a": 1.5}])
    [{'a': 1.5}]
    """
    if hasattr(value, "to_text"):
        return value.to_text()
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        named = [one.name for one in fields(value) if one.metadata or getattr(value, one.name) != _default_of(one)]
        return {name: plain_of(getattr(value, name)) for name in named}
    if isinstance(value, Mapping):
        return {key: plain_of(item) for key, item in value.items()}
    return [plain_of(item) for item in value] if isinstance(value, (list, tuple)) else value


def _default_of(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _plain_of(value: Any, place: str, kind: Any) -> Any:
    if kind is Any:
        return value
    if hasattr(kind, "parse"):
        return kind.parse(text(value, place))
    if kind in (str, Natural):
        return text(value, place) if kind is str else number(value, place)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return member(value, place, kind)
    if kind is bool and not isinstance(value, bool):
        raise UnexpectedValue(f"{place} is {value!r:.80}, not true or false")
    is_large = type(value) is int and not -(2**63) <= value < 2**63
    if kind is float and not is_large and (type(value) in (int, float) or value in ("inf", "-inf", "nan")):
        return float(value)
    if type(value) is not kind or is_large:
        raise UnexpectedValue(f"{place} is {value!r:.80}, not a {kind.__name__}")
    return value


def _dataclass_of(value: Any, place: str, kind: Any) -> Any:
    hints = _hints(kind)
    keys_of(value, place, *[f.name for f in fields(kind) if _default_of(f) is MISSING])
    if unknown := sorted(set(value) - set(hints)):
        raise UnexpectedValue(f"{place or 'it'} has {unknown[0]!r:.80}, which no {kind.__name__} has")
    return kind(**{name: value_of(item, f"{place}.{name}".lstrip("."), hints[name]) for name, item in value.items()})


_hints = cache(partial(get_type_hints, include_extras=True))
