"""Outputs that one pass computed, given out in another pass wherever a module gets the same inputs, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fakequant.data.again import same_bits
from fakequant.nn.quantized.elementwise import Add, MatMul
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Mode, Quantizer
from fakequant.restore import forwards_of, restore_after


class _RecordedCall(NamedTuple):
    inputs: tuple[Tensor, ...]
    output: Tensor
    versions: list[int]
    """The versions of inputs and output: operations in place may have written to them since."""


class ReusedOutputs:
    """The calls of a model's modules in one pass in float, for passes in which some layers are quantized.

    Only modules of torch and their quantized forms are looked at, which compute the same from the same inputs. All
    inputs and outputs of the recorded pass are held.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {module: module.forward for module in model.modules() if _computes_alone(module)}
        self._calls: dict[nn.Module, list[_RecordedCall]] = {}
        self._next: dict[nn.Module, int] = {}
        self._recording = False

    @contextmanager
    def record(self) -> Iterator[None]:
        """A context whose pass through the model replaces the recorded one."""
        self._calls, self._recording = {module: [] for module in self._modules}, True
        try:
            with self._watching():
                yield
        finally:
            self._recording = False

    @contextmanager
    def reuse(self) -> Iterator[None]:
        """Run the model once; a module whose inputs are those of the recorded run returns its recorded output."""
        self._next = dict.fromkeys(self._modules, 0)
        with self._watching():
            yield

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with restore_after(forwards_of(self._modules)):
            for module, forward in self._modules.items():
                module.forward = self._watched(module, forward)
            yield

    def _watched(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        own = [child for child in module.children() if isinstance(child, Quantizer)]

        @wraps(forward)
        def run(*inputs: Any, **options: Any) -> Any:
            plain = not options and all(isinstance(x, Tensor) and not x.is_inference() for x in inputs)
            plain = plain and not torch._C._are_functorch_transforms_active()  # whose values cannot be compared
            if not plain or any(quantizer.mode is not Mode.OFF for quantizer in own):
                return forward(*inputs, **options)
            if not self._recording:
                known = self._known(module, inputs)
                return forward(*inputs) if known is None else known
            versions = [x._version for x in inputs]
            output = forward(*inputs)
            if isinstance(output, Tensor) and not output.is_inference():
                self._calls[module].append(_RecordedCall(inputs, output, [*versions, output._version]))
            return output

        return run

    def _known(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor | None:
        calls, place = self._calls[module], self._next[module]
        self._next[module] = place + 1
        if place >= len(calls):
            return None
        call = calls[place]
        if [tensor._version for tensor in (*call.inputs, call.output)] != call.versions:
            return None
        same = len(inputs) == len(call.inputs) and all(map(_same, inputs, call.inputs))
        return call.output if same else None


def _computes_alone(module: nn.Module) -> bool:
    made_by = type(module).float_class if isinstance(module, QuantizedLayer) else type(module)
    known = made_by in (Add, MatMul) or made_by.__module__.startswith("torch.nn.modules.")
    changed = "forward" in module.__dict__
    return known and not changed and all(isinstance(child, Quantizer) for child in module.children())


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits in the same order of memory."""
    return a is b or (a.shape == b.shape and a.stride() == b.stride() and not a.is_complex() and same_bits(a, b))
