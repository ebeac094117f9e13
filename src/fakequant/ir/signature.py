"""How the inputs and attributes of an operation become the arguments of an operator.

Inputs that no attribute names by `%n` fill the parameters that take tensors, in order; a list of tensors takes all that
are left. A parameter that an attribute names, such as `weight=none`, is not filled by an input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from fakequant.errors import GraphError, nearest
from fakequant.ir.attributes import Ref, references, to_text
from fakequant.ir.op import IROp
from fakequant.ir.types import IRType, TensorShape, TensorType


class ArgumentKind(Enum):
    """The kinds of arguments."""

    TENSOR = "tensor"
    TENSORS = "list of tensors"
    VALUE = "value"


class Parameter(NamedTuple):
    """One parameter of an operator; `type` is that of its schema, such as "Optional[List[int]]"."""

    name: str
    type: str
    required: bool = True
    default: Any = None
    keyword_only: bool = False

    @property
    def kind(self) -> ArgumentKind:
        """The kind of argument."""
        inner = self.type.removeprefix("Optional[")
        if inner.startswith("Tensor"):
            return ArgumentKind.TENSOR
        return ArgumentKind.TENSORS if inner.startswith(("List[Tensor", "List[Optional[Tensor")) else ArgumentKind.VALUE


@dataclass(frozen=True)
class Signature:
    """One form of an operation: its parameters, and the operator of torch that computes it, if one does."""

    parameters: tuple[Parameter, ...]
    target: Callable[..., Any] | None = None
    name: str = ""


@lru_cache
def signature_of(overload: OpOverload) -> Signature:
    """The signature of an operator of torch."""
    parameters = tuple(
        Parameter(a.name, str(a.real_type), not a.has_default_value(), a.default_value, a.kwarg_only)
        for a in overload._schema.arguments
    )
    return Signature(parameters, overload, str(overload))


@dataclass(frozen=True)
class Call:
    """An operation whose inputs and attributes are bound to the parameters of a signature.

    In `arguments`, which has what was given by name, a `Ref` stands for every input.
    """

    op: IROp
    signature: Signature
    arguments: dict[str, Any]
    inputs: Sequence[TensorType]

    def has(self, name: str) -> bool:
        """Whether an argument was given and is not none."""
        return self.arguments.get(name) is not None

    def type(self, name: str) -> TensorType:
        """The type of a tensor; of a number or size in its place, that of a 0-d tensor."""
        value = self.arguments[name]
        if isinstance(value, Ref):
            found = self.inputs[value.position]
            return TensorType(IRType.Int64, found.shape) if found.type is IRType.Index else found
        kind = IRType.Boolean if isinstance(value, bool) else IRType.Int64 if isinstance(value, int) else IRType.Float32
        return TensorType(kind, TensorShape())

    def shape(self, name: str) -> TensorShape:
        """The shape of a tensor."""
        return self.type(name).shape

    def types(self, name: str) -> list[TensorType]:
        """The types of a list of tensors."""
        return [self.inputs[ref.position] for ref in references(self.arguments[name])]

    def value(self, name: str) -> Any:
        """An argument that is no tensor, or its default; -1 stands for every size that is known only at run time."""
        if name in self.arguments:
            return _unknown(self.arguments[name])
        return next(p.default for p in self.signature.parameters if p.name == name)

    def filled(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments for the operator, with values in the places of the inputs."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for place, parameter in enumerate(self.signature.parameters):
            if parameter.name not in self.arguments:
                continue
            value = _filled(self.arguments[parameter.name], values)
            if parameter.keyword_only or place > len(args):
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return tuple(args), kwargs


def _unknown(value: Any) -> Any:
    if isinstance(value, Ref):
        return -1
    return [_unknown(item) for item in value] if isinstance(value, (list, tuple)) else value


def _filled(value: Any, values: Sequence[Any]) -> Any:
    if isinstance(value, Ref):
        return values[value.position]
    return [_filled(item, values) for item in value] if isinstance(value, (list, tuple)) else value


def bind(op: IROp, signatures: Sequence[Signature], inputs: Sequence[TensorType]) -> Call:
    """An operation bound to the first signature that fits, or to the one that its attribute `overload` names.

    Raises:
        GraphError: none fits; says why.
    """
    attributes = dict(op.attributes)
    wanted = attributes.pop("overload", None) if len(signatures) > 1 else None
    reasons: list[str] = []
    for signature in signatures:
        if wanted is not None and signature.name != wanted:
            continue
        try:
            call = Call(op, signature, _arguments(op, signature, attributes), inputs)
            _check(call)
        except GraphError as error:
            reasons.append(str(error))
        else:
            return call
    if not reasons:
        raise GraphError(f"has no overload {wanted!r}{nearest(str(wanted), [s.name for s in signatures])}")
    raise GraphError(reasons[0] if len(set(reasons)) == 1 else "; or ".join(dict.fromkeys(reasons)))


def _arguments(op: IROp, signature: Signature, attributes: dict[str, Any]) -> dict[str, Any]:
    names = [p.name for p in signature.parameters]
    if unknown := [name for name in attributes if name not in names]:
        raise GraphError(f"has no attribute {unknown[0]!r}{nearest(unknown[0], names)}")
    named = references(list(attributes.values()))
    if beyond := [ref for ref in named if ref.position >= len(op.input_ids)]:
        raise GraphError(f"names the input {beyond[0]}, but has {_inputs(len(op.input_ids))}")
    taken = {ref.position for ref in named}
    free = [Ref(i) for i in range(len(op.input_ids)) if i not in taken]
    given = len(free)
    found: dict[str, Any] = {}
    for parameter in signature.parameters:
        if parameter.name in attributes:
            found[parameter.name] = attributes[parameter.name]
        elif parameter.kind is ArgumentKind.TENSORS and (free or parameter.required):
            found[parameter.name], free = free, []
        elif parameter.kind is ArgumentKind.TENSOR and free:
            found[parameter.name] = free.pop(0)
        elif parameter.required:
            raise GraphError(f"lacks the {parameter.kind.value} {parameter.name!r}: it has {_inputs(given)}")
    if free:
        raise GraphError(f"has {_inputs(given)}, {len(free)} more than it takes")
    return found


def _inputs(count: int) -> str:
    return f"{count} input{'s' * (count != 1)}"


def _check(call: Call) -> None:
    """Check the types of the arguments.

    Raises:
        GraphError: one is not.
    """
    for parameter in call.signature.parameters:
        if parameter.name not in call.arguments:
            continue
        value = call.arguments[parameter.name]
        for ref in references(value):
            found = call.inputs[ref.position].type
            # A size may stand for a tensor that accepts a number.
            fits = found is IRType.Index or parameter.kind is not ArgumentKind.VALUE
            if (
                not fits
                or found is IRType.Missing
                or (found is IRType.Index and parameter.kind is ArgumentKind.TENSORS)
            ):
                raise GraphError(f"takes a {parameter.kind.value} as {parameter.name!r}, got an input of {found.value}")
        if not _fits(value, parameter.type):
            raise GraphError(f"takes {parameter.type} as {parameter.name!r}, got {to_text(value)}")


def _fits(value: Any, type: str) -> bool:
    if type.startswith("Optional["):
        return value is None or _fits(value, type[9:-1])
    if type.startswith("List["):
        # torch accepts one number for all axes.
        items = value if isinstance(value, (list, tuple)) else [value] if type != "List[Tensor]" else None
        return items is not None and all(_fits(item, type[5:-1]) for item in items)
    if isinstance(value, Ref):
        return type in ("Tensor", "int", "number", "SymInt", "Scalar")
    is_number = isinstance(value, (int, float))
    if type in ("Tensor", "number", "Scalar"):
        return is_number
    if type in ("int", "SymInt"):
        return isinstance(value, int) and not isinstance(value, bool)
    if type == "float":
        return is_number and not isinstance(value, bool)
    kinds: dict[str, Any] = {"bool": bool, "str": str, "ScalarType": torch.dtype, "Layout": torch.layout}
    kinds |= {"Device": torch.device, "MemoryFormat": torch.memory_format, "Operation": IROp}
    return isinstance(value, kinds.get(type, ()))
