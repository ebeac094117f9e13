"""The interface of observers: they collect, they may merge, and they have a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from threading import Lock
from typing import Any, ClassVar

import torch
from torch import Tensor

from fakequant.errors import CalibrationError, ConfigError
from fakequant.numerics.qparams import check_tensor


class Observer(ABC):
    """Collects what a method needs to know about a stream of tensors, in bounded memory.

    A subclass says in `update` what it collects. One that answers with a range is a `Calibrator`.
    """

    mergeable: ClassVar[bool] = True
    """Whether the result depends on the observed values alone: not on how they were cut into batches, on the order of
    the batches, or on which of several merged observers saw which batch. If False, `merge` raises ConfigError."""

    def __init__(self) -> None:
        # The state is read, changed and written back: without a lock, two threads would lose an update.
        self._observing = Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self, 'spec', '')})"

    def __getstate__(self) -> dict[str, Any]:
        """Without the lock, which cannot be copied."""
        return {name: value for name, value in vars(self).items() if name != "_observing"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._observing = Lock()

    def observe(self, x: Tensor) -> None:
        """Update the state with a batch of any shape; a batch without elements changes nothing.

        Several threads may call it. It works under every grad mode and under `torch.inference_mode`.

        Raises:
            CalibrationError: the batch holds NaN or inf, or has no values (device meta); the state stays as it was.
            ShapeError: the batch does not fit the granularity, or has other groups than the batches before.
            DTypeError: the batch is not a dense floating-point tensor.
        """
        if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            with self._observing:
                self._checked_update(x)
            return
        # The state must be plain tensors, also when the batches come under torch.inference_mode.
        with torch.inference_mode(False), torch.no_grad(), self._observing:
            self._checked_update(x)

    def _checked_update(self, x: Tensor) -> None:
        check_tensor("batch", x)
        if x.is_meta:
            raise CalibrationError(
                "a batch on the device meta holds no values; move the model and the batches to a device, such as by "
                "model.to_empty(device='cpu') and loading its weights"
            )
        self.update(x)

    @abstractmethod
    def update(self, x: Tensor) -> None:
        """Update the state with a batch that `observe` has checked; one thread at a time, without gradients."""

    def merge(self, other: Observer) -> None:
        """Update the state with all that another observer has seen, bit for bit as if this one had seen it.

        Raises:
            ConfigError: observers of this class do not merge, or the other has another method, specification or
                resolution.
            ShapeError: the other has other groups.
        """
        raise ConfigError(f"{type(self).__name__} does not merge; its result depends on the order of the batches")

    @property
    @abstractmethod
    def observed(self) -> bool:
        """Whether any element was seen."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """All that was seen, as tensors that can travel between ranks; empty if nothing was."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the state of an observer of the same kind.

        Raises:
            CalibrationError: a tensor is missing, unknown or of a wrong shape; nothing is replaced.
        """


def check_keys(state: dict[str, Tensor], expected: tuple[str, ...]) -> None:
    """Raise unless a state has exactly the expected tensors."""
    if set(state) != set(expected):
        raise CalibrationError(
            f"a calibrator state with the tensors {sorted(state)}, expected {sorted(expected)}; "
            "load it into a calibrator of the method that made it"
        )
