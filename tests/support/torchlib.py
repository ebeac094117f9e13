"""What torch does anew at every export, 0.8 of 1.2 s: here once per process."""

import copy
import sys
import typing
from functools import cache
from typing import Any

import torch

_COMPOSITE = "CompositeImplicitAutograd"


def spare_exports() -> None:
    """Let every export take what the first one did, as soon as torch's exporters are imported.

    Each export reads the sources of 500 functions of onnxscript, looks 60 times for operators that are made of others,
    and makes 13,000 times the annotation `Callable[_P, _T]`, which `collections.abc` makes anew.
    """
    torch._ops.Callable = typing.Callable  # type: ignore[attr-defined]  it keeps what it made
    registration = sys.modules.get("torch.onnx._internal.exporter._registration")
    registry: Any = getattr(registration, "ONNXRegistry", None)
    read: Any = getattr(registry, "from_torchlib", None)
    if read is not None and not hasattr(read, "once"):  # another torch may have no such function
        registry.from_torchlib = staticmethod(_copies_of(cache(read)))
    utils: Any = sys.modules.get("torch._export.utils")
    find: Any = getattr(utils, "_materialize_cpp_cia_ops", None)
    if find is not None and not hasattr(find, "once"):
        utils._materialize_cpp_cia_ops = _where_there_are_more(find)


def _copies_of(once: Any) -> Any:
    def copied(**options: Any) -> Any:
        found = copy.copy(once(**options))
        found.functions = {name: [*functions] for name, functions in found.functions.items()}
        return found

    copied.once = once  # type: ignore[attr-defined]
    return copied


def _where_there_are_more(find: Any) -> Any:
    known = 0

    def found() -> None:
        nonlocal known
        operators = len(torch._C._dispatch_get_registrations_for_dispatch_key(_COMPOSITE))
        if operators != known:
            find()
            known = operators

    found.once = find  # type: ignore[attr-defined]
    return found
