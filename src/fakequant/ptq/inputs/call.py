"""The arguments of one call of a layer, as they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fakequant.nn.ranges.by_value import ByValue, call_again, calls_now


class LayerCall(NamedTuple):
    """The arguments of one call of a layer.

    Attributes:
        args: positional ones.
        kwargs: those by name.
        writes: how often the first one had been written in place before the call; None where torch does not count.
        autocast: the device type and the dtype of autocast around the call; None where it is off.
        bins: those of values by which ranges are chosen.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: int | None = None
    autocast: tuple[str, torch.dtype] | None = None
    bins: Mapping[ByValue, Tensor] = MappingProxyType({})

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        """The arguments as they are now."""
        first = cls(args, kwargs).first
        if not isinstance(first, Tensor):
            return cls(args, kwargs, bins=calls_now())
        device = first.device.type
        autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        return cls(args, kwargs, None if first.is_inference() else first._version, autocast, calls_now())

    @property
    def first(self) -> Any:
        """The first argument, which is the input of a layer with a weight."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()), None)

    def kept(self) -> LayerCall:
        """The same with copies of the tensors, which the model may write into after the call, as `x += layer(x)`."""
        tensors = {id(leaf): leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)}
        copies = {place: tensor.clone() for place, tensor in tensors.items()}
        args, kwargs = tree_map_only(Tensor, lambda x: copies[id(x)], (self.args, self.kwargs))
        return LayerCall(args, kwargs, autocast=self.autocast, bins=self.bins)

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """A context in which autocast and the choice of ranges are as they were around the call."""
        autocast = nullcontext() if self.autocast is None else torch.autocast(self.autocast[0], self.autocast[1])
        with call_again(self.bins), autocast:
            yield

    def has_input_of(self, other: LayerCall) -> bool:
        """Whether both got the same tensor with the same values."""
        return self.first is other.first and self.writes is not None and self.writes == other.writes
