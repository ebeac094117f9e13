"""The digest of any value, as of batches and the outputs of a model."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fakequant.errors import ConfigError, shown

_PLAIN = (str, int, float, complex, type(None), torch.dtype, torch.layout, torch.memory_format)
_REFUSALS = (TypeError, ValueError, AttributeError, RuntimeError, pickle.PickleError)
"""What objects raise that cannot be taken apart: open files, locks, generators."""


def digest(value: Any, *, or_class: bool = False) -> str:
    """The digest of a value, the same in every process.

    Of tensors and arrays the bytes count, of functions and classes the names, of other objects what pickle would store.

    Args:
        value: anything.
        or_class: whether a part that cannot be taken apart counts by its class alone.

    Raises:
        ConfigError: a part cannot be taken apart (says which).

    >>> digest([torch.ones(2), {"a": 1}]) == digest([torch.ones(2), {"a": 1}])
    True
    """
    return _Digests(or_class).of(value).hex()


class _Digests:
    """The digests of a value and of its parts; each part is taken apart once, and may hold itself."""

    def __init__(self, or_class: bool) -> None:
        self._or_class = or_class
        self._known: dict[int, tuple[Any, bytes]] = {}  # with the value, whose id stays its own as long as it is kept

    def of(self, value: Any) -> bytes:
        """The digest of a value."""
        if isinstance(value, _PLAIN):
            return _digest(_name(type(value)), repr(value).encode())
        if isinstance(value, bytes):
            return _digest("bytes", value)
        if id(value) not in self._known:
            self._known[id(value)] = value, b""
            self._known[id(value)] = value, self._whole(value)
        return self._known[id(value)][1]

    def _whole(self, value: Any) -> bytes:
        """The digest of a value that has parts, or a name."""
        if isinstance(value, Tensor) and _is_dense(value):
            data = value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
            return _digest(f"{value.dtype} {[*value.shape]}", data.numpy().data)
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return _digest(f"{value.dtype.descr} {[*value.shape]}", value.tobytes())
        if isinstance(value, (type, ModuleType, FunctionType)):
            return _digest(_name(value))
        kind = _name(type(value))
        if isinstance(value, (set, frozenset)):  # whose order is another one in another process
            return _digest(kind, *sorted(map(self.of, value)))
        return _digest(kind, *map(self.of, self._parts(value)))

    def _parts(self, value: Any) -> list[Any]:
        """What a value is made of."""
        if isinstance(value, Mapping):
            return [part for pair in value.items() for part in pair]
        if isinstance(value, (list, tuple)):
            return [*value]
        try:
            reduced: Any = value.__reduce_ex__(4)
        except _REFUSALS as error:
            if self._or_class:
                return []
            raise ConfigError(f"{shown(value)} cannot be taken apart: {error}") from error
        if isinstance(reduced, str):
            return [reduced]
        return [[*part] if isinstance(part, Iterator) else part for part in reduced[1:]]


def _is_dense(x: Tensor) -> bool:
    return x.layout == torch.strided and not (x.is_nested or x.is_quantized or x.is_meta)


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"


def _digest(kind: str, *parts: Any) -> bytes:
    found = hashlib.sha256(kind.encode() + b"\0")
    for part in parts:
        found.update(part)
    return found.digest()
