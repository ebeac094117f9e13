"""A graph: its data, and the methods that check, run, compile and print it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from fakequant.ir.check import Validity, check, faults_of, validate
from fakequant.ir.gradient import backward
from fakequant.ir.run.compiler import CompiledGraph, compile
from fakequant.ir.run.execute import run, to_torch
from fakequant.ir.structure import GraphStructure
from fakequant.ir.text import to_text


class Graph(GraphStructure):
    """Operations between values t0, t1, ..., each made once.

    Attributes:
        name: of the whole.
        inputs: by id, in the order in which `run` takes them.
        constants: by id.
        ops: in the order in which they run.
        outputs: ids of what `run` returns.

    Source: AiDotNet's IRGraph.

    >>> from fakequant.ir import IRType
    >>> graph = Graph("example")
    >>> x = graph.add_input("x", IRType.Float32, (2, 3))
    >>> y = graph.add("ReLU", x)
    >>> graph.outputs = [graph.add("FakeQuantization", y, num_bits=4)]
    >>> print(graph)
    IR Graph: example
      Inputs:
        t0 = "x" : Float32 [2, 3]
      Constants (0):
      Operations (2):
        t1 = ReLU(t0) : Float32 [2, 3]
        t2 = FakeQuantization(t1) {num_bits=4} : Float32 [2, 3]
      Outputs: t2
    >>> graph.run(torch.tensor([[-1.0, 0.1, 0.2], [0.3, 0.5, 0.7]]))
    tensor([[0.0000, 0.1000, 0.2000],
            [0.3000, 0.5000, 0.7000]])
    """

    def faults(self) -> list[str]:
        """The faults of the graph, each with its place; empty if the graph is valid."""
        return list(faults_of(self))

    def validate(self) -> Validity:
        """Whether the graph is valid, and if not, what is wrong with it and where.

        >>> from fakequant.ir import IROp, IRType, TensorShape, TensorType
        >>> graph = Graph("example")
        >>> x = graph.add_input("x", IRType.Float32, (2, 3))
        >>> graph.ops = [IROp("Add", [1], [x, 7], [TensorType(IRType.Float32, TensorShape((2, 3)))])]
        >>> found = graph.validate()
        >>> bool(found)
        False
        >>> print(found)
        t1 = Add(t0, t7) : Float32 [2, 3]: reads t7, which nothing makes
        the graph has no outputs
        """
        return validate(self)

    def check(self) -> Graph:
        """The graph itself, if it is valid.

        Raises:
            GraphError: it is not; names every fault.
        """
        check(self)
        return self

    def run(self, *inputs: Tensor) -> Any:
        """The outputs for some inputs: a tensor, or a tuple if there are several.

        For many calls take `to_torch` or `compile` once: this checks the graph every time, and each result.

        Args:
            inputs: in the order of the graph's inputs.

        Raises:
            GraphError: the graph is not valid, an input is not of the declared type, or an operation fails or makes
                another type than it declares; names it.
        """
        return run(self, inputs)

    def to_torch(self) -> fx.GraphModule:
        """The graph as a module of torch, with the constants as its parameters and buffers (the same tensors).

        Raises:
            GraphError: the graph is not valid.
        """
        return to_torch(self)

    def compile(self, *, exact: bool = True) -> CompiledGraph:
        """The graph as one compiled function, see `fakequant.ir.run.compiler.compile`."""
        return compile(self, exact=exact)

    def backward(self) -> Graph:
        """The graph of the gradients, see `fakequant.ir.gradient.backward`."""
        return backward(self)

    def __str__(self) -> str:
        return to_text(self).rstrip("\n")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and str(self) == str(other)

    __hash__ = None  # type: ignore[assignment]  graphs can be changed; `hash` is that of the present one
