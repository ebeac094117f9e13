"""Passes: each returns a new graph with the same outputs; `Pass.exact` says whether every bit stays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fakequant.ir.graph import Graph
from fakequant.ir.passes.constant_folding import FoldConstants
from fakequant.ir.passes.conv_batch_norm import FoldConvBatchNorm
from fakequant.ir.passes.duplicate_fake_quantize import MoveFakeQuantize, RemoveDuplicateFakeQuantize
from fakequant.ir.passes.fusion import FuseOperations, MergeCommonSubexpressions, RemoveDeadCode


class Pass(Protocol):
    """One transformation.

    Attributes:
        name: of the pass.
        exact: whether outputs keep every bit. Gradients keep theirs only where no trainable constant is folded and no
            two paths are merged, whose gradients are then added in another order.
    """

    @property
    def name(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    def run(self, graph: Graph) -> Graph:
        """Return a new graph; the given one does not change."""
        ...


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
"""All passes in their order: the one that is not exact first, so that the others work on what it leaves."""


@dataclass(frozen=True)
class Step:
    """The effect of one pass: operations before and after, and its time."""

    name: str
    exact: bool
    before: int
    after: int
    changed: bool
    seconds: float


@dataclass(frozen=True)
class Statistics:
    """The steps of a sequence of passes.

    >>> print(Statistics((Step("dead code", True, 9, 7, True, 0.001),)))
    dead code: 9 -> 7 operations, exact
    """

    steps: tuple[Step, ...]

    @property
    def exact(self) -> bool:
        """Whether the outputs keep every bit: only exact passes changed the graph."""
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
    """A graph after some passes, for inference: trainable constants are folded with the others.

    Args:
        graph: a valid graph; it stays as it is.
        passes: in the order in which they run; `EXACT`, `ALL`, or your own.

    Raises:
        GraphError: the graph is not valid, or a pass made an invalid one.

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
        changed = found.hash() != graph.hash()
        seconds = time.perf_counter() - start
        steps.append(Step(current.name, current.exact, len(graph.ops), len(found.ops), changed, seconds))
        graph = found
    return Optimized(graph, Statistics(tuple(steps)))
