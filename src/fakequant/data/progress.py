"""A progress bar of tqdm for work over batches, and counts in plain lines where a caller asks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

from fakequant.errors import warn_user

Item = TypeVar("Item")

COUNT_EVERY = 10.0
"""Seconds between two counts."""
BAR_AFTER = 0.5
"""Seconds after which a bar is there: short work shows none."""


class _Counts(NamedTuple):
    tell: Callable[[str], None]
    bars: bool


_COUNTS: ContextVar[_Counts | None] = ContextVar("counts", default=None)


@contextmanager
def counting(tell: Callable[[str], None], *, bars: bool = True) -> Iterator[None]:
    """Let `track` tell counts in plain lines, at most one in `COUNT_EVERY` seconds, where it shows no bar.

    A line is such as "calibrating: 16 of 64". Without `bars` there is no bar on a terminal either.
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


def tell(text: str, shown: bool | None = None) -> None:
    """Say a line where `track` would show a bar or tell counts."""
    if shown or (shown is None and (_COUNTS.get() or sys.stderr.isatty() or "ipykernel" in sys.modules)):
        say(text)


def length(items: Iterable[Any]) -> int | None:
    """The number of items; None if it is unknown. A DataLoader over a stream has `__len__`, but it raises.

    >>> length([1, 2]), length(iter([1, 2]))
    (2, None)
    """
    try:
        return len(items)  # pyright: ignore[reportArgumentType]  the error is the answer
    except (TypeError, NotImplementedError, OverflowError, ValueError):  # also one that is infinite or negative
        return None


def track(items: Iterable[Item], what: str, total: int | None, shown: bool | None = None) -> Iterator[Item]:
    """The items, with a progress bar on the error stream, which goes when they end.

    `shown`: true shows it, false does not; None shows it on a terminal and in a notebook, and tells counts elsewhere
    inside `counting`. `total` is the number of items, if it is known.
    """
    counts, has_bars = (_COUNTS.get() if shown is None else None), find_spec("tqdm") is not None
    if counts is not None and not (counts.bars and has_bars and sys.stderr.isatty()):
        told = time.monotonic()
        for done, item in enumerate(items):
            if done and time.monotonic() - told >= COUNT_EVERY:
                counts.tell(f"{what}: {done}" + ("" if total is None else f" of {total}"))
                told = time.monotonic()
            yield item
        return
    if shown is not False and has_bars:
        from tqdm.auto import tqdm

        # Without a total it would ask for a length. disable=None: by itself, on a terminal and in a notebook.
        disable = None if shown is None else False
        items = tqdm(iter(items), what, total, leave=False, delay=BAR_AFTER, disable=disable)
    elif shown:
        warn_user("a progress bar needs tqdm: pip install fakequant[progress]")
    yield from items
