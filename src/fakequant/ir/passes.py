"""Passes: each returns a new graph with the same outputs; `Pass.exact` says whether outputs keep every bit.

They work on operations, not on graphs of torch.fx: torch.fx merges `x / 0.0` and `x / -0.0` as common subexpressions,
and its constant folding ignores the alignment of memory and grad mode.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fakequant.errors import GraphError
from fakequant.ir.graph import Constant, Graph, Input, read_frozen
from fakequant.ir.op import IROp, IRType, TensorType, items_to_text
from fakequant.ir.ops import fuse
from fakequant.ir.table import ROWS, in_order, repeatable
from fakequant.numerics.formats.floats import Format, IntegerFormat
from fakequant.numerics.granularity import PerTensor, PerToken
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Arithmetic, QuantSpec, Rounding
from fakequant.ops import library

log = logging.getLogger("fakequant.ir")


class Pass(Protocol):
    """One transformation of a graph.

    Attributes:
        name: the name of the pass.
        exact: whether outputs keep every bit. Gradients keep every bit only if no trainable constant is folded, and no
            paths are merged, whose gradients would be added in another order.
    """

    @property
    def name(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    def run(self, graph: Graph) -> Graph:
        """Return a new graph, and leave `graph` unchanged."""
        ...


class RemoveDeadCode:
    """Removes operations and constants that no output needs; inputs and operations that draw random numbers stay."""

    name = "dead code"
    exact = True

    def run(self, graph: Graph) -> Graph:
        """A graph without dead operations and constants."""
        wanted = set(graph.outputs)
        kept = []
        for op in reversed(graph.ops):
            if wanted.intersection(op.output_ids) or not repeatable(op):
                kept.append(op)
                wanted.update(op.input_ids)
        constants = {id: constant for id, constant in graph.constants.items() if id in wanted}
        return graph.replaced(kept[::-1], constants)


class MergeCommonSubexpressions:
    """Keeps only the first of equal operations on equal inputs, and of equal constants; random draws stay."""

    name = "common subexpressions"
    exact = True

    def run(self, graph: Graph) -> Graph:
        """A graph in which equal values are computed once."""
        names: dict[int, int] = {}
        known: dict[object, int] = {}
        for place, constant in graph.constants.items():
            tensor = constant.tensor
            # Two parameters of equal values are moved apart by training; strides decide how the next operation sums.
            alike = id(tensor) if constant.trainable else (constant.digest(), tensor.stride(), tensor.device)
            names[place] = known.setdefault((constant.frozen, alike), place)
        made: dict[object, list[int]] = {}
        ops = []
        for op in graph.ops:
            read = [names.get(place, place) for place in op.input_ids]
            key = (op.op_type, items_to_text(op.attributes), tuple(read), tuple(map(str, op.outputs)))
            first = made.setdefault(key, op.output_ids) if repeatable(op) else op.output_ids
            if first is op.output_ids:
                ops.append(op.copied(input_ids=read))
            names.update(zip(op.output_ids, first, strict=True))
        kept = {place: constant for place, constant in graph.constants.items() if names[place] == place}
        merged = graph.replaced(ops, kept)
        merged.outputs = [names.get(place, place) for place in graph.outputs]
        return merged


@dataclass(frozen=True)
class FoldConstants:
    """Replaces operations on constants, such as fake-quantized weights, by their results, bit for bit.

    Args:
        limit: results of more elements are not folded, so that a mask of ones does not become megabytes.
        parameters: whether trainable constants are folded, too, after which training cannot change them.
    """

    limit: int = 10_000_000
    parameters: bool = True
    name = "constant folding"
    exact = True

    def run(self, graph: Graph) -> Graph:
        """A graph in which the results of operations on constants are constants."""
        found = graph.replaced(graph.ops)
        constants, ops = found.constants, []
        for op in graph.ops:
            results = self._results(op, constants)
            if results is None:
                ops.append(op.copied())
            else:
                constants.update({i: Constant(found.free_name(c.name), c.tensor, c.frozen) for i, c in results.items()})
        used = {id for op in ops for id in op.input_ids} | set(graph.outputs)
        found.ops = ops
        found.constants = {id: c for id, c in constants.items() if id in used or id in graph.constants}
        return found

    def _results(self, op: IROp, constants: dict[int, Constant]) -> dict[int, Constant] | None:
        """The results of an operation as constants; None if the operation must stay.

        It stays if a result is large, random or cannot be computed, or if its bits depend on grad mode. Strides and the
        alignment of memory are kept, because both decide the order in which kernels sum.
        """
        if not all(id in constants and (self.parameters or not constants[id].trainable) for id in op.input_ids):
            return None
        types = {
            id: type for id, type in zip(op.output_ids, op.outputs, strict=True) if type.type is not IRType.Missing
        }
        small = all(t.type is not IRType.Index and 0 < t.shape.element_count <= self.limit for t in types.values())
        if not small or not repeatable(op):
            return None
        alone = Graph()
        alone.inputs = {id: Input(f"t{id}", constants[id].type) for id in op.input_ids}
        alone.ops, alone.outputs = [op], list(types)
        given = [constants[id] for id in alone.inputs]
        found = []
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                try:
                    results = alone.run(
                        *(read_frozen(c.tensor) if c.trainable or c.frozen else c.tensor for c in given)
                    )
                except GraphError as error:
                    log.debug("%s stays: %s", op, error)
                    return None
            found.append(results if isinstance(results, tuple) else (results,))
        made = {}
        for id, without, graded in zip(types, *found, strict=True):
            # As far from a boundary of 64 bytes: no view of a parameter that training moves.
            without = without.detach()
            shift = without.data_ptr() % 64 // without.element_size()
            span = 1 + sum((n - 1) * stride for n, stride in zip(without.shape, without.stride(), strict=True))
            memory = without.new_empty(shift + span)
            memory[shift:].copy_(without.as_strided((span,), (1,)))
            copied = memory.as_strided(without.shape, without.stride(), shift)
            constant = Constant(f"folded.t{id}", copied, graded.requires_grad)
            if without.stride() != graded.stride() or constant.digest() != Constant("", graded).digest():
                return None
            made[id] = constant
        return made


_PRODUCTS = ("Linear", "MatMul", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
_ACTIVATIONS = (
    *("ReLU", "GELU", "SiLU", "Sigmoid", "Tanh", "LeakyReLU", "ELU"),
    *("HardSwish", "HardSigmoid", "HardTanh", "Clamp"),
)
_ORDER = (("BatchNorm",), ("Add",), _ACTIVATIONS, ("FakeQuantize", "FakeQuantization"))
"""The operations that may follow a product, each at most once and in this order."""


class FuseOperations:
    """Fuses a product and the operations after it, if no other operation reads the values in between.

    Kernels and their order stay, and so does every bit. The shorter graph shows operations as an engine fuses them.
    """

    name = "fusion"
    exact = True

    def run(self, graph: Graph) -> Graph:
        """A graph with fused operations."""
        users = graph.users()
        ops = list(graph.ops)
        for op in graph.ops:
            chain, place = [op], 0
            while op.op_type in _PRODUCTS:
                made = chain[-1].output_id
                readers = users.get(made, [])
                if len(readers) != 1 or made in graph.outputs or readers[0].input_ids[0] != made:
                    break
                kinds = [i for i in range(place, len(_ORDER)) if readers[0].op_type in _ORDER[i]]
                # The reader's other inputs must exist before the chain begins.
                if not kinds or not all(id == made or id in graph.constants for id in readers[0].input_ids):
                    break
                place = kinds[0] + 1
                chain.append(readers[0])
            if len(chain) > 1:
                ops = [fuse(chain) if o is chain[-1] else o for o in ops if not any(o is i for i in chain[:-1])]
        return graph.replaced(ops)


_MOST_VALUES = 1 << 22
"""The largest number of values to try; with more, the second quantizer stays."""

_EDGES = (-math.inf, -0.0, 0.0, math.inf, math.nan)
"""Special values that are tried besides the codes."""


class RemoveDuplicateFakeQuantize:
    """Removes a quantizer after one with the same specification and parameters, if it changes no value.

    All codes of all scales are tried: if a product of code and scale is rounded, a second quantizer may change its
    code.
    """

    name = "duplicate fake quantization"
    exact = True

    def run(self, graph: Graph) -> Graph:
        """A graph without the duplicate quantizers."""
        producers = graph.producers()
        names: dict[int, int] = {}
        ops = []
        for op in graph.ops:
            before = producers.get(op.input_ids[0]) if op.input_ids else None
            if before is not None and before.op_type == op.op_type == "FakeQuantize":
                # Without a scale both take it from what they see, which is not the same tensor; with a seed both draw.
                static = len(op.input_ids) in (2, 3) and in_order(before) and in_order(op)
                same = items_to_text(before.attributes) == items_to_text(op.attributes)
                repeats = static and same and before.input_ids[1:] == op.input_ids[1:] and _is_idempotent(graph, op)
            else:
                repeats = False
            if repeats and before is not None:
                names[op.output_id] = names.get(before.output_id, before.output_id)
            else:
                ops.append(op.copied(input_ids=[names.get(id, id) for id in op.input_ids]))
        found = graph.replaced(ops)
        found.outputs = [names.get(id, id) for id in graph.outputs]
        return found


def _is_idempotent(graph: Graph, op: IROp) -> bool:
    """Whether a quantizer with constant parameters changes none of its results when applied again."""
    spec = QuantSpec.parse(op.attributes["spec"])
    if not all(id in graph.constants for id in op.input_ids[1:]) or spec.arithmetic.has_two_scales:
        return False  # of those that encode and decode by different scales no code need keep its value
    given = [graph.constants[id].tensor.detach().reshape(-1, 1) for id in op.input_ids[1:]]
    scale, zero_point = given[0], given[1] if len(given) > 1 else None
    codes = values_of(spec.format).to(scale)
    if codes.numel() * scale.numel() > _MOST_VALUES:
        return False
    shifted = codes if zero_point is None else codes - zero_point
    x = shifted / scale if spec.arithmetic is Arithmetic.MULTIPLIER else shifted * scale
    params, by_row = QParams(scale, zero_point), spec.replace(granularity=PerToken())
    x = torch.cat([x, *(torch.full_like(x[:, :1], value) for value in _EDGES)], 1)
    dtype = op.output_type.dtype
    # In the type of the scale every code is met; those that round to zero in the type of x are -0.0 there.
    every = library.fake_quantize(x, params, by_row).to(dtype)
    once = torch.cat([every, library.fake_quantize(x.to(dtype), params, by_row)], 1)
    twice = library.fake_quantize(once, params, by_row)
    same = (once == twice) & (once.signbit() == twice.signbit())
    return bool((same | (once.isnan() & twice.isnan())).all())


def values_of(format: Format) -> Tensor:
    """All values of a format in units of the scale, ascending [n].

    >>> values_of(parse_format("float4_e2m1fn")).tolist()[7:]
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    if isinstance(format, IntegerFormat):
        return torch.arange(format.quant_min, format.quant_max + 1, dtype=torch.float64, device="cpu")
    # Every bfloat16, which has more bits of each kind than small floats, rounded to the format.
    every = (
        torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16).float()
    )
    return torch.unique(format.round(format.clamp(every[every.isfinite()]))).double()


