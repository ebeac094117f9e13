"""The float values of weights that have changed, for a run of the float model beside the quantized one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn


class FloatValues:
    """The float values of parts of a model.

    >>> layer, values = nn.Linear(1, 1, bias=False), FloatValues()
    >>> values.keep(layer, layer.parameters())
    >>> with torch.no_grad():
    ...     changed = layer.weight.fill_(3.0)
    >>> with values.in_place():
    ...     layer.weight.item() == 3.0
    False
    >>> layer.weight.item()
    3.0
    """

    def __init__(self) -> None:
        self._values: dict[nn.Module, dict[nn.Parameter, Tensor]] = {}

    def keep(self, part: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        """Keep the values of parameters that are about to change; those kept before stay."""
        own = self._values.setdefault(part, {})
        for parameter in parameters:
            if parameter not in own:
                own[parameter] = parameter.detach().clone()

    def forget(self, is_needed: Callable[[nn.Module], bool]) -> None:
        """Drop the values of parts that are not needed any more."""
        self._values = {part: values for part, values in self._values.items() if is_needed(part)}

    def in_place(self) -> InPlace:
        """A context in which the parameters have their float values."""
        return InPlace({parameter: value for own in self._values.values() for parameter, value in own.items()})


class InPlace:
    """A context in which parameters have other values.

    A class, because an interrupt may end a generator after the context that gives the model its first values back.
    """

    def __init__(self, values: dict[nn.Parameter, Tensor]) -> None:
        self._values, self._own = values, {parameter: parameter.data for parameter in values}

    def __enter__(self) -> None:
        for parameter, data in self._values.items():
            parameter.data = data

    def __exit__(self, *_: object) -> None:
        for parameter, data in self._own.items():
            parameter.data = data
