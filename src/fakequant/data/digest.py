"""The digest of plain values, as of weights and batches: tensors, arrays, numbers, texts, and containers of these."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fakequant.errors import ConfigError

_PLAIN = (str, bytes, int, float, complex, type(None), PurePath, torch.dtype, torch.device)


class NoDigestError(ConfigError):
    """A value, or a part of it, is not plain."""


def digest(value: Any) -> str:
    """The digest of a value, the same in every process.

    Args:
        value: tensors, arrays, numbers, texts and paths, in lists, tuples, mappings and dataclasses.

    Raises:
        NoDigestError: it holds an object of another kind (says which).

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
        return _digest(f"{value.dtype} {[*value.shape]}", b"" if value.is_meta else _bytes(value))
    if isinstance(value, np.generic) or (type(value) is np.ndarray and not value.dtype.hasobject):
        return _digest(f"{value.dtype.descr} {[*value.shape]}", value.tobytes())
    if isinstance(value, Mapping):
        return _digest(kind, *(_of(part) for pair in value.items() for part in pair))
    if isinstance(value, (list, tuple)):
        return _digest(kind, *map(_of, value))
    if is_dataclass(value) and not isinstance(value, type):
        return _digest(kind, *(_of(getattr(value, field.name)) for field in fields(value)))
    raise NoDigestError(
        f"a {type(value).__name__} cannot be compared with that of another run; give tensors, arrays, numbers and texts"
    )


def _bytes(x: Tensor) -> Any:
    """The bytes of a tensor's values."""
    if x.layout != torch.strided or x.is_quantized:
        x = x.dequantize() if x.is_quantized else x.to_dense()
    return x.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().data


def _digest(kind: str, *parts: Any) -> bytes:
    found = hashlib.sha256(kind.encode() + b"\0")
    for part in parts:
        found.update(part)
    return found.digest()
