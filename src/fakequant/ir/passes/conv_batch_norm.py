"""Batch normalisation folded into the convolution before it, before its weight is quantized."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fakequant.ir.graph import Graph
from fakequant.ir.op import IROp
from fakequant.ir.table import in_order
from fakequant.numerics.spec import Arithmetic, QuantSpec


class FoldConvBatchNorm:
    """Multiplies the weight, its scales and the bias of a convolution by what the batch normalisation after it does.

    The scales move with the weight, so that codes stay what they were, except where products round differently: not
    exact. It is done where every output channel has scales of its own in float32; where blocks have scales in a format
    of their own, the products would not be numbers of that format.

    Source: Jacob et al., arXiv 1712.05877, section 3.2.
    """

    name = "convolution and batch normalisation"
    exact = False

    def run(self, graph: Graph) -> Graph:
        """A graph without the batch normalisations that could be folded."""
        folded = graph.copy()
        for norm in [op for op in folded.ops if op.op_type == "BatchNorm"]:
            pair = _NormPair.find(folded, norm)
            if pair is not None:
                pair.fold(folded)
        return folded


_AXES = {"Conv1d": 1, "Conv2d": 2, "Conv3d": 3}
"""The number of spatial axes of each convolution."""


class _NormPair(NamedTuple):
    """A convolution and the batch normalisation that alone reads its result."""

    conv: IROp
    norm: IROp
    quantizer: IROp | None
    weight: Tensor
    params: list[Tensor]

    @staticmethod
    def find(graph: Graph, norm: IROp) -> _NormPair | None:
        """The pair of a normalisation; None if it has none that can be folded."""
        producers, users = graph.producers(), graph.users()
        conv = producers.get(norm.input_ids[0]) if norm.input_ids else None
        if conv is None or conv.op_type not in _AXES or len(norm.input_ids) != 5:
            return None
        # If an input has no batch axis, the normalisation takes another axis for the channels.
        batched = len(conv.output_shape) == _AXES[conv.op_type] + 2
        if not batched or not in_order(norm) or not in_order(conv):
            return None
        if len(users[conv.output_id]) > 1 or conv.output_id in graph.outputs:
            return None
        quantizer = producers.get(conv.input_ids[1])
        if quantizer is not None and (quantizer.op_type != "FakeQuantize" or not in_order(quantizer)):
            return None
        source = conv.input_ids[1] if quantizer is None else quantizer.input_ids[0]
        params = [] if quantizer is None else quantizer.input_ids[1:]
        needed = [source, *params, *norm.input_ids[1:], *conv.input_ids[2:]]
        if any(id not in graph.constants for id in needed):
            return None
        weight = graph.constants[source].tensor.detach()
        pair = _NormPair(conv, norm, quantizer, weight, [graph.constants[id].tensor.detach() for id in params])
        return pair if pair.scales_follow(graph) else None

    def scales_follow(self, graph: Graph) -> bool:
        """Whether the scales can be multiplied channel by channel."""
        factor, _ = self.affine(graph)
        if not bool((factor.isfinite() & (factor != 0)).all()):
            return False
        if self.quantizer is None:
            return True
        if not self.params:
            return False
        spec = QuantSpec.parse(self.quantizer.attributes["spec"])
        own = self.params[0].shape[0] == self.weight.shape[0]
        # A zero point belongs to a sign: a negative factor would exchange the ends of its range.
        return own and spec.is_plain and (len(self.params) == 1 or bool((factor > 0).all()))

    def affine(self, graph: Graph) -> tuple[Tensor, Tensor]:
        """The factor and the offset of the normalisation, float64 [channels]."""
        gamma, beta, mean, var = (graph.constants[id].tensor.detach().double() for id in self.norm.input_ids[1:])
        factor = gamma / torch.sqrt(var + self.norm.attributes["eps"])
        return factor, beta - mean * factor

    def fold(self, graph: Graph) -> None:
        factor, offset = self.affine(graph)
        dtype, name = self.weight.dtype, f"folded.t{self.norm.output_id}"
        by_channel = factor.reshape(-1, *[1] * (self.weight.dim() - 1))
        weight = graph.add_constant(graph.free_name(f"{name}.weight"), (self.weight.double() * by_channel).to(dtype))
        if len(self.conv.input_ids) > 2:
            offset = offset + graph.constants[self.conv.input_ids[2]].tensor.detach().double() * factor
        bias = graph.add_constant(graph.free_name(f"{name}.bias"), offset.to(dtype))
        dropped = [self.norm]
        read = [*graph.outputs, *(id for op in graph.ops for id in op.input_ids)]
        if self.quantizer is not None and read.count(self.quantizer.output_id) == 1:
            dropped.append(self.quantizer)
        ops = []
        for op in graph.ops:
            if op is self.conv:
                if self.quantizer is not None:
                    ops.append(self._quantizer(graph, weight, by_channel.abs()))
                    weight = ops[-1].output_id
                conv = op.copied(self.norm.output_ids, [op.input_ids[0], weight, bias])
                ops.append(conv)
            elif not any(op is other for other in dropped):
                ops.append(op)
        graph.ops = ops

    def _quantizer(self, graph: Graph, weight: int, by_channel: Tensor) -> IROp:
        assert self.quantizer is not None
        spec = QuantSpec.parse(self.quantizer.attributes["spec"])
        scale = self.params[0].double()
        scale = scale / by_channel if spec.arithmetic is Arithmetic.MULTIPLIER else scale * by_channel
        name = graph.free_name(f"folded.t{self.norm.output_id}.scale")
        new = graph.add_constant(name, scale.to(self.params[0].dtype))
        return self.quantizer.copied([graph.new_id()], [weight, new, *self.quantizer.input_ids[2:]])