class MoveFakeQuantize:
    """Moves a per-tensor quantizer before reshapes and transposes, directly after the operation that made the values.

    There it can be fused, or recognized as a duplicate. A tensor has the same range and rounded values in every order
    of its elements, unless rounding draws random numbers by position.
    """

    name = "fake quantization before reshapes"
    exact = True

    def run(self, graph: Graph) -> Graph:
        """A graph with every per-tensor quantizer as early as possible."""
        moved = graph.copy()
        reshaped: dict[tuple[int, int], int] = {}  # the constants made so far, by that they are made of and the rank
        while (pair := _movable(moved)) is not None:
            quantizer, movement = pair
            x = movement.input_ids[0]
            type = moved.types()[x]
            rank = len(type.shape)
            params = []
            for param in quantizer.input_ids[1:]:
                constant = moved.constants[param]
                if constant.tensor.dim() != rank and (param, rank) not in reshaped:
                    name = moved.free_name(f"{constant.name}.rank_{rank}")
                    reshaped[param, rank] = moved.add_constant(name, constant.tensor.detach().reshape([1] * rank))
                params.append(param if constant.tensor.dim() == rank else reshaped[param, rank])
            first = quantizer.copied([movement.output_id], [x, *params])
            first.outputs = [TensorType(*type)]
            second = movement.copied(quantizer.output_ids, [movement.output_id, *movement.input_ids[1:]])
            second.outputs = list(quantizer.outputs)
            # The quantizer's constants are made already; sizes that the movement reads were there before it.
            moved.ops = [first if op is movement else second if op is quantizer else op for op in moved.ops]
        return moved


