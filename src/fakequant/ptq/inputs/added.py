"""The other operand of the addition that takes what a layer gives: the residual stream beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from fakequant.model.run.recorded import Recording
from fakequant.model.run.recorder import tensors_in
from fakequant.model.run.traits import has
from fakequant.nn.sites.traits import Trait


class AddedOperand(NamedTuple):
    """Where a run shows a value before a layer is called.

    Attributes:
        module: the path of a module that takes it or gives it, and is called once.
        place: of the value among the tensors that the module takes or gives.
        is_result: whether the module gives it.
    """

    module: str
    place: int
    is_result: bool = False


def added_operands(recording: Recording, layers: Mapping[str, str]) -> dict[str, AddedOperand]:
    """For each layer whose result is added to a value of its shape, where that value is seen before the layer runs.

    Args:
        recording: of one run.
        layers: the paths of modules, by the names of layers.

    >>> from fakequant.model.run.recording import record
    >>> class Residual(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 2)
    ...     def forward(self, x):
    ...         return x + self.down(self.up(x).relu())
    >>> model = Residual()
    >>> recording = record(model, lambda: model(torch.ones(1, 2)))
    >>> added_operands(recording, {"up": "up", "down": "down"})
    {'down': AddedOperand(module='', place=0, is_result=False)}
    """
    once = {path: number for number, path in enumerate(one.path for one in recording.modules)}
    once = {path: number for path, number in once.items() if recording.visits[path] == 1}
    found = dict[str, AddedOperand]()
    for name, path in layers.items():
        if path not in once:
            continue
        layer = recording.modules[once[path]]
        other = _added_to(recording, layer.results[0]) if layer.results else None
        if other is None:
            continue
        for one in recording.modules[: once[path]]:
            if one.path in once and other in one.inputs:
                found[name] = AddedOperand(one.path, one.inputs.index(other))
                break
            if one.path in once and other in one.results and one.end <= once[path]:
                found[name] = AddedOperand(one.path, one.results.index(other), is_result=True)
                break
    return found


def _added_to(recording: Recording, value: int) -> int | None:
    """The value of the same shape that a value is added to, which nothing else reads; None where there is none."""
    shape = recording.values[value].shape
    while len(calls := recording.consumers.get(value, ())) == 1:
        (call,) = calls
        if has(call.function, Trait.IDENTITY) and len(call.outputs) == 1:
            value = call.outputs[0]
            continue
        if call.function != "add" or len(call.inputs) != 2:
            return None
        other = call.inputs[call.inputs[0] == value]
        return other if other != value and recording.values[other].shape == shape else None
    return None


@contextmanager
def operands_seen(
    model: nn.Module, operands: Mapping[str, AddedOperand], see: Callable[[str, Tensor], object]
) -> Iterator[None]:
    """A context in which the operands of additions are seen, by the names of their layers."""
    hooks = []

    def show(names: Iterable[str], values: Any) -> None:
        tensors = tensors_in(values)
        for name in names:
            place = operands[name].place
            if place < len(tensors):
                see(name, tensors[place])

    by_module = dict[AddedOperand, list[str]]()
    for name, operand in operands.items():
        by_module.setdefault(operand, []).append(name)
    try:
        for operand, names in by_module.items():
            module = model.get_submodule(operand.module)
            if operand.is_result:
                hooks.append(module.register_forward_hook(lambda _, __, y, names=names: show(names, y)))
            else:
                hooks.append(
                    module.register_forward_pre_hook(
                        lambda _, args, kwargs, names=names: show(names, (args, kwargs)), with_kwargs=True
                    )
                )
        yield
    finally:
        for hook in hooks:
            hook.remove()
