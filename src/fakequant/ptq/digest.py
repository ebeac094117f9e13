"""The digest of any value: batches, the functions that call a model with them, and what these hold."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
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

    Of tensors and arrays the bytes count, of functions their code, constants, defaults and enclosed variables, of other
    objects what pickle would store. Global variables, and the functions that a function calls, do not count.

    Args:
        value: anything.
        or_class: whether a part that cannot be taken apart counts by its class alone.

    Raises:
        ConfigError: a part cannot be taken apart (says which).

    >>> digest([torch.ones(2), {"a": 1}]) == digest([torch.ones(2), {"a": 1}])
    True
    >>> digest(lambda x: x + 1) == digest(lambda x: x + 2)
    False
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
        if isinstance(value, (type, ModuleType)):
            return _digest(_name(value))
        kind = _name(type(value))
        if isinstance(value, (set, frozenset)):  # whose order is another one in another process
            return _digest(kind, *sorted(map(self.of, value)))
        return _digest(kind, *map(self.of, self._parts(value)))

    def _parts(self, value: Any) -> list[Any]:
        """What a value is made of."""
        for kind, parts in _PARTS.items():
            if isinstance(value, kind):
                return parts(value)
        try:
            reduced: Any = value.__reduce_ex__(4)
        except _REFUSALS as error:
            if self._or_class:
                return []
            raise ConfigError(f"{shown(value)} cannot be taken apart: {error}") from error
        if isinstance(reduced, str):
            return [reduced]
        found = [[*part] if isinstance(part, Iterator) else part for part in reduced[1:]]
        return [*found, _call_of(type(value))]


def _of_function(function: Any) -> list[Any]:
    filled = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return [_name(function), function.__code__, function.__defaults__, function.__kwdefaults__, filled]


_PARTS: dict[Any, Callable[[Any], list[Any]]] = {
    FunctionType: _of_function,
    CodeType: lambda code: [code.co_code, code.co_names, code.co_consts],
    MethodType: lambda method: [method.__func__, method.__self__],
    BuiltinFunctionType: lambda function: [_name(function), function.__self__],
    Mapping: lambda values: [part for pair in values.items() for part in pair],
    list: list,
    tuple: list,
}
"""What values are made of that pickle does not look into, or keeps with more than their values."""


def _call_of(kind: type) -> Any:
    """What a class defines to be called, or None."""
    return next((vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None)


def _is_dense(x: Tensor) -> bool:
    return x.layout == torch.strided and not (x.is_nested or x.is_quantized or x.is_meta)


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"


def _digest(kind: str, *parts: Any) -> bytes:
    found = hashlib.sha256(kind.encode() + b"\0")
    for part in parts:
        found.update(part)
    return found.digest()
