"""The table of operations: what each is captured from, what tells its types and shapes, and what computes it.

A row is a name in `fakequant.ir.ops`. A name with dots that has no row is an operator of torch. Of both, arguments come
from torch's schema and results from torch's meta kernel, so that whatever torch.export writes can be in a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, product
from math import prod
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from fakequant.errors import GraphError, nearest
from fakequant.ir.op import (
    DYNAMIC,
    ArgumentKind,
    Call,
    IROp,
    IRType,
    Parameter,
    Signature,
    TensorShape,
    TensorType,
    bind,
    items_to_text,
    same,
    signature_of,
)

Check = Callable[[Call], None]
Rule = Callable[[Call], Sequence[TensorType]]


@dataclass(frozen=True)
class OperationRow:
    """One kind of operation.

    Attributes:
        name: its name in graphs.
        signatures: its forms; those of torch's operators are what it is captured from and what computes it.
        check: raises GraphError with the reason for which it does not take the inputs, where torch's meta kernel would.
        rule: the types and shapes of its results, -1 where a dimension is dynamic; raises GraphError as `check` does.
            Without one, torch's meta kernel decides.
        module: makes the module that computes it, where no operator of torch does.
        moves: whether every element of the result is one of the first input, each once: a reshape, a transpose.
        draws: whether an operation draws random numbers; by default its operators' tags tell.
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


def add_row(
    name: str,
    targets: str,
    *,
    check: Check | None = None,
    rule: Rule | None = None,
    moves: bool = False,
    draws: Callable[[IROp], bool] | None = None,
) -> None:
    """Add a kind of operation that operators of torch compute.

    Args:
        name: its name in graphs.
        targets: the operators, such as "aten.add.Tensor aten.add.Scalar"; where the arguments fit several, the first.
        check: as in `OperationRow`; so are the others.
        rule: in place of torch's meta kernel.
        moves: false where elements are computed or left out.
        draws: if not by the tags of the operators.
    """
    signatures = tuple(signature_of(find_overload(target)) for target in targets.split())
    _put(OperationRow(name, signatures, check, rule, moves=moves, draws=draws))


def add_module_row(name: str, parameters: Iterable[Parameter], rule: Rule, module: Callable[[Call], nn.Module]) -> None:
    """Add a kind of operation that a module computes."""
    _put(OperationRow(name, (Signature(tuple(parameters)),), rule=rule, module=module))


def add_function_row(name: str, function: Callable[..., object]) -> None:
    """Add a kind of operation that a function of Python computes: a size from two sizes."""
    size = TensorType(IRType.Index, TensorShape())
    parameters = (Parameter("self", "int"), Parameter("other", "int"))
    _put(OperationRow(name, (Signature(parameters, function),), rule=lambda call: [size]))


def _put(row: OperationRow) -> None:
    ROWS[row.name] = row
    for signature in row.signatures:
        if signature.target is not None:
            _captured_from.setdefault(signature.target, row.name)


def find_overload(name: str) -> OpOverload:
    """The operator of torch of a name such as "aten.add.Tensor".

    Raises:
        GraphError: torch has none.
    """
    parts = name.split(".")
    if parts[0].startswith(_PRIVATE):
        raise GraphError(f"{name} is a kernel that trusts its arguments, and no operation of graphs; FakeQuantize is")
    if len(parts) == 3:
        packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
        overload = None if packet is None else getattr(packet, parts[2], None)
        if isinstance(overload, OpOverload):
            return overload
    raise GraphError(f"torch has no operator {name!r}; its names are such as aten.add.Tensor")


def name_of(target: object) -> str:
    """The name in graphs of an operator of torch or a function.

    Raises:
        GraphError: something else.
    """
    if target in _captured_from:
        return _captured_from[target]
    if isinstance(target, OpOverload):
        return str(target)
    name = shown_target(target)  # such as sym_float, of sizes that a graph does not compute with
    raise GraphError(f"the operation {name} cannot be in a graph; it is no operator of torch")


def shown_target(target: object) -> str:
    """The name of an operator of torch, or of a function, for a message."""
    return str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))


