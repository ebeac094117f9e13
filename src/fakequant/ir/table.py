"""The table of operations: the operators from which each is captured, its types and shapes, and its computation.

A row is a name in `fakequant.ir.ops`. A name with dots that has no row is an operator of torch. For both, arguments
come from torch's schema and types of results from torch's meta kernel, so that graphs can contain all that torch.export
writes.

Inputs that no attribute names by `%n` fill the parameters for tensors, in order; a list of tensors takes all further
inputs. A parameter that an attribute names, such as `weight=none`, is not filled by an input.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import islice, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch.fx.node import map_aggregate

from fakequant.errors import GraphError, nearest
from fakequant.ir.op import DYNAMIC, IROp, IRType, Ref, TensorShape, TensorType, items_to_text, references, to_text
from fakequant.restore import set_to


class ArgumentKind(Enum):
    """The kinds of arguments of operators."""

    TENSOR = "tensor"
    TENSORS = "list of tensors"
    VALUE = "value"


class Parameter(NamedTuple):
    """One parameter of an operator; `type` is the type in its schema, such as "Optional[List[int]]"."""

    name: str
    type: str
    required: bool = True
    default: Any = None
    keyword_only: bool = False

    @property
    def kind(self) -> ArgumentKind:
        """The kind of argument that the parameter takes."""
        inner = self.type.removeprefix("Optional[")
        if inner.startswith("Tensor"):
            return ArgumentKind.TENSOR
        return ArgumentKind.TENSORS if inner.startswith(("List[Tensor", "List[Optional[Tensor")) else ArgumentKind.VALUE


@dataclass(frozen=True)
class Signature:
    """One overload of an operation: its parameters, and the operator of torch that computes it (None: no operator)."""

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
    """An operation, with its inputs and attributes bound to the parameters of a signature.

    `arguments` has the bound values by parameter name, with a `Ref` for every input.
    """

    op: IROp
    signature: Signature
    arguments: dict[str, Any]
    inputs: Sequence[TensorType]

    def has(self, name: str) -> bool:
        """Whether an argument is bound and is not None."""
        return self.arguments.get(name) is not None

    def type(self, name: str) -> TensorType:
        """The type of a tensor argument; a number or size in its place counts as a 0-d tensor."""
        value = self.arguments[name]
        if isinstance(value, Ref):
            found = self.inputs[value.position]
            return TensorType(IRType.Int64, found.shape) if found.type is IRType.Index else found
        kind = IRType.Boolean if isinstance(value, bool) else IRType.Int64 if isinstance(value, int) else IRType.Float32
        return TensorType(kind, TensorShape())

    def value(self, name: str) -> Any:
        """The value of an argument that is not a tensor, or its default, with -1 for sizes known only at run time."""
        if name in self.arguments:
            return map_aggregate(self.arguments[name], lambda item: DYNAMIC if isinstance(item, Ref) else item)
        return next(p.default for p in self.signature.parameters if p.name == name)

    def filled(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments for the operator, with `values` in place of the inputs."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for place, parameter in enumerate(self.signature.parameters):
            if parameter.name not in self.arguments:
                continue
            given = self.arguments[parameter.name]
            value = map_aggregate(given, lambda item: values[item.position] if isinstance(item, Ref) else item)
            if parameter.keyword_only or place > len(args):
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return tuple(args), kwargs


def bind(op: IROp, signatures: Sequence[Signature], inputs: Sequence[TensorType]) -> Call:
    """Bind an operation to the first signature that fits, or to the one in its attribute `overload`.

    Raises:
        GraphError: no signature fits; the message gives the reasons.
    """
    attributes = dict(op.attributes)
    wanted = attributes.pop("overload", None) if len(signatures) > 1 else None
    reasons: list[str] = []
    for signature in signatures:
        if wanted is not None and signature.name != wanted:
            continue
        try:
            arguments = _arguments(op, signature, attributes)
            for parameter in signature.parameters:
                if parameter.name in arguments:
                    value = arguments[parameter.name]
                    kind = parameter.kind
                    for ref in references(value):
                        found = inputs[ref.position].type
                        # A size may stand for a tensor that accepts a number.
                        wrong = kind is ArgumentKind.TENSORS if found is IRType.Index else kind is ArgumentKind.VALUE
                        if wrong or found is IRType.Missing:
                            raise GraphError(
                                f"takes a {kind.value} as {parameter.name!r}, got an input of {found.value}"
                            )
                    if not _fits(value, parameter.type):
                        raise GraphError(f"takes {parameter.type} as {parameter.name!r}, got {to_text(value)}")
        except GraphError as error:
            reasons.append(str(error))
        else:
            return Call(op, signature, arguments, inputs)
    if not reasons:
        raise GraphError(f"has no overload {wanted!r}{nearest(str(wanted), [s.name for s in signatures])}")
    raise GraphError("; or ".join(dict.fromkeys(reasons)))


def _arguments(op: IROp, signature: Signature, attributes: dict[str, Any]) -> dict[str, Any]:
    names = [p.name for p in signature.parameters]
    if unknown := [name for name in attributes if name not in names]:
        raise GraphError(f"has no attribute {unknown[0]!r}{nearest(unknown[0], names)}")
    named = references(list(attributes.values()))
    count = len(op.input_ids)
    if beyond := [ref for ref in named if ref.position >= count]:
        raise GraphError(f"names the input {beyond[0]}, but has {_inputs(count)}")
    free = [Ref(i) for i in range(count) if Ref(i) not in named]
    unnamed = _inputs(len(free))
    found: dict[str, Any] = {}
    for parameter in signature.parameters:
        if parameter.name in attributes:
            found[parameter.name] = attributes[parameter.name]
        elif parameter.kind is ArgumentKind.TENSORS and (free or parameter.required):
            found[parameter.name], free = free, []
        elif parameter.kind is ArgumentKind.TENSOR and free:
            found[parameter.name] = free.pop(0)
        elif parameter.required:
            raise GraphError(f"lacks the {parameter.kind.value} {parameter.name!r}: it has {unnamed}")
    if free:
        raise GraphError(f"has {unnamed}, {len(free)} more than it takes")
    return found


def _inputs(count: int) -> str:
    return f"{count} input{'s' * (count != 1)}"


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


Check = Callable[[Call], None]
Rule = Callable[[Call], Sequence[TensorType]]


@dataclass(frozen=True)
class OperationRow:
    """One kind of operation in the table.

    Attributes:
        name: the name in graphs.
        signatures: the overloads; torch's operators among them are captured as this operation, and compute it.
        check: raises GraphError with the reason if inputs do not fit, although torch's meta kernel would take them.
        rule: returns the types and shapes of results, -1 for a dynamic dimension; raises GraphError as `check` does.
            Without a rule, torch's meta kernel decides.
        module: makes the module that computes the operation, if no operator of torch does.
        moves: whether every element of the result is one of the first input, each once: a reshape, a transpose.
        draws: whether an operation draws random numbers; by default its operators' tags decide.
    """

    name: str
    signatures: tuple[Signature, ...]
    check: Check | None = None
    rule: Rule | None = None
    module: Callable[[Call], nn.Module] | None = None
    moves: bool = False
    draws: Callable[[IROp], bool] | None = None


# Libraries of kernels that backends call with arguments that they have checked.
_PRIVATE = "fakequant_"

ROWS: dict[str, OperationRow] = {}
OP_CLASSES: dict[str, type[IROp]] = {}
_captured_from: dict[object, str] = {}


def add_row(row: OperationRow) -> None:
    """Add a row; an operator of torch that is in several rows is captured as the first of these."""
    ROWS[row.name] = row
    for signature in row.signatures:
        if signature.target is not None:
            _captured_from.setdefault(signature.target, row.name)


def find_overload(name: str) -> OpOverload:
    """The operator of torch with a name such as "aten.add.Tensor".

    Raises:
        GraphError: torch has no such operator.
    """
    parts = name.split(".")
    if parts[0].startswith(_PRIVATE):
        raise GraphError(f"{name} does not check its arguments, so that graphs cannot have it; use FakeQuantize")
    if len(parts) == 3:
        overload = getattr(getattr(getattr(torch.ops, parts[0]), parts[1], None), parts[2], None)
        if isinstance(overload, OpOverload):
            return overload
    raise GraphError(f"torch has no operator {name!r}; its names are such as aten.add.Tensor")


def name_of(target: object) -> str:
    """The name in graphs for an operator of torch or a function.

    Raises:
        GraphError: `target` is something else.
    """
    if target in _captured_from:
        return _captured_from[target]
    if isinstance(target, OpOverload):
        return str(target)
    name = shown_target(target)  # such as sym_float, of sizes that a graph does not compute with
    raise GraphError(f"the operation {name} cannot be in a graph; it is not an operator of torch")


def shown_target(target: object) -> str:
    """The name of an operator or a function, for messages."""
    return str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))


def find_row(name: str) -> OperationRow:
    """The row of an operation.

    Raises:
        GraphError: neither the table nor torch has the operation; the message offers the nearest names.
    """
    if name in ROWS:
        return ROWS[name]
    if "." not in name:
        raise GraphError(f"unknown operation {name!r}{nearest(name, list(ROWS))}")
    overload = find_overload(name)
    if overload._schema.is_mutable:
        raise GraphError(f"{name} changes its inputs in place, which operations of a graph do not")
    return OperationRow(name, (signature_of(overload),))


def bound(op: IROp, inputs: Sequence[TensorType]) -> tuple[OperationRow, Call]:
    """The row of an operation, and its arguments bound to a signature.

    Raises:
        GraphError: an unknown operation, or arguments that it does not take.
    """
    row = find_row(op.op_type)
    return row, bind(op, row.signatures, inputs)


def infer(op: IROp, inputs: Sequence[TensorType]) -> list[TensorType]:
    """The types and shapes of an operation's results, from the types and shapes of its inputs.

    Raises:
        GraphError: the inputs or attributes do not fit; the message says why.
    """
    row, call = bound(op, inputs)
    if row.check is not None:
        row.check(call)
    if row.rule is not None:
        return list(row.rule(call))
    settings = torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    found = _by_torch(_Question((op.op_type, items_to_text(op.attributes), tuple(inputs), settings), call))
    if found is None and not op.outputs:
        raise GraphError(
            "has outputs whose shapes only a run can tell; append an IROp with its outputs to the graph's ops"
        )
    return list(op.outputs if found is None else found)


# torch raises these for operators without a rule for shapes, and for sizes that depend on values, as with nonzero.
_UNTOLD = (
    NotImplementedError,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.DataDependentOutputException,
)


@dataclass(frozen=True)
class _Question:
    """A call as a key of a cache: calls with equal keys have equal types, which torch infers in 0.3 ms or more."""

    key: tuple[object, ...]
    call: Call = field(compare=False)


@lru_cache(maxsize=4096)
def _by_torch(question: _Question) -> tuple[TensorType, ...] | None:
    """The types that torch's meta kernel infers; None if only a run can tell.

    Raises:
        GraphError: the inputs do not fit.
    """
    call = question.call
    is_size: list[bool] = []
    for type, shape in call.inputs:
        is_size += [True] if type is IRType.Index else [False] * shape.count(DYNAMIC)
    try:
        return _by_lengths(call, is_size) if is_size else _by_fake_tensors(call, ())
    except _UNTOLD:
        return None


def _by_lengths(call: Call, is_size: list[bool]) -> tuple[TensorType, ...] | None:
    """The types that torch's meta kernel infers for all lengths of dynamic dimensions; None if not certain.

    Two lengths of all dynamic dimensions are tried, and a dimension of the result that differs is dynamic. If only one
    length fits, or only different lengths for the dimensions, all dimensions of the result are dynamic; likewise if
    sizes are inputs, because their relation to the dimensions is unknown.

    Raises:
        GraphError: no lengths fit.
    """
    refused: list[GraphError] = []

    def fitting(tries: Iterable[Sequence[int]], most: int) -> list[tuple[TensorType, ...]]:
        found: list[tuple[TensorType, ...]] = []
        for lengths in tries:
            try:
                found.append(_by_fake_tensors(call, lengths))
            except GraphError as error:
                refused.append(error)
            if len(found) == most:
                break
        return found

    made = fitting(_alike(call, is_size), 1 if any(is_size) else 2)
    if len(made) == 2:
        one, other = made
        if len(one) != len(other):
            raise GraphError(f"cannot tell into how many parts it splits {call.inputs[0].shape}")
        return tuple(
            TensorType(type, TensorShape(n if n == m else DYNAMIC for n, m in zip(shape, also, strict=True)))
            for (type, shape), (_, also) in zip(one, other, strict=True)
        )
    others = product((_SOME[0], 1, *_lengths_in(call)), repeat=len(is_size))
    if made := made or fitting(islice(others, _MOST_TRIES), 1):
        return tuple(TensorType(type, TensorShape(DYNAMIC for _ in shape)) for type, shape in made[0])
    # A size may be any, and less is known of operators without a row: what fits may not have been tried.
    if any(is_size) or call.op.op_type not in ROWS or next(others, None) is not None:
        return None
    raise GraphError(f"{refused[0]} (with the length {_SOME[0]} for dynamic dimensions)") from refused[0]


# The first is divisible by what sizes are commonly divided by, the second shorter than what slices leave.
_SOME = (840, 2, 1680)
_MOST_TRIES = 500  # of 0.3 ms


def _alike(call: Call, is_size: list[bool]) -> Iterator[list[int]]:
    """Lists of lengths to try, one length per dynamic dimension or size.

    All lengths in a list are equal, except where one size is -1 (from a reshape) and the other sizes are 1.
    """
    yield [_SOME[0]] * len(is_size)
    for free in (i for i, size in enumerate(is_size) if size):
        yield [-1 if i == free else 1 if size else _SOME[0] for i, size in enumerate(is_size)]
    given = _lengths_in(call)
    combined = (n for a in given for b in given for n in (a * b, a // b, a + b))
    yield from ([n] * len(is_size) for n in dict.fromkeys((*_SOME[1:], *given, *combined)) if n > 1)


def _lengths_in(call: Call) -> list[int]:
    """The lengths in a call that a dynamic dimension may have to equal, and sums and products of the call's lists."""
    values = [value if isinstance(value, (list, tuple)) else [value] for value in call.arguments.values()]
    lists = [[n for n in value if type(n) is int] for value in values]
    lists += [[n for n in t.shape if n != DYNAMIC] for t in call.inputs]
    lengths = [n for found in lists for n in (*found, sum(found), prod(found))]
    return sorted({n for n in lengths if 1 < n < 2**20})


