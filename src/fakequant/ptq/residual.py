"""Residual streams and heads of attention, found by one run: which modules make their values, and which read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fakequant.model.flow import METADATA
from fakequant.model.modes import evaluating
from fakequant.model.outputs import float_tensors
from fakequant.restore import restore_after, stack_without

_KEEP_CHANNELS = frozenset(
    """
    dropout dropout_ contiguous clone detach to float type_as view reshape flatten unflatten transpose permute
    unsqueeze squeeze expand repeat repeat_interleave __getitem__ mean mul __mul__ __rmul__ mul_ __imul__ div
    __truediv__ true_divide
    """.split()  # noqa: SIM905
)
"""Functions of one tensor, and of numbers, that commute with a rotation of its channels. Some do so for some arguments
alone, as `reshape`: callers check the model's output."""
_SUMS = frozenset(["add", "__add__", "__radd__", "add_", "__iadd__", "cat", "concat", "stack"])
_PRODUCTS = frozenset(["matmul", "__matmul__", "bmm"])


@dataclass(eq=False)
class Residual:
    """Values with the same channels: sums of what its makers give.

    Attributes:
        makers: linear layers, convolutions, embeddings and parameters whose last results are added up.
        readers: linear layers that multiply the values, with the normalisation between, if there is one.
        norms: the normalisations that read the values.
        read_by: what else reads the values.
    """

    makers: dict[nn.Module | nn.Parameter, None] = field(default_factory=dict)
    readers: dict[nn.Module, nn.Module | None] = field(default_factory=dict)
    norms: dict[nn.Module, Tensor] = field(default_factory=dict)
    read_by: list[str] = field(default_factory=list)


class Heads(NamedTuple):
    """A layer that makes the values of attention, and the one that reads the heads' results."""

    maker: nn.Linear
    reader: nn.Linear
    size: int
    """Channels of a head."""


class Flow(NamedTuple):
    """What one run shows."""

    residuals: list[Residual]
    heads: list[Heads]


def follow(model: nn.Module, run: Callable[[], Any]) -> Flow:
    """Run the model once, and follow the results of its linear layers, convolutions, embeddings and parameters.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    >>> found = follow(model, lambda: model(torch.ones(1, 4)))
    >>> [len(one.readers) for one in found.residuals]
    [1]
    """
    watch = _Watch(model)
    with evaluating(model), torch.no_grad(), watch.hooks(), restore_after(stack_without(watch)), watch:
        output = run()
    for tensor in float_tensors(output):
        watch.read(tensor, "the model's output")
    found = list(dict.fromkeys(watch.root(group) for group in watch.groups))
    uses = Counter(layer for one in watch.heads for layer in (one.maker, one.reader))
    heads = [
        one for one in watch.heads if one.maker not in watch.not_heads and uses[one.maker] == uses[one.reader] == 1
    ]
    return Flow([one for one in found if one.readers], heads)


class _Value(NamedTuple):
    """What is known of a tensor."""

    tensor: Tensor  # held, so that no other tensor gets the same identity
    group: Residual
    norm: nn.Module | None = None
    maker: nn.Module | None = None
    """The layer whose values these are, as long as heads may be cut from them."""
    head: int = 0
    """Channels of a head behind attention."""


