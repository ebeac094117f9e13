"""The float model beside the quantized one: both stop before the same layers, whose float values are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

from torch import Tensor, nn

from fakequant.data.batches import KeptBatches
from fakequant.model.weights import off
from fakequant.nn.quantizer import quantizers
from fakequant.ptq.inputs.stream import CallOrder, Stage, Stream, Watchable

T = TypeVar("T")


class Beside:
    """The first stage of each layer in the quantized model, with that of the float model.

    Args:
        model: with its quantizers on.
        layers: where to stop, by name.
        parts: the module that a layer changes, by the name of the layer.
        batches, recorded: as for `Stream`.
        with_float: the layers for which the float model runs; it does not run without any.
        floats: the batches of the float model where they are others, by the same numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, Watchable],
        parts: Mapping[str, nn.Module],
        batches: KeptBatches,
        recorded: CallOrder,
        with_float: Iterable[str],
        floats: KeptBatches | None = None,
    ) -> None:
        self._with_float, self._parts = frozenset(with_float), parts
        self._quantized = Stream(model, layers, batches, recorded)
        self._float = Stream(model, layers, floats or batches, recorded) if self._with_float else None
        self._quantizers, self._stack = quantizers(model).values(), ExitStack()
        self._values: dict[nn.Module, dict[nn.Parameter, Tensor]] = {}
        self._names: dict[nn.Module, list[str]] = {}
        for name, part in parts.items():
            self._names.setdefault(part, []).append(name)
        self.parted = ""
        """The layer from which on the float model calls others; "" where it calls the same."""
        self.reached_later: dict[str, None] = {}
        """The layers that some batches reach only after their first stage."""

    def __enter__(self) -> Beside:
        for stream in filter(None, (self._quantized, self._float)):
            self._stack.enter_context(stream)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def __iter__(self) -> Iterator[tuple[Stage, Stage | None]]:
        while (stage := self._quantized.advance()) is not None:
            wanted = self._advance(stage)
            if stage.is_first:
                yield stage, wanted if stage.name in self._with_float else None
            else:
                self.reached_later[stage.name] = None
            for seen in filter(None, (stage, wanted)):
                seen.calls.clear()  # the threads free an input as soon as its layer has run

    def _advance(self, stage: Stage) -> Stage | None:
        """The stage of the float model, if it is of the same layer."""
        if self._float is None:
            return None
        wanted = self.in_float(self._float.advance)
        if not stage.is_like(wanted):
            self._float, wanted, self.parted = None, None, stage.name  # the stream ends with the context
        present, runs = self._parts[stage.name], self._will_run
        self._values = {part: own for part, own in self._values.items() if part is present or runs(part)}
        return wanted

    def _will_run(self, part: nn.Module) -> bool:
        return self._float is not None and any(map(self._float.will_run, self._names[part]))

    def in_float(self, run: Callable[[], T]) -> T:
        """What a function gives while the model is that in float."""
        values = {parameter: value for own in self._values.values() for parameter, value in own.items()}
        with off(self._quantizers), with_data(values):
            return run()

    def keep(self, name: str, parameters: Iterable[nn.Parameter | None]) -> None:
        """Keep the values of parameters that a layer is about to change, for the float model; earlier ones stay."""
        if self._float is not None:
            own = self._values.setdefault(self._parts[name], {})
            for parameter in parameters:
                if parameter is not None and parameter not in own:
                    own[parameter] = parameter.detach().clone()


class with_data(AbstractContextManager[None]):
    """A context in which parameters have other values.

    A class, because an interrupt may end a generator after the context that gives the model its first values back.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> with with_data({layer.weight: torch.full((1, 1), 3.0)}):
    ...     layer.weight.item()
    3.0
    >>> layer.weight.item() == 3.0
    False
    """

    def __init__(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        self._values, self._own = values, {parameter: parameter.data for parameter in values}

    def __enter__(self) -> None:
        for parameter, data in self._values.items():
            parameter.data = data

    def __exit__(self, *_: object) -> None:
        for parameter, data in self._own.items():
            parameter.data = data
