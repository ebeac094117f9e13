"""The method of calibration by which a model's output keeps most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from fakequant.calibration import DEFAULT_METHOD
from fakequant.data.batches import KeptBatches
from fakequant.errors import CalibrationError
from fakequant.model.modes import disabled
from fakequant.model.run.outputs import OutputDistance

AUTO = "auto"
"""The argument `method` that asks for the best of `METHODS`."""

METHODS = (DEFAULT_METHOD, "max", "percentile", "entropy")
"""What one pass over the batches serves."""

CLEARLY = 0.9
"""The share of an error below which a change clearly lowers it. On few batches a smaller difference is chance: on the
four trained models of `benchmarks.accuracy.methods` the mean error is 1.004 (INT8) and 1.017 (INT8_AFFINE) of the best;
with 0.95 here it was 1.021 and 1.050."""

_EVERY, _AT_MOST = 4, 8
"""The second of every four batches is held back by default, up to eight: they stay in memory."""


class HeldBack:
    """Batches for calibration, of which the second of `every` few is held back to choose by.

    Attributes:
        held: the batches held back, by their number from 0; of a single batch that batch itself.

    >>> batches = HeldBack(range(7))
    >>> list(batches), batches.held
    ([0, 2, 3, 4, 6], {1: 1, 5: 5})
    """

    def __init__(self, batches: Iterable[Any], every: int = _EVERY) -> None:
        self._batches, self._every = batches, every
        self.held: dict[int, Any] = {}
        self.count = 0
        """The number of all batches."""

    def __iter__(self) -> Iterator[Any]:
        only: dict[int, Any] = {}
        for number, batch in enumerate(self._batches):
            self.count = number + 1
            if number == 0:
                only = {number: batch}
            if number % self._every == 1 and len(self.held) < _AT_MOST:
                self.held[number] = batch
            else:
                yield batch
        self.held = self.held or only


class MethodChoice(NamedTuple):
    """What each method leaves.

    Attributes:
        errors: by method, the error of the model's output as a share of its energy; the mean of several outputs.
        batches: how many were held back.
        worst: by method, the one of several outputs with the largest error, and this error; else "".
    """

    errors: dict[str, float]
    batches: int
    worst: dict[str, str]

    @property
    def method(self) -> str:
        """The default, unless another leaves clearly less."""
        least = min(self.errors, key=self.errors.__getitem__)
        return least if self.errors[least] < CLEARLY * self.errors[DEFAULT_METHOD] else DEFAULT_METHOD

    def __str__(self) -> str:
        others = ", ".join(f"{name} {error:.2e}" for name, error in self.errors.items() if name != self.method)
        return (
            f'method "{AUTO}" chose "{self.method}": error of the output {self.errors[self.method]:.2e} of its energy '
            f"{self.worst[self.method]}on {self.batches} {'batch' if self.batches == 1 else 'batches'} held back "
            f"({others})"
        )


def choose(model: nn.Module, held: KeptBatches, use: Callable[[str], object]) -> MethodChoice:
    """Measure the model's output by every method.

    Args:
        model: with calibrated quantizers.
        held: batches to measure on.
        use: sets the ranges of a method's name.

    Raises:
        CalibrationError: a batch gives no float output.
    """
    with disabled(model):
        outputs = OutputDistance(model, held)
    if not outputs.has_outputs:
        raise CalibrationError(
            f'method "{AUTO}" compares float outputs, and the model returns none; name a method, such as '
            f"{DEFAULT_METHOD!r}"
        )
    errors, worst = {}, {}
    for method in METHODS:
        use(method)
        found = outputs.of(model)
        errors[method], worst[method] = found.mean, f"({found.shown_worst}) " if found.shown_worst else ""
    return MethodChoice(errors, len(held), worst)
