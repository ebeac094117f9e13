"""Descriptors as YAML: one key on a line, with a value of numbers, strings, lists and mappings.

What is written is YAML 1.1 that any reader takes; only what is written here, or by a reader's plain block style, is
read.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

_KEY = re.compile(r"(\w+):(?:\s+(.*\S))?\s*")
_ITEM = re.compile(r"\s*-\s+(.*\S)\s*")
# A quoted string, a bracket, a comma, a colon, or a plain word.
_TOKEN = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[\[\]{},]|:(?=\s|$)|[^\[\]{},:\s][^\[\]{},:]*)""")
_WHOLE = re.compile(r"[-+]?\d+")
_TUPLE = "!!python/tuple"
_WORDS = {"null": None, "~": None, "true": True, "false": False, ".nan": math.nan, ".inf": math.inf, "-.inf": -math.inf}


def dump(values: dict[str, Any]) -> str:
    """The text of a mapping, keys in alphabetical order.

    >>> dump({"name": "a: b", "amax": 1e-05, "block_sizes": {-1: 16, "type": "dynamic"}})
    'amax: 1.0e-05\\nblock_sizes: {-1: 16, "type": "dynamic"}\\nname: "a: b"\\n'
    """
    return "".join(f"{key}: {_text(values[key])}\n" for key in sorted(values))


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key)}: {_text(each)}' for key, each in value.items())}}}"
    if isinstance(value, float):
        return _float(value)
    return json.dumps(value)


def _float(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = repr(value)
    # YAML 1.1 takes a number without a point for a string.
    return text if "." in text else text.replace("e", ".0e")


def load(text: str) -> dict[str, Any]:
    """The mapping of a text that `dump` wrote, or of plain block style with scalars and lists of them.

    Raises:
        ValueError: a line that is of neither form.

    >>> load("axis:\\n- 0\\n- 1\\nname: null\\nnum_bits: 8\\n")
    {'axis': [0, 1], 'name': None, 'num_bits': 8}
    """
    values: dict[str, Any] = {}
    key = None
    for line in text.splitlines():
        if not line.strip() or line.strip() in ("---", "..."):
            continue
        if match := _KEY.fullmatch(line):
            key = match[1]
            values[key] = [] if match[2] in (None, _TUPLE) else _value(match[2])
        elif (match := _ITEM.fullmatch(line)) and key is not None and isinstance(values[key], list):
            values[key].append(_value(match[1]))
        else:
            raise ValueError(f"cannot read {line!r} of a descriptor; expected a line such as 'num_bits: 8'")
    return values


def _value(text: str) -> Any:
    if text[0] not in "[{":
        return _scalar(text)
    tokens = _TOKEN.findall(text)
    if "".join(tokens).replace(" ", "") != text.replace(" ", ""):
        raise ValueError(f"cannot read {text!r} of a descriptor")
    value, rest = _flow(tokens)
    if rest:
        raise ValueError(f"cannot read {text!r} of a descriptor: something follows the closing bracket")
    return value


def _flow(tokens: list[str]) -> tuple[Any, list[str]]:
    """The value at the beginning of the tokens, and the tokens after it."""
    if not tokens:
        raise ValueError("a descriptor with a bracket that is not closed")
    first, *rest = tokens
    if first not in ("[", "{"):
        return _scalar(first), rest
    close, items = {"[": "]", "{": "}"}[first], []
    while rest and rest[0] != close:
        item, rest = _flow(rest)
        if first == "{":
            value, rest = _flow(rest[1:])
            item = item, value
        items.append(item)
        if rest and rest[0] == ",":
            rest = rest[1:]
    if not rest:
        raise ValueError(f"a descriptor with {first!r} that is not closed")
    return (dict(items) if first == "{" else items), rest[1:]


def _scalar(text: str) -> Any:
    text = text.strip()
    if text.startswith('"'):
        return json.loads(text)
    if text.startswith("'"):
        return text[1:-1].replace("''", "'")
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _WHOLE.fullmatch(text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text
