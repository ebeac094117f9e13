"""Say which step of a job runs, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from fakequant.data.batches import counting
from fakequant.text import visible


class Steps:
    """The steps of a job, printed as "[3/6] exporting ... 12 s".

    Args:
        console: where they are printed.
        total: the number of steps.
    """

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        self.begun = 0
        self._line_is_open = False

    @contextmanager
    def step(self, what: str, done: bool = False) -> Iterator[bool]:
        """Print the step when it begins, and its time when it ends without an error; gives whether to work.

        Args:
            what: the step does.
            done: whether an earlier run did it; then nothing is to do.
        """
        self.begun += 1
        if done:
            self.console.print(Text(f"[{self.begun}/{self.total}] {what}: done before"))
            yield False
            return
        head, started = f"[{self.begun}/{self.total}] {what} ...", time.perf_counter()
        self.console.print(Text(head), end="")
        self._line_is_open = True
        try:
            with counting(self.note, bars=not self.console.quiet):
                yield True
        except BaseException:
            self._close_line()
            raise
        took = duration(time.perf_counter() - started)
        if self._line_is_open and not self.console.is_terminal:
            self.console.print(Text(f" {took}"))
        else:  # a progress bar wiped the line, or notes came after it
            self.console.control(Control(ControlType.CARRIAGE_RETURN))
            self.console.print(Text(f"{head} {took}"))
        self._line_is_open = False

    def note(self, text: str) -> None:
        """Print lines of their own."""
        self._close_line()
        self.console.print(Text(visible(text, keep="\n")), soft_wrap=True)  # a path in a pipe stays whole

    def _close_line(self) -> None:
        if self._line_is_open:
            self.console.print()
        self._line_is_open = False


def duration(seconds: float) -> str:
    """Format a time for reading.

    >>> duration(0.04), duration(12.3), duration(754)
    ('0.0 s', '12 s', '12 min 34 s')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