_inferring = ContextVar("_inferring", default=False)
# Torch logs arguments that an operator does not take, with a traceback, before it raises.
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: not _inferring.get())


def _by_fake_tensors(call: Call, lengths: Iterable[int]) -> tuple[TensorType, ...]:
    """The types that torch infers with fake tensors; it checks most restrictions of operators and computes nothing.

    Args:
        call: a call of an operator of torch.
        lengths: the lengths of the dynamic dimensions and sizes, in order.
    """
    assert isinstance(call.signature.target, OpOverload)
    left = iter(lengths)
    try:
        # Fallback kernels run an operator that has no rule for shapes on real tensors.
        with set_to(_inferring, True), fake_tensor.FakeTensorMode(allow_fallback_kernels=False):
            fakes: list[torch.Tensor | int | None] = []
            for type, shape in call.inputs:
                if type is IRType.Index:
                    fakes.append(next(left))
                    continue
                sizes = [next(left) if n == DYNAMIC else n for n in shape]
                is_missing = type is IRType.Missing
                fakes.append(None if is_missing else torch.empty(sizes, dtype=type.dtype, device="cpu"))
            args, kwargs = map_aggregate(call.filled(fakes), _on_cpu)
            made = call.signature.target(*args, **kwargs)
    except _UNTOLD:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError, ArithmeticError, AssertionError) as error:
        raise GraphError(f"torch refuses it: {str(error).splitlines()[0]}") from error
    return tuple(type_of(result) for result in (made if isinstance(made, (tuple, list)) else [made]))