def _movable(graph: Graph) -> tuple[IROp, IROp] | None:
    """A quantizer with constant parameters that is the only reader of a reshape, and the reshape; else None."""
    producers, users, types = graph.producers(), graph.users(), graph.types()
    for op in graph.ops:
        before = producers.get(op.input_ids[0]) if op.input_ids else None
        if before is None or op.op_type != "FakeQuantize" or not in_order(op) or not in_order(before):
            continue
        read_alone = len(users[before.output_id]) == 1 and before.output_id not in graph.outputs
        moves = before.op_type in ROWS and ROWS[before.op_type].moves
        if not read_alone or not moves or not all(id in graph.constants for id in op.input_ids[1:]):
            continue
        rank = len(types[before.input_ids[0]].shape)
        spec = QuantSpec.parse(op.attributes["spec"])
        params = [graph.constants[id] for id in op.input_ids[1:]]
        # A parameter in another shape would be another parameter, which nothing trains.
        constant = all(c.tensor.dim() == rank or not (c.trainable or c.frozen) for c in params)
        if constant and isinstance(spec.granularity, PerTensor) and spec.rounding is Rounding.NEAREST_EVEN:
            return op, before
    return None


class FoldConvBatchNorm:
    """Folds a batch normalisation into the weight, its scales and the bias of the convolution before it.

    Scales are multiplied like the weight, so that codes stay except where products round differently: so the pass is
    not exact. It folds only if every output channel has separate float32 scales, because products of scales in another
    format would not be numbers of that format.

    Source: Jacob et al., arXiv 1712.05877, section 3.2.
    """

    name = "convolution and batch normalisation"
    exact = False

    def run(self, graph: Graph) -> Graph:
        """A graph in which all suitable batch normalisations are folded."""
        folded = graph.copy()
        for norm in [op for op in folded.ops if op.op_type == "BatchNorm"]:
            _fold_norm(folded, norm)
        return folded


