"""Step functions of one number: found from their definition, said in ONNX as a binary search.

ONNX has neither the bits of a number nor its exponent. But whatever maps a float32 number to one of a few values and
never falls is known by the smallest number at which each next value begins. These are found by bisection over all
float32 numbers, with the definition itself as the judge, so that nothing has to be derived twice.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fakequant.export.site import Emitter

_LARGEST = torch.finfo(torch.float32).max
_SIGN = 0x7FFFFFFF


def thresholds(index_of: Callable[[Tensor], Tensor], count: int, lowest: float = -_LARGEST) -> Tensor:
    """The smallest float32 numbers at which a step function reaches 1, 2, ... count - 1; NaN where it never does.

    Args:
        index_of: from numbers [k] to indices 0 to count - 1 [k], never falling.
        lowest: where the function begins, with the index 0.

    >>> thresholds(lambda v: (v >= 0.5).long() + (v > 2.0).long(), 3)
    tensor([0.5000, 2.0000])
    """
    wanted = torch.arange(1, count, device="cpu")
    first, last = (torch.full((count - 1,), end, dtype=torch.float32, device="cpu") for end in (lowest, _LARGEST))
    low, high = _order(first), _order(last)
    reached = index_of(_number(high)) >= wanted
    already = index_of(_number(low)) >= wanted
    # 2**32 numbers in order; the difference of two halves each time.
    for _ in range(33):
        middle = (low + high).div(2, rounding_mode="floor")
        beyond = index_of(_number(middle)) >= wanted
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    found = torch.where(already, first, _number(high))
    return torch.where(reached, found, torch.nan)


def _order(v: Tensor) -> Tensor:
    """The place of float32 numbers in the order of all; both zeros have the place 0."""
    bits = v.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & _SIGN), bits)


def _number(order: Tensor) -> Tensor:
    bits = torch.where(order < 0, -order - (_SIGN + 1), order)
    return bits.to(torch.int32).view(torch.float32)


def look_up(to: Emitter, name: str, value: str, limits: Tensor, results: Tensor) -> str:
    """Nodes that give results[i] where limits[i - 1] <= value < limits[i]; results[0] for NaN.

    Args:
        name: begins the names of the constants.
        limits: rising, [k - 1]; NaN for those that are never reached.
        results: float32, [k].
    """
    steps = [1 << k for k in reversed(range(max(len(results) - 1, 1).bit_length()))]
    # Nothing compares with NaN, so that the index never goes beyond the last result.
    padded = np.full(2 * steps[0] - 1, np.nan, np.float32)
    padded[: len(limits)] = limits.numpy()
    table = to.add(f"{name}_limits", padded)
    index = to.add(f"{name}_start", np.array(0, np.int64))
    for step in steps:
        limit = to.emit("Gather", table, to.emit("Add", index, to.add(f"{name}_probe_{step}", np.array(step - 1))))
        moved = to.emit("Add", index, to.add(f"{name}_step_{step}", np.array(step)))
        index = to.emit("Where", to.emit("GreaterOrEqual", value, limit), moved, index)
    return to.emit("Gather", to.add(f"{name}_values", results), index)
