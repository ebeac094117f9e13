"""Products, convolutions, attention, recurrent cells, embeddings and normalisations.

Operations that move elements without computing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fakequant.errors import GraphError
from fakequant.ir.op import DYNAMIC, Call, IRType, TensorShape, TensorType, references
from fakequant.ir.ops.elementwise import axis, floating
from fakequant.ir.table import add_row

RECURRENT = ("aten.lstm.", "aten.gru.", "aten.rnn_tanh.", "aten.rnn_relu.")
"""Beginnings of the names of whole recurrent layers, which only eager torch runs."""


def differ(a: int, b: int) -> bool:
    """Whether two dimensions are known to be different."""
    return DYNAMIC not in (a, b) and a != b


def _same_type(call: Call, *names: str) -> IRType:
    """The element type of all.

    Raises:
        GraphError: they differ.
    """
    types = {name: call.type(name).type for name in names if call.has(name)}
    if len(set(types.values())) > 1:
        words = ", ".join(f"{name} is {type.value}" for name, type in types.items())
        raise GraphError(f"takes tensors of one type, but {words}")
    return next(iter(types.values()))


def matmul(call: Call) -> list[TensorType]:
    """[..., n, k] times [..., k, m]."""
    first, second = (p.name for p in call.signature.parameters[:2])
    a, b = call.shape(first), call.shape(second)
    type = _same_type(call, first, second)
    if not a or not b:
        raise GraphError(f"takes tensors with at least one dimension, got {a} and {b}")
    inner = b[-2] if len(b) > 1 else b[-1]
    if differ(a[-1], inner):
        raise GraphError(f"inner dimensions differ: {a} has {a[-1]} columns, {b} has {inner} rows")
    batch = TensorShape(a[:-2]).broadcast_with(b[:-2])
    return [TensorType(type, TensorShape((*batch, *(a[-2:-1]), *(b[-1:] if len(b) > 1 else ()))))]


def linear(call: Call) -> list[TensorType]:
    """Input [..., in], weight [out, in], bias [out]."""
    x, weight = call.shape("input"), call.shape("weight")
    type = _same_type(call, "input", "weight", "bias")
    if not x or len(weight) != 2:
        raise GraphError(f"takes an input [..., in] and a weight [out, in], got {x} and {weight}")
    if differ(x[-1], weight[1]):
        raise GraphError(
            f"inner dimensions differ: the input {x} has {x[-1]} features, the weight {weight} {weight[1]}"
        )
    # Torch adds a bias [1] to all features.
    if not (call.has("bias") and call.shape("bias") == (1,)):
        _bias(call, weight[0])
    return [TensorType(type, TensorShape((*x[:-1], weight[0])))]


def _bias(call: Call, channels: int) -> None:
    if call.has("bias") and (len(call.shape("bias")) != 1 or differ(call.shape("bias")[0], channels)):
        raise GraphError(f"takes a bias [{channels}], got {call.shape('bias')}")


def _each(value: Any, axes: int, name: str, least: int) -> list[int]:
    """One number per axis, from a list or one for all."""
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    found = found * axes if len(found) == 1 else found
    if len(found) != axes:
        raise GraphError(f"takes {name} for {axes} axes, got {found}")
    if any(n < least for n in found):
        raise GraphError(f"takes {name} >= {least}, got {found}")
    return found


def _windows(n: int, kernel: int, stride: int, padding: int, dilation: int, *, ceil: bool = False) -> int:
    """How many windows fit along an axis.

    Raises:
        GraphError: none does.
    """
    if n == DYNAMIC or kernel == DYNAMIC:
        return DYNAMIC
    covered = dilation * (kernel - 1) + 1
    room = n + 2 * padding - covered
    count = (room + (stride - 1 if ceil else 0)) // stride + 1
    # The last window must begin inside the input or its left padding.
    count -= ceil and (count - 1) * stride >= n + padding
    if count < 1:
        raise GraphError(f"the kernel covers {covered} elements, but the padded input has {n + 2 * padding}")
    return count


def _convolved(call: Call, axes: int) -> tuple[TensorShape, TensorShape, list[int]]:
    """Input with a batch axis, weight, and what leads the result's shape."""
    x, weight = call.shape("input"), call.shape("weight")
    if len(x) not in (axes + 1, axes + 2) or len(weight) != axes + 2:
        raise GraphError(f"takes an input and a weight of {axes + 2} dimensions, got {x} and {weight}")
    leading = list(x[: len(x) - axes - 1])
    return TensorShape((1, *x) if len(x) == axes + 1 else x), weight, leading