class _Watch(TorchFunctionMode):
    """Notes what is made of tensors while a model runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.groups: list[Residual] = []
        self.heads: list[Heads] = []
        self.not_heads: set[nn.Module] = set()
        self._model, self._names = model, {module: name for name, module in model.named_modules()}
        self._into: dict[Residual, Residual] = {}
        self._values: dict[int, _Value] = {}
        self._of: dict[nn.Module | nn.Parameter, Residual] = {}
        self._running: list[nn.Module] = []

    def root(self, group: Residual) -> Residual:
        """The group that a group has become a part of."""
        while group in self._into:
            group = self._into[group]
        return group

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """A context in which the calls of layers and normalisations are noted."""
        handles: list[Any] = []
        with restore_after(lambda: [handle.remove() for handle in handles]):
            for module in self._names:
                if _makes(module) or is_vector_norm(module):
                    handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                    handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
            yield

    def read(self, tensor: Tensor, what: str) -> None:
        """Note that something reads a tensor that no rotation can follow."""
        value = self._values.get(id(tensor))
        if value is not None:
            self.root(value.group).read_by.append(what)
            self._drop_heads(value)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        value = self._values.get(id(given[0])) if given else None
        name = self._names[module]
        if value is not None:
            given, group = given[1:], self.root(value.group)
            if isinstance(module, nn.Linear) and value.head and isinstance(value.maker, nn.Linear):
                self.heads.append(Heads(value.maker, module, value.head))
            elif isinstance(module, nn.Linear):
                if group.readers.get(module, value.norm) is not value.norm:
                    group.read_by.append(f"{name}, with and without a normalisation before it,")
                group.readers[module] = value.norm
                self._drop_heads(value)
            elif is_vector_norm(module) and value.norm is None:
                group.norms[module] = value.tensor
                self._drop_heads(value)
            else:
                self.read(value.tensor, name)
        for tensor in given:
            self.read(tensor, name)
        self._running.append(module)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._running.pop()
        if not isinstance(output, Tensor):
            return
        if _makes(module):
            self._values[id(output)] = _Value(output, self._group_of(module), maker=module)
            return
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        value = self._values.get(id(first))
        if value is not None and value.norm is None:
            self._values[id(output)] = _Value(output, value.group, norm=module)

    def _group_of(self, maker: nn.Module | nn.Parameter) -> Residual:
        if maker not in self._of:
            self._of[maker] = Residual({maker: None})
            self.groups.append(self._of[maker])
        return self.root(self._of[maker])

    def _drop_heads(self, value: _Value) -> None:
        if value.maker is not None:
            self.not_heads.add(value.maker)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        name = getattr(func, "__name__", "")
        if self._running or (name in METADATA and not any(isinstance(x, Tensor) for x in tree_leaves(result))):
            return result
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        if name in (*_SUMS, *_KEEP_CHANNELS):
            for tensor in tensors:
                if isinstance(tensor, nn.Parameter) and id(tensor) not in self._values:
                    self._values[id(tensor)] = _Value(tensor, self._group_of(tensor))
        known = [self._values[id(tensor)] for tensor in tensors if id(tensor) in self._values]
        if not known:
            return result
        value = self._result(name, result, tensors, known, args, given)
        if value is None:
            for one in known:
                self.read(one.tensor, f"torch.{name}")
        else:
            self._values[id(result)] = value
        return result

    def _result(
        self, name: str, result: Any, tensors: list[Tensor], known: list[_Value], args: Any, kwargs: Any
    ) -> _Value | None:
        """What is known of a function's result; None where no rotation can follow it."""
        if not isinstance(result, Tensor):
            return None
        first = known[0]
        if name in _KEEP_CHANNELS:
            alone = len(known) == 1 and all(
                x is first.tensor or x.dim() == 0 or not x.is_floating_point() for x in tensors
            )
            return first._replace(tensor=result) if alone else None
        if name in _SUMS:
            return self._sum(result, tensors, known)
        if name == "scaled_dot_product_attention" or (name in _PRODUCTS and len(tensors) == 2):
            place = 1 if name in _PRODUCTS else 2
            values = args[place] if len(args) > place else kwargs.get("value")
            value = self._values.get(id(values))
            for one in known:
                if one is not value:
                    self.read(one.tensor, f"torch.{name}")
            if value is None or value.maker is None or value.head:
                return None
            self.root(value.group).read_by.append("attention")
            return value._replace(tensor=result, head=values.shape[-1])
        return None

    def _sum(self, result: Tensor, tensors: list[Tensor], known: list[_Value]) -> _Value | None:
        groups = [self.root(value.group) for value in known]
        if len(known) < len(tensors) or any(value.norm is not None or value.head for value in known):
            return None
        first = groups[0]
        for other in groups[1:]:
            if other is not first:
                self._into[other] = first
                first.makers |= other.makers
                first.readers |= other.readers
                first.norms |= other.norms
                first.read_by += other.read_by
        for value in known:
            self._drop_heads(value)
        return _Value(result, first)


def _makes(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d))


def is_vector_norm(module: nn.Module) -> bool:
    """Whether a module may be a normalisation: all that it holds are vectors of one length."""
    held = [p for p in module._parameters.values() if p is not None]
    own = next(module.children(), None) is None and "weight" in module._parameters
    return own and bool(held) and all(p.dim() == 1 and p.shape == held[0].shape for p in held)
