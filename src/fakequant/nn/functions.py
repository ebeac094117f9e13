"""The table of functions whose calls in a model can get quantizers: names, aliases, operands and axes.

torch offers one function under many objects (`torch.add`, `Tensor.add_`, `operator.add`, `torch.ops.aten.add` ...). The
table gives these objects one name, so that a call counts as the same whether it runs eagerly, compiled or in an export.
A new function is one entry here, which targets, counts, transforms and coverage read; `register_function` adds an entry
at run time.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Flag, auto
from string import ascii_letters
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from fakequant.errors import ConfigError, nearest

Args: TypeAlias = Sequence[Any]
Kwargs: TypeAlias = Mapping[str, Any]


def of_einsum(args: Args, _: Kwargs) -> str:
    """The equation in a call of `einsum`; "" if the call has lists of axes instead of an equation."""
    return args[0] if args and isinstance(args[0], str) else ""


def of_tensordot(args: Args, kwargs: Kwargs) -> str:
    """The `einsum` equation of a call of `tensordot`.

    >>> import torch
    >>> of_tensordot((torch.ones(2, 3, 4), torch.ones(4, 3, 5)), {"dims": ([1, 2], [1, 0])})
    'abc,cbf->af'
    """
    a, b = _first_two(args, kwargs, ("a", "self"), ("b", "other"))
    dims: Any = args[2] if len(args) > 2 else kwargs.get("dims", kwargs.get("dims_self", 2))
    if len(args) > 3 or "dims_other" in kwargs:  # of the operator, with one list for each tensor
        dims = (dims, args[3] if len(args) > 3 else kwargs["dims_other"])
    dims = dims.tolist() if hasattr(dims, "tolist") else dims
    if isinstance(dims, int):
        dims = (list(range(a.dim() - dims, a.dim())), list(range(dims)))
    of_a, of_b = ([axis] if isinstance(axis, int) else axis for axis in dims)
    first, second = ascii_letters[: a.dim()], [*ascii_letters[a.dim() : a.dim() + b.dim()]]
    for one, other in zip(of_a, of_b, strict=True):
        second[other] = first[one]
    shared = {*first} & {*second}
    return f"{first},{''.join(second)}->{''.join(index for index in (*first, *second) if index not in shared)}"


def of_vecdot(args: Args, kwargs: Kwargs) -> str:
    """The `einsum` equation of a call of `vecdot`, which may broadcast its tensors.

    >>> import torch
    >>> of_vecdot((torch.ones(2, 3, 4), torch.ones(3, 1)), {"dim": 0})
    'abc,bc->bc'
    """
    x, y = _first_two(args, kwargs, ("x",), ("y",))
    axes = max(x.dim(), y.dim())
    letters, axis = ascii_letters[:axes], kwargs.get("dim", args[2] if len(args) > 2 else -1)
    summed = letters[axis if axis < 0 else axis - axes]
    return f"{letters[axes - x.dim() :]},{letters[axes - y.dim() :]}->{letters.replace(summed, '')}"


def of_chain(args: Args, kwargs: Kwargs) -> str:
    """The `einsum` equation of a product of a list of matrices; the first and the last may be vectors.

    >>> import torch
    >>> of_chain(([torch.ones(2), torch.ones(2, 3), torch.ones(3, 4)],), {})
    'a,ab,bc->c'
    """
    given = kwargs.get("tensors", args)
    tensors = given[0] if given and isinstance(given[0], (list, tuple)) else given
    terms, place = [], 0
    for tensor in tensors:
        terms.append(ascii_letters[place : place + tensor.dim()])
        place += tensor.dim() - 1
    ends = (terms[0][:-1], terms[-1][1:])
    return f"{','.join(terms)}->{''.join(ends)}"


def axes_of(equation: str, place: int) -> tuple[int, int]:
    """The axis of outputs (0 if none) and the axis of the sum (-1 if none) of an `einsum` operand.

    `place` is the index of the operand's term in the equation.

    >>> axes_of("bsd,dhk->bshk", 1), axes_of("ab,bc,cd->ad", 1)
    ((1, 0), (1, 0))
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    own, later = terms[place], "".join(terms[place + 1 :])
    others = "".join(terms[:place]) or later
    summed = {index for index in left if left.count(index) > 1} if not arrow else {*left} - {*right}
    if place:
        summed -= {*later}
    outputs = [index for index in own if index.isalpha() and index not in summed and index not in others]
    sums = [index for index in own if index.isalpha() and index in summed]

    def axis(indices: list[str], otherwise: int) -> int:
        if not indices:
            return otherwise
        before, dots, after = own.partition("...")
        first = indices[0]
        return before.index(first) if first in before else after.index(first) - len(after) if dots else otherwise

    return axis(outputs, 0), axis(sums, -1)