def convolution(axes: int) -> Any:
    """The rule of a convolution along 1, 2 or 3 axes."""

    def rule(call: Call) -> list[TensorType]:
        x, weight, leading = _convolved(call, axes)
        type = _same_type(call, "input", "weight", "bias")
        groups = call.value("groups")
        if groups < 1 or (weight[0] != DYNAMIC and weight[0] % groups):
            raise GraphError(f"groups={groups} does not divide the {weight[0]} output channels")
        if weight[1] != DYNAMIC and differ(x[1], weight[1] * groups):
            taken = weight[1] * groups
            raise GraphError(f"the input has {x[1]} channels, but the weight {weight}, groups={groups}, takes {taken}")
        _bias(call, weight[0])
        strides, dilations = (_each(call.value(name), axes, name, 1) for name in ("stride", "dilation"))
        padding = call.value("padding")
        if isinstance(padding, str):
            if padding not in ("valid", "same") or (padding == "same" and strides != [1] * axes):
                raise GraphError(f'takes padding "valid", or "same" with stride 1, got "{padding}" with {strides}')
            if padding == "same":
                return [TensorType(type, TensorShape((*leading, weight[0], *x[2:])))]
            padding = 0
        paddings = _each(padding, axes, "padding", 0)
        places = zip(x[2:], weight[2:], strides, paddings, dilations, strict=True)
        return [TensorType(type, TensorShape((*leading, weight[0], *(_windows(*place) for place in places))))]

    return rule


def transposed_convolution(axes: int) -> Any:
    """The rule of a transposed convolution along 1, 2 or 3 axes."""

    def rule(call: Call) -> list[TensorType]:
        x, weight, leading = _convolved(call, axes)
        type = _same_type(call, "input", "weight", "bias")
        groups = call.value("groups")
        if groups < 1 or (weight[0] != DYNAMIC and weight[0] % groups):
            raise GraphError(f"groups={groups} does not divide the {weight[0]} input channels of the weight {weight}")
        if differ(x[1], weight[0]):
            raise GraphError(f"the input has {x[1]} channels, but the weight {weight} takes {weight[0]}")
        channels = DYNAMIC if weight[1] == DYNAMIC else weight[1] * groups
        _bias(call, channels)
        strides, dilations = (_each(call.value(name), axes, name, 1) for name in ("stride", "dilation"))
        paddings, more = (_each(call.value(name), axes, name, 0) for name in ("padding", "output_padding"))
        lengths = []
        for n, k, stride, padding, extra, dilation in zip(
            x[2:], weight[2:], strides, paddings, more, dilations, strict=True
        ):
            if extra >= max(stride, dilation):
                raise GraphError(f"takes output_padding below the stride {stride} or dilation {dilation}, got {extra}")
            length = (n - 1) * stride - 2 * padding + dilation * (k - 1) + extra + 1
            if DYNAMIC not in (n, k) and length < 1:
                raise GraphError(f"padding {padding} leaves nothing of the result")
            lengths.append(DYNAMIC if DYNAMIC in (n, k) else length)
        return [TensorType(type, TensorShape((*leading, channels, *lengths)))]

    return rule


def attention(call: Call) -> list[TensorType]:
    """Query [..., n, e], key [..., m, e], value [..., m, v]."""
    query, key, value = call.shape("query"), call.shape("key"), call.shape("value")
    type = _same_type(call, "query", "key", "value")
    if min(len(query), len(key), len(value)) < 2:
        raise GraphError(f"takes query, key and value of at least 2 dimensions, got {query}, {key} and {value}")
    if differ(query[-1], key[-1]):
        raise GraphError(f"query {query} and key {key} differ in their features, {query[-1]} and {key[-1]}")
    if differ(key[-2], value[-2]):
        raise GraphError(f"key {key} and value {value} differ in their length, {key[-2]} and {value[-2]}")
    batch = TensorShape(query[:-2])
    if not call.value("enable_gqa"):
        batch = batch.broadcast_with(key[:-2]).broadcast_with(value[:-2])
    return [TensorType(type, TensorShape((*batch, query[-2], value[-1])))]


