"""Graphs as single functions, each structure made once: of kernels that keep every bit, or by Inductor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

from fakequant.errors import GraphError
from fakequant.ir.check import check
from fakequant.ir.ops.products import RECURRENT
from fakequant.ir.run.execute import check_inputs, to_torch
from fakequant.ir.run.lower import lower
from fakequant.ir.structure import GraphStructure
from fakequant.ir.table import repeatable

_LIMIT = 64
"""The most structures to keep; the least recently used one goes first."""


class CacheInfo(NamedTuple):
    """Hits, misses and size of the cache of compiled structures."""

    hits: int
    misses: int
    size: int


class _Cache:
    """Compiled functions by the hash of the structure; constants are arguments, so that they need no place in it."""

    def __init__(self) -> None:
        self.functions: OrderedDict[tuple[str, bool], Callable[..., Any]] = OrderedDict()
        self.hits = self.misses = 0

    def find(self, graph: GraphStructure, exact: bool) -> Callable[..., Any]:
        key = graph.hash(constants=False), exact
        if key in self.functions:
            self.hits += 1
        else:
            self.misses += 1
            self.functions[key] = _compiled(graph, exact)
            if len(self.functions) > _LIMIT:
                self.functions.popitem(last=False)
        self.functions.move_to_end(key)
        return self.functions[key]


_cache = _Cache()


class CompiledGraph:
    """A graph as one function, with its constants bound to it.

    It reads the constants at every call: a training step that moves the parameters moves the function.
    """

    def __init__(self, graph: GraphStructure, function: Callable[..., Any]) -> None:
        self.graph = graph
        self._function = function

    def __call__(self, *inputs: Tensor) -> Any:
        """The outputs for some inputs, as `Graph.run` gives them."""
        check_inputs(self.graph, inputs)
        results = self._function(*inputs, *(constant.read() for constant in self.graph.constants.values()))
        count = len(self.graph.outputs)
        return results if isinstance(results, Tensor) else results[0] if count == 1 else results[:count]

    def parameters(self) -> Iterator[Tensor]:
        """The constants that training moves."""
        return (constant.tensor for constant in self.graph.constants.values() if constant.trainable)


def compile(graph: GraphStructure, *, exact: bool = True) -> CompiledGraph:
    """A graph as one function, forward and backward.

    Args:
        graph: what to compile; it is checked, and copied.
        exact: whether every bit of outputs and gradients must be that of `Graph.run`. Then the function is a sequence
            of torch's own kernels and of this package's, without the modules in between, and takes those that are
            fastest: a ReLU and the quantizer after it are one. Otherwise torch.compile has Inductor generate code,
            which fuses more, takes seconds to minutes to compile, and rounds sums, exponentials and products in its
            own way; a last bit that differs there may move a code by one.

    Returns:
        A function of the graph's inputs. Graphs of equal `hash(constants=False)` share what was compiled; the constants
        are arguments of it, so that no graph can get those of another.

    Raises:
        GraphError: the graph is not valid, or exact is false and it has an operation that torch.compile cannot record:
            a whole recurrent layer such as nn.LSTM.

    >>> from fakequant.ir import Graph, IRType
    >>> graph = Graph("example")
    >>> x = graph.add_input("x", IRType.Float32, (2,))
    >>> graph.outputs = [graph.add("FakeQuantization", x, num_bits=4, scale=0.5)]
    >>> compile(graph)(torch.tensor([0.7, -9.0]))
    tensor([ 0.5000, -4.0000])
    """
    check(graph)
    for op in graph.ops:
        if op.op_type.startswith(RECURRENT) and not exact:
            raise GraphError(
                f"{op}{f' of {op.origin}' if op.origin else ''}: torch.compile cannot record a whole recurrent layer; "
                "compile with exact=True, or write the layer as a loop of nn.LSTMCell or nn.GRUCell"
            )
    return CompiledGraph(graph.copy(), _cache.find(graph, exact))


class _Function:
    """A module compiled by torch.compile, again where torch has too many variants of it for other strides and modes."""

    def __init__(self, module: fx.GraphModule, **options: Any) -> None:
        self.module, self.options = module, options
        self._compile()

    def _compile(self) -> None:
        # The limit belongs to the code of the module, which is written anew.
        self.function = torch.compile(fx.GraphModule(self.module, self.module.graph), **self.options)

    def __call__(self, *args: Tensor) -> Any:
        try:
            return self.function(*args)
        except FailOnRecompileLimitHit:
            self._compile()
            return self.function(*args)
        except Unsupported as error:
            raise GraphError(
                f"torch.compile cannot record the graph; graph.to_torch() computes it: {str(error).splitlines()[0]}"
            ) from error


def _compiled(graph: GraphStructure, exact: bool) -> Callable[..., Any]:
    if exact:
        module = to_torch(graph, lifted=True)
        lower(module, graph)
        return module.forward
    module = to_torch(_with_unread_draws(graph), lifted=True)
    dynamic = any(type.shape.dynamic for type in graph.types().values())
    return _Function(module, fullgraph=True, backend="inductor", dynamic=dynamic or None)


def _with_unread_draws(graph: GraphStructure) -> GraphStructure:
    """A graph with further outputs: what draws random numbers though nothing reads it.

    Compilers drop what is no output, and later operations would draw other numbers.
    """
    kept = graph.copy()
    read = set(graph.outputs)
    for op in reversed(graph.ops):
        if read.intersection(op.output_ids):
            read.update(op.input_ids)
        elif not repeatable(op):
            kept.outputs.append(kept.add("Detach", op.output_id))
            read.update(op.input_ids)
    return kept


def cache_info() -> CacheInfo:
    """The hits, misses and size of the cache of compiled structures."""
    return CacheInfo(_cache.hits, _cache.misses, len(_cache.functions))


def clear_cache() -> None:
    """Remove every compiled structure from the cache."""
    global _cache
    _cache = _Cache()
