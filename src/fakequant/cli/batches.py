"""Batches that say their number and shapes when the model fails on one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import nn

from fakequant.data.failures import BatchError, described, one_line, place
from fakequant.errors import FakeQuantError, RecipeError


class NamedBatches:
    """Batches of a recipe; `current` is the number and the batch that is in use, None between batches."""

    def __init__(self) -> None:
        self.current: tuple[int, Any] | None = None

    def of(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The same batches, noted while they are in use; with a length where they have one."""
        return _Listed(self, batches) if isinstance(batches, Sized) else _Noted(self, batches)

    @contextmanager
    def failures_named(self, model: nn.Module, verbose: bool = False) -> Iterator[None]:
        """Turn an error of the model into one that names the batch, its shapes and the layer.

        Args:
            verbose: whether to raise the model's own error instead, for its traceback.

        Raises:
            RecipeError: the model failed on a batch. Errors that arise outside of the model stay as they are.
        """
        try:
            yield
        except Exception as error:  # what a user's model raises is named with its batch, or raised as it is
            at, cause, where = self.current, error, place(model, error)
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


class _Noted:
    def __init__(self, note: NamedBatches, batches: Iterable[Any]) -> None:
        self.note, self.batches = note, batches

    def __iter__(self) -> Iterator[Any]:
        source = iter(self.batches)
        for number in count(1):
            self.note.current = None
            try:
                batch = next(source)
            except StopIteration:
                return
            self.note.current = (number, batch)
            yield batch


class _Listed(_Noted):
    def __len__(self) -> int:
        return len(self.batches)  # pyright: ignore[reportArgumentType]  only made of what has a length
