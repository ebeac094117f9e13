"""Which layers a run of a model calls, and which weights it reads without calling their layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fakequant.model.modes import not_compiled
from fakequant.nn.layers import QuantizedLayer
from fakequant.nn.quantizer import Quantizer
from fakequant.restore import restore_after, stack_without

Run = Callable[[], object]


def layers_called(model: nn.Module, run: Run, kind: type[nn.Module] = QuantizedLayer) -> set[nn.Module]:
    """The modules of a kind, by default the quantized layers, that a run of a model calls.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), presets.INT8_WEIGHT_ONLY)
    >>> layers_called(model, lambda: model[0](torch.ones(1, 4))) == {model[0]}
    True
    """
    called: set[nn.Module] = set()
    layers = [one for one in model.modules() if isinstance(one, kind) and not isinstance(one, torch.jit.ScriptModule)]
    with not_compiled(), _hooks() as handles:
        for layer in layers:
            handles.append(layer.register_forward_pre_hook(lambda module, _: called.add(module)))
        run()
    return called


def weight_readers(model: nn.Module, run: Run, others: Iterable[nn.Module] = ()) -> dict[nn.Module, str]:
    """The quantized layers whose weight a run reads without calling them, and the path of the module that reads it.

    Args:
        model: what runs.
        run: calls it.
        others: layers in float to look for, too, which have one weight.

    >>> class Projects(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.inner = nn.Linear(4, 4)
    ...     def forward(self, x):
    ...         return nn.functional.linear(x, self.inner.weight)
    >>> model = prepare(nn.Sequential(Projects()), presets.INT8_WEIGHT_ONLY)
    >>> weight_readers(model, lambda: model(torch.ones(1, 4))) == {model[0].inner: "0"}
    True
    """
    with watch_readers(model, others) as found:
        run()
    return found


@contextmanager
def watch_readers(model: nn.Module, others: Iterable[nn.Module] = ()) -> Iterator[dict[nn.Module, str]]:
    """A context that fills a dict, as `weight_readers` returns it, while the model runs."""
    owners: dict[int, list[nn.Module]] = {}
    # Parameters alone: a parametrization would compute an unused weight, and may change its buffers.
    held = {m: [w.parameter for w in m.weights()] for m in model.modules() if isinstance(m, QuantizedLayer)}
    held |= {layer: [layer._parameters.get("weight")] for layer in others}
    for layer, parameters in held.items():
        for parameter in parameters:
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(layer)
    running: list[tuple[nn.Module, str]] = []

    def leave(*_: Any) -> None:
        running.pop()

    readers = _Readers(owners, running)
    with not_compiled(), _hooks() as handles, restore_after(stack_without(readers)), readers:
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks of Python
                continue
            handles.append(module.register_forward_pre_hook(lambda own, _, path=path: running.append((own, path))))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield readers.found


class _Readers(TorchFunctionMode):
    """Notes every torch function that takes a layer's weight and is not called within a layer whose weight it is."""

    def __init__(self, owners: dict[int, list[nn.Module]], running: list[tuple[nn.Module, str]]) -> None:
        super().__init__()
        self.owners = owners
        self.running = running
        self.found: dict[nn.Module, str] = {}
        self.quantized: set[nn.Module] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        held = [leaf for leaf in _values(func, args, kwargs) if id(leaf) in self.owners]
        # Not where only the shape, the dtype or the device of the weight is asked for.
        if held and any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            for leaf in held:
                self._note(self.owners[id(leaf)])
        return result

    def _note(self, layers: list[nn.Module]) -> None:
        if any(module in layers for module, _ in self.running):
            return
        module, path = self.running[-1] if self.running else (None, "")
        if isinstance(module, Quantizer):  # that of a function, which takes the weight next
            self.quantized.update(layers)
        else:
            self.found.update((one, path) for one in layers if one not in self.found and one not in self.quantized)


def _values(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments of a torch function whose values it may use: `zeros_like` and `to` ask for a shape or a dtype."""
    name = getattr(func, "__name__", "")
    if name.endswith("_like") or name.startswith("new_"):
        return []
    return tree_leaves(args[:1] if name == "to" or name.endswith("_as") else (args, kwargs))


@contextmanager
def _hooks() -> Iterator[list[RemovableHandle]]:
    handles: list[RemovableHandle] = []
    with restore_after(lambda: [handle.remove() for handle in handles]):
        yield handles
