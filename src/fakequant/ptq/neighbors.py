"""Which layers read the output of which module, found by the identity of tensors in one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fakequant.distributed import is_sharded
from fakequant.model.flow import METADATA
from fakequant.model.modes import evaluating
from fakequant.model.outputs import float_tensors
from fakequant.restore import restore_after, stack_without

_KEEP_SCALES = frozenset(
    """
    relu relu_ leaky_relu leaky_relu_ dropout dropout_ contiguous to flatten view reshape permute transpose mean
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    """.split()  # noqa: SIM905
)
"""Functions of torch with f(s x) = s f(x) for s > 0, in eval mode. Some may also mix channels, as `mean` does:
callers check the model's output."""


@dataclass
class Neighbors:
    """The modules that make tensors, and the layers that read them.

    Attributes:
        readers: for each maker, the layers whose first argument is its output, or a function of it that keeps scales.
        calls: how often the makers and layers are called.
        elsewhere: makers whose output, or a parameter of theirs, something else reads too.
    """

    readers: dict[nn.Module, list[nn.Module]] = field(default_factory=dict)
    calls: Counter[nn.Module] = field(default_factory=Counter)
    elsewhere: set[nn.Module] = field(default_factory=set)


def find_neighbors(
    model: nn.Module, makers: set[nn.Module], layers: set[nn.Module], run: Callable[[], Any]
) -> Neighbors:
    """Run the model once and follow the outputs of makers, also through functions that keep scales, such as ReLU.

    Args:
        model: in any mode; it runs in eval mode.
        makers: the modules whose outputs are followed.
        layers: those that may read them.
        run: runs the model.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> layers = {model[0], model[2]}
    >>> found = find_neighbors(model, layers, layers, lambda: model(torch.ones(1, 4)))
    >>> found.readers[model[0]] == [model[2]]
    True
    """
    watch = _Watch(makers, layers)
    with evaluating(model), torch.no_grad(), watch.hooks(), restore_after(stack_without(watch)), watch:
        output = run()
    for tensor in float_tensors(output):
        watch.read(tensor)
    return watch.found


def shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that several modules hold, or one module by several names, and those that lie in one memory."""
    held = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    return {parameter for parameter, count in held.items() if count > 1} | _in_one_memory([*held])


def _in_one_memory(parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """The parameters whose memory overlaps with that of another, as after `one.data = other.data`."""
    found, end, last = set[nn.Parameter](), 0, None
    held = [own for own in parameters if not (is_lazy(own) or own.is_meta or is_sharded(own))]
    spans = [(*_span(own), own) for own in held if own.numel()]
    for start, stop, own in sorted(spans, key=lambda span: span[:2]):
        if last is not None and start < end:
            found |= {last, own}
        if stop > end:
            end, last = stop, own
    return found


def _span(parameter: nn.Parameter) -> tuple[int, int]:
    """The first byte of a parameter, and that after its last one."""
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return parameter.data_ptr(), parameter.data_ptr() + (last + 1) * parameter.element_size()


class _Watch(TorchFunctionMode):
    """Notes what reads the outputs of makers while a model runs."""

    def __init__(self, makers: set[nn.Module], layers: set[nn.Module]) -> None:
        super().__init__()
        self.found = Neighbors()
        self._makers, self._layers = makers, layers
        self._made: dict[int, tuple[Tensor, nn.Module]] = {}
        """Tensors by identity with their makers. Held, so that no other tensor gets the same identity."""
        self._owners: Mapping[int, nn.Module] = {
            id(p): module for module in makers | layers for p in module._parameters.values() if p is not None
        }
        self._running: list[nn.Module] = []

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """A context in which the calls of makers and layers are noted."""
        handles: list[Any] = []
        with restore_after(lambda: [handle.remove() for handle in handles]):
            for module in self._makers | self._layers:
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave))
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.found.calls[module] += 1
        first = given[0] if given else None
        if module in self._layers and first is not None and id(first) in self._made:
            self.found.readers.setdefault(self._made[id(first)][1], []).append(module)
            given = given[1:]
        for tensor in given:
            self.read(tensor)
        self._running.append(module)

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        self._running.pop()
        if module in self._makers and isinstance(output, Tensor):
            self._made[id(output)] = (output, module)

    def read(self, tensor: Tensor) -> None:
        """Note that something else than a layer reads a tensor."""
        if id(tensor) in self._made:
            self.found.elsewhere.add(self._made[id(tensor)][1])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in METADATA and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            return result
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for leaf in leaves:
            owner = self._owners.get(id(leaf))
            if owner is not None and owner not in self._running:
                self.found.elsewhere.add(owner)
        if self._running:
            return result
        if name in _KEEP_SCALES and isinstance(result, Tensor) and leaves and id(leaves[0]) in self._made:
            self._made[id(result)] = (result, self._made[id(leaves[0])][1])
            leaves = leaves[1:]
        for leaf in leaves:
            self.read(leaf)
        return result
