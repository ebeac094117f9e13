"""Quantizers whose input is quantized already."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fakequant.ir.attributes import items_to_text
from fakequant.ir.graph import Graph
from fakequant.ir.op import IROp
from fakequant.ir.structure import Constant
from fakequant.ir.table import in_order
from fakequant.numerics.formats.format import Format
from fakequant.numerics.formats.integers import IntegerFormat
from fakequant.numerics.granularity import PerToken
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Arithmetic, QuantSpec
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
