"""Whether a model still computes what it did before its weights were changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.errors import ConfigError
from fakequant.model.modes import evaluating
from fakequant.model.outputs import float_tensors

_TOLERANCE = 1e-5
"""A share of the output's norm; in half precision it is one step of the dtype."""


def tolerance_of(x: Tensor) -> float:
    """How much of its norm a tensor may change by rounding."""
    return max(_TOLERANCE, torch.finfo(x.dtype).eps)


class OutputCheck:
    """Whether a model still gives the output that it gave.

    Args:
        model: it runs in eval mode, without gradients.
        run: runs it.

    Raises:
        ConfigError: two runs give different outputs, an output holds NaN or inf, or there are no floats in it.
    """

    def __init__(self, model: nn.Module, run: Callable[[], Any]) -> None:
        self._model, self._run = model, run
        self._wanted = self._outputs()
        if not self._wanted:
            raise ConfigError(
                "the model gives no floats, so that a change of its weights cannot be checked; return some in forward="
            )
        if not all(bool(x.isfinite().all()) for x in self._wanted):
            raise ConfigError("an output of the model holds NaN or inf for this batch; give another batch")
        self._allowed = max(map(tolerance_of, self._wanted))
        if (found := self.difference()) > self._allowed:
            raise ConfigError(
                f"two runs of the model differ by {found:.1e} of the output, so that a change of its weights cannot be "
                "checked; fix the random numbers that it draws, for example in forward="
            )

    def run(self) -> Any:
        """The model's result."""
        with evaluating(self._model), torch.no_grad():
            return self._run()

    def difference(self, run: Callable[[], Any] | None = None, model: nn.Module | None = None) -> float:
        """The norm of what differs in an output, as a share of the norm of the first ones: the largest.

        It is inf for NaN, and for an output of another shape, as a detector gives where it finds something else.

        Args:
            run: by default that of the model.
            model: the one that it runs.
        """
        largest = 0.0
        for old, new in zip(self._wanted, self._outputs(run, model), strict=True):
            if new.shape != old.shape:
                return float("inf")
            change = float((new.double() - old.double()).norm())
            size = float(old.double().norm())
            share = change / size if size else (0.0 if change == 0 else float("inf"))
            largest = max(largest, share if share == share else float("inf"))
        return largest

    def why_not(self) -> str | None:
        """Why the model cannot stay as it is now, or None."""
        found = self.difference()
        return None if found <= self._allowed else f"the model's output would change by {found:.1e} of its size"

    def _outputs(self, run: Callable[[], Any] | None = None, model: nn.Module | None = None) -> list[Tensor]:
        with evaluating(model or self._model), torch.no_grad():
            return [tensor.clone() for tensor in float_tensors((run or self._run)())]
