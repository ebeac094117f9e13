"""The table of operations: what each is captured from, its rule for types and shapes, and what computes it.

A row is one line in one of the modules of `fakequant.ir.ops`. A name with dots that has no row is an operator of torch:
its arguments come from its schema and its results from its meta kernel, so that whatever torch.export writes can be in
a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
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
    same,
    signature_of,
)

Rule = Callable[[Call], Sequence[TensorType]]


@dataclass(frozen=True)
class OperationRow:
    """One kind of operation.

    Attributes:
        name: its name in graphs.
        signatures: its forms; those of torch's operators are what it is captured from and what computes it.
        rule: the types and shapes of its results, -1 where a dimension is dynamic; raises GraphError with the reason
            for which the inputs do not fit. Without one, torch's meta kernel decides.
        module: makes the module that computes it, where no operator of torch does.
        moves: whether every element of the result is one of the first input, each once: a reshape, a transpose.
        draws: whether an operation draws random numbers; by default its operators' tags tell.
    """

    name: str
    signatures: tuple[Signature, ...]
    rule: Rule | None = None
    module: Callable[[Call], nn.Module] | None = None
    moves: bool = False
    draws: Callable[[IROp], bool] | None = None


# Divisible by what sizes are commonly divided by.
_SOME = 840

# Libraries of kernels that backends call with arguments that they have checked.
_PRIVATE = "fakequant_"

ROWS: dict[str, OperationRow] = {}
OP_CLASSES: dict[str, type[IROp]] = {}
_captured_from: dict[object, str] = {}


def add_row(
    name: str,
    targets: str,
    rule: Rule | None,
    *,
    moves: bool = False,
    draws: Callable[[IROp], bool] | None = None,
) -> None:
    """Add a kind of operation that operators of torch compute.

    Args:
        name: its name in graphs.
        targets: the operators, such as "aten.add.Tensor aten.add.Scalar"; where the arguments fit several, the first.
        rule: as in `OperationRow`.
        moves: as in `OperationRow`.
        draws: as in `OperationRow`.
    """
    overloads = [find_overload(target) for target in targets.split()]
    _put(OperationRow(name, tuple(signature_of(overload) for overload in overloads), rule, moves=moves, draws=draws))


def add_module_row(name: str, parameters: Iterable[Parameter], rule: Rule, module: Callable[[Call], nn.Module]) -> None:
    """Add a kind of operation that a module computes."""
    _put(OperationRow(name, (Signature(tuple(parameters)),), rule, module))


def add_function_row(name: str, function: Callable[..., object], parameters: Iterable[Parameter], rule: Rule) -> None:
    """Add a kind of operation that a function of Python computes."""
    _put(OperationRow(name, (Signature(tuple(parameters), function),), rule))


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
    raise GraphError(f"the operation {target} cannot be in a graph; it is no operator of torch")


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
    found = None if row.rule is None else list(row.rule(call))
    dynamic = any(t.shape.dynamic for t in inputs)
    if any(t.type is IRType.Index for t in inputs) or not isinstance(call.signature.target, OpOverload):
        return list(op.outputs) if found is None else found
    if found is None and dynamic:
        return _by_some_sizes(call)
    # A rule says in the words of graphs what does not fit; of static shapes torch knows every restriction.
    return found if found is not None and dynamic else _by_fake_tensors(call)


# torch raises these for operators without a rule for shapes, and for sizes that depend on values, as with nonzero.
_UNTOLD = (
    NotImplementedError,
    UnsupportedOperatorException,
    DynamicOutputShapeException,
    DataDependentOutputException,
)


def _by_some_sizes(call: Call) -> list[TensorType]:
    """What is known about an operator's results before dynamic dimensions are known: element types and ranks."""
    types = [TensorType(t.type, TensorShape(_SOME if n == DYNAMIC else n for n in t.shape)) for t in call.inputs]
    try:
        made = _by_fake_tensors(Call(call.op, call.signature, call.arguments, types))
    except GraphError:
        # Other sizes may fit; a run tells.
        return list(call.op.outputs)
    return [TensorType(t.type, TensorShape(DYNAMIC for _ in t.shape)) for t in made]


def _by_fake_tensors(call: Call) -> list[TensorType]:
    """The types that torch finds for fake tensors; it knows each restriction of an operator and computes nothing."""
    assert call.signature.target is not None
    args, kwargs = call.filled(call.inputs)
    with _without_memory():
        args, kwargs = _as_fake(args), {name: _as_fake(value) for name, value in kwargs.items()}
        try:
            made = call.signature.target(*args, **kwargs)
        except _UNTOLD:
            return list(call.op.outputs)
        except (RuntimeError, IndexError, TypeError, ValueError, ArithmeticError) as error:
            raise GraphError(f"torch refuses it: {str(error).splitlines()[0]}") from error
    return [_type_of(result) for result in (made if isinstance(made, (tuple, list)) else [made])]


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
    same = declared.type is found.type and TensorShape(declared.shape).matches(found.shape)
    return same or declared.type is IRType.Missing


def make_op(op_type: str, input_ids: Iterable[int] = (), attributes: dict[str, Any] | None = None) -> IROp:
    """An operation of the class that the table has for its name, which makes nothing yet."""
    op = object.__new__(OP_CLASSES.get(op_type, IROp))
    IROp.__init__(op, op_type, (), input_ids, (), attributes)
    return op
