"""What captured graphs promise: bits against the eager model, and the time of a compiled step over an eager one.

`python -m benchmarks.ir` prints the rows that `make bars` measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fakequant as fq
from benchmarks.harness import CannotRunError, Effort, Prepared, measure, ratio
from fakequant import ir
from tests.support.networks import NETWORKS, PRESETS, Cnn, quantized

from .training import CNN, Step

_EFFORT = Effort(5.0)


class Differing(NamedTuple):
    """Elements compared and those of which a bit differs."""

    elements: int
    differing: int

    def __add__(self, other: tuple[int, ...]) -> Differing:  # type: ignore[override]
        return Differing(self.elements + other[0], self.differing + other[1])


def compared(actual: Tensor, expected: Tensor) -> Differing:
    """Two results bit for bit; the sign of zero counts, NaN equals NaN."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    same = (actual == expected) & (actual.signbit() == expected.signbit())
    return Differing(actual.numel(), int((~(same | (actual.isnan() & expected.isnan()))).sum()))


def step(function: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and the gradient of every parameter after one backward pass."""
    model.zero_grad()
    y = function(x)
    y.backward(torch.linspace(-1.0, 1.0, y.numel()).view_as(y))
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def exact_differences(network: str, preset: str) -> dict[str, Differing]:
    """What differs from the eager model before any pass that is not exact, by what was done."""
    model, x = quantized(network, preset)
    graph = ir.capture(model, x)
    expected = step(model, model, x)
    found = {
        "run, with gradients": _sum(step(graph.to_torch(), model, x), expected),
        "compiled, with gradients": _sum(step(graph.compile(), model, x), expected),
    }
    gradients = graph.backward().run(x, torch.linspace(-1.0, 1.0, expected[0].numel()).view_as(expected[0]))
    trained = [c.tensor for c in graph.constants.values() if c.trainable]
    by_parameter = {id(p): p.grad for p in model.parameters()}
    wanted = [by_parameter[id(tensor)] for tensor in trained]
    found["graph of the gradients"] = _sum(list(gradients)[-len(trained) :], [g for g in wanted if g is not None])
    optimized = ir.optimize(graph).graph
    with torch.no_grad():
        found["optimised by exact passes, run and compiled"] = compared(optimized.run(x), expected[0]) + compared(
            optimized.compile()(x), expected[0]
        )
    return found


def _sum(actual: list[Tensor], expected: list[Tensor]) -> Differing:
    assert len(actual) == len(expected)
    return sum((compared(a, e) for a, e in zip(actual, expected, strict=True)), Differing(0, 0))


class Steps(NamedTuple):
    """Codes compared after folding, those that moved at all, and how far the farthest did."""

    elements: int
    moved: int
    farthest: int


def folded_steps(network: str, preset: str, count: int = 64) -> Steps:
    """How far the codes of activations move when batch normalisations are folded, of quantizers per tensor.

    Where quantizers find their scales anew, nothing is folded, and every element of the output must be the same.
    """
    model, x = quantized(network, preset, count)
    graph = ir.capture(model, x)
    optimized = ir.optimize(graph, [ir.FoldConvBatchNorm()])
    found = Steps(0, 0, 0)
    for op in graph.ops:
        constants = [graph.constants[id].tensor for id in op.input_ids[1:] if id in graph.constants]
        if op.op_type == "FakeQuantize" and op.input_ids[0] not in graph.constants and len(constants) == 1:
            values = ir.values_of(fq.QuantSpec.parse(op.attributes["spec"]).format).to(constants[0].dtype)
            codes = [_codes(g, op.output_id, x, values, constants[0]) for g in (graph, optimized.graph)]
            found = _more(found, codes[0] - codes[1])
    if not optimized.statistics.steps[0].changed:
        differing = compared(optimized.graph.run(x), graph.run(x))
        found = Steps(found.elements + differing[0], found.moved + differing[1], found.farthest)
    return found


def _codes(graph: ir.Graph, id: int, x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """The place of every element of a quantized value among all values of its format."""
    part = graph.copy()
    part.outputs = [id]
    with torch.no_grad():
        quantized = part.run(x)
    middles = (values[1:] + values[:-1]) / 2
    return torch.bucketize(quantized / scale, middles)


def _more(found: Steps, distance: Tensor) -> Steps:
    steps = distance.abs()
    moved = int((steps > 0).sum())
    return Steps(found.elements + steps.numel(), found.moved + moved, max(found.farthest, int(steps.max())))


@dataclass(frozen=True)
class GraphStep(Step):
    """A training step of the compiled graph of a model with INT8 weights and activations."""

    @property
    def direction(self) -> str:
        return "training step of the compiled graph"

    def captured(self) -> tuple[nn.Module, ir.Graph]:
        """The model, quantized and calibrated, as evaluation runs it, and its graph."""
        torch.manual_seed(0)
        model = fq.prepare(self.make().eval(), fq.presets.INT8)
        fq.calibrate(model, self.batches(), progress=False)
        return model, ir.capture(model, self.batches(1)[0])

    def differing(self) -> int:
        """Elements of the output and of all gradients that differ from those of the eager model."""
        model, graph = self.captured()
        (x,) = self.batches(1)
        return _sum(step(graph.compile(), model, x), step(model, model, x)).differing

    def prepare(self, against: str) -> Prepared:
        if against != EAGER:
            raise CannotRunError(f"{against} has no graph")
        model, graph = self.captured()
        return self.timed(graph.compile(), model)

    def timed(self, compiled: Callable[[Tensor], Tensor], model: nn.Module) -> Prepared:
        """A compiled graph and its eager model, with the same parameters."""
        return Prepared(lambda x: step(compiled, model, x), lambda x: step(model, model, x), self.batches())


EAGER = "the eager model"
GRAPH_STEPS = (
    GraphStep("CNN of 2 convolutions, 256 images", lambda: Cnn(16), (256, 1, 16, 16)),
    GraphStep(CNN.name, CNN.make, CNN.shape),
)


def inductor_ratios(effort: Effort | None = None) -> dict[str, float]:
    """The time of a training step of graphs that Inductor compiled over that of their eager models; the median."""
    found = {}
    for case in GRAPH_STEPS:
        model, graph = case.captured()
        prepared = case.timed(graph.compile(exact=False), model)
        found[case.name] = ratio(prepared.ours, prepared.theirs, prepared.inputs, effort).p50
    return found


def main() -> None:
    """Print everything."""
    for network in NETWORKS:
        for preset in PRESETS:
            print(network, preset, exact_differences(network, preset))
            print(network, preset, folded_steps(network, preset))
    for case in GRAPH_STEPS:
        for result in measure(case, [EAGER], _EFFORT):
            print(case.name, result.outcome, result.ratio)
    print("by Inductor", inductor_ratios(_EFFORT))


if __name__ == "__main__":
    main()
