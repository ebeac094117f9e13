"""One operation of a graph, `IROp`, with types and shapes of values, and the text of attributes."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from fakequant.errors import GraphError

DYNAMIC = -1
"""The number for a dimension that is known only when the graph runs."""

# With 16 bytes per element, 63 bits address them.
_MAX_ELEMENTS = 2**59 - 1


class IRType(Enum):
    """The element type of a value; the enum's value is its name in text.

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
    """Complex numbers of two float64."""
    BFloat16 = "BFloat16"
    Boolean = "Boolean"
    Complex64 = "Complex64"
    """Complex numbers of two float32."""
    Index = "Index"
    """A size: one integer, not a tensor. Sizes of dynamic dimensions are computed with it."""
    Missing = "Missing"
    """No value: a result that an operator omits, or an empty result that no operation reads."""

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the elements.

        Raises:
            GraphError: torch has no such dtype.
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
        """The type for a torch dtype.

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
    """The dimensions of a value; a dynamic dimension is -1, and no dimension is 0.

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
        """The fault in the dimensions as a sentence; None if they are valid."""
        wrong = [n for n in self if isinstance(n, bool) or not isinstance(n, int) or not (n > 0 or n == DYNAMIC)]
        if not wrong and math.prod(n for n in self if n != DYNAMIC) > _MAX_ELEMENTS:
            return f"shape {list(self)} has more than {_MAX_ELEMENTS} elements"
        if not wrong:
            return None
        return f"shape {list(self)} has the dimension {wrong[0]!r}; a dimension is a positive integer, or -1 if dynamic"

    def matches(self, other: Iterable[int]) -> bool:
        """Whether both can be the shape of one tensor: the same rank, and equal where neither is dynamic."""
        given = tuple(other)
        return len(self) == len(given) and all(DYNAMIC in (a, b) or a == b for a, b in zip(self, given, strict=True))

    def is_compatible_with(self, other: Iterable[int]) -> bool:
        """Whether the shapes may broadcast; dynamic dimensions always may."""
        pairs = zip(reversed(self), reversed(tuple(other)), strict=False)
        return all(a == b or 1 in (a, b) or DYNAMIC in (a, b) for a, b in pairs)

    def broadcast_with(self, other: Iterable[int]) -> TensorShape:
        """The shape of an elementwise result of tensors with both shapes.

        Raises:
            GraphError: the shapes do not broadcast.
        """
        given = TensorShape(other)
        if not self.is_compatible_with(given):
            raise GraphError(f"shapes {self} and {given} do not broadcast: from the right, axes must be equal or 1")
        rank = max(len(self), len(given))
        pairs = zip((1,) * (rank - len(self)) + self, (1,) * (rank - len(given)) + given, strict=True)
        # A dynamic dimension equals a known one other than 1, or the tensors do not broadcast.
        return TensorShape(b if a == 1 else a if b in (1, DYNAMIC) else b for a, b in pairs)

    def __str__(self) -> str:
        return f"[{', '.join('?' if n == DYNAMIC else str(n) for n in self)}]" if self else "scalar"


class TensorType(NamedTuple):
    """The element type and shape of a value, as known before the graph runs.

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
        """The fault in type or shape as a sentence; None if both are valid."""
        if not isinstance(self.type, IRType):
            return f"{self.type!r} is not an IRType"
        if self.type is IRType.Decimal:
            return f"{self.type.value} has no torch dtype, so that nothing can compute it"
        if self.type in (IRType.Index, IRType.Missing) and self.shape:
            return f"{self.type.value} is not a tensor and has no shape, got {self.shape}"
        if not isinstance(self.shape, (tuple, list)):
            return f"the shape {self.shape!r} is not a tuple of integers"
        return TensorShape(self.shape).fault()

    def __str__(self) -> str:
        return f"{self.type.value if isinstance(self.type, IRType) else repr(self.type)} {self.shape}"


@dataclass(frozen=True)
class Ref:
    """A reference to an input of the operation inside an attribute: in `shape=[%1, 64]`, a size is input 1."""

    position: int

    def __str__(self) -> str:
        return f"%{self.position}"


_MAX_DEPTH = 32  # of lists in lists
_MAX_DIGITS = 1000


def references(value: Any) -> list[Ref]:
    """All references to inputs in an attribute's value, in order."""
    if isinstance(value, Ref):
        return [value]
    return [ref for item in value for ref in references(item)] if isinstance(value, (list, tuple)) else []