def _on_cpu(value: Any) -> Any:
    """An argument with the CPU in place of any device, so that all machines infer the same."""
    if isinstance(value, torch.device) and value.type == "meta":
        raise GraphError("makes a tensor of the device meta, which has no memory")
    return torch.device("cpu") if isinstance(value, torch.device) else value


def type_of(value: Any) -> TensorType:
    """The type of an operator's result, fake or real.

    Raises:
        GraphError: a graph cannot hold it.
    """
    if value is None:
        return TensorType(IRType.Missing, TensorShape())
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return TensorType(IRType.Index, TensorShape())
    if not isinstance(value, torch.Tensor):
        raise GraphError(f"its result is a {type(value).__name__}, and a graph holds tensors and sizes")
    if value.layout != torch.strided:
        raise GraphError(f"its result is a tensor of layout {value.layout}, but a graph holds dense tensors only")
    return TensorType(IRType.of(value.dtype), TensorShape(n if isinstance(n, int) else DYNAMIC for n in value.shape))


def repeatable(op: IROp) -> bool:
    """Whether an operation always gives the same result for the same inputs, as it draws no random numbers."""
    row = find_row(op.op_type)
    if row.draws is not None:
        return not row.draws(op)
    tag = torch.Tag.nondeterministic_seeded
    return not any(isinstance(s.target, OpOverload) and tag in s.target.tags for s in row.signatures)


