"""Values that decide what Python does, read from an accelerator: each read waits until the accelerator is done.

Within `one_wait` the checks that only ever raise an error are put off, and read together with the next values that are
asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor


class PutOff:
    """Checks that are put off.

    Attributes:
        failed: whether a flag that was read is set.
    """

    def __init__(self) -> None:
        self.failed = False
        self._flags: list[Tensor] = []

    def read(self, flags: Sequence[Tensor] = ()) -> list[bool]:
        """The values of these flags; those that were put off are read with them."""
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
        """Read a flag with the next ones."""
        self._flags.append(flag)


_NOW: ContextVar[PutOff | None] = ContextVar("put_off", default=None)


@contextmanager
def one_wait() -> Iterator[PutOff]:
    """A context in which checks are put off to the next `read_flags`, or to its end."""
    token = _NOW.set(checks := PutOff())
    try:
        yield checks
    finally:
        _NOW.reset(token)
    checks.read()


def read_flags(flags: Sequence[Tensor]) -> list[bool]:
    """The values of bool tensors without axes, in one wait.

    >>> read_flags([torch.tensor(True), torch.tensor(False)])
    [True, False]
    """
    return (_NOW.get() or PutOff()).read(flags)


def is_refused(flag: Tensor) -> bool:
    """Whether a check fails; False where it is put off, and `PutOff.failed` says so later."""
    checks = _NOW.get()
    if checks is None or flag.is_cpu:
        return bool(flag)
    checks.add(flag)
    return False


def are_equal(one: Tensor, other: Tensor) -> bool | Tensor:
    """Whether two tensors of one device are equal, as a bool; as a flag for `read_flags` where that would be a wait."""
    return torch.equal(one, other) if one.is_cpu else (one == other).all()
