"""How the operator runs: in plain eager execution, or traced, as torch's operations or as a node of a graph."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fakequant.errors import ExportError
from fakequant.numerics import compilers
from fakequant.numerics.qparams import is_concrete

from . import dispatch


def needs_tracing(*tensors: object) -> bool:
    """Whether something other than plain eager execution watches: it must see torch operations, not a kernel."""
    return not is_concrete(*tensors) or (forward_ad._current_level >= 0 and dispatch.have_tangents(*tensors))


def is_compiled_as_node(x: Tensor) -> bool:
    """Whether a compiled graph holds the operator whole on the device of x, see `Backend.compiles_as_node`."""
    return torch.compiler.is_compiling() and x.device.type in compilers.approximate_devices


def is_compiled_in_transforms() -> bool:
    """Whether a compiler reads a function transform, which differentiates no node and no autograd function right."""
    return torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_recorded() -> bool:
    """Whether an exporter or torch.jit.trace records operators.

    Raises:
        ExportError: torch.onnx.export, which has no form for these.
    """
    recorded = not torch.compiler.is_compiling() and (torch._C._is_tracing() or _seen.get())
    found = compilers.is_exporting() or recorded
    if found:
        refuse_onnx()
    return found


_translated: ContextVar[bool] = ContextVar("_translated", default=False)


@contextmanager
def translated_to_onnx() -> Iterator[None]:
    """A context in which torch.onnx.export is given a form for the operators of this package."""
    token = _translated.set(True)
    try:
        yield
    finally:
        _translated.reset(token)


_seen: ContextVar[bool] = ContextVar("_seen", default=False)


@contextmanager
def seen_as_operators() -> Iterator[None]:
    """A context in which a dispatch mode of torch sees each call of the operator as one, as exporters do."""
    token = _seen.set(True)
    try:
        yield
    finally:
        _seen.reset(token)


def refuse_onnx() -> None:
    """Raise ExportError if torch.onnx.export runs outside of `translated_to_onnx`."""
    exporter = sys.modules.get("torch.onnx")
    if exporter is not None and exporter.is_in_onnx_export() and not _translated.get():
        raise ExportError(
            "torch.onnx.export has no form for the quantizers of fakequant; "
            "call fakequant.export_onnx(model, example, path) instead"
        )
