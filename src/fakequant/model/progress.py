"""A progress bar for work over batches, where rich is installed and a person watches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TypeVar

Item = TypeVar("Item")


def track(items: Iterable[Item], what: str, total: int | None, shown: bool | None = None) -> Iterator[Item]:
    """The items, with a progress bar on the error stream.

    Args:
        shown: true shows it, false does not; None shows it on a terminal.
    """
    if shown is None:
        shown = sys.stderr.isatty()
    if not shown or find_spec("rich") is None:
        yield from items
        return
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(items, description=what, total=total, console=Console(stderr=True), transient=True)
