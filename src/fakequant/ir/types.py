"""Element types and shapes of the values of a graph."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

import torch

from fakequant.errors import GraphError

DYNAMIC = -1
"""A dimension that is known only when the graph runs."""

# With 16 bytes per element, 63 bits address them.
_MAX_ELEMENTS = 2**59 - 1


class IRType(Enum):
    """The type of a value's elements; the value of each is how it is written.

    Source: AiDotNet's IRType, with Boolean, BFloat16, Complex64 and Index added.

    >>> IRType.of(torch.float16), IRType.Half.dtype
    (<IRType.Half: 'Half'>, torch.float16)
    """

    Float32 = "Float32"
    Float64 = "Float64"
    Int32 = "Int32"
    Int64 = "Int64"
    Byte = "Byte"
    SByte = "SByte"
    Int16 = "Int16"
    UInt16 = "UInt16"
    UInt32 = "UInt32"
    UInt64 = "UInt64"
    Decimal = "Decimal"
    """128-bit decimal numbers, for which torch has no type: a graph with them is not valid."""
    Half = "Half"
    Complex = "Complex"
    """Two float64."""
    BFloat16 = "BFloat16"
    Boolean = "Boolean"
    Complex64 = "Complex64"
    """Two float32."""
    Index = "Index"
    """A size: one integer, no tensor. Sizes of dynamic dimensions are computed with it."""
    Missing = "Missing"
    """No value: a result that an operator leaves out, or an empty one that nothing reads."""

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype.

        Raises:
            GraphError: torch has none.
        """
        if self not in _DTYPES:
            raise GraphError(f"{self.value} has no torch dtype; use {', '.join(t.value for t in _DTYPES)}")
        return _DTYPES[self]

    @property
    def floating(self) -> bool:
        """Whether elements are real floating-point numbers."""
        return self in _DTYPES and _DTYPES[self].is_floating_point

    @staticmethod
    def of(dtype: torch.dtype) -> IRType:
        """The type of a torch dtype.

        Raises:
            GraphError: a dtype that graphs do not have.
        """
        if dtype not in _TYPES:
            known = ", ".join(str(known) for known in _TYPES)
            raise GraphError(f"a value of {dtype} cannot be in a graph; convert it to one of {known}")
        return _TYPES[dtype]


_DTYPES = {
    IRType.Float32: torch.float32,
    IRType.Float64: torch.float64,
    IRType.Int32: torch.int32,
    IRType.Int64: torch.int64,
    IRType.Byte: torch.uint8,
    IRType.SByte: torch.int8,
    IRType.Int16: torch.int16,
    IRType.UInt16: torch.uint16,
    IRType.UInt32: torch.uint32,
    IRType.UInt64: torch.uint64,
    IRType.Half: torch.float16,
    IRType.Complex: torch.complex128,
    IRType.BFloat16: torch.bfloat16,
    IRType.Boolean: torch.bool,
    IRType.Complex64: torch.complex64,
}
_TYPES = {dtype: type for type, dtype in _DTYPES.items()}


class TensorShape(tuple[int, ...]):
    """The dimensions of a value, -1 where one is dynamic; no dimension is 0.

    >>> shape = TensorShape((2, -1, 4))
    >>> print(shape, shape.rank, shape.element_count)
    [2, ?, 4] 3 -1
    >>> print(TensorShape((3, 1)).broadcast_with(TensorShape((2, 1, 5))))
    [2, 3, 5]
    """

    __slots__ = ()

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self)

    @property
    def dynamic(self) -> bool:
        """Whether a dimension is known only at run time."""
        return DYNAMIC in self

    @property
    def element_count(self) -> int:
        """The number of elements: 1 without dimensions, -1 if a dimension is dynamic."""
        return DYNAMIC if self.dynamic else math.prod(self)

    def fault(self) -> str | None:
        """What is wrong with the dimensions; None if nothing is."""
        wrong = [n for n in self if isinstance(n, bool) or not isinstance(n, int) or not (n > 0 or n == DYNAMIC)]
        if not wrong and math.prod(n for n in self if n != DYNAMIC) > _MAX_ELEMENTS:
            return f"shape {list(self)} has more than {_MAX_ELEMENTS} elements"
        if not wrong:
            return None
        return f"shape {list(self)} has the dimension {wrong[0]!r}; a dimension is a positive integer, or -1 if dynamic"

    def matches(self, other: Iterable[int]) -> bool:
        """Whether both can be the shape of the same tensor: as many dimensions, equal where neither is dynamic."""
        given = tuple(other)
        return len(self) == len(given) and all(DYNAMIC in (a, b) or a == b for a, b in zip(self, given, strict=True))

    def is_compatible_with(self, other: Iterable[int]) -> bool:
        """Whether both broadcast together, as far as is known."""
        pairs = zip(reversed(self), reversed(tuple(other)), strict=False)
        return all(a == b or 1 in (a, b) or DYNAMIC in (a, b) for a, b in pairs)

    def broadcast_with(self, other: Iterable[int]) -> TensorShape:
        """The shape of an elementwise result of both.

        Raises:
            GraphError: they do not broadcast.
        """
        given = TensorShape(other)
        if not self.is_compatible_with(given):
            raise GraphError(f"shapes {self} and {given} do not broadcast: from the right, equal or 1")
        rank = max(len(self), len(given))
        pairs = zip((1,) * (rank - len(self)) + self, (1,) * (rank - len(given)) + given, strict=True)
        # A dynamic dimension equals a known one other than 1, or the tensors do not broadcast.
        return TensorShape(b if a == 1 else a if b in (1, DYNAMIC) else b for a, b in pairs)

    def __str__(self) -> str:
        return f"[{', '.join('?' if n == DYNAMIC else str(n) for n in self)}]" if self else "scalar"


class TensorType(NamedTuple):
    """What is known about a value before the graph runs.

    >>> print(TensorType(IRType.Float32, TensorShape((3, 4))))
    Float32 [3, 4]
    """

    type: IRType
    shape: TensorShape

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorType:
        """The type of a tensor.

        Raises:
            GraphError: a dtype that graphs do not have.
        """
        return TensorType(IRType.of(tensor.dtype), TensorShape(tensor.shape))

    def fault(self) -> str | None:
        """What is wrong with it; None if nothing is."""
        if not isinstance(self.type, IRType):
            return f"{self.type!r} is no IRType"
        if self.type is IRType.Decimal:
            return f"{self.type.value} has no torch dtype, so that nothing can compute it"
        if self.type in (IRType.Index, IRType.Missing) and self.shape:
            return f"{self.type.value} is no tensor and has no shape, got {self.shape}"
        if not isinstance(self.shape, (tuple, list)):
            return f"the shape {self.shape!r} is no tuple of integers"
        return TensorShape(self.shape).fault()

    def __str__(self) -> str:
        return f"{self.type.value if isinstance(self.type, IRType) else repr(self.type)} {self.shape}"
