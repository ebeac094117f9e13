"""Operations that move elements without computing."""

from __future__ import annotations

import math
from typing import Any

from fakequant.errors import GraphError
from fakequant.ir.attributes import references
from fakequant.ir.ops.elementwise import axis
from fakequant.ir.ops.products import differ
from fakequant.ir.signature import Call
from fakequant.ir.table import add_row
from fakequant.ir.types import DYNAMIC, IRType, TensorShape, TensorType


def reshaped(call: Call) -> list[TensorType]:
    """A reshape to `shape`, in which one -1 is what the other dimensions leave."""
    type, shape = call.inputs[0]
    sizes, unknown = list(call.value("shape")), len(references(call.arguments["shape"]))
    if any(n < 1 and n != DYNAMIC for n in sizes):
        raise GraphError(f"takes positive sizes or -1, got {sizes}")
    free = sizes.count(DYNAMIC) - unknown
    if free > 1:
        raise GraphError(f"takes at most one -1, got {sizes}")
    if shape.dynamic or unknown:
        return [TensorType(type, TensorShape(sizes))]
    known = math.prod(n for n in sizes if n != DYNAMIC)
    if (shape.element_count % known) if free else (shape.element_count != known):
        raise GraphError(f"has {shape.element_count} elements in shape {shape}, which do not fill {sizes}")
    return [TensorType(type, TensorShape(shape.element_count // known if n == DYNAMIC else n for n in sizes))]


def flattened(call: Call) -> list[TensorType]:
    """The dimensions from start_dim to end_dim as one."""
    type, shape = call.inputs[0]
    first, last = (axis(call.value(name), shape) for name in ("start_dim", "end_dim"))
    if first > last:
        raise GraphError(f"start_dim {first} comes after end_dim {last}")
    middle = TensorShape(shape[first : last + 1])
    return [TensorType(type, TensorShape((*shape[:first], middle.element_count, *shape[last + 1 :])))]


def transposed(call: Call) -> list[TensorType]:
    """Two dimensions exchanged."""
    type, shape = call.inputs[0]
    if not any(p.name == "dim0" for p in call.signature.parameters):
        if len(shape) > 2:
            raise GraphError(f"takes at most 2 dimensions, got {shape}")
        return [TensorType(type, TensorShape(reversed(shape)))]
    a, b = axis(call.value("dim0"), shape), axis(call.value("dim1"), shape)
    dims = list(shape)
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return [TensorType(type, TensorShape(dims))]


def permuted(call: Call) -> list[TensorType]:
    """All dimensions in another order."""
    type, shape = call.inputs[0]
    dims = [axis(dim, shape) for dim in call.value("dims")]
    if sorted(dims) != list(range(len(shape))):
        raise GraphError(f"takes every dimension of {shape} once, got {list(call.value('dims'))}")
    return [TensorType(type, TensorShape(shape[dim] for dim in dims))]


def concatenated(call: Call) -> list[TensorType]:
    """Tensors one after the other along `dim`."""
    tensors = _list_of_one_type(call)
    first = tensors[0].shape
    dim = axis(call.value("dim"), first)
    for other in tensors[1:]:
        same_rank = len(other.shape) == len(first)
        if not same_rank or any(differ(a, b) for i, (a, b) in enumerate(zip(first, other.shape)) if i != dim):  # noqa: B905
            raise GraphError(f"shapes {first} and {other.shape} differ in another dimension than {dim}")
    lengths = [t.shape[dim] for t in tensors] if first else [1] * len(tensors)
    total = DYNAMIC if DYNAMIC in lengths else sum(lengths)
    merged = [_known(*(t.shape[i] for t in tensors)) for i in range(len(first))]
    return [TensorType(tensors[0].type, TensorShape((*merged[:dim], total, *merged[dim + 1 :])))]


def stacked(call: Call) -> list[TensorType]:
    """Tensors of one shape along a new dimension."""
    tensors = _list_of_one_type(call)
    first = tensors[0].shape
    for other in tensors[1:]:
        if not first.matches(other.shape):
            raise GraphError(f"takes tensors of one shape, got {first} and {other.shape}")
    dim = axis(call.value("dim"), first, extra=1)
    merged = [_known(*(t.shape[i] for t in tensors)) for i in range(len(first))]
    return [TensorType(tensors[0].type, TensorShape((*merged[:dim], len(tensors), *merged[dim:])))]


def _list_of_one_type(call: Call) -> list[TensorType]:
    tensors = call.types("tensors")
    if not tensors:
        raise GraphError("takes at least one tensor")
    types = {t.type for t in tensors}
    if len(types) > 1:
        raise GraphError(f"takes tensors of one type, got {', '.join(sorted(type.value for type in types))}")
    if any(not t.shape for t in tensors) and "cat" in str(call.signature.target):
        raise GraphError("takes tensors with at least one dimension, got a scalar")
    return tensors


def _known(*lengths: int) -> int:
    return next((n for n in lengths if n != DYNAMIC), DYNAMIC)


def sliced(call: Call) -> list[TensorType]:
    """Every step-th element from start to end of one dimension."""
    type, shape = call.inputs[0]
    if not shape:
        raise GraphError("cannot slice a scalar")
    dim, step = axis(call.value("dim"), shape), call.value("step")
    if step < 1:
        raise GraphError(f"takes a step >= 1, got {step}")
    given = [call.arguments.get(name) for name in ("start", "end")]
    length = shape[dim]
    if length == DYNAMIC or references(given):
        return [TensorType(type, TensorShape((*shape[:dim], _dynamic_slice(length, given, step), *shape[dim + 1 :])))]
    length = len(range(*slice(given[0], given[1], step).indices(length)))
    if not length:
        raise GraphError(f"leaves nothing of dimension {dim} of shape {shape}: from {given[0]} to {given[1]}")
    return [TensorType(type, TensorShape((*shape[:dim], length, *shape[dim + 1 :])))]


def _dynamic_slice(length: int, given: list[Any], step: int) -> int:
    whole = given[0] in (None, 0) and (given[1] is None or given[1] == 2**63 - 1) and step == 1
    return length if whole else DYNAMIC


def selected(call: Call) -> list[TensorType]:
    """One index of one dimension, which vanishes."""
    type, shape = call.inputs[0]
    if not shape:
        raise GraphError("cannot select from a scalar")
    dim = axis(call.value("dim"), shape)
    index = call.arguments["index"]
    if isinstance(index, int) and shape[dim] != DYNAMIC and not -shape[dim] <= index < shape[dim]:
        raise GraphError(f"index {index} is out of range for dimension {dim} of shape {shape}")
    return [TensorType(type, TensorShape((*shape[:dim], *shape[dim + 1 :])))]


def split(call: Call) -> list[TensorType]:
    """Parts of the given sizes along `dim`."""
    type, shape = call.inputs[0]
    if not shape:
        raise GraphError("cannot split a scalar")
    dim = axis(call.value("dim"), shape)
    sizes = call.value(call.signature.parameters[1].name)
    if isinstance(sizes, int):
        if shape[dim] == DYNAMIC or sizes < 1:
            raise GraphError(f"cannot tell into how many parts of {sizes} it splits dimension {dim} of {shape}")
        whole, rest = divmod(shape[dim], sizes)
        sizes = [sizes] * whole + [rest] * bool(rest)
    if any(n < 1 and n != DYNAMIC for n in sizes) or not sizes:
        raise GraphError(f"takes positive sizes, got {sizes}")
    if DYNAMIC not in sizes and differ(shape[dim], sum(sizes)):
        raise GraphError(f"the sizes {sizes} add up to {sum(sizes)}, but dimension {dim} of shape {shape} is another")
    return [TensorType(type, TensorShape((*shape[:dim], n, *shape[dim + 1 :]))) for n in sizes]


def unbound(call: Call) -> list[TensorType]:
    """All indices of one dimension."""
    type, shape = call.inputs[0]
    dim = axis(call.value("dim"), shape)
    if not shape or shape[dim] == DYNAMIC:
        raise GraphError(f"cannot tell into how many parts it splits dimension {dim} of shape {shape}")
    return [TensorType(type, TensorShape((*shape[:dim], *shape[dim + 1 :])))] * shape[dim]


def expanded(call: Call) -> list[TensorType]:
    """Dimensions of 1 repeated to `size`; -1 keeps one."""
    type, shape = call.inputs[0]
    sizes = list(call.value("size"))
    given = call.arguments["size"]
    if len(sizes) < len(shape):
        raise GraphError(f"takes at least {len(shape)} sizes for shape {shape}, got {sizes}")
    padded = (1,) * (len(sizes) - len(shape)) + tuple(shape)
    found = []
    for n, size, raw in zip(padded, sizes, given, strict=True):
        if size == DYNAMIC and isinstance(raw, int):
            size = n
        elif size < 1 and size != DYNAMIC:
            raise GraphError(f"takes positive sizes or -1, got {sizes}")
        if n not in (1, DYNAMIC) and differ(n, size):
            raise GraphError(f"cannot expand shape {shape} to {sizes}: only dimensions of 1 are repeated")
        found.append(size)
    return [TensorType(type, TensorShape(found))]


def squeezed(call: Call) -> list[TensorType]:
    """The input without dimensions of 1."""
    type, shape = call.inputs[0]
    named = [p.name for p in call.signature.parameters]
    dims = call.value("dim") if "dim" in named else range(len(shape))
    chosen = {axis(dim, shape) for dim in ([dims] if isinstance(dims, int) else dims)} if shape else set()
    # A dynamic dimension is taken for longer than 1, as torch.export does; a run tells if it is not.
    return [TensorType(type, TensorShape(n for i, n in enumerate(shape) if not (i in chosen and n == 1)))]


def unsqueezed(call: Call) -> list[TensorType]:
    """The input with a dimension of 1 at `dim`."""
    type, shape = call.inputs[0]
    dim = axis(call.value("dim"), shape, extra=1)
    return [TensorType(type, TensorShape((*shape[:dim], 1, *shape[dim:])))]


def gathered(call: Call) -> list[TensorType]:
    """`index_select`: the rows of a dimension that an index [n] names."""
    type, shape = call.type("self")
    index = call.type("index")
    dim = axis(call.value("dim"), shape)
    if index.type not in (IRType.Int64, IRType.Int32) or len(index.shape) > 1:
        raise GraphError(f"takes an index [n] of Int64 or Int32, got {index}")
    count = index.shape[0] if index.shape else 1
    return [TensorType(type, TensorShape((*shape[:dim], count, *shape[dim + 1 :])) if shape else shape)]


add_row("Reshape", "aten.reshape.default", reshaped, moves=True)
add_row("Flatten", "aten.flatten.using_ints", flattened, moves=True)
add_row("Transpose", "aten.transpose.int aten.t.default", transposed, moves=True)
add_row("Permute", "aten.permute.default", permuted, moves=True)
add_row("Squeeze", "aten.squeeze.default aten.squeeze.dim aten.squeeze.dims", squeezed, moves=True)
add_row("Unsqueeze", "aten.unsqueeze.default", unsqueezed, moves=True)
add_row("Concat", "aten.cat.default", concatenated)
add_row("Stack", "aten.stack.default", stacked)
add_row("Slice", "aten.slice.Tensor", sliced)
add_row("Select", "aten.select.int", selected)
add_row("Split", "aten.split_with_sizes.default aten.split.Tensor", split)
add_row("Unbind", "aten.unbind.int", unbound)
add_row("Expand", "aten.expand.default", expanded)
add_row("Gather", "aten.index_select.default", gathered)
