"""Which tensors of a run share memory, so that a write to one of them changes the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]  a room of torch without type stubs


class Memory:
    """The tensors of a run by the memory that they are in.

    >>> memory, x = Memory(), torch.zeros(4)
    >>> for tensor in (x, x[:2], x[2:]):
    ...     memory.add(tensor)
    >>> [(other.tolist(), share) for other, share in memory.sharing(x[1:3])]
    [([0.0, 0.0, 0.0, 0.0], 0.5), ([0.0, 0.0], 0.5), ([0.0, 0.0], 0.5)]
    """

    def __init__(self) -> None:
        self._tensors: dict[int, dict[int, Tensor]] = {}

    def add(self, tensor: Tensor) -> None:
        """Note a tensor; it is kept."""
        if (memory := _memory_of(tensor)) is not None:
            self._tensors.setdefault(memory, {})[id(tensor)] = tensor

    def sharing(self, written: Tensor) -> list[tuple[Tensor, float]]:
        """The other tensors that share memory with one, and the share of their elements that is in its memory."""
        memory = _memory_of(written)
        others = [] if memory is None else [x for x in self._tensors.get(memory, {}).values() if x is not written]
        if not others:
            return []
        marks = torch.zeros(written.untyped_storage().nbytes() // written.element_size(), dtype=torch.bool)
        _elements(marks, written).fill_(True)
        # Of another dtype, elements are others; all of them count.
        shares = [
            _elements(marks, other).float().mean().item() if other.dtype is written.dtype else 1.0 for other in others
        ]
        return [(other, share) for other, share in zip(others, shares, strict=True) if share > 0]


def version_of(tensor: Tensor) -> int | None:
    """A number that changes with every write; inference tensors have none."""
    return None if tensor.is_inference() else tensor._version


def _memory_of(tensor: Tensor) -> int | None:
    """What names the memory of a tensor; None where it has none of its own."""
    if tensor.layout is not torch.strided or _functorch.is_functorch_wrapped_tensor(tensor):
        return None
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None  # type: ignore[attr-defined]


def _elements(marks: Tensor, tensor: Tensor) -> Tensor:
    """The elements of a tensor among the marks of its memory."""
    return marks.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def largest(tensor: Tensor) -> float:
    """The largest magnitude in a float tensor, NaN where it has one; 0 for others, and where torch finds none.

    >>> largest(torch.tensor([1.0, -torch.inf])), largest(torch.ones(2, dtype=torch.int64))
    (inf, 0.0)
    """
    while _functorch.is_functorch_wrapped_tensor(tensor):  # by vmap, which lets no values out
        tensor = _functorch.get_unwrapped(tensor)
    is_plain = tensor.layout is torch.strided and not (tensor.is_nested or is_traceable_wrapper_subclass(tensor))
    # torch finds no extremes of floats with 8 bits.
    if not (is_plain and tensor.is_floating_point() and tensor.numel()) or tensor.is_meta or tensor.itemsize == 1:
        return 0.0
    return max(abs(limit.item()) for limit in tensor.aminmax())