def _first_two(args: Args, kwargs: Kwargs, first: Sequence[str], second: Sequence[str]) -> list[Any]:
    """The first two tensors of a call, by position, else by the first of their possible keywords."""
    named = [next((kwargs[name] for name in names if name in kwargs), None) for names in (first, second)]
    return [args[place] if place < len(args) else named[place] for place in (0, 1)]


class Trait(Flag):
    """How a function treats the values of its tensors."""

    MOVES = auto()
    """Moves or picks values, which all engines compute on codes."""
    CODES = auto()
    """Moves, copies or clips values: the result is quantized if the inputs are."""
    SCALES = auto()
    """f(s x) = s f(x) for s > 0, in eval mode. The function may mix channels, as `mean`: callers check the output."""
    CHANNELS = auto()
    """Commutes with a rotation of channels if other arguments are numbers, `reshape` only for some arguments, so that
    callers check the model's output."""
    SUMS = auto()
    """Adds or joins tensors with the same channels."""
    FILLS = auto()
    """Writes values from elsewhere into a tensor."""
    EMPTY = auto()
    """Reads no values, and returns an empty tensor, or zeros, which every quantized format has."""
    PRODUCT = auto()
    """A product that integer or low-precision units compute. Other functions are elementwise, normalisations or
    reductions, which run in float on most engines."""
    LOOKUP = auto()
    """Reads rows of a table, and multiplies nothing."""
    ATTENTION = auto()
    """Computes two products with a softmax between them, and may take a mask."""
    HEADS = auto()
    """The last axis of the result is that of the operand that is summed along axis -2, as the values of attention."""
    SOFTMAX = auto()
    """Turns scores into probabilities; masked scores may be among them."""
    IDENTITY = auto()
    """Returns its input in eval mode; exported files leave the function out."""
    SHAPE = auto()
    """Reads no values, unless the result holds a tensor."""


NO_TRAITS = Trait(0)


def read_traits(table: str) -> dict[str, Trait]:
    """The traits of functions by name, from lines such as "relu | codes scales".

    >>> read_traits("relu | codes scales")
    {'relu': <Trait.CODES|SCALES: 6>}
    """
    found = dict[str, Trait]()
    for line in table.strip().splitlines():
        names, _, traits = line.partition("|")
        held = NO_TRAITS
        for trait in traits.split():
            held |= Trait[trait.upper()]
        assert found.keys().isdisjoint(names.split()), line
        found |= dict.fromkeys(names.split(), held | Trait.CODES if Trait.MOVES in held else held)
    return found


@dataclass(frozen=True)
class SiteOperand:
    """A tensor argument that may be quantized, of a function of the table.

    Attributes:
        name: the attribute of a site that holds the argument's quantizer.
        position: the argument's index among the positional arguments.
        keywords: the names under which the argument may be passed.
        channels: the argument's axis of output channels, if the argument is a weight.
        reduction: the argument's axis that a product sums over; for other functions, the axis of features.
        positions: how many of the argument's last axes are positions of a kernel, over which a product sums, too.
    """

    name: str
    position: int
    keywords: tuple[str, ...] = ()
    channels: int = 0
    reduction: int = -1
    positions: int = 0


@dataclass(frozen=True)
class SiteFunction:
    """A function whose calls can have quantizers; such a call is a site, see `nn/sites.py`.

    Attributes:
        name: the canonical name, under which calls are counted and quantizers named.
        operands: the tensor arguments; empty if the function takes a list of tensors, see `list_position`.
        traits: how the function treats values.
        also: torch's other names of the function, and operators with their namespace, as "mylib::product".
        fewest: how many float tensors a call must have to be a site; with 2, `x + 1` is not a site.
        list_position: the index of the argument where a list of tensors begins; None without a list.
        equation: returns the `einsum` equation of a call's arguments; None if the axes of `operands` always hold.
        multiplications: returns the count of multiply-accumulates, from the count of results and the operands, where
            torch's counter cannot. None: results times the length of the first operand's reduction axis.
    """

    name: str
    operands: tuple[SiteOperand, ...] = ()
    traits: Trait = NO_TRAITS
    also: tuple[str, ...] = ()
    fewest: int = 1
    list_position: int | None = None
    equation: Callable[[Sequence[Any], Mapping[str, Any]], str] | None = None
    multiplications: Callable[..., int] | None = None


