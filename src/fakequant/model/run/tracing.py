"""A model as a graph of torch operations: the one call of torch.export."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from fakequant.errors import ExportError, warn_user
from fakequant.restore import restore_after

_UNKNOWN_OUTPUT = re.compile(r"Found <class '(?P<name>[^']+)'> in output")
_CACHE = "use_cache"
"""The argument that tells a decoder whether to return keys and values together with its result."""


def traced_program(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic_shapes: Any = None
) -> ExportedProgram:
    """`torch.export.export`, not strict. A decoder that returns a cache by default is called without one.

    Raises:
        ExportError: the model returns something that torch.export does not know, or holds a scripted module.
        torch.export's errors: the model cannot be traced.
    """
    args, kwargs = _unmarked((args, kwargs))
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except TypeError as error:
        scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
        if not scripted:
            raise
        raise ExportError(
            f"{scripted[0] or 'the model'} is a module of torch.jit.script, into which torch.export cannot look; trace "
            "the model with the module as it was written, and script it afterwards"
        ) from error
    except RuntimeError as error:
        if (found := _UNKNOWN_OUTPUT.search(str(error))) is None:
            raise
        if _CACHE in kwargs or not _takes_cache(model):
            raise ExportError(_refusal(found["name"])) from error
    warn_user(f"traced with {_CACHE}=False: torch.export does not know the {found['name']} that the model returns")
    shapes = _with_cache(model, dynamic_shapes)
    return traced_program(model, args, {**kwargs, _CACHE: False}, dynamic_shapes=shapes)


def _unmarked(example: Any) -> Any:
    """An example of other tensors in the same memory: torch.export marks axes on those that it gets."""
    others: dict[int, Tensor] = {}  # one tensor that is given twice stays one
    return pytree.tree_map_only(Tensor, lambda x: others.setdefault(id(x), x.detach()), example)


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Without what torch's exporters report of their own insides: packages they do not find, their use of old calls.

    Args:
        names: loggers that report errors only.
    """
    logs = [logging.getLogger(name) for name in names]
    levels = [log.level for log in logs]

    def restore() -> None:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)

    with restore_after(restore), warnings.catch_warnings():
        for log in logs:
            log.setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


def _takes_cache(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.name == _CACHE or p.kind is p.VAR_KEYWORD for p in parameters)


def _with_cache(model: nn.Module, dynamic_shapes: Any) -> Any:
    """Dynamic shapes by name, with one for the argument that was added."""
    if dynamic_shapes is None:
        return None
    if not isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = dict(zip(inspect.signature(model.forward).parameters, dynamic_shapes, strict=False))
    return {**dynamic_shapes, _CACHE: None}


def _refusal(name: str) -> str:
    return (
        f"the model returns a {name}, which torch.export does not know; let it return tensors, and tuples, lists and "
        "dicts of them. A decoder returns no cache if the example is a dict with use_cache=False, or if "
        "model.config.use_cache is False"
    )
