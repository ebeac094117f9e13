"""Products as equations of `einsum`, which tell the axes of their operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_letters
from typing import Any, TypeAlias

Args: TypeAlias = Sequence[Any]
Kwargs: TypeAlias = Mapping[str, Any]


def of_einsum(args: Args, _: Kwargs) -> str:
    """The equation that a call of `einsum` gives; empty where it gives lists of axes."""
    return args[0] if args and isinstance(args[0], str) else ""


def of_tensordot(args: Args, kwargs: Kwargs) -> str:
    """The equation of a call of `tensordot`.

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
    return _equation(first, "".join(second))


def of_vecdot(args: Args, kwargs: Kwargs) -> str:
    """The equation of a call of `vecdot`, whose tensors are broadcast.

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
    """The equation of a product of a list of matrices, of which the first and the last may be vectors.

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
    """The axis of a term's outputs, or 0, and of its sum, or -1, where terms are multiplied from left to right.

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
    """Two tensors by their places, or by their keywords."""
    named = [next((kwargs[name] for name in names if name in kwargs), None) for names in (first, second)]
    return [args[place] if place < len(args) else named[place] for place in (0, 1)]


def _equation(first: str, second: str) -> str:
    shared = {*first} & {*second}
    return f"{first},{second}->{''.join(index for index in first + second if index not in shared)}"
