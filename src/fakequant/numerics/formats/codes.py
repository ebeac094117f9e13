"""Codes as tensors: the patterns of their bits, and whether they are codes of a format."""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.errors import QParamsError, ShapeError
from fakequant.numerics.formats.format import Format

_INTEGERS = {1: torch.uint8, 2: torch.int16}
"""Integer types for the codes of floats, by bytes."""


def lowest_of(format: Format) -> int:
    """The lowest code of an integer format, which is subtracted so that patterns are not negative; else 0."""
    is_integer = format.grid.table is None and format.grid.mantissa_bits is None
    return int(format.quant_min) if is_integer else 0


def count_of(format: Format) -> int:
    """The number of patterns of a format."""
    if format.grid.table is not None:
        return len(format.grid.table.values)
    return int(format.quant_max - format.quant_min) + 1 if format.grid.mantissa_bits is None else 1 << format.bits


def patterns_of(codes: Tensor, format: Format) -> Tensor:
    """Codes as numbers from 0, int32: the patterns of their bits, of integers counted from the lowest code."""
    # A float of 16 bits has its sign in that of the int16 that stores it: only its bits count.
    whole = as_integers(codes.contiguous()).to(torch.int32) - lowest_of(format)
    return whole & (1 << format.bits) - 1 if format.grid.mantissa_bits is not None else whole


def as_integers(codes: Tensor) -> Tensor:
    """The same memory in a dtype that `model.to(dtype)` leaves as it is."""
    return codes.view(_INTEGERS[codes.element_size()]) if codes.dtype.is_floating_point else codes


def of_integers(codes: Tensor, format: Format) -> Tensor:
    """The codes of `as_integers` in the storage of their format."""
    return codes.view(format.storage) if format.storage.is_floating_point else codes


def integers_of(format: Format) -> torch.dtype:
    """The dtype of `as_integers` of a format's codes."""
    return _INTEGERS[format.storage.itemsize] if format.storage.is_floating_point else format.storage


def check_codes(codes: Tensor, shape: tuple[int, ...], format: Format) -> None:
    """Raise where codes are none of a format, or of another shape.

    Raises:
        ShapeError: codes of another shape.
        QParamsError: codes of another dtype, or that the format does not have.
    """
    if tuple(codes.shape) != tuple(shape):
        raise ShapeError(f"are of shape {list(codes.shape)}, but the weight of shape {list(shape)}")
    if codes.dtype is not format.storage:
        raise QParamsError(f"are {codes.dtype}, but {format} has {format.storage}")
    lowest, highest = map(int, patterns_of(codes, format).aminmax()) if codes.numel() else (0, 0)
    if lowest < 0 or highest >= count_of(format):
        raise QParamsError(f"hold {min(lowest, 0) or highest}, but {format} has {count_of(format)} codes")