def embedding(call: Call) -> list[TensorType]:
    """Table [rows, features], indices of any shape."""
    table, indices = call.type("weight"), call.type("indices")
    if len(table.shape) != 2:
        raise GraphError(f"takes a table [rows, features], got {table.shape}")
    if indices.type not in (IRType.Int64, IRType.Int32):
        raise GraphError(f"takes indices of Int64 or Int32, got {indices.type.value}")
    return [TensorType(table.type, TensorShape((*indices.shape, table.shape[1])))]


def _cell(call: Call, gates: int, hidden: TensorShape) -> TensorType:
    x, w_ih, w_hh = call.shape("input"), call.shape("w_ih"), call.shape("w_hh")
    if len(x) != 2 or len(hidden) != 2 or len(w_ih) != 2 or len(w_hh) != 2:
        raise GraphError(f"takes an input [n, in] and a state [n, hidden], got {x} and {hidden}")
    rows = DYNAMIC if hidden[1] == DYNAMIC else gates * hidden[1]
    if differ(w_ih[1], x[1]) or differ(w_ih[0], rows) or differ(w_hh[0], rows) or differ(w_hh[1], hidden[1]):
        raise GraphError(
            f"the weights {w_ih} and {w_hh} do not fit the input {x} and the state {hidden}: "
            f"[{rows}, {x[1]}] and [{rows}, {hidden[1]}] do"
        )
    if differ(x[0], hidden[0]):
        raise GraphError(f"the input {x} and the state {hidden} have different numbers of rows")
    return TensorType(call.type("input").type, TensorShape(hidden))


def lstm_cell(call: Call) -> list[TensorType]:
    """Input [n, in], states [n, hidden] twice, weights [4 hidden, in] and [4 hidden, hidden]."""
    states = call.types("hx")
    if len(states) != 2 or states[0] != states[1]:
        raise GraphError(f"takes two states of one type, got {', '.join(map(str, states))}")
    found = _cell(call, 4, states[0].shape)
    return [found, found]


def gru_cell(call: Call) -> list[TensorType]:
    """Input [n, in], state [n, hidden], weights [3 hidden, in] and [3 hidden, hidden]."""
    return [_cell(call, 3, call.shape("hx"))]


def rnn_cell(call: Call) -> list[TensorType]:
    """Input [n, in], state [n, hidden], weights [hidden, in] and [hidden, hidden]."""
    return [_cell(call, 1, call.shape("hx"))]


def _per_channel(call: Call, channels: int, names: Sequence[str]) -> None:
    for name in names:
        if call.has(name) and (len(call.shape(name)) != 1 or differ(call.shape(name)[0], channels)):
            raise GraphError(f"takes {name} [{channels}], one number per channel, got {call.shape(name)}")


def _parameters_of(call: Call, names: Sequence[str]) -> None:
    """Check the element types of the parameters of a normalisation: all that of the input, or all Float32 for a half.

    Raises:
        GraphError: one is another.
    """
    input = call.inputs[0].type
    allowed = {input, IRType.Float32} if input in (IRType.Half, IRType.BFloat16) else {input}
    given = {name: call.type(name).type for name in names if call.has(name)}
    if len(set(given.values())) > 1 or set(given.values()) - allowed:
        words = ", ".join(f"{name} is {type.value}" for name, type in given.items())
        either = " or ".join(sorted(type.value for type in allowed))
        raise GraphError(f"normalizes {input.value} with parameters of one type, {either}, but {words}")


def batch_norm(call: Call) -> list[TensorType]:
    """Input [n, channels, ...]; all others [channels]."""
    (result,) = floating(call)
    if len(result.shape) < 2:
        raise GraphError(f"takes an input [n, channels, ...], got {result.shape}")
    if call.value("training") and (call.has("running_mean") or call.has("running_var")):
        raise GraphError("training=true changes the running statistics, which graphs do not; use model.eval()")
    names = ("weight", "bias", "running_mean", "running_var")
    _per_channel(call, result.shape[1], names)
    _parameters_of(call, names)
    return [result]


def layer_norm(call: Call) -> list[TensorType]:
    """Input [..., normalized_shape]; weight and bias have that shape."""
    (result,) = floating(call)
    normalized = call.value("normalized_shape")
    tail = TensorShape(result.shape[len(result.shape) - len(normalized) :])
    if not normalized or not tail.matches(normalized):
        raise GraphError(f"normalizes the last dimensions {list(normalized)}, but the input has shape {result.shape}")
    for name in ("weight", "bias"):
        if call.has(name) and not call.shape(name).matches(normalized):
            raise GraphError(f"takes {name} of shape {list(normalized)}, got {call.shape(name)}")
    _parameters_of(call, ("weight", "bias"))
    return [result]


