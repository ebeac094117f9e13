"""Processes that die between two operations on files, without a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

_CHANGES = ("replace", "rename", "link", "symlink", "unlink", "rmdir", "mkdir", "open")


class Killed(BaseException):
    """The process is dead; code that catches this to clean up cannot."""


@contextmanager
def killed_after(operations: int) -> Iterator[None]:
    """A context in which the process dies at an operation on files: it and every later one raise instead."""
    done = 0

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal done
            done += 1
            if done > operations:
                raise Killed
            return function(*args, **kwargs)

        return call

    with mock.patch.multiple(os, **{name: counted(getattr(os, name)) for name in _CHANGES}):
        yield


def every_death(prepare: Callable[[], None], act: Callable[[], object], check: Callable[[], None]) -> int:
    """Let `act` die before each of its operations on files, each time from the state that `prepare` makes."""
    for operations in range(1_000):
        prepare()
        try:
            with killed_after(operations):
                act()
        except Killed:
            check()
        else:
            check()
            return operations
    raise AssertionError("it never ends")
