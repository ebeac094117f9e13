"""Digests of plain values, such as weights and batches: tensors, arrays, numbers, texts, and containers of these."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import PurePath
from types import CellType, CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from fakequant.errors import ConfigError

_PLAIN = (str, bytes, int, float, complex, type(None), PurePath, torch.dtype, torch.device)
_DEPTH = 4
"""The depth to which functions within functions are digested: they may refer to themselves."""


class NoDigestError(ConfigError):
    """A value, or a part of it, is neither a tensor, an array, a number, a text nor a container."""


def digest(value: Any) -> str:
    """The digest of tensors, arrays, numbers, texts, paths and containers of them, the same in every process.

    For an object of another type, a NoDigestError names the type.

    >>> digest([torch.ones(2), {"a": 1}]) == digest([torch.ones(2), {"a": 1}])
    True
    """
    return _of(value).hex()


def _of(value: Any) -> bytes:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, _PLAIN):
        return _digest(kind, repr(value).encode("utf-8", "backslashreplace"))
    if isinstance(value, Tensor) and value.is_nested:
        return _digest(kind, *map(_of, value.unbind()))
    if isinstance(value, Tensor):
        kind = f"{value.dtype} {[*value.shape]}"
        if value.is_meta:
            return _digest(kind, b"")
        if value.layout != torch.strided or value.is_quantized:
            value = value.dequantize() if value.is_quantized else value.to_dense()
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
        return _digest(kind, flat.view(torch.uint8).numpy().data)
    if isinstance(value, np.generic) or (type(value) is np.ndarray and not value.dtype.hasobject):
        return _digest(f"{value.dtype.descr} {[*value.shape]}", value.tobytes())
    if isinstance(value, Mapping):
        return _digest(kind, *(_of(part) for pair in value.items() for part in pair))
    if isinstance(value, (list, tuple)):
        return _digest(kind, *map(_of, value))
    if is_dataclass(value) and not isinstance(value, type):
        return _digest(kind, *(_of(getattr(value, field.name)) for field in fields(value)))
    raise NoDigestError(
        f"a {type(value).__name__} cannot be compared between two runs; give tensors, arrays, numbers and texts"
    )


def function_digest(function: Any) -> str:
    """A digest that differs for a function with another name or code, or with other numbers and tensors inside.

    >>> limits = [lambda model, most=most: most for most in (1, 2)]
    >>> function_digest(limits[0]) == function_digest(limits[1])
    False
    """
    return digest(_described(function))


def _described(value: Any, depth: int = 0) -> Any:
    if isinstance(value, (*_PLAIN, Tensor)):
        return value
    if isinstance(value, CodeType):
        return [value.co_code, *value.co_names, *(_described(one, depth + 1) for one in value.co_consts)]
    if isinstance(value, (tuple, frozenset)) and depth < _DEPTH:
        return [_described(one, depth + 1) for one in (value if isinstance(value, tuple) else sorted(map(repr, value)))]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if not callable(value) or depth >= _DEPTH:
        return kind
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', kind)}"
    cells = [one.cell_contents for one in getattr(value, "__closure__", None) or () if one != CellType()]
    parts = [getattr(value, "__code__", None), getattr(value, "__defaults__", None), *cells]
    parts += [*vars(value).values()] if hasattr(value, "__dict__") and not isinstance(value, (type, Module)) else []
    parts += [value.func, value.args, *value.keywords.values()] if isinstance(value, partial) else []
    return [name, *(_described(one, depth + 1) for one in parts)]


def _digest(kind: str, *parts: Any) -> bytes:
    found = hashlib.sha256(kind.encode() + b"\0")
    for part in parts:
        found.update(part)
    return found.digest()
