"""Which modules a model calls how often, and which of them take the output of which layer."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fakequant.errors import ConfigError
from fakequant.model.modes import evaluating, in_eval_mode
from fakequant.model.outputs import float_tensors
from fakequant.restore import restore_after, stack_without, structure_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

METADATA = frozenset(
    """
    __get__ size dim ndimension stride numel nelement is_contiguous is_floating_point is_complex element_size
    storage_offset get_device __len__
    """.split()  # noqa: SIM905
)
"""What may be asked of a tensor without reading its values. A result that holds a tensor counts as reading it."""


@dataclass
class Flow:
    """The calls of layers and of the modules after them."""

    calls: Counter[nn.Module] = field(default_factory=Counter)
    sources: dict[nn.Module, nn.Module] = field(default_factory=dict)
    """For modules whose input is the output of a layer, that layer."""
    read_elsewhere: set[nn.Module] = field(default_factory=set)
    """Layers whose output goes elsewhere than to one such module, or whose parameters are read outside their call."""


def data_flow(
    model: nn.Module, layers: Sequence[nn.Module], readers: Sequence[nn.Module], arguments: Arguments | None
) -> Flow:
    """How outputs flow from layers to readers, by torch.fx; if it cannot trace the model, by one run.

    Args:
        model: any module; it is not changed.
        layers: those whose outputs are followed.
        readers: those that may take them.
        arguments: positional and keyword arguments of the run.

    Raises:
        ConfigError: torch.fx cannot trace the model, and there are no arguments.
    """
    try:
        with restore_after(structure_of([model])), in_eval_mode(model):  # a model may store what it sees: proxies
            graph = _Tracer({*layers, *readers}).trace(model, concrete_args=_defaults(model))
    except Exception as error:  # tracing runs the model's own code, with values for which it was not written
        if arguments is None:
            raise ConfigError(
                f"torch.fx cannot trace the model ({type(error).__name__}: {error}); give an example, by whose run the "
                "order of its layers is found"
            ) from error
        return _by_run(model, layers, readers, arguments)
    return _by_graph(model, graph, {*layers}, {*readers})


class _Tracer(fx.Tracer):
    """Records a call of a layer or a reader as one call, whatever its class."""

    def __init__(self, whole: set[nn.Module]) -> None:
        super().__init__()
        self.whole = whole

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self.whole or super().is_leaf_module(m, module_qualified_name)


def _defaults(model: nn.Module) -> dict[str, Any]:
    """Optional arguments of a model at their defaults: torch.fx would take them for given ones."""
    parameters = inspect.signature(model.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty and p.kind is not p.KEYWORD_ONLY}


def _by_graph(model: nn.Module, graph: fx.Graph, layers: set[nn.Module], readers: set[nn.Module]) -> Flow:
    flow = Flow()
    called = {node: model.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}
    flow.calls.update(called.values())
    for node in graph.nodes:
        module = called.get(node)
        if module in readers and len(node.all_input_nodes) == 1:
            source = called.get(node.all_input_nodes[0])
            if source in layers:
                flow.sources[module] = source
        if module in layers and [called.get(user) in readers for user in node.users] != [True]:
            flow.read_elsewhere.add(module)
        if node.op == "get_attr":
            owner = model.get_submodule(str(node.target).rpartition(".")[0])
            flow.read_elsewhere |= {owner} & layers
    return flow


def _by_run(model: nn.Module, layers: Sequence[nn.Module], readers: Sequence[nn.Module], arguments: Arguments) -> Flow:
    watch = _Watch({*layers}, {*readers})
    with evaluating(model), torch.no_grad(), watch.hooks(), restore_after(stack_without(watch)), watch:
        output = model(*arguments[0], **arguments[1])
    for tensor in float_tensors(output):
        watch.read(tensor)
    return watch.flow


class _Watch(TorchFunctionMode):
    """Notes which functions read the outputs and the parameters of layers while a model runs."""

    def __init__(self, layers: set[nn.Module], readers: set[nn.Module]) -> None:
        super().__init__()
        self.flow = Flow()
        self.layers = layers
        self.readers = readers
        self.made: dict[int, tuple[Tensor, nn.Module]] = {}
        """Outputs by identity, with the layers that made them. Held, so that no other tensor gets the same identity."""
        self.owners = {id(p): layer for layer in layers for p in layer._parameters.values() if p is not None}
        self.running: list[nn.Module] = []
        """The layers and readers whose call has not ended."""

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """A context in which calls of layers and readers are noted."""
        handles: list[Any] = []
        with restore_after(lambda: [handle.remove() for handle in handles]):
            for module in self.layers | self.readers:
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave))
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.flow.calls[module] += 1
        for tensor in given:
            if module in self.readers and len(given) == 1 and id(tensor) in self.made:
                source = self.made[id(tensor)][1]
                if source in self.flow.sources.values():
                    self.flow.read_elsewhere.add(source)
                self.flow.sources[module] = source
            else:
                self.read(tensor)
        self.running.append(module)

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        self.running.pop()
        if module in self.layers and isinstance(output, Tensor):
            self.made[id(output)] = (output, module)

    def read(self, tensor: Tensor) -> None:
        """Note that something other than a reader reads a tensor."""
        if id(tensor) in self.made:
            self.flow.read_elsewhere.add(self.made[id(tensor)][1])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        shape_only = getattr(func, "__name__", "") in METADATA
        if shape_only and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            return result
        for leaf in tree_leaves((args, kwargs)):
            layer = self.owners.get(id(leaf))
            if layer is not None and layer not in self.running:
                self.flow.read_elsewhere.add(layer)
            if isinstance(leaf, Tensor) and not (self.running and self.running[-1] in self.readers):
                self.read(leaf)
        return result
