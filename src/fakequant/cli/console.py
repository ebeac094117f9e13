"""The lines that a command prints: the steps of a job with their times, and errors and warnings without tracebacks."""

from __future__ import annotations

import re
import shutil
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import typer
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text
from torch import nn
from typer.core import TyperGroup

from fakequant.data.batches import BatchError, batch_of, counting, described, locate, one_line
from fakequant.errors import FakeQuantError, RecipeError
from fakequant.restore import set_to
from fakequant.text import LINE_WIDTH, fitted, visible

LOADED: set[str] = set()
"""The files that were executed as recipes; a traceback of a user's error starts in such a file."""
_OPTIONS = {
    r"\brules=\{(\S+): '?(\w+)'?\}": r"--rule \1=\2",
    r"\bskip=\[(.+?)\]": r"--float \1",
    r"\bpacked=True\b": "--packed",
    r"\b(blocks|load)=": r"\1= of fakequant.improve_folder",
}
"""By a pattern of an argument in messages of functions, the option of commands that replaces it."""
_PIPED = 100
"""The characters of a line if there is no terminal and COLUMNS is not set."""


def show(text: str, *, whole: bool = False) -> None:
    """Print the result of a command; with `whole`, lines are not broken, so that they can be copied."""
    Console(soft_wrap=True).print(Text(text if whole else fitted(text)))


class Commands(TyperGroup):
    """All commands; an error or a warning of this package is printed as one line, which a terminal breaks at spaces."""

    def invoke(self, ctx: Any) -> Any:
        with set_to(LINE_WIDTH, shutil.get_terminal_size((_PIPED, 0)).columns):  # errors are printed in it, too
            try:
                with _warnings_as_lines():
                    return super().invoke(ctx)
            except FakeQuantError as error:
                _print(f"error: {with_options(str(error))}", "bold red")
                raise typer.Exit(1) from None
            except KeyboardInterrupt as interrupt:
                _print(str(interrupt) or "interrupted", "bold red")
                raise typer.Exit(130) from None
            except Exception as error:  # errors of a recipe's code are named; others are raised
                lines, trace = list[str](), error.__traceback__
                while trace is not None and trace.tb_frame.f_code.co_filename not in LOADED:
                    trace = trace.tb_next
                if isinstance(error, SyntaxError) and error.filename in LOADED:
                    lines = traceback.format_exception_only(error)
                elif trace is not None:  # from the recipe's line on
                    lines = traceback.format_exception(type(error), error, trace, chain=False)
                if not lines:
                    raise
                _print("".join(lines).rstrip(), "bold red", fits=False)
                raise typer.Exit(1) from error


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """A context that prints warnings as lines without a file and line number, except warnings of a recipe."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def shown(message: Any, category: Any, filename: str, *where: Any, **options: Any) -> None:
            if issubclass(category, UserWarning) and filename not in LOADED:
                _print(f"warning: {with_options(str(message))}", "yellow")
            else:
                show(message, category, filename, *where, **options)

        warnings.showwarning = shown
        yield


def with_options(text: str) -> str:
    """A message of a function in which options of the command replace arguments of the function.

    >>> with_options("skip=['head'] leaves it in float, rules={name: 'int8'} is finer")
    "--float 'head' leaves it in float, --rule name=int8 is finer"
    """
    for argument, option in _OPTIONS.items():
        text = re.sub(argument, option, text)
    return text


def _print(text: str, style: str, *, fits: bool = True) -> None:
    if (steps := _STEPS.get()) is not None:
        steps.close_line()
    console, text = Console(stderr=True, soft_wrap=True), visible(text, keep="\n")
    console.print(Text(fitted(text) if fits and console.is_terminal else text, style=style))


@contextmanager
def failures_named(model: nn.Module, verbose: bool = False) -> Iterator[None]:
    """A context that turns an error of a recipe's model into a RecipeError with batch and layer; not if `verbose`.

    Errors outside of the model are not changed.
    """
    try:
        yield
    except Exception as error:  # what a user's model raises is named with its batch, or raised as it is
        at, cause, where = batch_of(error), error, locate(model, error)
        if isinstance(error, BatchError) and isinstance(error.__cause__, Exception):
            at, cause, where = (error.number, error.batch), error.__cause__, error.where
        if verbose:
            raise cause from cause.__cause__
        ours = isinstance(cause, FakeQuantError)
        if where is None or (ours and at is None):
            raise
        which = "the model" if at is None else f"batch {at[0]} of calibration_batches(), {described(at[1])},"
        if ours:  # the message says what to do
            raise RecipeError(f"{which} failed{where}: {cause}") from cause
        raise RecipeError(
            f"{which} failed{where}: {one_line(cause)}; correct the batch or the model (-v shows the traceback)"
        ) from cause


class Steps:
    """The steps of a job, printed as "[3/6] exporting ... 12 s"."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        self.begun = 0
        self._line_is_open = False

    @contextmanager
    def step(self, what: str, done: bool = False) -> Iterator[bool]:
        """Print the step when it begins, and its time when it ends without an error; yields whether it must run.

        The step need not run if an earlier run did it (`done`).
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
            with set_to(_STEPS, self), counting(self.note, bars=not self.console.quiet):
                yield True
        except BaseException:
            self.close_line()
            raise
        took = duration(time.perf_counter() - started)
        if self._line_is_open and not self.console.is_terminal:
            self.console.print(Text(f" {took}"))
        else:  # a progress bar wiped the line, or notes came after it
            self.console.control(Control(ControlType.CARRIAGE_RETURN))
            self.console.print(Text(f"{head} {took}"))
        self._line_is_open = False

    def note(self, text: str) -> None:
        """Print a text on new lines, after the line of the present step."""
        self.close_line()
        self.console.print(Text(fitted(visible(text, keep="\n"))), soft_wrap=True)  # a path in a pipe stays whole

    def close_line(self) -> None:
        """End the line of a step that goes on, so that another line begins."""
        if self._line_is_open:
            self.console.print()
        self._line_is_open = False


_STEPS: ContextVar[Steps | None] = ContextVar("steps", default=None)
"""The steps of the job that runs."""


def duration(seconds: float) -> str:
    """Format a time for reading.

    >>> duration(0.04), duration(12.3), duration(754)
    ('0.0 s', '12 s', '12 min 34 s')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
