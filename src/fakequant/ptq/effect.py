"""What an algorithm does to the error of the whole model, beside that of its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from fakequant.distributed import Together
from fakequant.errors import CalibrationWarning, warn_user
from fakequant.model.batches import Forward
from fakequant.model.modes import disabled
from fakequant.ptq.output_error import OutputError
from fakequant.ptq.results import Improvement
from fakequant.ptq.stream import Record

_JUDGED = 4
"""Batches on which the error of the model's output is measured."""


class Effect:
    """The error of a model's output before and after a change; none of a model that draws random numbers.

    Args:
        model: quantized, before the change.
        batches: the first four are taken.
        run: called as run(model, batch).
        recorded: of the same model and batches.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Any], run: Forward, recorded: Record) -> None:
        self._model, self._before = model, None
        if recorded.outputs_repeat:
            with disabled(model):
                self._error = OutputError(model, batches[:_JUDGED], run)
            self._before = self._error.of(model)

    def put_into(self, result: Improvement, processes: Together) -> None:
        """Put the error before and now into a result, the mean over processes; None if it was not finite before."""
        now = None if self._before is None else self._error.of(self._model)
        before, after = zip(*processes.all((self._before, now)), strict=True)
        if all(value is not None and math.isfinite(value) for value in before):  # what follows may be infinite
            result.before, result.after = sum(before) / len(before), sum(after) / len(after)


def warn_if_worse(result: Improvement, caller: str) -> None:
    """Warn if the error of the model's output became larger."""
    if result.before is not None and result.after is not None and result.after > result.before:
        warn_user(
            f"{caller} made the error of the model's output larger, {result.before:.1e} -> {result.after:.1e}, though "
            "no part of the model loses more; prepare the model anew, and give more batches or other settings",
            CalibrationWarning,
        )
