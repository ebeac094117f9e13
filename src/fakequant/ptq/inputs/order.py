"""How a model calls its layers, in one run over all batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fakequant.data.again import Changes, random_state
from fakequant.data.batches import KeptBatches
from fakequant.distributed import Together
from fakequant.errors import ConfigError
from fakequant.model.run.recorded import Recording
from fakequant.model.run.recording import watching
from fakequant.nn.paths import layer_of
from fakequant.ptq.inputs.added import AddedOperand
from fakequant.ptq.inputs.call import LayerCall
from fakequant.restore import Restore, in_order

CHECKED = 2
"""How many batches run alone, and once more side by side, before anything is changed."""


class Watchable(Protocol):
    """A module, or a product of a weight: hooks see its calls before they run."""

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool) -> Any:
        """Have a hook called as hook(self, args, kwargs); returns what removes it."""


@dataclass
class CallOrder:
    """How a model calls its layers.

    Attributes:
        order: the layers in the order of their last calls.
        counts: for each batch, how often it calls each layer.
        siblings: by layer, the layers that get the same tensor as their first argument in every call, in order.
        first: the run of the first batch.
        starts: by number of a batch, what restores what it found: what earlier ones left, and random numbers.
        outputs_repeat: whether a second run of the first batch gives the same.
    """

    order: list[str] = field(default_factory=list)
    counts: list[Counter[str]] = field(default_factory=list)
    siblings: dict[str, list[str]] = field(default_factory=dict)
    first: Recording = field(default_factory=Recording)
    starts: dict[int, Restore] = field(default_factory=dict)
    outputs_repeat: bool = True
    added: dict[str, AddedOperand] = field(default_factory=dict)
    """Where the values are seen that the results of layers are added to."""
    checked: dict[int, Any] = field(default_factory=dict)
    """What the first batches give, for `check_side_by_side`."""

    def of(self, layers: Container[str]) -> CallOrder:
        """The calls of some of the layers."""
        return replace(
            self,
            order=[name for name in self.order if name in layers],
            counts=[Counter({name: n for name, n in own.items() if name in layers}) for own in self.counts],
            siblings={
                name: [other for other in group if other in layers]
                for name, group in self.siblings.items()
                if name in layers
            },
        )

    def parts(self, processes: Together) -> tuple[list[str], list[str]]:
        """The order of the layers up to the first one that a batch calls several times, and from that one on.

        A layer is changed before its last call. So its earlier calls, and what comes of them, are not what they will
        be with the change.

        Args:
            processes: they run the same model, each with its own batches.
        """
        own = {name for counted in self.counts for name, count in counted.items() if count > 1}
        repeated = set().union(*processes.all(own))
        first = next((place for place, name in enumerate(self.order) if name in repeated), len(self.order))
        return self.order[:first], self.order[first:]


def call_order(model: nn.Module, layers: Mapping[str, Watchable], batches: KeptBatches) -> CallOrder:
    """Run all batches once and count the calls of the layers.

    Args:
        model: as it will run.
        layers: by name.
        batches: of the run; the first one is recorded.
    """
    found = CallOrder()
    last: dict[str, int] = {}
    readers: dict[Any, tuple[LayerCall, list[str]]] = {}  # with the tensor, whose id stays its own while it is kept
    seen: list[dict[str, list[list[str]]]] = []  # for each batch and call, the layers that read a layer's input
    step = 0

    def count(name: str, call: LayerCall) -> None:
        nonlocal step
        step += 1
        last[name] = step
        found.counts[-1][name] += 1
        readers.setdefault((id(call.first), call.writes), (call, []))[1].append(name)

    with watched(layers, count), torch.no_grad(), batches.one_pass(model) as values:
        left = Changes()
        for number, batch in batches.numbered.items():
            found.counts.append(Counter())
            found.starts[number] = in_order(random_state(), left.capture())
            with nullcontext(found.first) if seen else watching(model) as found.first:
                result = batches.run(model, batch)
            seen.append({name: [] for name in found.counts[-1]})
            for _, names in readers.values():
                for name in dict.fromkeys(names):
                    seen[-1][name].append(names)
            readers.clear()
            if len(seen) <= CHECKED:
                found.checked[number] = tree_map_only(Tensor, Tensor.clone, result)
            if left.things or len(seen) == 1:  # a model that has written nothing by then writes nothing
                left = values.changes()
    found.order = sorted(last, key=last.__getitem__)
    found.siblings = _siblings(seen)
    return found


def _siblings(seen: Sequence[Mapping[str, list[list[str]]]]) -> dict[str, list[str]]:
    """The layers that read the same tensors as a layer in every batch, itself among them."""
    groups: dict[Any, list[str]] = {}
    for name in dict.fromkeys(name for own in seen for name in own):
        groups.setdefault(tuple(tuple(map(tuple, own.get(name, ()))) for own in seen), []).append(name)
    return {name: group for group in groups.values() for name in group}


@contextmanager
def watched(layers: Mapping[str, Watchable], see: Any) -> Iterator[None]:
    """Have all calls of layers seen before they run."""
    hooks = []
    try:
        for name, layer in layers.items():
            hooks.append(
                layer.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: see(name, _call_of(name, args, kwargs)), with_kwargs=True
                )
            )
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _call_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
    if torch._C._are_functorch_transforms_active():
        name = layer_of(name) if name.endswith("_quantizer") else name
        raise ConfigError(
            f"the model calls {name or 'itself'} within torch.vmap or another transform of torch.func, out of which no "
            "input can be kept. Let it call the layer on the whole batch, or prepare the model with "
            f"skip=({name!r},)"
        )
    return LayerCall.of(args, kwargs)