@dataclass(frozen=True)
class CalledAs:
    """How an object of torch, such as `torch.add` or `Tensor.add_`, calls a function of the table.

    Attributes:
        function: the entry of the table.
        operands: the function's operands, with their positions in calls of this object.
        plain: for an object that overwrites its first operand, the function that computes the same in a new tensor.
        inplace_position: the index of an argument `inplace`; None without this argument.
    """

    function: SiteFunction
    operands: tuple[SiteOperand, ...]
    plain: Callable[..., Any] | None = None
    inplace_position: int | None = None

    def writes(self, args: list[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments overwrites its first operand."""
        position = self.inplace_position
        if position is None:
            return self.plain is not None
        return bool(args[position] if len(args) > position else kwargs.get("inplace", False))

    def without_writing(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """A function that computes the same as `func` but overwrites nothing.

        An argument `inplace` becomes False in `args` or `kwargs`.
        """
        position = self.inplace_position
        if position is None:
            return func if self.plain is None else self.plain
        if len(args) > position:
            args[position] = False
        else:
            kwargs["inplace"] = False
        return func


_INPUT = SiteOperand("input", 0, ("input", "self"))
_OTHER = SiteOperand("other", 1, ("other", "tensor", "vec2"))
_ROWS = SiteOperand("input", 0, ("input", "self", "a"), channels=-2)


def _weighted(channels: int, reduction: int, positions: int = 0) -> tuple[SiteOperand, ...]:
    weight = SiteOperand("weight", 1, ("weight",), channels, reduction, positions)
    return SiteOperand("input", 0, ("input", "self"), reduction=-1 - positions, positions=positions), weight


_MATMUL = (_ROWS, SiteOperand("other", 1, ("other", "mat2", "tensor2"), channels=-1, reduction=-2))
_ADDED = (
    SiteOperand("input", 1, ("mat1", "mat", "batch1"), channels=-2),
    SiteOperand("other", 2, ("mat2", "batch2"), channels=-1, reduction=-2),
)
_VECTORS = SiteOperand("input", 0, ("x",)), SiteOperand("other", 1, ("y",))
_ADDED_VECTORS = SiteOperand("input", 1, ("vec1",)), SiteOperand("other", 2, ("vec2",))
_ATTENTION = (
    SiteOperand("query", 0, ("query",)),
    SiteOperand("key", 1, ("key",)),
    SiteOperand("value", 2, ("value",), reduction=-2),
)
_BILINEAR = (
    SiteOperand("input", 0, ("input1",)),
    SiteOperand("other", 1, ("input2",)),
    SiteOperand("weight", 2, ("weight",)),
)
_TABLE = (SiteOperand("weight", 1, ("weight",)),)
# Functions of one tensor that engines know as operators with a quantized input.
_UNARY = """
softmax log_softmax | softmax
relu | codes scales
relu6 hardtanh | codes
leaky_relu avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d | scales
mean | scales channels
sigmoid tanh elu gelu silu mish hardswish hardsigmoid softplus layer_norm group_norm instance_norm batch_norm |
rms_norm normalize interpolate pixel_shuffle |
"""
_PRODUCT = Trait.PRODUCT
_STACKS = ("concat", "concatenate", "hstack", "vstack", "dstack", "row_stack", "column_stack")


def _each(outputs: int, *_: Tensor) -> int:
    return outputs


_FUNCTIONS = [
    SiteFunction("linear", _weighted(0, -1), _PRODUCT),
    *(SiteFunction(f"conv{n}d", _weighted(0, 1, n), _PRODUCT) for n in (1, 2, 3)),
    *(SiteFunction(f"conv_transpose{n}d", _weighted(1, 0, n), _PRODUCT) for n in (1, 2, 3)),
    SiteFunction("conv_tbc", _weighted(2, 1), _PRODUCT, multiplications=lambda n, x, w: n * w[..., 0].numel()),
    SiteFunction("matmul", _MATMUL, _PRODUCT | Trait.HEADS, also=("mm", "bmm")),
    *(SiteFunction(name, _ADDED, _PRODUCT) for name in ("addmm", "baddbmm")),
    SiteFunction("addbmm", _ADDED, _PRODUCT, multiplications=lambda n, x, _: n * x.shape[0] * x.shape[-1]),
    SiteFunction("mv", (_INPUT, SiteOperand("other", 1, ("vec",))), _PRODUCT),
    SiteFunction("addmv", (_ADDED[0], SiteOperand("other", 2, ("vec",))), _PRODUCT),
    *(SiteFunction(name, (_INPUT, _OTHER), _PRODUCT) for name in ("inner", "dot", "vdot")),
    SiteFunction("linalg_vecdot", _VECTORS, _PRODUCT, also=("vecdot",), equation=of_vecdot),
    *(SiteFunction(name, (_INPUT, _OTHER), _PRODUCT, multiplications=_each) for name in ("outer", "ger", "kron")),
    SiteFunction("addr", _ADDED_VECTORS, _PRODUCT, multiplications=_each),
    SiteFunction("tensordot", (_ROWS, SiteOperand("other", 1, ("b", "other"))), _PRODUCT, equation=of_tensordot),
    SiteFunction("scaled_dot_product_attention", _ATTENTION, _PRODUCT | Trait.ATTENTION | Trait.HEADS),
    SiteFunction("attention_function", _ATTENTION, _PRODUCT | Trait.ATTENTION | Trait.HEADS),
    SiteFunction("bilinear", _BILINEAR, _PRODUCT, multiplications=lambda n, _, __, w: n * w[0].numel()),
    SiteFunction("einsum", (), _PRODUCT, fewest=2, list_position=1, equation=of_einsum),
    SiteFunction("linalg_multi_dot", (), _PRODUCT, ("multi_dot",), fewest=2, list_position=0, equation=of_chain),
    SiteFunction("chain_matmul", (), _PRODUCT, fewest=2, list_position=0, equation=of_chain),
    *(SiteFunction(name, _TABLE, _PRODUCT | Trait.LOOKUP) for name in ("embedding", "embedding_bag")),
    SiteFunction("add", (_INPUT, _OTHER), Trait.SUMS, fewest=2),
    SiteFunction("sub", (_INPUT, _OTHER), also=("subtract",), fewest=2),
    SiteFunction("mul", (_INPUT, _OTHER), Trait.CHANNELS, also=("multiply",), fewest=2),
    SiteFunction("div", (_INPUT, _OTHER), Trait.CHANNELS, also=("divide", "true_divide", "truediv"), fewest=2),
    *(SiteFunction(name, (_INPUT, _OTHER), fewest=2) for name in ("maximum", "minimum")),
    SiteFunction("cat", (), Trait.CODES | Trait.SUMS, also=_STACKS, fewest=2, list_position=0),
    SiteFunction("stack", (), Trait.CODES | Trait.SUMS, fewest=2, list_position=0),
    *(SiteFunction(name, (_INPUT,), traits) for name, traits in read_traits(_UNARY).items()),
]
SITE_FUNCTIONS = {function.name: function for function in _FUNCTIONS}
"""The functions, by canonical name."""

# Names for rules that stand for several functions, or are shorter.
_SHORT = {
    "sdpa": ("scaled_dot_product_attention",),
    "attention": ("scaled_dot_product_attention", "attention_function"),
    "conv": tuple(f"conv{n}d" for n in (1, 2, 3)),
    "conv_transpose": tuple(f"conv_transpose{n}d" for n in (1, 2, 3)),
    "concat": ("cat",),
    "bmm": ("matmul",),
    "mm": ("matmul",),
    "multi_dot": ("linalg_multi_dot",),
    "vecdot": ("linalg_vecdot",),
}
_C_nn: Any = torch._C._nn  # type: ignore[attr-defined]  a room of torch without type stubs
_ROOMS = (torch, F, torch.special, torch.linalg, _C_nn, Tensor, operator)


def _objects(name: str) -> Iterable[tuple[Any, Any, bool]]:
    """torch's objects for a name, each with its out-of-place variant or None, and whether operands are swapped."""
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


def _table() -> dict[Any, CalledAs]:
    table: dict[Any, CalledAs] = {}
    for function in _FUNCTIONS:
        for name in (function.name, *function.also):
            for found, plain, swapped in _objects(name):
                operands = function.operands
                if swapped:
                    if len(operands) != 2 or (_PRODUCT in function.traits) != (function.name == "matmul"):
                        continue
                    left, right = operands
                    operands = (
                        replace(left, position=right.position, keywords=()),
                        replace(right, position=left.position, keywords=()),
                    )
                try:
                    names = list(inspect.signature(found).parameters)
                except (TypeError, ValueError):  # a function in C, which has no argument `inplace`
                    names = []
                position = names.index("inplace") if "inplace" in names else None
                table[found] = CalledAs(function, operands, plain, position)
            table |= _operators(function, name)
    # `torch.embedding` takes the table first; `F.embedding` and what calls it take the indices first.
    for name in ("embedding", "embedding_bag"):
        called = CalledAs(SITE_FUNCTIONS[name], (SiteOperand("weight", 0, ("weight",)),))
        table |= {getattr(torch, name): called, f"aten.{name}": called}
    return table


def _operators(function: SiteFunction, name: str) -> dict[str, CalledAs]:
    """The operators of torch.ops that call `function` under `name`, by the operators' names without overload."""
    if "::" in name:
        return {name.replace("::", "."): CalledAs(function, function.operands)}
    written = CalledAs(function, function.operands, getattr(torch.ops.aten, name, None))
    return {f"aten.{name}": CalledAs(function, function.operands), f"aten.{name}_": written}


def einsum_operand(equation: str, name: str, place: int | None = None) -> SiteOperand:
    """The operand of an `einsum` for a term of its equation, with the axes that `axes_of` returns.

    `place` is the index of the term; None: the number at the end of `name`.

    >>> einsum_operand("bsd,dhk->bshk", "input_1")
    SiteOperand(name='input_1', position=2, keywords=(), channels=1, reduction=0, positions=0)
    """
    place = int(name.rpartition("_")[2]) if place is None else place
    return SiteOperand(name, place + 1, (), *axes_of(equation, place))


CALLED_AS = _table()
"""The functions by the objects of torch that call them, as `__torch_function__` gets the objects."""
# torch's compiler does not find the methods of Tensor that are written in Python (`1 - x`) in a dictionary.
_IN_PYTHON = tuple((method, CALLED_AS.pop(method)) for method in (Tensor.__rsub__, Tensor.__rdiv__, Tensor.__rmatmul__))


def called_as(func: Any) -> CalledAs | None:
    """How an object of torch calls a function of the table; None if the object's calls cannot have quantizers.

    >>> called_as(torch.Tensor.__rsub__).function.name
    'sub'
    """
    for method, called in _IN_PYTHON:
        if func is method:
            return called
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return CALLED_AS.get(".".join(str(func).split(".")[:2]))
    return CALLED_AS.get(func)


def register_function(function: SiteFunction, *objects: Callable[..., Any]) -> None:
    """Let calls of a function outside of torch have quantizers.

    Args:
        function: the entry of the table; `also` names operators of torch.ops, such as "mylib::product".
        objects: Python functions that dispatch by `__torch_function__`.

    Raises:
        ConfigError: another function has the name, or the name is not an identifier.

    >>> register_function(SiteFunction("my_product", _MATMUL, Trait.PRODUCT, also=("mylib::product",)))
    >>> sorted(canonical_ops(["my_product"]))
    ['my_product']
    >>> del SITE_FUNCTIONS["my_product"], CALLED_AS["mylib.product"]
    """
    if function.name in SITE_FUNCTIONS or not function.name.isidentifier():
        raise ConfigError(f"a function's name must be an identifier that no other function has, got {function.name!r}")
    SITE_FUNCTIONS[function.name] = function
    for name in function.also:
        CALLED_AS.update(_operators(function, name))
    CALLED_AS.update(dict.fromkeys(objects, CalledAs(function, function.operands)))


def canonical_ops(ops: Iterable[str]) -> frozenset[str]:
    """The canonical names of the functions that a rule names, also by a short name such as "sdpa".

    Raises ConfigError for an unknown name, with the nearest known name.

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


def arguments_of(called: CalledAs, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call that are operands of the function, by the operands' names in the table."""
    return {name: holder[key] for name, holder, key in places_of(called, list(args), dict(kwargs))}


def places_of(called: CalledAs, args: list[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The name of each operand, the list or dict of the call that holds the operand, and the index or key in it.

    A list of tensors among `args` or `kwargs` is replaced by a copy first.
    """
    first = called.function.list_position
    if first is not None:
        if len(args) <= first:
            if "tensors" not in kwargs:
                return []
            holder = kwargs["tensors"] = list(kwargs["tensors"])
        elif isinstance(args[first], (list, tuple)):
            holder = args[first] = list(args[first])
        else:
            return [(f"input_{place - first}", args, place) for place in range(first, len(args))]
        return [(f"input_{place}", holder, place) for place in range(len(holder))]
    places: list[tuple[str, Any, Any]] = []
    for operand in called.operands:
        if operand.position < len(args):
            places.append((operand.name, args, operand.position))
        else:
            places += [(operand.name, kwargs, word) for word in operand.keywords if word in kwargs]
    return places
