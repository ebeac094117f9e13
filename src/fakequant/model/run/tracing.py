"""Tracing a model with torch.export; no other module calls it."""

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

from fakequant.data.batches import Arguments
from fakequant.data.failures import OF_TORCH
from fakequant.errors import ConfigError, ExportError, FakeQuantError, warn_user
from fakequant.restore import restore_after
from fakequant.text import module_name

_UNKNOWN_OUTPUT = re.compile(r"Found <class '(?P<name>[^']+)'> in output")
_CACHE = "use_cache"
"""The argument that tells a decoder whether to return keys and values together with its result."""
_TRACEBACKS = "torch._subclasses.fake_tensor"
"""The logger to which torch writes the traceback of an error in tracing; it raises the error, too."""


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
            f"{module_name(scripted[0])} is a module of torch.jit.script, into which torch.export cannot look; trace "
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


@contextmanager
def example_named(model: nn.Module, arguments: Arguments) -> Iterator[None]:
    """Turn an error of torch's tracing into one that names shapes and layer, if the model itself fails on the example.

    Raises:
        ExportError: a call of the model with the example fails, too. Other errors stay.
    """
    log = logging.getLogger(_TRACEBACKS)
    level = log.level
    try:
        with restore_after(lambda: log.setLevel(level)):
            log.setLevel(logging.CRITICAL)
            yield
    except FakeQuantError:
        raise
    except OF_TORCH as error:
        try:
            with torch.no_grad():
                arguments.run(model)
        except ConfigError as refused:
            raise ExportError(str(refused)) from error
        except OF_TORCH:
            pass
        raise


def _unmarked(example: Any) -> Any:
    """A copy of an example that shares its memory: torch.export marks axes on the tensors that it gets."""
    others: dict[int, Tensor] = {}  # one tensor that is given twice stays one
    return pytree.tree_map_only(Tensor, lambda x: others.setdefault(id(x), x.detach()), example)


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silence reports of torch's exporters about themselves: missing packages, their use of deprecated functions.

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
    """Dynamic shapes by name, with an entry for the added argument."""
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
