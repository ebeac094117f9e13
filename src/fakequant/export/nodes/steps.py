"""Step functions in ONNX: find the thresholds by bisection, look a number up by binary search.

ONNX has no operator for the bits or the exponent of a number. A monotonic function with few values is fully described
by its thresholds: the smallest number at which each next value begins. Bisection over all float32 numbers finds them
with the torch definition itself, so the function is not implemented twice.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fakequant.export.nodes.site import Emitter

_LARGEST = torch.finfo(torch.float32).max
_SIGN = 0x7FFFFFFF


def thresholds(index_of: Callable[[Tensor], Tensor], count: int, lowest: float = -_LARGEST) -> Tensor:
    """Return the smallest float32 numbers at which a step function reaches 1, 2, ... count - 1; NaN if it never does.

    Args:
        index_of: maps numbers [k] to indices 0 to count - 1 [k], monotonically.
        count: the number of indices.
        lowest: the start of the function's domain, where the index is 0.

    >>> thresholds(lambda v: (v >= 0.5).long() + (v > 2.0).long(), 3)
    tensor([0.5000, 2.0000])
    """
    wanted = torch.arange(1, count, device="cpu")
    first, last = (torch.full((count - 1,), end, dtype=torch.float32, device="cpu") for end in (lowest, _LARGEST))
    low, high = _order(first), _order(last)
    reached = index_of(_number(high)) >= wanted
    already = index_of(_number(low)) >= wanted
    # There are 2**32 ordered numbers, and every round halves the interval.
    for _ in range(33):
        middle = (low + high).div(2, rounding_mode="floor")
        beyond = index_of(_number(middle)) >= wanted
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    limits = torch.where(already, first, _number(high))
    return torch.where(reached, limits, torch.nan)


def _order(v: Tensor) -> Tensor:
    """Map float32 numbers to integers in the same order; both zeros map to 0."""
    bits = v.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & _SIGN), bits)


def _number(order: Tensor) -> Tensor:
    bits = torch.where(order < 0, -order - (_SIGN + 1), order)
    return bits.to(torch.int32).view(torch.float32)


def look_up(to: Emitter, name: str, value: str, limits: Tensor, results: Tensor) -> str:
    """Add nodes that return results[i] where limits[i - 1] <= value < limits[i]; results[0] for NaN.

    Args:
        to: receives the nodes.
        name: prefix of the names of the constants.
        value: name of the input.
        limits: ascending thresholds [k - 1]; NaN for those that are never reached.
        results: float32 values [k].
    """
    steps = [1 << k for k in reversed(range(max(len(results) - 1, 1).bit_length()))]
    # A comparison with NaN is false, so the index never goes beyond the last result.
    padded = np.full(2 * steps[0] - 1, np.nan, np.float32)
    padded[: len(limits)] = limits.numpy()
    table = to.add(f"{name}_limits", padded)
    index = to.add(f"{name}_start", np.array(0, np.int64))
    for step in steps:
        limit = to.emit("Gather", table, to.emit("Add", index, to.add(f"{name}_probe_{step}", np.array(step - 1))))
        moved = to.emit("Add", index, to.add(f"{name}_step_{step}", np.array(step)))
        index = to.emit("Where", to.emit("GreaterOrEqual", value, limit), moved, index)
    return to.emit("Gather", to.add(f"{name}_values", results), index)
