"""What an algorithm does to the error of the whole model, beside that of its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fakequant.distributed import Together
from fakequant.errors import CalibrationWarning, warn_user
from fakequant.model.batches import Forward
from fakequant.model.modes import disabled
from fakequant.model.outputs import OutputDistance
from fakequant.ptq.results import Improvement
from fakequant.ptq.stream import NOT_REPEATED, Record

_JUDGED = 4
"""Batches on which the error of the model's output is measured."""
_WORSE = 1.01
"""How much larger the error may become without a warning."""


class Effect:
    """The error of a model's output before and after a change; a note says why where it is not measured.

    Args:
        model: quantized, before the change.
        batches: the first four are taken.
        run: called as run(model, batch).
        recorded: of the same model and batches.
        counts: for each batch the tokens that count; None: all.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        run: Forward,
        recorded: Record,
        counts: Sequence[Tensor | None] | None = None,
    ) -> None:
        self._model, self._before = model, math.nan
        self._why_not = None if recorded.outputs_repeat else NOT_REPEATED
        if self._why_not is None:
            with disabled(model):
                self._error = OutputDistance(model, batches[:_JUDGED], run, counts and counts[:_JUDGED])
            self._before = self._error.of(model).mean
            if not self._error.has_outputs:
                self._why_not = "the model gives no floats"
            elif not math.isfinite(self._before):
                self._why_not = "it was NaN or infinite before"

    def put_into(self, result: Improvement, processes: Together) -> None:
        """Put the error before and now into a result, the mean over processes; or why there is none."""
        now = math.nan if self._why_not else self._error.of(self._model).mean
        before, after, reasons = zip(*processes.all((self._before, now, self._why_not)), strict=True)
        if why_not := next(filter(None, reasons), None):
            result.notes.append(f"the error of the model's output was not measured: {why_not}")
        else:  # what follows may be infinite
            result.before, result.after = sum(before) / len(before), sum(after) / len(after)


def warn_if_worse(result: Improvement, caller: str) -> None:
    """Warn if the error of the model's output became larger by more than rounding does by chance."""
    if result.before is not None and result.after is not None and result.after > _WORSE * result.before:
        warn_user(
            f"{caller} made the error of the model's output larger, {result.before:.2e} -> {result.after:.2e}, though "
            "each part by itself loses no more than before; prepare the model anew, and give more batches or other "
            "settings",
            CalibrationWarning,
        )
