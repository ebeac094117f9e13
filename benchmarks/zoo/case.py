"""One architecture as the steps see it: its models, batches and outputs, which are compared by their bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.data.batches import example_arguments, run_batch
from fakequant.export.verdict import differing_bits

from .architecture import Architecture

PRESET = "INT8"
TARGET = "onnxruntime"


class WrongError(Exception):
    """A step ran and its result is wrong; `note` is what it found nevertheless."""

    def __init__(self, text: str, note: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.note = note


class Case:
    """An architecture with what its steps share: batches, and one calibrated model until a step changes it."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        self._calibrated: nn.Module | None = None

    @cached_property
    def batches(self) -> list[Any]:
        """Two batches."""
        return self._build(0)[1]

    @property
    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the first batch."""
        return example_arguments(self.batches[0])

    def float(self, seed: int = 0) -> nn.Module:
        """The float model in eval mode, made anew; statistics of batch normalisations are those of two batches."""
        model, batches = self._build(seed)
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            model.train()
            with torch.no_grad():
                for batch in batches:
                    run_batch(model, batch)
        return model.eval()

    def _build(self, seed: int) -> tuple[nn.Module, list[Any]]:
        torch.manual_seed(seed)
        return self.architecture.build()

    def calibrated(self) -> nn.Module:
        """The model prepared and calibrated, the same object for all steps until `forget`."""
        if self._calibrated is None:
            self._calibrated = self.calibrate(self.prepare(self.float()), unseen="float")
        return self._calibrated

    def forget(self) -> None:
        """Have the next step make its calibrated model anew."""
        self._calibrated = None

    def prepare(self, model: nn.Module) -> nn.Module:
        """A model prepared for the engine, with the first batch as the example."""
        return fq.prepare(model, PRESET, self.batches[0], target=TARGET)

    def calibrate(self, model: nn.Module, unseen: Any = "error") -> nn.Module:
        """A prepared model calibrated on the two batches.

        That layers saw no data is what step b records; the other steps leave them in float.
        """
        fq.calibrate(model, self.batches, progress=False, unseen=unseen)
        return model

    @torch.no_grad()
    def outputs(self, model: nn.Module, batch: Any = None) -> list[Tensor]:
        """The tensors that a model returns for a batch, by default the first."""
        return tensors(run_batch(model, self.batches[0] if batch is None else batch))


def tensors(output: Any) -> list[Tensor]:
    """The tensors in an output, in order; a cache of keys and values holds none."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    return [found for one in output for found in tensors(one)] if isinstance(output, (tuple, list)) else []


def mapped(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """A batch with every tensor changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: mapped(change, value) for name, value in batch.items()}
    return type(batch)(mapped(change, value) for value in batch) if isinstance(batch, (tuple, list)) else batch


def check_same_bits(actual: list[Tensor], expected: list[Tensor], what: str) -> None:
    """Fail unless outputs are the same in number, type, shape and every bit.

    Raises:
        WrongError: they are not.
    """
    if len(actual) != len(expected):
        raise WrongError(f"{what}: {len(actual)} outputs, expected {len(expected)}")
    for place, (found, wanted) in enumerate(zip(actual, expected, strict=True)):
        if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
            raise WrongError(f"{what}: output {place} is {found.dtype} {tuple(found.shape)}, not {tuple(wanted.shape)}")
        differing = _differing(found, wanted)
        if differing:
            raise WrongError(f"{what}: {differing} of {wanted.numel()} elements of output {place} differ")


def _differing(found: Tensor, wanted: Tensor) -> int:
    if wanted.is_floating_point():
        return differing_bits(found.detach(), wanted.detach())
    return int((found != wanted).sum())


def check_finite(outputs: list[Tensor], expected: list[Tensor], what: str) -> None:
    """Fail where an output is not finite and that of the float model is.

    Raises:
        WrongError: there is such an element.
    """
    for place, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if found.shape == wanted.shape and bool((wanted.isfinite() & ~found.isfinite()).any()):
            raise WrongError(f"{what}: output {place} is not finite where the float model's is")


def decibels(outputs: list[Tensor], exact: list[Tensor]) -> float | None:
    """Signal over noise of the float outputs in dB; None without noise, or where shapes differ."""
    signal = noise = 0.0
    for found, wanted in zip(outputs, exact, strict=True):
        if found.shape != wanted.shape:
            return None
        if wanted.is_floating_point():
            signal += wanted.double().square().sum().item()
            noise += (found.double() - wanted.double()).square().sum().item()
    if not (signal and noise and math.isfinite(signal) and math.isfinite(noise)):
        return None
    return round(10 * math.log10(signal / noise), 1)