_AXES = {"Conv1d": 1, "Conv2d": 2, "Conv3d": 3}
"""The number of spatial axes of each convolution."""


def _fold_norm(graph: Graph, norm: IROp) -> None:
    """Fold a batch normalisation, in place, into the convolution that only this normalisation reads, if possible."""
    producers, users = graph.producers(), graph.users()
    conv = producers.get(norm.input_ids[0]) if norm.input_ids else None
    if (
        conv is None
        or conv.op_type not in _AXES
        or len(norm.input_ids) != 5
        or not in_order(norm)
        or not in_order(conv)
    ):
        return
    # If an input has no batch axis, the normalisation takes another axis for the channels.
    batched = len(conv.output_shape) == _AXES[conv.op_type] + 2 and in_order(norm) and in_order(conv)
    if not batched or len(users[conv.output_id]) > 1 or conv.output_id in graph.outputs:
        return
    quantizer = producers.get(conv.input_ids[1])
    if quantizer is not None and (quantizer.op_type != "FakeQuantize" or not in_order(quantizer)):
        return
    source, *params = [conv.input_ids[1]] if quantizer is None else quantizer.input_ids
    if any(id not in graph.constants for id in (source, *params, *norm.input_ids[1:], *conv.input_ids[2:])):
        return
    weight = graph.constants[source].tensor.detach()
    gamma, beta, mean, var = (graph.constants[id].tensor.detach().double() for id in norm.input_ids[1:])
    factor = gamma / torch.sqrt(var + norm.attributes["eps"])
    offset = beta - mean * factor
    if not bool((factor.isfinite() & (factor != 0)).all()):
        return
    name, read = f"folded.t{norm.output_id}", [*graph.outputs, *(id for op in graph.ops for id in op.input_ids)]
    by_channel = factor.reshape(-1, *[1] * (weight.dim() - 1))
    new_weight = (weight.double() * by_channel).to(weight.dtype)
    new_bias = offset
    if len(conv.input_ids) > 2:
        new_bias = new_bias + graph.constants[conv.input_ids[2]].tensor.detach().double() * factor
    if quantizer is None:
        inputs = [graph.add_constant(graph.free_name(f"{name}.weight"), new_weight)]
        made = []
    else:
        spec = QuantSpec.parse(quantizer.attributes["spec"])
        scale = graph.constants[params[0]].tensor.detach() if params else None
        # A zero point belongs to a sign: a negative factor would exchange the ends of its range.
        signs_stay = len(params) == 1 or bool((factor > 0).all())
        if scale is None or scale.shape[0] != weight.shape[0] or not spec.is_plain or not signs_stay:
            return
        by_size = by_channel.abs()
        moved = scale.double() / by_size if spec.arithmetic is Arithmetic.MULTIPLIER else scale.double() * by_size
        ids = [graph.add_constant(graph.free_name(f"{name}.weight"), new_weight)]
        ids.append(graph.add_constant(graph.free_name(f"{name}.scale"), moved.to(scale.dtype)))
        made = [quantizer.copied([graph.new_id()], [*ids, *params[1:]])]
        inputs = made[0].output_ids
    # The id after that of the quantizer, which the graph does not have yet.
    bias = max(graph.new_id(), inputs[0] + 1)
    graph.add_constant(graph.free_name(f"{name}.bias"), new_bias.to(weight.dtype), bias)
    made.append(conv.copied(norm.output_ids, [conv.input_ids[0], *inputs, bias]))
    unread = quantizer is not None and read.count(quantizer.output_id) == 1
    kept = [op for op in graph.ops if op is not norm and not (unread and op is quantizer)]
    graph.ops = [new for op in kept for new in (made if op is conv else [op])]


