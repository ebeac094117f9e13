"""The functions whose operands can get quantizers where a model calls them: names, aliases, operands and axes.

torch offers one function under many objects (`torch.add`, `Tensor.add`, `Tensor.add_`, `operator.add` ...). The table
gives all of them one name, so that a call counts as the same whether it runs eagerly, compiled or in an export. A new
function is one entry here.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant.errors import ConfigError, nearest


@dataclass(frozen=True)
class Operand:
    """One tensor argument of a function that may be quantized.

    Attributes:
        name: the attribute that holds its quantizer.
        position: among the positional arguments.
        keywords: the names under which it may be passed.
        channels: the axis of its output channels, where it is a weight.
        reduction: the axis that a product sums over; of other functions the axis of the features.
        positions: the number of last axes that hold the positions of a kernel, which a product sums over, too.
    """

    name: str
    position: int
    keywords: tuple[str, ...] = ()
    channels: int = 0
    reduction: int = -1
    positions: int = 0


@dataclass(frozen=True)
class SiteFunction:
    """A function that can be a site.

    Attributes:
        name: the canonical name, which counts calls and names quantizers.
        operands: its tensor arguments; empty where it takes a list of tensors, see `list_position`.
        is_product: whether quantized hardware would compute it as a product.
        fewest: how many float tensors a call needs to be a site: `x + 1` is none.
        list_position: the first argument that belongs to a list of tensors, or None.
    """

    name: str
    operands: tuple[Operand, ...] = ()
    is_product: bool = False
    fewest: int = 1
    list_position: int | None = None


@dataclass(frozen=True)
class CalledAs:
    """How one object of torch calls a function of the table.

    Attributes:
        function: the entry of the table.
        operands: those of the function, with the positions of this object.
        plain: what computes the same without overwriting the first operand, where this does.
        inplace_position: the position of an argument `inplace`, or None.
    """

    function: SiteFunction
    operands: tuple[Operand, ...]
    plain: Callable[..., Any] | None = None
    inplace_position: int | None = None

    def writes(self, args: list[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments overwrites its first operand."""
        position = self.inplace_position
        if position is None:
            return self.plain is not None
        return bool(args[position] if len(args) > position else kwargs.get("inplace", False))

    def without_writing(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """What computes the same as `func` from the same arguments, and overwrites none; they are changed for it."""
        position = self.inplace_position
        if position is None:
            return func if self.plain is None else self.plain
        if len(args) > position:
            args[position] = False
        else:
            kwargs["inplace"] = False
        return func


_INPUT = Operand("input", 0, ("input", "self"))
_OTHER = Operand("other", 1, ("other",))


def _weighted(channels: int, reduction: int, positions: int = 0) -> tuple[Operand, ...]:
    weight = Operand("weight", 1, ("weight",), channels, reduction, positions)
    return Operand("input", 0, ("input",), reduction=-1 - positions, positions=positions), weight


_MATMUL = (
    Operand("input", 0, ("input", "self"), channels=-2),
    Operand("other", 1, ("other", "mat2", "tensor2"), channels=-1, reduction=-2),
)
_ADDED = (
    Operand("input", 1, ("mat1", "batch1"), channels=-2),
    Operand("other", 2, ("mat2", "batch2"), channels=-1, reduction=-2),
)
_ATTENTION = (
    Operand("query", 0, ("query",)),
    Operand("key", 1, ("key",)),
    Operand("value", 2, ("value",), reduction=-2),
)
_BILINEAR = (
    Operand("input", 0, ("input1",)),
    Operand("other", 1, ("input2",)),
    Operand("weight", 2, ("weight",)),
)
# Functions of one tensor that engines know as operators with a quantized input.
_UNARY = """
    softmax log_softmax sigmoid tanh relu relu6 leaky_relu elu gelu silu mish hardtanh hardswish hardsigmoid softplus
    mean layer_norm group_norm instance_norm batch_norm rms_norm normalize avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d interpolate pixel_shuffle
""".split()  # noqa: SIM905

_FUNCTIONS = [
    SiteFunction("linear", _weighted(0, -1), is_product=True),
    *(SiteFunction(f"conv{n}d", _weighted(0, 1, n), is_product=True) for n in (1, 2, 3)),
    *(SiteFunction(f"conv_transpose{n}d", _weighted(1, 0, n), is_product=True) for n in (1, 2, 3)),
    SiteFunction("matmul", _MATMUL, is_product=True),
    *(SiteFunction(name, _ADDED, is_product=True) for name in ("addmm", "baddbmm", "addbmm")),
    SiteFunction("scaled_dot_product_attention", _ATTENTION, is_product=True),
    SiteFunction("attention_function", _ATTENTION, is_product=True),
    SiteFunction("bilinear", _BILINEAR, is_product=True),
    SiteFunction("einsum", is_product=True, list_position=1),
    SiteFunction("embedding", (Operand("weight", 1, ("weight",)),), is_product=True),
    *(SiteFunction(name, (_INPUT, _OTHER), fewest=2) for name in ("add", "sub", "mul", "div", "maximum", "minimum")),
    *(SiteFunction(name, fewest=2, list_position=0) for name in ("cat", "stack")),
    *(SiteFunction(name, (_INPUT,)) for name in _UNARY),
]
SITE_FUNCTIONS = {function.name: function for function in _FUNCTIONS}
"""The table, by canonical name."""

# Other names of torch for the same function.
_SYNONYMS = {
    "matmul": ("mm", "bmm"),
    "sub": ("subtract",),
    "mul": ("multiply",),
    "div": ("divide", "true_divide", "truediv"),
    "cat": ("concat", "concatenate", "hstack", "vstack", "dstack", "row_stack", "column_stack"),
}
# Names for rules that stand for several functions, or are shorter.
_SHORT = {
    "sdpa": ("scaled_dot_product_attention",),
    "attention": ("scaled_dot_product_attention", "attention_function"),
    "conv": tuple(f"conv{n}d" for n in (1, 2, 3)),
    "conv_transpose": tuple(f"conv_transpose{n}d" for n in (1, 2, 3)),
    "concat": ("cat",),
    "bmm": ("matmul",),
    "mm": ("matmul",),
}
_C_nn: Any = torch._C._nn  # type: ignore[attr-defined]  a room of torch without type stubs
_ROOMS = (torch, F, torch.special, torch.linalg, _C_nn, Tensor, operator)


def _objects(name: str) -> Iterable[tuple[Any, Any, bool]]:
    """What a name calls in torch; where that is in place, what is not; and whether the operands are swapped."""
    spellings = [(name, "", False), (f"{name}_", name, False), (f"special_{name}", "", False)]
    spellings += [(f"__{name}__", "", False), (f"__i{name}__", f"__{name}__", False), (f"__r{name}__", "", True)]
    spellings += [(f"r{name}", "", True)]
    for spelling, plain, swapped in spellings:
        for room in _ROOMS:
            if room is not operator or not spelling.startswith("_"):
                found = getattr(room, spelling, None)
                if callable(found):
                    yield found, getattr(room, plain) if plain else None, swapped
    if callable(found := getattr(operator, f"i{name}", None)):
        yield found, getattr(operator, name), False


def _inplace_position(function: Callable[..., Any]) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function in C, which has no such argument
        return None
    return names.index("inplace") if "inplace" in names else None


def _swapped(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
    first, second = operands
    return (
        Operand(first.name, second.position, (), first.channels, first.reduction),
        Operand(second.name, first.position, (), second.channels, second.reduction),
    )


def _table() -> dict[Any, CalledAs]:
    table: dict[Any, CalledAs] = {}
    for function in _FUNCTIONS:
        for name in (function.name, *_SYNONYMS.get(function.name, ())):
            for found, plain, swapped in _objects(name):
                operands = function.operands
                if swapped:
                    if len(operands) != 2 or function.is_product != (function.name == "matmul"):
                        continue
                    operands = _swapped(operands)
                table[found] = CalledAs(function, operands, plain, _inplace_position(found))
    # `torch.embedding` takes the table first; `F.embedding` and what calls it take the indices first.
    table[torch.embedding] = CalledAs(SITE_FUNCTIONS["embedding"], (Operand("weight", 0, ("weight",)),))
    return table


def einsum_operand(equation: str, name: str) -> Operand:
    """The axes of an operand of an `einsum`: of its outputs, which no other operand has, and of the sum.

    >>> einsum_operand("bsd,dhk->bshk", "input_1")
    Operand(name='input_1', position=2, keywords=(), channels=1, reduction=0, positions=0)
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms, place = left.split(","), int(name.rpartition("_")[2])
    own, others = terms[place], "".join(terms[:place] + terms[place + 1 :])
    summed = {index for index in left if left.count(index) > 1} if not arrow else {*left} - {*right}
    outputs = [index for index in own if index.isalpha() and index not in summed and index not in others]
    sums = [index for index in own if index.isalpha() and index in summed]

    def axis(indices: list[str], otherwise: int) -> int:
        if not indices:
            return otherwise
        before, dots, after = own.partition("...")
        first = indices[0]
        return before.index(first) if first in before else after.index(first) - len(after) if dots else otherwise

    return Operand(name, place + 1, (), axis(outputs, 0), axis(sums, -1))


CALLED_AS = _table()
"""What an object of torch is, by the object itself as `__torch_function__` gets it."""
# torch's compiler does not find the methods of Tensor that are written in Python (`1 - x`) in a dictionary.
_IN_PYTHON = tuple((method, CALLED_AS.pop(method)) for method in (Tensor.__rsub__, Tensor.__rdiv__, Tensor.__rmatmul__))


def called_as(func: Any) -> CalledAs | None:
    """What an object of torch is; None if it cannot be a site.

    >>> called_as(torch.Tensor.__rsub__).function.name
    'sub'
    """
    for method, called in _IN_PYTHON:
        if func is method:
            return called
    return CALLED_AS.get(func)


def canonical_ops(ops: Iterable[str]) -> frozenset[str]:
    """The canonical names that a rule's names of functions stand for.

    Raises:
        ConfigError: a name that stands for none; the nearest are offered.

    >>> sorted(canonical_ops(["sdpa", "add"]))
    ['add', 'scaled_dot_product_attention']
    """
    names: set[str] = set()
    for op in ops:
        if op in SITE_FUNCTIONS:
            names.add(op)
        elif op in _SHORT:
            names.update(_SHORT[op])
        else:
            raise ConfigError(f"no function {op!r} can be quantized{nearest(str(op), [*SITE_FUNCTIONS, *_SHORT])}")
    return frozenset(names)
