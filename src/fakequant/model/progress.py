"""A progress bar for work over batches on a terminal or in a notebook, and counts elsewhere where a caller asks."""

from __future__ import annotations

import builtins
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

Item = TypeVar("Item")

COUNT_EVERY = 10.0
"""Seconds between two counts."""
REDRAW_EVERY = 0.5
"""Seconds between two drawings of the line in a notebook, each of which is a message to the browser."""
_WIDTH = 24


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


def length(items: Iterable[Any]) -> int | None:
    """The number of items; None where they do not say: a DataLoader has `__len__`, and over a stream it raises.

    >>> length([1, 2]), length(iter([1, 2]))
    (2, None)
    """
    try:
        return len(items)  # pyright: ignore[reportArgumentType]  the error is the answer
    except (TypeError, NotImplementedError, OverflowError, ValueError):  # also one that is infinite or negative
        return None


def track(items: Iterable[Item], what: str, total: int | None, shown: bool | None = None) -> Iterator[Item]:
    """The items, with a progress bar on the error stream.

    Args:
        shown: true shows it, false does not; None shows it on a terminal and in a notebook, and tells counts elsewhere
            inside `counting`.
    """
    counts = _COUNTS.get() if shown is None else None
    notebook = counts is None and in_notebook()
    if shown is None:
        shown = notebook or (sys.stderr.isatty() and (counts is None or counts.bars))
    if shown and notebook:
        yield from _in_one_line(items, what, total)
        return
    if not shown or find_spec("rich") is None:
        yield from items if counts is None else _counted(items, what, total, counts.tell)
        return
    from rich.console import Console
    from rich.progress import track as rich_track

    # Without a total it would ask for a length.
    yield from rich_track(iter(items), description=what, total=total, console=Console(stderr=True), transient=True)


def _counted(items: Iterable[Item], what: str, total: int | None, tell: Callable[[str], None]) -> Iterator[Item]:
    told = time.monotonic()
    for done, item in enumerate(items):
        if done and time.monotonic() - told >= COUNT_EVERY:
            tell(f"{what}: {done}" + ("" if total is None else f" of {total}"))
            told = time.monotonic()
        yield item


def in_notebook() -> bool:
    """Whether the error stream is shown by a Jupyter kernel, seen without importing IPython."""
    if type(sys.stderr).__module__.partition(".")[0] == "ipykernel":
        return True
    shell = getattr(builtins, "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def _in_one_line(items: Iterable[Item], what: str, total: int | None) -> Iterator[Item]:
    """The items, with a line that is drawn over itself: a bar of rich would need ipywidgets.

    Work that ends before the first drawing leaves no line.
    """
    begun = drawn = time.monotonic()
    done = width = 0
    try:
        for item in items:
            now = time.monotonic()
            if done and now - drawn >= REDRAW_EVERY:
                width, drawn = _draw(_line(what, done, total, now - begun), width), now
            yield item
            done += 1
        if width:
            _draw(_line(what, done, total, time.monotonic() - begun), width)
    finally:
        if width:
            sys.stderr.write("\n")
            sys.stderr.flush()


def _draw(line: str, width: int) -> int:
    """Write a line over one of a width; returns its own."""
    sys.stderr.write("\r" + line.ljust(width))
    sys.stderr.flush()
    return len(line)


def _line(what: str, done: int, total: int | None, seconds: float) -> str:
    if not total or done > total:
        return f"{what}: {done}, {seconds:.0f} s"
    bar = ("#" * (_WIDTH * done // total)).ljust(_WIDTH, ".")
    left = f"{seconds:.0f} s" if done == total else f"about {seconds * (total - done) / done:.0f} s left"
    return f"{what}: [{bar}] {done} of {total}, {left}"
