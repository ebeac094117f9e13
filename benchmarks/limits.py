"""What is promised: cases, what they are timed beside, and the most that the ratio of the times may be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from benchmarks.harness import ATEN, COMPILED, COPY, DOUBLED, Case, Prepared, Result, Timed, square

from . import kinds
from .calibration import BINS, FORWARD, LOOPS, METHODS, Search, WholeModel, fewer
from .ir import EAGER, GRAPH_STEPS
from .peers import PEERS
from .sensitivity import SENSITIVITY, WHOLE_PASSES
from .torch_ao import ROUTED, TORCH_AO
from .training import (
    BLOCK,
    CNN,
    CONVOLUTION_BY_CODES,
    EVALUATIONS_BY_CODES,
    FLOAT,
    FUSED,
    LINEAR_BY_CODES,
    MODULE,
    Step,
)

K, M = 1 << 10, 1 << 20
PIECES = "pieces of 1M"
_INT8 = "int8 per tensor and channel, float32 and bfloat16"
LEAST_COMPARED = 4 * K


@dataclass(frozen=True)
class Limit:
    """The most that a ratio may be.

    Args:
        what: the promise in words.
        cases: each of them keeps it.
        against: what they are timed beside.
        most: the largest ratio of their time to that of the other.
        slow: whether it takes so long to make them ready that one process is enough.
    """

    what: str
    cases: tuple[Timed, ...]
    against: str
    most: float
    slow: bool = False

    def holds_for(self, result: Result) -> bool:
        """Whether this is the result of one of the cases."""
        return result.against == self.against and any(
            (case.name, case.direction, case.elements, case.dtype_name, case.text)
            == (result.case, result.direction, result.elements, result.dtype, result.spec)
            for case in self.cases
        )


class AtOnce(Case):
    """A large tensor compared with the same one in pieces, whose results are kept too: does only its size cost?"""

    def prepare(self, against: str) -> Prepared:
        if against != PIECES:
            return super().prepare(against)
        ours, rows = self.run(), M // self.shape[-1]
        return Prepared(ours, lambda x: [ours(piece) for piece in x.split(rows)], self.inputs())


def _int8(sizes: Iterable[int], *, backward: bool = False) -> tuple[Timed, ...]:
    return tuple(
        kind.case(elements, dtype, backward=backward)
        for kind in (kinds.INT8_TENSOR, kinds.INT8_CHANNEL)
        for elements in sizes
        for dtype in (torch.float32, torch.bfloat16)
    )


_4M_FLOAT32 = f"{4 * M:,} float32"
_COMPILED = tuple(Step(step.name, step.make, step.shape, compiled=True) for step in (CNN, BLOCK))
INT8_4M = kinds.INT8_TENSOR.case(4 * M)
_LARGEST = AtOnce("int8 per tensor, at once", INT8_4M.spec, square(64 * M), torch.float16)
ONE_COPY = Limit(f"int8 forward, {_4M_FLOAT32}: time over `x.clone()`", (INT8_4M,), COPY, 1.5)
ONE_ATEN = Limit(f"int8 forward, {_4M_FLOAT32}: time over ATen", (INT8_4M,), ATEN, 0.1)
LIMITS: tuple[Limit, ...] = (
    ONE_COPY,
    ONE_ATEN,
    Limit(
        f"FP8, FP6, FP4 forward, {_4M_FLOAT32}: time over `x.clone()`",
        tuple(kind.case(4 * M) for kind in kinds.SMALL_FLOATS),
        COPY,
        1.5,
    ),
    Limit(
        f"MXFP8, MXFP4, NVFP4, INT4 in groups, scales from the input, forward, {_4M_FLOAT32}: time over `x.clone()`",
        tuple(kind.case(4 * M) for kind in kinds.FROM_THE_INPUT),
        COPY,
        2.0,
    ),
    Limit(
        f"Q4_K, Q2_K, Q6_K, scales from the input, forward, {_4M_FLOAT32}: time over `x.clone()`",
        tuple(kind.case(4 * M) for kind in kinds.K_QUANTS),
        COPY,
        3.0,
    ),
    Limit(f"{_INT8}, forward, 4M elements: time over `x.clone()`", _int8([4 * M]), COPY, 1.15),
    Limit(f"{_INT8}, forward, 16M elements: time over `x.clone()`", _int8([16 * M]), COPY, 1.1),
    Limit(
        f"{_INT8}, forward and backward, 4M elements: time over `x * 2`", _int8([4 * M], backward=True), DOUBLED, 1.15
    ),
    Limit(
        "int8 per tensor and channel, forward, and forward and backward, float32, 4K, 1M, 4M elements: time over ATen",
        tuple(
            kind.case(n, backward=backward)
            for kind in (kinds.INT8_TENSOR, kinds.INT8_CHANNEL)
            for n in (4 * K, M, 4 * M)
            for backward in (False, True)
        ),
        ATEN,
        1.0,
    ),
    Limit("int8 forward, 64M float16: time over that in pieces of 1M elements", (_LARGEST,), PIECES, 1.1),
    Limit("quantizer module, 256 elements, forward and backward: time over torch.ao's fused one", (MODULE,), FUSED, 1),
    Limit("quantizer module, 256 elements, forward and backward: time over ATen's operator", (MODULE,), ATEN, 1.6),
    Limit("training step, INT8 weights and activations: time over the float step", (CNN, BLOCK), FLOAT, 1.1),
    Limit("the same under torch.compile: time over the compiled float step", _COMPILED, FLOAT, 1.05, slow=True),
    Limit("training step, INT8, of the compiled graph: time over the eager model", GRAPH_STEPS, EAGER, 1.0),
    Limit("Linear, codes multiplied, forward: time over `F.linear`", (LINEAR_BY_CODES,), FLOAT, 0.4),
    Limit("3x3 convolution, codes multiplied, forward: time over `F.conv2d`", (CONVOLUTION_BY_CODES,), FLOAT, 0.5),
    Limit(
        "evaluation, INT8, codes multiplied, weights quantized once: time over the float model",
        EVALUATIONS_BY_CODES,
        FLOAT,
        0.5,
    ),
    Limit("models of torch.ao by `compat.aten`, training: time over torch", ROUTED, TORCH_AO, 1.0),
    Limit(
        f"entropy and mse search in a histogram of {BINS} bins: time over pytorch-quantization's",
        (Search("entropy"), Search("mse")),
        LOOPS,
        1 / 100,
    ),
    Limit(
        f"percentile, entropy and mse search in {4 * BINS} bins: time over that in {BINS}",
        tuple(Search(method, 4 * BINS) for method in METHODS),
        fewer(BINS),
        4.0,
    ),
    Limit(
        "calibration of the demo's network by max, percentile, entropy, mse: time over plain forward passes",
        tuple(WholeModel(method) for method in ("max", *METHODS)),
        FORWARD,
        1.3,
    ),
    Limit(
        "sensitivity of the demo's network, codes multiplied: time over a simulated pass for each layer",
        (SENSITIVITY,),
        WHOLE_PASSES,
        0.6,
    ),
)


def limit_of(result: Result) -> float | None:
    """The smallest ratio that is promised of a result; None if there is no promise.

    It is at most 1 to every other library; to ATen and torch's compiler in what the tables show, from 4K elements on.
    """
    shown = result.elements >= LEAST_COMPARED and result.case in {kind.name for kind in kinds.SHOWN}
    others = {peer.name for peer in PEERS} | ({ATEN, COMPILED} if shown else set())
    at_most_one = [1.0] if result.against.split(" ")[0] in others else []
    return min((*at_most_one, *(limit.most for limit in LIMITS if limit.holds_for(result))), default=None)


def missed(result: Result) -> str:
    """What a result misses, in words; empty if nothing."""
    most, found = limit_of(result), result.ratio
    return f"MISSED: > {most:g}" if most is not None and found is not None and found.p50 > most else ""
