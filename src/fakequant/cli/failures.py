"""What users see of errors and warnings: a line in place of a traceback, and the batch on which a model failed."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from torch import nn
from typer.core import TyperGroup

from fakequant.data.batches import BatchError, batch_of, described, locate, one_line
from fakequant.errors import FakeQuantError, RecipeError
from fakequant.text import visible

LOADED: set[str] = set()
"""The files that were executed as recipes; a traceback of a user's error starts in one of them."""
_OPTIONS = {
    r"\brules=\{(\S+): '?(\w+)'?\}": r"--rule \1=\2",
    r"\bskip=\[(.+?)\]": r"--float \1",
    r"\bpacked=True\b": "--packed",
    r"\b(blocks|load)=": r"\1= of fakequant.improve_folder",
}
"""What functions call their arguments, and what commands do."""


class Commands(TyperGroup):
    """All commands; an error or a warning of this package is printed as one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _warnings_as_lines():
                return super().invoke(ctx)
        except FakeQuantError as error:
            _print(f"error: {with_options(str(error))}", "bold red")
            raise typer.Exit(1) from None
        except KeyboardInterrupt as interrupt:
            _print(str(interrupt) or "interrupted", "bold red")
            raise typer.Exit(130) from None
        except Exception as error:  # of code in a recipe, which is named; all others are raised
            lines = _of_the_recipe(error)
            if not lines:
                raise
            _print(lines, "bold red")
            raise typer.Exit(1) from error


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """A context that prints warnings without a place, which is in this command, unless it is in a recipe."""
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
    """A message of a function for users of a command, whose options it names.

    >>> with_options("skip=['head'] leaves it in float, rules={name: 'int8'} is finer")
    "--float 'head' leaves it in float, --rule name=int8 is finer"
    """
    for argument, option in _OPTIONS.items():
        text = re.sub(argument, option, text)
    return text


def _of_the_recipe(error: Exception) -> str:
    """The traceback of a recipe's error, from the recipe's line on; "" for any other error."""
    if isinstance(error, SyntaxError) and error.filename in LOADED:
        return "".join(traceback.format_exception_only(error)).rstrip()
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename not in LOADED:
        trace = trace.tb_next
    return "" if trace is None else "".join(traceback.format_exception(type(error), error, trace, chain=False)).rstrip()


def _print(text: str, style: str) -> None:
    Console(stderr=True, soft_wrap=True).print(Text(visible(text, keep="\n"), style=style))


@contextmanager
def failures_named(model: nn.Module, verbose: bool = False) -> Iterator[None]:
    """Turn an error of a recipe's model into one that names the batch, its shapes and the layer.

    Args:
        verbose: whether to raise the model's own error instead, for its traceback.

    Raises:
        RecipeError: the model failed on a batch. Errors that arise outside of the model stay as they are.
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
        if ours:  # which says what to do
            raise RecipeError(f"{which} failed{where}: {cause}") from cause
        raise RecipeError(
            f"{which} failed{where}: {one_line(cause)}; correct the batch or the model (-v shows the traceback)"
        ) from cause
