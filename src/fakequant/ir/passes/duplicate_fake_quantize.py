"""Quantizers whose input is quantized already."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fakequant.ir.graph import Graph
from fakequant.ir.op import IROp, TensorType, items_to_text
from fakequant.ir.structure import Constant
from fakequant.ir.table import ROWS, in_order
from fakequant.numerics.formats.floats import Format, IntegerFormat
from fakequant.numerics.granularity import PerTensor, PerToken
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Arithmetic, QuantSpec, Rounding
from fakequant.ops import library

_LIMIT = 1 << 22
"""The most values to try; with more, the second quantizer stays."""

_EDGES = (-math.inf, -0.0, 0.0, math.inf, math.nan)
"""Further values to try."""


class RemoveDuplicateFakeQuantize:
    """Removes a quantizer that follows one of the same specification and parameters, where it changes no value.

    Whether it changes none is tried, with every code of every scale: a scale whose products are rounded may move one.
    """

    name = "duplicate fake quantization"
    exact = True

    def run(self, graph: Graph) -> Graph:
        """A graph without them."""
        producers = graph.producers()
        names: dict[int, int] = {}
        ops = []
        for op in graph.ops:
            before = producers.get(op.input_ids[0]) if op.input_ids else None
            if before is not None and _same_quantizer(before, op) and _is_idempotent(graph, op):
                names[op.output_id] = names.get(before.output_id, before.output_id)
            else:
                ops.append(op.copied(input_ids=[names.get(id, id) for id in op.input_ids]))
        found = graph.replaced(ops)
        found.outputs = [names.get(id, id) for id in graph.outputs]
        return found


def _same_quantizer(a: IROp, b: IROp) -> bool:
    same_attributes = items_to_text(a.attributes) == items_to_text(b.attributes)
    # Without a scale both take it from what they see, which is not the same tensor; with a seed both draw.
    static = len(b.input_ids) in (2, 3) and in_order(a) and in_order(b)
    return (
        a.op_type == b.op_type == "FakeQuantize" and static and same_attributes and a.input_ids[1:] == b.input_ids[1:]
    )


def _is_idempotent(graph: Graph, op: IROp) -> bool:
    params = [graph.constants.get(id) for id in op.input_ids[1:]]
    spec = QuantSpec.parse(op.attributes["spec"])
    if any(constant is None for constant in params) or spec.arithmetic.has_two_scales:
        return False  # of those that encode and decode by different scales no code need keep its value
    given = [c.tensor.detach().reshape(-1, 1) for c in params if isinstance(c, Constant)]
    scale, zero_point = given[0], given[1] if len(given) > 1 else None
    codes = values_of(spec.format).to(scale)
    if codes.numel() * scale.numel() > _LIMIT:
        return False
    shifted = codes if zero_point is None else codes - zero_point
    x = shifted / scale if spec.arithmetic is Arithmetic.MULTIPLIER else shifted * scale
    by_row = spec.replace(granularity=PerToken())
    x = torch.cat([x, *(torch.full_like(x[:, :1], value) for value in _EDGES)], 1)
    dtype = op.output_type.dtype
    # In the type of the scale every code is met; those that round to zero in the type of x are -0.0 there.
    every = library.fake_quantize(x, QParams(scale, zero_point), by_row).to(dtype)
    once = torch.cat([every, library.fake_quantize(x.to(dtype), QParams(scale, zero_point), by_row)], 1)
    twice = library.fake_quantize(once, QParams(scale, zero_point), by_row)
    same = (once == twice) & (once.signbit() == twice.signbit())
    return bool((same | (once.isnan() & twice.isnan())).all())


def values_of(format: Format) -> Tensor:
    """Every value that a format has, in units of the scale, ascending [n].

    >>> values_of(parse_format("float4_e2m1fn")).tolist()[7:]
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    if isinstance(format, IntegerFormat):
        return torch.arange(format.quant_min, format.quant_max + 1, dtype=torch.float64)
    # Every bfloat16, which has more bits of each kind than small floats, rounded to the format.
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    return torch.unique(format.round(format.clamp(every[every.isfinite()]))).double()


class MoveFakeQuantize:
    """Moves a quantizer of one scale per tensor before reshapes and transposes, next to what made the elements.

    There it can be fused with that, or be found twice. A tensor has the same range and rounds to the same values in
    every order of its elements, unless rounding draws random numbers by position.
    """

    name = "fake quantization before reshapes"
    exact = True

    def run(self, graph: Graph) -> Graph:
        """A graph with every such quantizer as early as it can be."""
        moved = graph.copy()
        reshaped: dict[tuple[int, int], int] = {}
        while (pair := _next(moved)) is not None:
            _swap(moved, *pair, reshaped)
        return moved


def _next(graph: Graph) -> tuple[IROp, IROp] | None:
    """A quantizer and the movement before it, which nothing else reads."""
    producers, users = graph.producers(), graph.users()
    for op in graph.ops:
        before = producers.get(op.input_ids[0]) if op.input_ids else None
        if before is None or op.op_type != "FakeQuantize" or not _moves(before) or not _can_move(graph, op, before):
            continue
        if len(users[before.output_id]) == 1 and before.output_id not in graph.outputs:
            return op, before
    return None


def _moves(op: IROp) -> bool:
    return op.op_type in ROWS and ROWS[op.op_type].moves and in_order(op)


def _can_move(graph: Graph, op: IROp, movement: IROp) -> bool:
    if not in_order(op) or not all(id in graph.constants for id in op.input_ids[1:]):
        return False
    params = [graph.constants[id] for id in op.input_ids[1:]]
    rank = len(graph.types()[movement.input_ids[0]].shape)
    spec = QuantSpec.parse(op.attributes["spec"])
    # A parameter in another shape would be another parameter, which nothing trains.
    constant = all(c.tensor.dim() == rank or not (c.trainable or c.frozen) for c in params)
    return isinstance(spec.granularity, PerTensor) and spec.rounding is Rounding.NEAREST_EVEN and constant


def _swap(graph: Graph, quantizer: IROp, movement: IROp, reshaped: dict[tuple[int, int], int]) -> None:
    """Quantize first, then move; ids and places of the results stay.

    Args:
        graph: what is changed.
        quantizer: what is moved.
        movement: what it is moved before.
        reshaped: the constants made so far, by the one they were made of and their rank.
    """
    x = movement.input_ids[0]
    type = graph.types()[x]
    params = [_of_rank(graph, id, len(type.shape), reshaped) for id in quantizer.input_ids[1:]]
    first = quantizer.copied([movement.output_id], [x, *params])
    first.outputs = [TensorType(*type)]
    second = movement.copied(quantizer.output_ids, [movement.output_id, *movement.input_ids[1:]])
    second.outputs = list(quantizer.outputs)
    places = {id(movement): first, id(quantizer): second}
    # The quantizer's constants are made already; sizes that the movement reads were there before it.
    graph.ops = [places.get(id(op), op) for op in graph.ops]


def _of_rank(graph: Graph, id: int, rank: int, reshaped: dict[tuple[int, int], int]) -> int:
    """The one number of a constant in as many dimensions as the tensor has."""
    constant = graph.constants[id]
    if constant.tensor.dim() == rank:
        return id
    if (id, rank) not in reshaped:
        name = graph.free_name(f"{constant.name}.rank_{rank}")
        reshaped[id, rank] = graph.add_constant(name, constant.tensor.detach().reshape([1] * rank))
    return reshaped[id, rank]
