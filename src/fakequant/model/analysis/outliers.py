"""Inputs with a few large values, for which one scale of few bits is the wrong kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.nn.paths import layer_of
from fakequant.nn.quantizer import Kind, quantizers
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.granularity import PerTensor
from fakequant.restore import restore_after

PEAK = 44.0
"""The largest magnitude of an input over its root mean square from which 8 bits leave less than 20 dB: uniform noise of
a step of peak / 127. MiniLM-L6 has 89, and keeps 15 dB of its output by `int8`, 23 by `int8_per_token`; a ViT, a byte
transformer, Fracast-0, CREPE and a perceptron have at most 24, and keep 34 and more."""
_FEWER = 2.0
"""By how much the root mean square of the largest of each token must be lower, so that scales per token help: 6 dB."""


class Peaks:
    """The inputs of linear layers with one fixed scale of 8 bits, as a run shows them.

    >>> model = prepare(nn.Sequential(nn.Linear(2, 2)), "int8")
    >>> x = torch.ones(10_000, 2)
    >>> x[0, 0] = 1000.0
    >>> with Peaks(model).watching() as peaks, disabled(model):
    ...     y = model(x)
    >>> print(*peaks.notes)
    1 input of a linear layer has single values far larger than the others, 0 140 times the root mean square: one \
fixed scale of 8 bits loses much there, and "int8_per_token" loses less where the engine takes it
    """

    def __init__(self, model: nn.Module) -> None:
        self._found = dict[str, float]()
        self._watched = {
            name: one
            for name, one in quantizers(model).items()
            if one.kind is Kind.INPUT
            and not one.dynamic
            and isinstance(one.spec.granularity, PerTensor)
            and one.spec.format.bits == 8
            and isinstance(one.spec.format, IntegerFormat)
            and isinstance(model.get_submodule(layer_of(name)), nn.Linear)
        }

    @contextmanager
    def watching(self) -> Iterator[Peaks]:
        """A context in which the inputs of calls are looked at."""
        handles: list[Any] = []

        def remove() -> None:
            for handle in handles:
                handle.remove()

        with restore_after(remove):
            for name, one in self._watched.items():
                handles.append(one.register_forward_pre_hook(partial(self._see, name)))
            yield self

    def _see(self, name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():  # what records the run does not see it
            self._measure(name, args[0])

    def _measure(self, name: str, x: Tensor) -> None:
        if x.dim() < 2 or not x.numel() or x.is_meta:
            return
        tokens = x.detach().abs().amax(-1).double()
        largest, mean = float(tokens.max()), float(x.detach().double().square().mean()) ** 0.5
        if largest > max(PEAK * mean, _FEWER * float(tokens.square().mean()) ** 0.5):
            self._found[name] = max(self._found.get(name, 0.0), largest / mean)

    @property
    def notes(self) -> list[str]:
        """A line about them, if there are any."""
        if not self._found:
            return []
        worst = max(self._found, key=self._found.__getitem__)
        many = len(self._found)
        return [
            f"{many} input{'s of linear layers have' if many > 1 else ' of a linear layer has'} single values far "
            f"larger than the others, {layer_of(worst)} {self._found[worst]:.0f} times the root mean square: one fixed "
            'scale of 8 bits loses much there, and "int8_per_token" loses less where the engine takes it'
        ]
