"""Interfaces of other libraries on top of this package, one module or folder each."""

from __future__ import annotations

import importlib
from types import ModuleType

from fakequant.compat.alias import INSTALLABLE, install

_INTERFACES = (*INSTALLABLE, "aidotnet")

__all__ = ["install"]

_INTERFACES = (*INSTALLABLE, "aten", "onnxruntime")


def __getattr__(name: str) -> ModuleType:
    """Import an interface at its first use, because most programs need none."""
    if name not in _INTERFACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
