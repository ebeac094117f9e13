"""What quantized modules share, also those that users write."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from fakequant.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer
from fakequant.compat.pytorch_quantization.tensor_quant import QUANT_DESC_8BIT_PER_TENSOR, QuantDescriptor


class QuantInputMixin:
    """Gives a module a quantizer for its input, `_input_quantizer`."""

    default_quant_desc_input = QUANT_DESC_8BIT_PER_TENSOR
    _input_quantizer: TensorQuantizer

    @classmethod
    def set_default_quant_desc_input(cls, value: QuantDescriptor) -> None:
        """Set the descriptor that modules of this class use from now on.

        Raises:
            ValueError: no descriptor.
        """
        cls.default_quant_desc_input = _copied(value)

    def init_quantizer(self, quant_desc_input: QuantDescriptor) -> None:
        """Make the quantizer; only a module's `__init__` may call this.

        Raises:
            TypeError: something else called it.
            ValueError: the descriptor does not ask for fake quantization.
        """
        _check_caller()
        self._input_quantizer = _quantizer(quant_desc_input)

    @property
    def input_quantizer(self) -> TensorQuantizer:
        """The quantizer of the input."""
        return self._input_quantizer


class QuantMixin:
    """Gives a module quantizers for its input and its weight, `_input_quantizer` and `_weight_quantizer`."""

    default_quant_desc_input = QUANT_DESC_8BIT_PER_TENSOR
    default_quant_desc_weight = QUANT_DESC_8BIT_PER_TENSOR
    _input_quantizer: Any
    _weight_quantizer: Any
    _input_quantizers: nn.ModuleList
    _weight_quantizers: nn.ModuleList

    @classmethod
    def set_default_quant_desc_input(cls, value: QuantDescriptor) -> None:
        """Set the descriptor of inputs that modules of this class use from now on.

        Raises:
            ValueError: no descriptor.
        """
        cls.default_quant_desc_input = _copied(value)

    @classmethod
    def set_default_quant_desc_weight(cls, value: QuantDescriptor) -> None:
        """Set the descriptor of weights that modules of this class use from now on.

        Raises:
            ValueError: no descriptor.
        """
        cls.default_quant_desc_weight = _copied(value)

    def init_quantizer(
        self, quant_desc_input: QuantDescriptor, quant_desc_weight: QuantDescriptor, num_layers: int | None = None
    ) -> None:
        """Make the quantizers; only a module's `__init__` may call this.

        Args:
            quant_desc_input: how inputs are quantized.
            quant_desc_weight: how weights are quantized.
            num_layers: if given, as many pairs, in the lists `_input_quantizers` and `_weight_quantizers`.

        Raises:
            TypeError: something else called it.
            ValueError: a descriptor does not ask for fake quantization.
        """
        _check_caller()
        if num_layers is None:
            self._input_quantizer, self._weight_quantizer = _quantizer(quant_desc_input), _quantizer(quant_desc_weight)
            return
        self._input_quantizers = nn.ModuleList(_quantizer(quant_desc_input) for _ in range(num_layers))
        self._weight_quantizers = nn.ModuleList(_quantizer(quant_desc_weight) for _ in range(num_layers))

    @property
    def input_quantizer(self) -> TensorQuantizer:
        """The quantizer of the input."""
        return self._input_quantizer

    @property
    def weight_quantizer(self) -> TensorQuantizer:
        """The quantizer of the weight."""
        return self._weight_quantizer


class WeightedModule(QuantMixin):
    """A layer with a weight: put before the layer's class, it takes `quant_desc_input` and `quant_desc_weight`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        descriptors = take_descriptors(kwargs, super().__init__)
        super().__init__(*args, **kwargs)
        self.init_quantizer(*pop_quant_desc_in_kwargs(type(self), **descriptors))
        cast("nn.Module", self).to(next(cast("nn.Module", self).parameters()).device)

    def quantized_weight(self) -> Tensor:
        """The weight as the product sees it."""
        return self._weight_quantizer(cast("nn.Linear", self).weight)


class InputModule(QuantInputMixin):
    """A layer whose input alone is quantized: put before the layer's class, it takes `quant_desc_input`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        descriptors = take_descriptors(kwargs, super().__init__)
        super().__init__(*args, **kwargs)
        self.init_quantizer(pop_quant_desc_in_kwargs(type(self), input_only=True, **descriptors))

    def forward(self, input: Tensor) -> Any:
        """What the layer computes of the quantized input."""
        return cast("Any", super()).forward(self._input_quantizer(input))


def pop_quant_desc_in_kwargs(quant_cls: Any, input_only: bool = False, **kwargs: Any) -> Any:
    """The descriptors among keyword arguments, and a class's own defaults for those that are not there.

    Args:
        quant_cls: a class with `default_quant_desc_input` and `default_quant_desc_weight`.
        input_only: whether only `quant_desc_input` is meant; that alone is returned then.

    Raises:
        TypeError: another keyword argument.
    """
    quant_desc_input = kwargs.pop("quant_desc_input", quant_cls.default_quant_desc_input)
    quant_desc_weight = None if input_only else kwargs.pop("quant_desc_weight", quant_cls.default_quant_desc_weight)
    if kwargs:
        expected = "quant_desc_input" if input_only else "quant_desc_input and quant_desc_weight"
        raise TypeError(f"Unused keys: {', '.join(kwargs)}; {quant_cls.__name__} takes {expected}")
    return quant_desc_input if input_only else (quant_desc_input, quant_desc_weight)


def take_descriptors(kwargs: dict[str, Any], made_by: Callable[..., None]) -> dict[str, Any]:
    """The keyword arguments that are descriptors, or that the float layer does not take, taken out of all."""
    known = inspect.signature(made_by).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    names = [name for name in kwargs if name.startswith("quant_desc_") or not (takes_all or name in known)]
    return {name: kwargs.pop(name) for name in names}


def _copied(value: QuantDescriptor) -> QuantDescriptor:
    if not isinstance(value, QuantDescriptor):
        raise ValueError(f"{value!r} is not an instance of QuantDescriptor")
    return copy.deepcopy(value)


def _quantizer(descriptor: QuantDescriptor) -> TensorQuantizer:
    if not descriptor.fake_quant:
        raise ValueError("Only fake quantization is supported in modules; leave fake_quant=True")
    return TensorQuantizer(descriptor)


def _check_caller() -> None:
    """Raise unless what called `init_quantizer` is an `__init__`."""
    if sys._getframe(2).f_code.co_name != "__init__":
        raise TypeError("init_quantizer is for the __init__ of a quantized module; assign to the quantizers instead")
