"""The tensors of a run, and which of them share memory, so that a write to one changes the others."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fakequant.data.again import memory_of

_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]  a room of torch without type stubs
_ADDED = 1000  # tensors after which dead ones are dropped; as many as living ones, where those are more


class Tensors:
    """The tensors of a run by identity and by the memory that they are in. None is kept alive.

    >>> found, x = Tensors(), torch.zeros(4)
    >>> views = x[:2], x[2:]
    >>> for number, tensor in enumerate((x, *views)):
    ...     found.add(tensor, number)
    >>> found.number(views[1]), [(other.tolist(), share) for other, share in found.sharing(x[1:3])]
    (2, [([0.0, 0.0, 0.0, 0.0], 0.5), ([0.0, 0.0], 0.5), ([0.0, 0.0], 0.5)])
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[ref[Tensor], int]] = {}
        self._by_memory: dict[int | None, dict[int, ref[Tensor]]] = {}
        self._left = _ADDED

    def add(self, tensor: Tensor, number: int) -> None:
        """Note a tensor, or another number of a known one."""
        self._left -= 1
        if not self._left:
            self._forget_dead()
        one = ref(tensor)  # Python swallows an interrupt in a callback of a reference, so there is none
        self._held[id(tensor)] = one, number
        self._by_memory.setdefault(memory_of(tensor), {})[id(tensor)] = one

    def _forget_dead(self) -> None:
        self._held = {key: own for key, own in self._held.items() if own[0]() is not None}
        alive = {
            memory: {key: one for key, one in held.items() if one() is not None}
            for memory, held in self._by_memory.items()
        }
        self._by_memory = {memory: held for memory, held in alive.items() if held}
        self._left = max(_ADDED, len(self._held))

    def number(self, tensor: Tensor) -> int | None:
        """The last number of a tensor; None for an unknown one."""
        one, number = self._held.get(id(tensor), (None, None))
        return number if one is not None and one() is tensor else None

    def numbers(self) -> frozenset[int]:
        """The last numbers of all tensors that something still holds."""
        return frozenset(number for one, number in self._held.values() if one() is not None)

    def sharing(self, written: Tensor) -> list[tuple[Tensor, float]]:
        """The other tensors that share memory with one, and the share of their elements that is in its memory."""
        memory = memory_of(written)
        held = [] if memory is None else [one() for one in self._by_memory.get(memory, {}).values()]
        others = [x for x in held if x is not None and x is not written]
        if not others:
            return []
        marks = torch.zeros(written.untyped_storage().nbytes() // written.element_size(), dtype=torch.bool)
        _elements(marks, written).fill_(True)
        # A view of another dtype has other elements; all of them count.
        shares = [
            _elements(marks, other).float().mean().item() if other.dtype is written.dtype else 1.0 for other in others
        ]
        return [(other, share) for other, share in zip(others, shares, strict=True) if share > 0]


def version_of(tensor: Tensor) -> int | None:
    """A number that changes with every write; inference tensors have none."""
    return None if is_lazy(tensor) or tensor.is_inference() else tensor._version


def _elements(marks: Tensor, tensor: Tensor) -> Tensor:
    """The elements of a tensor among the marks of its memory."""
    return marks.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def largest(tensor: Tensor) -> float:
    """The largest magnitude in a float tensor, NaN where it has one; 0 for others, and where torch finds none.

    >>> largest(torch.tensor([1.0, -torch.inf])), largest(torch.ones(2, dtype=torch.int64))
    (inf, 0.0)
    """
    tensor = unwrapped(tensor)
    is_plain = tensor.layout is torch.strided and not (tensor.is_nested or is_traceable_wrapper_subclass(tensor))
    # torch finds no extremes of floats with 8 bits.
    if not (is_plain and tensor.is_floating_point() and tensor.numel()) or tensor.is_meta or tensor.itemsize == 1:
        return 0.0
    return max(abs(limit.item()) for limit in tensor.aminmax())


def holds_mask(tensor: Tensor, extreme: float) -> bool:
    """Whether a float tensor has zeros and extreme numbers alone, or one negative extreme number.

    >>> holds_mask(torch.tensor([0.0, -1e9, 0.0]), 1e4), holds_mask(torch.tensor([0.5, -1e9]), 1e4)
    (True, False)
    """
    tensor = unwrapped(tensor)
    is_zero = tensor == 0
    if not bool((is_zero | (tensor.abs() >= extreme)).all()):
        return False
    return bool(is_zero.any()) or bool((tensor == tensor.flatten()[0]).all() and tensor.flatten()[0] < 0)


def unwrapped(tensor: Tensor) -> Tensor:
    """A tensor without the wrappers of vmap, which let no values out."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