def in_order(op: IROp) -> bool:
    """Whether inputs fill the tensor parameters in order, with no attribute in place of a tensor.

    Passes that read the first or second input skip other operations.
    """
    parameters = (p for s in find_row(op.op_type).signatures for p in s.parameters)
    return not any(p.kind is not ArgumentKind.VALUE and p.name in op.attributes for p in parameters)


def faults(op: IROp, inputs: Sequence[TensorType]) -> list[str]:
    """List the faults of an operation whose inputs have these types, one sentence each; [] if there are none."""
    if found := op.faults():
        return found
    try:
        inferred = infer(op, inputs)
    except GraphError as error:
        return [str(error)]
    except Exception as error:  # whatever arguments a rule or torch did not expect are a fault of the operation
        return [f"cannot be checked: {type(error).__name__}: {error}"]
    if len(inferred) != len(op.outputs):
        return [f"makes {len(inferred)} values, but {len(op.outputs)} are declared"]
    wrong = []
    for id, declared, made in zip(op.output_ids, op.outputs, inferred, strict=True):
        fits = declared.type is made.type and TensorShape(declared.shape).matches(made.shape) and 0 not in made.shape
        # No operation reads a value that is declared as missing, so that its type does not matter.
        if not fits and declared.type is not IRType.Missing:
            wrong.append(f"declares t{id} as {declared}, but its inputs make it {made}")
    return wrong


def make_op(op_type: str, input_ids: Iterable[int] = (), attributes: dict[str, Any] | None = None) -> IROp:
    """An operation of the class that the table has for its name, without outputs yet."""
    op = object.__new__(OP_CLASSES.get(op_type, IROp))
    IROp.__init__(op, op_type, (), input_ids, (), attributes)
    return op