EXACT: tuple[Pass, ...] = (
    MoveFakeQuantize(),
    RemoveDuplicateFakeQuantize(),
    MergeCommonSubexpressions(),
    FoldConstants(),
    RemoveDeadCode(),
    FuseOperations(),
)
"""The passes that keep every bit of the outputs, in their order."""

ALL: tuple[Pass, ...] = (FoldConvBatchNorm(), *EXACT)
"""All passes in order; the pass that is not exact runs first, so that the others can use its result."""


@dataclass(frozen=True)
class Step:
    """The effect of one pass: the number of operations before and after, and its time."""

    name: str
    exact: bool
    before: int
    after: int
    changed: bool
    seconds: float


@dataclass(frozen=True)
class Statistics:
    """The steps of a sequence of passes; prints one line for each.

    >>> print(Statistics((Step("dead code", True, 9, 7, True, 0.001),)))
    dead code: 9 -> 7 operations, exact
    """

    steps: tuple[Step, ...]

    @property
    def exact(self) -> bool:
        """Whether the outputs keep every bit, since only exact passes changed the graph."""
        return all(step.exact or not step.changed for step in self.steps)

    def __str__(self) -> str:
        rows = []
        for step in self.steps:
            found = f"{step.before} -> {step.after} operations" if step.changed else "nothing to do"
            rows.append(f"{step.name}: {found}, {'exact' if step.exact else 'not exact'}")
        return "\n".join(rows)


class Optimized(NamedTuple):
    """An optimized graph and the statistics of its passes."""

    graph: Graph
    statistics: Statistics


def optimize(graph: Graph, passes: Sequence[Pass] = EXACT) -> Optimized:
    """Apply passes to a graph for inference; trainable constants are folded like other constants.

    Args:
        graph: a valid graph, which does not change.
        passes: the passes in the order in which they run: `EXACT`, `ALL`, or your own.

    Raises:
        GraphError: the graph is not valid, or a pass made an invalid graph.

    >>> from fakequant.ir import IRType
    >>> graph = Graph("example")
    >>> weight = graph.add("FakeQuantization", graph.add_constant("w", torch.randn(3, 4)))
    >>> graph.outputs = [graph.add("Linear", graph.add_input("x", IRType.Float32, (2, 4)), weight)]
    >>> print(optimize(graph, [FoldConstants()]).statistics)
    constant folding: 2 -> 1 operations, exact
    """
    graph.check()
    steps = []
    for current in passes:
        start = time.perf_counter()
        found = current.run(graph).check()
        changed = found != graph
        seconds = time.perf_counter() - start
        steps.append(Step(current.name, current.exact, len(graph.ops), len(found.ops), changed, seconds))
        graph = found
    return Optimized(graph, Statistics(tuple(steps)))
