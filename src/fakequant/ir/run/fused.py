"""Operations that are one: a product and what follows it, computed by the same kernels in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fakequant.errors import GraphError
from fakequant.ir.op import IROp
from fakequant.ir.signature import Call, Parameter, Signature
from fakequant.ir.table import ROWS, OperationRow, faults, make_op, repeatable
from fakequant.ir.types import TensorType

NAME = "Fused"


def fuse(ops: Sequence[IROp]) -> IROp:
    """One operation that is a chain of others; its last result is the only one.

    Args:
        ops: in their order; every result but the last is read within the chain only.
    """
    made = {id for op in ops for id in op.output_ids}
    inputs = list(dict.fromkeys(id for op in ops for id in op.input_ids if id not in made))
    local = {id: place for place, id in enumerate(inputs)}
    body: list[IROp] = []
    for op in ops:
        read = [local[id] for id in op.input_ids]
        local.update({id: len(local) + place for place, id in enumerate(op.output_ids)})
        body.append(op.copied([local[id] for id in op.output_ids], read))
    attributes: dict[str, Any] = {"name": "+".join(op.op_type for op in ops), "body": body}
    fused = make_op(NAME, inputs, attributes)
    fused.output_ids, fused.outputs = list(ops[-1].output_ids), list(ops[-1].outputs)
    fused.origin = ops[0].origin
    return fused


def body_of(op: IROp) -> list[IROp]:
    """The operations of a fused one, whose values are t0, t1, ...: its inputs first. Copy them before a change.

    Raises:
        GraphError: its attribute is no list of operations.
    """
    body = op.attributes.get("body")
    if not isinstance(body, (list, tuple)) or not body or not all(isinstance(part, IROp) for part in body):
        raise GraphError(f"takes a list of operations as its body, got {body!r}")
    return list(body)


def _rule(call: Call) -> list[TensorType]:
    """The types of the last operation; all are checked like those of a graph."""
    known = dict(enumerate(call.inputs))
    body = body_of(call.op)
    for op in body:
        if missing := [id for id in op.input_ids if id not in known]:
            raise GraphError(f"in its body {op} reads t{missing[0]}, which nothing makes before")
        if op.op_type == NAME:
            raise GraphError(f"in its body is another {NAME}: {op}")
        if found := faults(op, [known[id] for id in op.input_ids]):
            raise GraphError(f"in its body {op}: {found[0]}")
        if twice := [id for id in op.output_ids if id in known]:
            raise GraphError(f"in its body {op} makes t{twice[0]}, which is there already")
        known.update(zip(op.output_ids, op.outputs, strict=True))
    return body[-1].outputs


def _draws(op: IROp) -> bool:
    return not all(repeatable(part) for part in body_of(op))


_PARAMETERS = (Parameter("tensors", "List[Tensor]"), Parameter("name", "str"), Parameter("body", "List[Operation]"))
ROWS[NAME] = OperationRow(NAME, (Signature(_PARAMETERS),), _rule, draws=_draws)