def group_norm(call: Call) -> list[TensorType]:
    """Input [n, channels, ...], num_groups a divisor of channels."""
    (result,) = floating(call)
    groups = call.value("num_groups")
    if len(result.shape) < 2:
        raise GraphError(f"takes an input [n, channels, ...], got {result.shape}")
    if groups < 1 or (result.shape[1] != DYNAMIC and result.shape[1] % groups):
        raise GraphError(f"num_groups={groups} does not divide the {result.shape[1]} channels")
    _per_channel(call, result.shape[1], ("weight", "bias"))
    _parameters_of(call, ("weight", "bias"))
    return [result]


def pooling(axes: int, *, average: bool = False) -> Any:
    """The rule of pooling along 1, 2 or 3 axes."""

    def rule(call: Call) -> list[TensorType]:
        type, shape = call.type("self")
        if len(shape) not in (axes + 1, axes + 2):
            raise GraphError(f"takes an input of {axes + 2} dimensions, got {shape}")
        kernels = _each(call.value("kernel_size"), axes, "kernel_size", 1)
        strides = _each(call.value("stride") or kernels, axes, "stride", 1)
        paddings = _each(call.value("padding"), axes, "padding", 0)
        dilations = [1] * axes if average else _each(call.value("dilation"), axes, "dilation", 1)
        if any(2 * padding > kernel for padding, kernel in zip(paddings, kernels, strict=True)):
            raise GraphError(f"takes padding of at most half the kernel {kernels}, got {paddings}")
        ceil = call.value("ceil_mode")
        places = zip(shape[-axes:], kernels, strides, paddings, dilations, strict=True)
        return [TensorType(type, TensorShape((*shape[:-axes], *(_windows(*p, ceil=ceil) for p in places))))]

    return rule


def adaptive_pooling(axes: int) -> Any:
    """The rule of adaptive pooling along 1, 2 or 3 axes."""

    def rule(call: Call) -> list[TensorType]:
        type, shape = call.type("self")
        if len(shape) not in (axes + 1, axes + 2):
            raise GraphError(f"takes an input of {axes + 2} dimensions, got {shape}")
        sizes = call.value("output_size")
        sizes = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes]
        sizes = sizes * axes if len(sizes) == 1 else sizes
        if len(sizes) != axes or any(n < 1 and n != DYNAMIC for n in sizes):
            raise GraphError(f"takes output_size for {axes} axes, each >= 1, got {sizes}")
        return [TensorType(type, TensorShape((*shape[:-axes], *sizes)))]

    return rule


add_row("MatMul", "aten.matmul.default aten.mm.default aten.bmm.default", matmul)
add_row("Linear", "aten.linear.default", linear)
for _axes in (1, 2, 3):
    add_row(f"Conv{_axes}d", f"aten.conv{_axes}d.default aten.conv{_axes}d.padding", convolution(_axes))
    _target = f"aten.conv_transpose{_axes}d.{'default' if _axes == 1 else 'input'}"
    add_row(f"ConvTranspose{_axes}d", _target, transposed_convolution(_axes))
    add_row(f"MaxPool{_axes}d", f"aten.max_pool{_axes}d.default", pooling(_axes))
    add_row(f"AvgPool{_axes}d", f"aten.avg_pool{_axes}d.default", pooling(_axes, average=True))
    add_row(f"AdaptiveAvgPool{_axes}d", f"aten.adaptive_avg_pool{_axes}d.default", adaptive_pooling(_axes))
add_row("Attention", "aten.scaled_dot_product_attention.default", attention)
add_row("Embedding", "aten.embedding.default", embedding)
add_row("LSTMCell", "aten.lstm_cell.default", lstm_cell)
add_row("GRUCell", "aten.gru_cell.default", gru_cell)
add_row("RNNTanhCell", "aten.rnn_tanh_cell.default", rnn_cell)
add_row("RNNReLUCell", "aten.rnn_relu_cell.default", rnn_cell)
add_row("BatchNorm", "aten.batch_norm.default", batch_norm)
add_row("LayerNorm", "aten.layer_norm.default", layer_norm)
add_row("GroupNorm", "aten.group_norm.default", group_norm)


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
