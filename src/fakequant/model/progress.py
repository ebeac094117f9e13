"""A progress bar for work over batches on a terminal, and counts elsewhere where the caller asks for them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")

COUNT_EVERY = 10.0
"""Seconds between two counts."""


class _Counts(NamedTuple):
    tell: Callable[[str], None]
    bars: bool


_COUNTS: ContextVar[_Counts | None] = ContextVar("counts", default=None)


@contextmanager
def counting(tell: Callable[[str], None], *, bars: bool = True) -> Iterator[None]:
    """Let `track` tell counts in plain lines where it shows no bar.

    Args:
        tell: takes a line such as "calibrating: 16 of 64", at most once in `COUNT_EVERY` seconds.
        bars: false shows no bar on a terminal either.
    """
    token = _COUNTS.set(_Counts(tell, bars))
    try:
        yield
    finally:
        _COUNTS.reset(token)


def say(text: str) -> None:
    """Tell a line: to what `counting` names, else on the error stream."""
    counts = _COUNTS.get()
    if counts is None:
        print(text, file=sys.stderr)
    else:
        counts.tell(text)


def track(items: Iterable[Item], what: str, total: int | None, shown: bool | None = None) -> Iterator[Item]:
    """The items, with a progress bar on the error stream.

    Args:
        shown: true shows it, false does not; None shows it on a terminal, and tells counts elsewhere inside `counting`.
    """
    counts = _COUNTS.get() if shown is None else None
    if shown is None:
        shown = sys.stderr.isatty() and (counts is None or counts.bars)
    if not shown or find_spec("rich") is None:
        yield from items if counts is None else _counted(items, what, total, counts.tell)
        return
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(items, description=what, total=total, console=Console(stderr=True), transient=True)


def _counted(items: Iterable[Item], what: str, total: int | None, tell: Callable[[str], None]) -> Iterator[Item]:
    told = time.monotonic()
    for done, item in enumerate(items):
        if done and time.monotonic() - told >= COUNT_EVERY:
            tell(f"{what}: {done}" + ("" if total is None else f" of {total}"))
            told = time.monotonic()
        yield item