def to_text(value: Any, depth: int = 0) -> str:
    """The text of an attribute's value; `depth` is the number of lists around it.

    Raises:
        GraphError: attributes cannot have this value.

    >>> to_text([1, 2.5, True, None, "a b", torch.float16, Ref(1), float("inf")])
    '[1, 2.5, true, none, "a b", Half, %1, inf]'
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) < 10**_MAX_DIGITS:
        return int.__repr__(value)
    if isinstance(value, Ref) and type(value.position) is int and value.position >= 0:
        return str(value)
    if isinstance(value, float):
        # A subclass, such as numpy's, is written as the number that it is.
        return float.__repr__(value)
    if isinstance(value, (str, IROp)):  # an operation in the body of another one
        return json.dumps(value if isinstance(value, str) else value.detailed())
    if isinstance(value, torch.dtype):
        return IRType.of(value).value
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return f"{type(value).__name__}({str(value).removeprefix('torch.')})"
    if isinstance(value, (list, tuple)) and depth < _MAX_DEPTH:
        return f"[{', '.join(to_text(item, depth + 1) for item in value)}]"
    shown = "a list so deep" if isinstance(value, (list, tuple)) else "that integer" if isinstance(value, int) else None
    raise GraphError(
        f"an attribute cannot be {shown or repr(value)}; it is a number of at most {_MAX_DIGITS} digits, text, "
        f"dtype, device or a list of these, at most {_MAX_DEPTH} deep"
    )


def items_to_text(attributes: dict[str, Any]) -> str:
    """The text of all attributes, sorted by name, in braces; "" without attributes."""
    if wrong := [name for name in attributes if not (isinstance(name, str) and _NAME.fullmatch(name))]:
        raise GraphError(f"an attribute cannot have the name {wrong[0]!r}; names are such as num_bits")
    items = ", ".join(f"{name}={to_text(value)}" for name, value in sorted(attributes.items()))
    return f" {{{items}}}" if items else ""


_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_OP_TYPE = re.compile(r"\w+(\.\w+)*", re.ASCII)


def is_id(value: object) -> bool:
    """Whether a value can be an id: an integer >= 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class IROp:
    """An operation: the ids of the values it reads and makes, and the types and shapes of the values it makes.

    Args:
        op_type: a name in the table of operations, or of any operator of torch such as "aten.erf.default".
        output_ids: the ids of the values that the operation makes.
        input_ids: the ids of the values that it reads, in order.
        outputs: the type and shape of every value that it makes.
        attributes: all other arguments by name, see `fakequant.ir.op.to_text` for possible values.
        origin: the path of the module from which the operation was captured.

    Source: AiDotNet's IROp.

    >>> op = IROp("Add", [2], [0, 1], [TensorType(IRType.Float32, TensorShape((3, 4)))])
    >>> print(op)
    t2 = Add(t0, t1) : Float32 [3, 4]
    >>> op.validate(), op.output_id, op.output_shape
    (True, 2, (3, 4))
    """

    def __init__(
        self,
        op_type: str,
        output_ids: Iterable[int] = (),
        input_ids: Iterable[int] = (),
        outputs: Iterable[TensorType] = (),
        attributes: dict[str, Any] | None = None,
        *,
        origin: str = "",
    ) -> None:
        self.op_type = op_type
        self.output_ids = list(output_ids)
        self.input_ids = list(input_ids)
        self.outputs = list(outputs)
        self.attributes = dict(attributes or {})
        self.origin = origin

    @property
    def output_id(self) -> int:
        """The id of the first output; -1 without outputs."""
        return self.output_ids[0] if self.output_ids else -1

    @output_id.setter
    def output_id(self, value: int) -> None:
        self.output_ids = [value]

    @property
    def output_type(self) -> IRType:
        """The element type of the first output; Float32 without outputs."""
        return self.outputs[0].type if self.outputs else IRType.Float32

    @output_type.setter
    def output_type(self, value: IRType) -> None:
        self.outputs[:1] = [TensorType(value, self.output_shape)]

    @property
    def output_shape(self) -> TensorShape:
        """The shape of the first output; without outputs, the shape [] of a scalar."""
        return self.outputs[0].shape if self.outputs else TensorShape()

    @output_shape.setter
    def output_shape(self, value: Sequence[int]) -> None:
        self.outputs[:1] = [TensorType(self.output_type, TensorShape(value))]

    def faults(self) -> list[str]:
        """List the faults of the operation alone, one sentence each; [] if it is well formed.

        `fakequant.ir.table.faults` also checks the operation against the types of its inputs.
        """
        kinds = {"op_type": str, "origin": str, "attributes": dict}
        kinds |= dict.fromkeys(("output_ids", "input_ids", "outputs"), list)
        if wrong := [name for name, kind in kinds.items() if not isinstance(getattr(self, name), kind)]:
            return [f"its {name} must be a {kinds[name].__name__}, got {getattr(self, name)!r}" for name in wrong]
        found = []
        if not self.output_ids:
            found.append("makes no value: output_ids is empty")
        for what, ids in (("output", self.output_ids), ("input", self.input_ids)):
            if wrong_ids := [id for id in ids if not is_id(id)]:
                found.append(f"the {what} id {wrong_ids[0]!r} is not an integer >= 0")
        if len(self.output_ids) != len(self.outputs):
            found.append(f"has {len(self.output_ids)} output ids, but {len(self.outputs)} types of outputs")
        for place, type in enumerate(self.outputs):
            fault = type.fault() if isinstance(type, TensorType) else f"{type!r} is not a TensorType"
            found += [f"output {place}: {fault}"] if fault else []
        if not _OP_TYPE.fullmatch(self.op_type):
            found.append(f"the op_type {self.op_type!r} is not a name such as Add or aten.add.Tensor")
        try:
            items_to_text(self.attributes)
        except GraphError as error:
            found.append(str(error))
        return found

    def validate(self) -> bool:
        """Whether the operation alone is well formed; `faults` lists the reasons if not."""
        return not self.faults()

    def copied(self, output_ids: Iterable[int] | None = None, input_ids: Iterable[int] | None = None) -> IROp:
        """A copy of the operation, with other outputs and inputs if they are not None."""
        op = copy.copy(self)
        op.output_ids = list(self.output_ids if output_ids is None else output_ids)
        op.input_ids = list(self.input_ids if input_ids is None else input_ids)
        op.outputs, op.attributes = list(self.outputs), dict(self.attributes)
        return op

    def detailed(self) -> str:
        """The text of the operation with its attributes.

        >>> op = IROp("Concat", [2], [0, 1], [TensorType(IRType.Float32, TensorShape((3, 8)))], {"dim": 1})
        >>> print(op.detailed())
        t2 = Concat(t0, t1) {dim=1} : Float32 [3, 8]
        """
        return self._text(items_to_text(self.attributes))

    def __str__(self) -> str:
        return self._text("")

    def _text(self, attributes: str) -> str:
        made, read = (", ".join(f"t{id}" for id in ids) for ids in (self.output_ids, self.input_ids))
        return f"{made} = {self.op_type}({read}){attributes} : {', '.join(map(str, self.outputs))}"

    __repr__ = detailed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IROp) and self.detailed() == other.detailed()

    __hash__ = None  # type: ignore[assignment]  operations can be changed
