"""One operation of a graph."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from typing import Any

from fakequant.errors import GraphError
from fakequant.ir.attributes import Quoted, items_to_text
from fakequant.ir.types import IRType, TensorShape, TensorType

_OP_TYPE = re.compile(r"\w+(\.\w+)*", re.ASCII)


def is_id(value: object) -> bool:
    """Whether something can be the id of a value: an integer from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class IROp(Quoted):
    """An operation: which values it reads, which it makes, of what type and shape.

    Args:
        op_type: the name in the table of operations, or that of any operator of torch such as "aten.erf.default".
        output_ids: of the values it makes.
        input_ids: of the values it reads, in order.
        outputs: type and shape of every value it makes.
        attributes: all other arguments by name, see `fakequant.ir.attributes.to_text` for what they may be.
        origin: path of the module that it was captured from.

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
        """The first value it makes; -1 if there is none."""
        return self.output_ids[0] if self.output_ids else -1

    @output_id.setter
    def output_id(self, value: int) -> None:
        self.output_ids = [value]

    @property
    def output_type(self) -> IRType:
        """The element type of the first value it makes; Float32 if there is none."""
        return self.outputs[0].type if self.outputs else IRType.Float32

    @output_type.setter
    def output_type(self, value: IRType) -> None:
        self.outputs = [TensorType(value, self.output_shape), *self.outputs[1:]]

    @property
    def output_shape(self) -> TensorShape:
        """The shape of the first value it makes; that of a scalar if there is none."""
        return self.outputs[0].shape if self.outputs else TensorShape()

    @output_shape.setter
    def output_shape(self, value: Sequence[int]) -> None:
        self.outputs = [TensorType(self.output_type, TensorShape(value)), *self.outputs[1:]]

    def faults(self) -> list[str]:
        """What is wrong with the operation by itself, one sentence each; empty if nothing is.

        What `fakequant.ir.table.faults` finds, given the types of the inputs, comes on top.
        """
        kinds = {"op_type": str, "origin": str, "attributes": dict, "output_ids": list, "input_ids": list}
        kinds["outputs"] = list
        fields = [(name, kind, getattr(self, name)) for name, kind in kinds.items()]
        if wrong := [field for field in fields if not isinstance(field[2], field[1])]:
            return [f"its {name} must be a {kind.__name__}, got {value!r}" for name, kind, value in wrong]
        found = []
        if not self.output_ids:
            found.append("makes no value: output_ids is empty")
        for what, ids in (("output", self.output_ids), ("input", self.input_ids)):
            if wrong_ids := [id for id in ids if not is_id(id)]:
                found.append(f"the {what} id {wrong_ids[0]!r} is no integer >= 0")
        if len(self.output_ids) != len(self.outputs):
            found.append(f"has {len(self.output_ids)} output ids, but {len(self.outputs)} types of outputs")
        for place, type in enumerate(self.outputs):
            fault = type.fault() if isinstance(type, TensorType) else f"{type!r} is no TensorType"
            found += [f"output {place}: {fault}"] if fault else []
        if not _OP_TYPE.fullmatch(self.op_type):
            found.append(f"the op_type {self.op_type!r} is no name such as Add or aten.add.Tensor")
        try:
            items_to_text(self.attributes)
        except GraphError as error:
            found.append(str(error))
        return found

    def validate(self) -> bool:
        """Whether the operation by itself is well formed; `faults` says why not."""
        return not self.faults()

    def copied(self, output_ids: Iterable[int] | None = None, input_ids: Iterable[int] | None = None) -> IROp:
        """The same operation, between other values if they are given."""
        op = copy.copy(self)
        op.output_ids = list(self.output_ids if output_ids is None else output_ids)
        op.input_ids = list(self.input_ids if input_ids is None else input_ids)
        op.outputs, op.attributes = list(self.outputs), dict(self.attributes)
        return op

    def detailed(self) -> str:
        """`str(op)` with the attributes.

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
