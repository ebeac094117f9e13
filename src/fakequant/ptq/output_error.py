"""How far the outputs of a quantized model are from those of the float model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.errors import CalibrationError, ConfigError
from fakequant.model.batches import Forward
from fakequant.model.modes import evaluating
from fakequant.model.outputs import float_tensors
from fakequant.nn import cached_weights


class OutputError:
    """The squared error of a model's outputs, as a share of the energy of those of the float model.

    Outputs that are infinite or NaN in float, as those of masked tokens may be, count only where they change.

    Args:
        model: the one in float, as it is now.
        batches: those to compare on; the outputs of all of them are kept.
        run: called as run(model, batch).
        counts: for each batch the tokens that count, bool [batch, tokens]; None: all. Outputs with other leading axes
            count as a whole.

    >>> model, batches = nn.Linear(2, 2), [torch.randn(3, 2)]
    >>> error = OutputError(model, batches, lambda model, batch: model(batch))
    >>> error.of(model)
    0.0
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], run: Forward, counts: Sequence[Tensor | None] | None = None
    ) -> None:
        self._batches, self._run = batches, run
        self._counts = [None] * len(batches) if counts is None else counts
        self._wanted = [*self._outputs(model)]
        self._energy = sum(float(_finite(y).square().sum()) for outputs in self._wanted for y in outputs)

    @property
    def has_outputs(self) -> bool:
        """Whether the model gives floats at all; there is no error of whole numbers."""
        return any(y.numel() for outputs in self._wanted for y in outputs)

    def check(self, *, has_metric: bool = False) -> None:
        """Raise if the float model gives NaN, or no floats where nothing else is measured.

        Raises:
            CalibrationError: an output holds NaN (numbers the batch).
            ConfigError: there are no floats.
        """
        for number, outputs in enumerate(self._wanted, 1):
            if any(bool(y.isnan().any()) for y in outputs):
                raise CalibrationError(f"batch {number}: an output in float holds NaN; leave the batch out")
        if not self.has_outputs and not has_metric:
            raise ConfigError("the model gives no floats, so that its outputs have no error; measure it by a metric=")

    def of(self, model: nn.Module) -> float:
        """The error of another model, or of the same one as it is now; inf for NaN and for outputs of other shapes."""
        lost = 0.0
        with cached_weights(model):
            for found, wanted in zip(self._outputs(model), self._wanted, strict=True):
                if [y.shape for y in found] != [y.shape for y in wanted]:
                    return math.inf
                lost += sum(_squared(y, other) for y, other in zip(found, wanted, strict=True))
        if math.isnan(lost):
            return math.inf
        return lost / self._energy if self._energy else float(lost > 0)

    def _outputs(self, model: nn.Module) -> Iterator[list[Tensor]]:
        for batch, counts in zip(self._batches, self._counts, strict=True):
            with evaluating(model), torch.no_grad():
                outputs = float_tensors(self._run(model, batch))
            yield [_counted(tensor, counts) for tensor in outputs]


def _counted(y: Tensor, counts: Tensor | None) -> Tensor:
    """A copy of what counts of an output [batch, tokens, ...]."""
    return y.clone() if counts is None or y.shape[:2] != counts.shape else y[counts.to(y.device)]


def _finite(y: Tensor) -> Tensor:
    return torch.where(y.isfinite(), y, 0.0).double()


def _squared(y: Tensor, wanted: Tensor) -> float:
    same = (y == wanted) | (y.isnan() & wanted.isnan())
    return float(torch.where(same, 0.0, y - wanted).double().square().sum())
