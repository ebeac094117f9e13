"""Check that a model's output stays the same after a change of its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fakequant.data.batches import KeptBatches
from fakequant.errors import ConfigError
from fakequant.model.modes import evaluating, exact_products
from fakequant.model.run.outputs import OutputDistance
from fakequant.restore import Restore

T = TypeVar("T")
R = TypeVar("R")
_TOLERANCE = 1e-5
"""A share of the output's norm; in half precision it is one step of the dtype."""


def tolerance_of(x: Tensor) -> float:
    """How much of its norm a tensor may change by rounding."""
    return max(_TOLERANCE, torch.finfo(x.dtype).eps)


class OutputCheck(OutputDistance):
    """Compares a model's output with its output before the changes.

    Args:
        model: it runs in eval mode, without gradients.
        batches: of one batch, the model's input.

    Raises:
        ConfigError: two runs give different outputs, an output holds NaN or inf, or there are no floats in it.
    """

    def __init__(self, model: nn.Module, batches: KeptBatches) -> None:
        with exact_products():
            super().__init__(model, batches)
        self._model = model
        if not self.wanted:
            raise ConfigError(
                "the model gives no floats, so that a change of its weights cannot be checked; return some in forward="
            )
        if not all(bool(x.isfinite().all()) for x in self.wanted):
            raise ConfigError("an output of the model holds NaN or inf for this batch; give another batch")
        self._allowed = max(map(tolerance_of, self.wanted))
        if (found := self.difference()) > self._allowed:
            raise ConfigError(
                f"two runs of the model differ by {found:.1e} of the output, so that a change of its weights cannot be "
                "checked; reset in forward= what it keeps outside of its tensors and attributes"
            )

    def run(self) -> Any:
        """The model's result."""
        with evaluating(self._model), torch.no_grad():
            return self.batches.run_first(self._model)

    def difference(self) -> float:
        """The norm of the error of an output, as a share of the output's norm: the largest of all outputs."""
        with exact_products():
            return max(self.of(self._model).shares.values(), default=0.0) ** 0.5

    def keep(
        self, changes: Sequence[T], make: Callable[[Sequence[T]], R], restore: Restore
    ) -> tuple[R, list[tuple[T, str]]]:
        """Make all changes if the output stays; otherwise try them one by one, and keep those that preserve it.

        Args:
            changes: of the model.
            make: makes several of them at once.
            restore: takes all of them back.

        Returns:
            The result of `make`, and each rejected change with the reason.
        """
        made, kept, left = make(changes), list[T](), list[tuple[T, str]]()
        if not changes or self.why_not() is None:
            return made, left
        for change in changes:
            restore()
            make([*kept, change])
            if (why := self.why_not()) is None:
                kept.append(change)
            else:
                left.append((change, why))
        restore()
        return make(kept), left

    def why_not(self) -> str | None:
        """The reason to reject the model's present state, or None."""
        found = self.difference()
        if found <= self._allowed:
            return None
        half = "; half precision alone may do it: try model.float()" if self._allowed > _TOLERANCE else ""
        return f"the model's output would change by {found:.1e} of its size{half}"
