"""The error of a recipe's model: the batch on which it failed, its shapes and the layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fakequant.data.batches import batch_of
from fakequant.data.failures import BatchError, described, locate, one_line
from fakequant.errors import FakeQuantError, RecipeError


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