def find_row(name: str) -> OperationRow:
    """The row of a kind of operation.

    Raises:
        GraphError: there is none, and it is no operator of torch; the nearest are offered.
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
    """The row of an operation and its arguments.

    Raises:
        GraphError: an unknown operation, or arguments that it does not take.
    """
    row = find_row(op.op_type)
    return row, bind(op, row.signatures, inputs)


def infer(op: IROp, inputs: Sequence[TensorType]) -> list[TensorType]:
    """The types and shapes of an operation's results.

    Raises:
        GraphError: the inputs or attributes do not fit; says why.
    """
    row, call = bound(op, inputs)
    if row.check is not None:
        row.check(call)
    if row.rule is not None:
        return list(row.rule(call))
    found = _by_torch(_Question.of(call))
    if found is None and not op.outputs:
        raise GraphError("makes what only a run can tell; append an IROp with its outputs to the graph's ops")
    return list(op.outputs if found is None else found)


# torch raises these for operators without a rule for shapes, and for sizes that depend on values, as with nonzero.
_UNTOLD = (
    NotImplementedError,
    UnsupportedOperatorException,
    DynamicOutputShapeException,
    DataDependentOutputException,
)


@dataclass(frozen=True)
class _Question:
    """A call, equal to those for which torch finds the same: layers repeat, and torch takes 0.3 ms and more."""

    call: Call = field(compare=False)
    op_type: str
    attributes: str
    inputs: tuple[TensorType, ...]
    settings: tuple[object, ...]

    @staticmethod
    def of(call: Call) -> _Question:
        """The question to torch what a call makes."""
        settings = torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return _Question(call, call.op.op_type, items_to_text(call.op.attributes), tuple(call.inputs), settings)


@lru_cache(maxsize=4096)
def _by_torch(question: _Question) -> tuple[TensorType, ...] | None:
    """What torch's meta kernel finds; None if only a run can tell.

    Raises:
        GraphError: the inputs do not fit.
    """
    call = question.call
    is_size: list[bool] = []
    for type, shape in call.inputs:
        is_size += [True] if type is IRType.Index else [False] * shape.count(DYNAMIC)
    try:
        return _by_lengths(call, is_size) if is_size else _by_fake_tensors(call, call.inputs)
    except _UNTOLD:
        return None


def _by_lengths(call: Call, is_size: list[bool]) -> tuple[TensorType, ...] | None:
    """What torch's meta kernel finds, whichever lengths dynamic dimensions and sizes have; None if it is not sure.

    Two lengths of all dynamic dimensions are tried, and a dimension of the result that differs is dynamic. Where only
    one length fits, or lengths that differ between the dimensions, all dimensions of the result are; so they are where
    sizes are given, because nothing tells how these follow from the dimensions.

    Raises:
        GraphError: no lengths fit.
    """
    refused: list[GraphError] = []

    def fitting(tries: Iterable[Sequence[int]]) -> Iterator[tuple[TensorType, ...]]:
        for lengths in tries:
            try:
                yield _by_fake_tensors(call, _with_lengths(call.inputs, lengths))
            except GraphError as error:
                if not refused:
                    refused.append(error)

    made = list(islice(fitting(_alike(call, is_size)), 1 if any(is_size) else 2))
    if len(made) == 2:
        return _merged(call, *made)
    others = product((_SOME[0], 1, *_given(call)), repeat=len(is_size))
    made = made or list(islice(fitting(islice(others, _MOST_TRIES)), 1))
    if made:
        return tuple(TensorType(type, TensorShape(DYNAMIC for _ in shape)) for type, shape in made[0])
    # A size may be any, and less is known of operators without a row: what fits may not have been tried.
    if any(is_size) or call.op.op_type not in ROWS or next(others, None) is not None:
        return None
    raise GraphError(f"{refused[0]} (with {_SOME[0]} for what is dynamic)") from refused[0]


# The first is divisible by what sizes are commonly divided by, the second shorter than what slices leave.
_SOME = (840, 2, 1680)
_MOST_TRIES = 500  # of 0.3 ms


def _alike(call: Call, is_size: list[bool]) -> Iterator[list[int]]:
    """One length for all dynamic dimensions and sizes."""
    yield [_SOME[0]] * len(is_size)
    # A reshape takes one size that is left over, -1.
    for free in (i for i, size in enumerate(is_size) if size):
        yield [-1 if i == free else 1 if size else _SOME[0] for i, size in enumerate(is_size)]
    given = _given(call)
    combined = (n for a in given for b in given for n in (a * b, a // b, a + b))
    for length in dict.fromkeys((*_SOME[1:], *given, *combined)):
        if length > 1:
            yield [length] * len(is_size)


def _given(call: Call) -> list[int]:
    """Lengths in a call, to which dynamic dimensions may be bound, and the sums and products of its lists."""
    values = [value if isinstance(value, (list, tuple)) else [value] for value in call.arguments.values()]
    lists = [[n for n in value if type(n) is int] for value in values]
    lists += [[n for n in t.shape if n != DYNAMIC] for t in call.inputs]
    lengths = [n for found in lists for n in (*found, sum(found), prod(found))]
    return sorted({n for n in lengths if 1 < n < 2**20})


def _with_lengths(inputs: Sequence[TensorType], lengths: Iterable[int]) -> list[TensorType | int]:
    """Inputs whose dynamic dimensions and sizes have these lengths, in order."""
    left = iter(lengths)
    return [
        next(left)
        if type is IRType.Index
        else TensorType(type, TensorShape(next(left) if n == DYNAMIC else n for n in shape))
        for type, shape in inputs
    ]


def _merged(call: Call, *made: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """Results for two lengths of the dynamic dimensions as one."""
    one, other = made
    if len(one) != len(other):
        raise GraphError(f"cannot tell into how many parts it splits {call.inputs[0].shape}")
    return tuple(
        TensorType(type, TensorShape(n if n == m else DYNAMIC for n, m in zip(shape, also, strict=True)))
        for (type, shape), (_, also) in zip(one, other, strict=True)
    )


def _by_fake_tensors(call: Call, inputs: Sequence[TensorType | int]) -> tuple[TensorType, ...]:
    """The types that torch finds for fake tensors; it knows most restrictions of an operator and computes nothing."""
    assert isinstance(call.signature.target, OpOverload)
    args, kwargs = call.filled(inputs)
    with _without_memory():
        try:
            args, kwargs = _as_fake(args), {name: _as_fake(value) for name, value in kwargs.items()}
            made = call.signature.target(*args, **kwargs)
        except _UNTOLD:
            raise
        except (RuntimeError, IndexError, TypeError, ValueError, ArithmeticError, AssertionError) as error:
            raise GraphError(f"torch refuses it: {str(error).splitlines()[0]}") from error
    return tuple(_type_of(result) for result in (made if isinstance(made, (tuple, list)) else [made]))


@contextmanager
def _without_memory() -> Iterator[None]:
    """A context in which operators allocate no memory and compute nothing, also those that read no tensor."""
    before = _inferring.set(True)
    try:
        # Fallback kernels run an operator that has no rule for shapes on real tensors.
        with FakeTensorMode(allow_fallback_kernels=False):
            yield
    finally:
        _inferring.reset(before)


_inferring = ContextVar("_inferring", default=False)
# Torch logs arguments that an operator does not take, with a traceback, before it raises.
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: not _inferring.get())


def _as_fake(value: Any) -> Any:
    """A fake tensor for a type; devices as the CPU, so that all machines say the same."""
    if isinstance(value, TensorType):
        missing = value.type is IRType.Missing
        return None if missing else torch.empty(value.shape, dtype=value.type.dtype, device="cpu")
    if isinstance(value, torch.device):
        if value.type == "meta":
            raise GraphError("makes a tensor of the device meta, which has no memory")
        return torch.device("cpu")
    return [_as_fake(item) for item in value] if isinstance(value, (list, tuple)) else value


def _type_of(result: object) -> TensorType:
    if result is None:
        return TensorType(IRType.Missing, TensorShape())
    if isinstance(result, int):
        return TensorType(IRType.Index, TensorShape())
    if not isinstance(result, torch.Tensor):
        raise GraphError(f"makes {result!r}, which is no tensor")
    if result.layout != torch.strided:
        raise GraphError(f"makes a tensor of layout {result.layout}, and a graph holds dense ones")
    return TensorType.of(result)


def repeatable(op: IROp) -> bool:
    """Whether an operation gives the same result for the same inputs every time."""
    row = find_row(op.op_type)
    if row.draws is not None:
        return not row.draws(op)
    tag = torch.Tag.nondeterministic_seeded
    return not any(isinstance(s.target, OpOverload) and tag in s.target.tags for s in row.signatures)


def without_defaults(op: IROp) -> dict[str, Any]:
    """The attributes of an operation but those that are the defaults in all of its forms."""
    parameters = [p for s in find_row(op.op_type).signatures for p in s.parameters if p.kind is ArgumentKind.VALUE]

    def is_default(name: str, value: Any) -> bool:
        named = [p for p in parameters if p.name == name]
        return bool(named) and all(not p.required and same(value, p.default) for p in named)

    return {name: value for name, value in op.attributes.items() if not is_default(name, value)}


def in_order(op: IROp) -> bool:
    """Whether inputs fill the parameters by their places: no attribute stands for one or names it.

    Passes that look at the first or second input leave other operations alone.
    """
    tensors = {
        p.name for s in find_row(op.op_type).signatures for p in s.parameters if p.kind is not ArgumentKind.VALUE
    }
    return not tensors & op.attributes.keys()


def faults(op: IROp, inputs: Sequence[TensorType]) -> list[str]:
    """What is wrong with an operation whose inputs have these types, one sentence each; empty if nothing is."""
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
    return [
        f"declares t{id} as {declared}, but its inputs make it {found}"
        for id, declared, found in zip(op.output_ids, op.outputs, inferred, strict=True)
        if not _declares(declared, found)
    ]


def _declares(declared: TensorType, found: TensorType) -> bool:
    # What is declared as missing is read by nothing, so that its type does not matter.
    fits = declared.type is found.type and TensorShape(declared.shape).matches(found.shape) and 0 not in found.shape
    return fits or declared.type is IRType.Missing


def make_op(op_type: str, input_ids: Iterable[int] = (), attributes: dict[str, Any] | None = None) -> IROp:
    """An operation of the class that the table has for its name, which makes nothing yet."""
    op = object.__new__(OP_CLASSES.get(op_type, IROp))
    IROp.__init__(op, op_type, (), input_ids, (), attributes)
    return op
