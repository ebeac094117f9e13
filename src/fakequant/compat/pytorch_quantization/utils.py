"""The logger of the interface, and the largest magnitude along axes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from fakequant.errors import CalibrationError

__all__ = ["reduce_amax", "reset_logger_handler"]


logger = logging.getLogger("fakequant.compat.pytorch_quantization")
"""The logger of all messages of the interface."""


def reset_logger_handler() -> None:
    """Remove all handlers from Python's root logger."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)


@torch.no_grad()
def reduce_amax(input: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = True) -> Tensor:
    """The largest magnitude of a tensor along some axes; NaN if a value is NaN.

    Args:
        input: any shape.
        axis: the axis or axes to reduce; None reduces all, to a 0-d tensor.
        keepdims: keep reduced axes with one element. Several axes that leave one element give a 0-d tensor.

    Returns:
        A tensor of the dtype of input, without a gradient.

    Raises:
        ValueError: a tuple of more axes than the tensor has.
        IndexError: an axis that the tensor does not have.
        CalibrationError: nothing to reduce; it is also a RuntimeError.

    >>> x = torch.tensor([[1.0, -2.0], [3.0, 0.5]])
    >>> reduce_amax(x), reduce_amax(x, axis=1)
    (tensor(3.), tensor([[2.],
            [3.]]))
    """
    if isinstance(axis, tuple) and len(axis) > input.dim():
        raise ValueError(f"Cannot reduce more axes than tensor's dim: got {axis} for a tensor of {input.dim()}.")
    if axis is None or isinstance(axis, int):
        return _largest(input, range(input.dim()) if axis is None else [axis], keepdims and axis is not None)
    amax = _largest(input, axis, True)
    return amax.squeeze() if not keepdims or amax.numel() == 1 else amax


def _largest(x: Tensor, axes: Sequence[int], keepdims: bool) -> Tensor:
    count = max(x.dim(), 1)
    if beyond := [axis for axis in axes if not -count <= axis < count]:
        raise IndexError(f"axis {beyond[0]} is out of range for a tensor of {x.dim()} axes")
    dims = sorted({axis % count for axis in axes})
    if x.numel() == 0 and any(x.shape[dim] == 0 for dim in dims):
        raise CalibrationError(f"a tensor of shape {list(x.shape)} has no largest magnitude along {list(axes)}")
    if not dims or not x.dim():
        return x.abs()
    if not x.dtype.is_floating_point:
        return x.abs().amax(dims, keepdims)
    # + 0.0: of zeros the negated minimum is -0.0.
    return torch.maximum(-x.amin(dims, keepdims), x.amax(dims, keepdims)) + 0.0
