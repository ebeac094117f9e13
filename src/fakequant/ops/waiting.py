"""Flags that decide what Python does, read from an accelerator: each read waits until the accelerator is done.

Within `one_wait`, checks whose only effect is an error are deferred, and read together with the next flags.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor


class PutOff:
    """Deferred checks: flags on an accelerator that are read together later.

    Attributes:
        failed: whether a deferred flag was set when it was read.
    """

    def __init__(self) -> None:
        self.failed = False
        self._flags: list[Tensor] = []

    def read(self, flags: Sequence[Tensor] = ()) -> list[bool]:
        """The values of flags; deferred flags are read with them, in one wait."""
        every = [*flags, *self._flags]
        self._flags = []
        # A copy for each device; flags of the CPU are there.
        devices = dict.fromkeys(flag.device for flag in every)
        together = {device: [flag for flag in every if flag.device == device] for device in devices}
        values = {device: iter(torch.stack(found).tolist()) for device, found in together.items()}
        found = [next(values[flag.device]) for flag in every]
        self.failed = self.failed or any(found[len(flags) :])
        return found[: len(flags)]

    def add(self, flag: Tensor) -> None:
        """Defer a flag to the next `read`."""
        self._flags.append(flag)


_NOW: ContextVar[PutOff | None] = ContextVar("put_off", default=None)


@contextmanager
def one_wait() -> Iterator[PutOff]:
    """A context in which checks are deferred to the next `read_flags`, or to the end of the context."""
    token = _NOW.set(checks := PutOff())
    try:
        yield checks
    finally:
        _NOW.reset(token)
    checks.read()


def read_flags(flags: Sequence[Tensor]) -> list[bool]:
    """The values of bool tensors without axes, read in one wait.

    >>> read_flags([torch.tensor(True), torch.tensor(False)])
    [True, False]
    """
    return (_NOW.get() or PutOff()).read(flags)


def is_refused(flag: Tensor) -> bool:
    """Whether a check failed; False if it is deferred, and `PutOff.failed` tells later."""
    checks = _NOW.get()
    if checks is None or flag.is_cpu:
        return bool(flag)
    checks.add(flag)
    return False


def are_equal(one: Tensor, other: Tensor) -> bool | Tensor:
    """Whether two tensors of a device are equal: a bool on a CPU, else a flag for `read_flags`, to wait only once."""
    return torch.equal(one, other) if one.is_cpu else (one == other).all()
