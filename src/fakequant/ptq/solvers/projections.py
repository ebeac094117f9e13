"""The weights of a layer that has several, each with what algorithms ask of a layer with one weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from fakequant.nn.attention import QuantMultiheadAttention
from fakequant.nn.operands import LayerWeight
from fakequant.nn.paths import join, layer_of
from fakequant.nn.quantizer import Quantizer

_INPUTS = ("query", "key", "value")
_READS = {"in_proj_weight": (0, 1, 2), "q_proj_weight": (0,), "k_proj_weight": (1,), "v_proj_weight": (2,)}
_SUFFIX = "_weight_quantizer"


class Projection(ABC):
    """One weight [out, in] of a layer with several, as a linear layer.

    Args:
        weight: of the layer.
    """

    input_transform = None

    def __init__(self, weight: LayerWeight) -> None:
        self.layer: Any = weight.layer
        self._weight = weight

    @property
    def weight(self) -> Tensor:
        """The weight as it is now."""
        return self._weight.tensor

    @property
    def weight_quantizer(self) -> Quantizer:
        """The quantizer of the weight."""
        return self._weight.quantizer

    @property
    @abstractmethod
    def input_quantizer(self) -> Quantizer | None:
        """The quantizer of the input, if this weight alone gets what it quantizes."""

    @property
    @abstractmethod
    def bias(self) -> tuple[nn.Parameter | None, slice]:
        """The parameter that holds the bias, and the place of this weight's part of it."""

    @abstractmethod
    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool) -> Any:
        """Have a hook called as hook(self, args, kwargs) before each product, the input as its first argument."""

    @abstractmethod
    def inputs(self, call: Any) -> tuple[Tensor, ...]:
        """The inputs of a call that the hook got; each quantizer sees all that the layer gives it."""

    @abstractmethod
    def quantized_inputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The same inputs as the product sees them."""

    @property
    @abstractmethod
    def reads(self) -> tuple[int, ...]:
        """The places of the inputs that the weight is multiplied with, one for each block of its rows."""


class _InProjection(Projection):
    """The weight that makes query, key and value of an attention, or one of the three."""

    @property
    def reads(self) -> tuple[int, ...]:
        return _READS[self._weight.name]

    @property
    def input_quantizer(self) -> Quantizer | None:
        layer = self.layer
        others = layer._key_input_quantizer, layer._value_input_quantizer
        return layer._input_quantizer if len(self.reads) == len(_INPUTS) and others == (None, None) else None

    @property
    def bias(self) -> tuple[nn.Parameter | None, slice]:
        first, last, width = self.reads[0], self.reads[-1] + 1, self.layer.embed_dim
        return self.layer._parameters.get("in_proj_bias"), slice(first * width, last * width)

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool) -> Any:
        def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = {**dict(zip(_INPUTS, args, strict=False)), **kwargs}
            inputs = {name: given[name] for name in _INPUTS}
            hook(self, (inputs[_INPUTS[self.reads[0]]],), inputs)

        return self.layer.register_forward_pre_hook(see, with_kwargs=with_kwargs)

    def inputs(self, call: Any) -> tuple[Tensor, ...]:
        return tuple(call.kwargs[name] for name in _INPUTS)

    def quantized_inputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        query, key, value = inputs
        return self.layer._quantized_inputs(query, key, value)


class _OutProjection(Projection):
    """The weight of an attention's last projection, whose input is made inside of the attention's call."""

    @property
    def reads(self) -> tuple[int, ...]:
        return (0,)

    @property
    def input_quantizer(self) -> Quantizer | None:
        return self.layer._out_proj_input_quantizer

    @property
    def bias(self) -> tuple[nn.Parameter | None, slice]:
        return self.layer.out_proj._parameters.get("bias"), slice(None)

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool) -> Any:
        return self.layer.watch_out_proj(lambda x: hook(self, (x.transpose(0, 1),), {}))

    def inputs(self, call: Any) -> tuple[Tensor, ...]:
        return (call.first,)

    def quantized_inputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        x = inputs[0].transpose(0, 1)  # the attention quantizes one matrix, whose rows have this order
        y = self.layer.quantized("_out_proj_input_quantizer", x.reshape(-1, x.shape[-1]))
        return (y.view(x.shape).transpose(0, 1),)


def _of_attention(weight: LayerWeight) -> Projection:
    return _InProjection(weight) if weight.owner is weight.layer else _OutProjection(weight)


_VIEWS: dict[type[nn.Module], Callable[[LayerWeight], Projection]] = {QuantMultiheadAttention: _of_attention}
"""Layers with several weights that are multiplied with rows of inputs."""


def as_layer(weight: LayerWeight) -> Any:
    """The layer of a weight, or a `Projection` where the layer has several."""
    view = next((view for kind, view in _VIEWS.items() if isinstance(weight.layer, kind)), None)
    return weight.layer if view is None else view(weight)


def whole_layer(layer: Any) -> Any:
    """The layer that a `Projection` is of; others are their own."""
    return layer.layer if isinstance(layer, Projection) else layer


def bias_of(layer: Any) -> tuple[nn.Parameter | None, slice]:
    """The parameter that holds the bias of a layer or a `Projection`, and the place of the bias in it."""
    return layer.bias if isinstance(layer, Projection) else (layer._parameters.get("bias"), slice(None))


def inputs_of(layer: Any, call: Any) -> tuple[Tensor, ...]:
    """The inputs of a call before their quantizers: one, and of a `Projection` of several, all of them."""
    return layer.inputs(call) if isinstance(layer, Projection) else (call.first,)


def quantized_inputs(layer: Any, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same inputs as the product sees them."""
    return layer.quantized_inputs(inputs) if isinstance(layer, Projection) else (layer.quantized_input(inputs[0]),)


def reads_of(layer: Any, calls: Sequence[Sequence[Tensor]]) -> tuple[int, ...]:
    """For each block of rows of a weight, the place of the input that it is multiplied with.

    Where the tensors at two places are the same in all calls, it is the first of them.

    Args:
        layer: or a `Projection`.
        calls: the inputs of each call.
    """
    if not isinstance(layer, Projection):
        return (0,)
    return first_places([tuple(id(inputs[place]) for inputs in calls) for place in layer.reads], layer.reads)


def first_places(columns: Sequence[Any], places: Sequence[int]) -> tuple[int, ...]:
    """For each column, the place of the first one that equals it.

    >>> first_places(["a", "b", "a"], (0, 1, 2))
    (0, 1, 0)
    """
    return tuple(places[columns.index(column)] for column in columns)


def row_name(path: str, layer: Any) -> str:
    """How results name a weight, by the path of its quantizer: its layer, and in a layer with several also the weight.

    >>> layer = prepare(nn.Linear(2, 2), "INT8_WEIGHT_ONLY")
    >>> row_name("encoder.0._weight_quantizer", layer)
    'encoder.0'
    >>> row_name("encoder.1._hh_weight_quantizer", prepare(nn.LSTMCell(2, 2), "INT8_WEIGHT_ONLY"))
    'encoder.1.hh'
    """
    name = layer_of(path)
    if sum(weight.quantizer is not None for weight in whole_layer(layer).weights()) == 1:
        return name
    return join(name, path.rpartition(".")[2].removeprefix("_").removesuffix(_SUFFIX))
