"""The quantizer and the quantized layers, also under the names of their float layers."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.compat.pytorch_quantization import tensor_quant
from fakequant.compat.pytorch_quantization.quantizer import Clip as Clip
from fakequant.compat.pytorch_quantization.quantizer import TensorQuantizer
from fakequant.compat.pytorch_quantization.tensor_quant import QUANT_DESC_8BIT_PER_TENSOR, QuantDescriptor
from fakequant.nn.quantized.layers import conv_transpose
from fakequant.nn.quantized.recurrent import GateQuantizers, GateWeights, step, unroll

__all__ = [  # noqa: RUF022  by kind
    "Clip", "TensorQuantizer", "Linear", "QuantLinear", "LSTM", "QuantLSTM", "LSTMCell", "QuantLSTMCell",
    "Conv1d", "Conv2d", "Conv3d", "QuantConv1d", "QuantConv2d", "QuantConv3d",
    "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d",
    "QuantConvTranspose1d", "QuantConvTranspose2d", "QuantConvTranspose3d",
    "MaxPool1d", "MaxPool2d", "MaxPool3d", "QuantMaxPool1d", "QuantMaxPool2d", "QuantMaxPool3d",
    "AvgPool1d", "AvgPool2d", "AvgPool3d", "QuantAvgPool1d", "QuantAvgPool2d", "QuantAvgPool3d",
    "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d",
    "QuantAdaptiveAvgPool1d", "QuantAdaptiveAvgPool2d", "QuantAdaptiveAvgPool3d",
    "QuantInstanceNorm1d", "QuantInstanceNorm2d", "QuantInstanceNorm3d",
]  # fmt: skip


class _QuantizesInput:
    default_quant_desc_input = QUANT_DESC_8BIT_PER_TENSOR
    _input_quantizer: Any

    @classmethod
    def set_default_quant_desc_input(cls, value: QuantDescriptor) -> None:
        """Set the descriptor of inputs for modules of this class that are made later.

        Raises:
            ValueError: `value` is not a descriptor.
        """
        cls.default_quant_desc_input = _copied(value)

    @property
    def input_quantizer(self) -> TensorQuantizer:
        """The quantizer of the input."""
        return self._input_quantizer


class QuantInputMixin(_QuantizesInput):
    """A mixin with a quantizer of the input, `_input_quantizer`."""

    def init_quantizer(self, quant_desc_input: QuantDescriptor) -> None:
        """Make the quantizer; may only be called in the `__init__` of a module.

        Raises:
            TypeError: called outside of an `__init__`.
            ValueError: the descriptor does not ask for fake quantization.
        """
        _check_caller()
        self._input_quantizer = _quantizer(quant_desc_input)


class QuantMixin(_QuantizesInput):
    """A mixin with quantizers of input and weight, `_input_quantizer` and `_weight_quantizer`."""

    default_quant_desc_weight = QUANT_DESC_8BIT_PER_TENSOR
    _weight_quantizer: Any
    _input_quantizers: nn.ModuleList
    _weight_quantizers: nn.ModuleList

    @classmethod
    def set_default_quant_desc_weight(cls, value: QuantDescriptor) -> None:
        """Set the descriptor of weights for modules of this class that are made later."""
        cls.default_quant_desc_weight = _copied(value)

    def init_quantizer(
        self, quant_desc_input: QuantDescriptor, quant_desc_weight: QuantDescriptor, num_layers: int | None = None
    ) -> None:
        """Make both quantizers, as `QuantInputMixin.init_quantizer` does.

        Args:
            quant_desc_input: how inputs are quantized.
            quant_desc_weight: how weights are quantized.
            num_layers: if not None, make lists `_input_quantizers` and `_weight_quantizers` of this length.
        """
        _check_caller()
        if num_layers is None:
            self._input_quantizer, self._weight_quantizer = _quantizer(quant_desc_input), _quantizer(quant_desc_weight)
            return
        self._input_quantizers = nn.ModuleList(_quantizer(quant_desc_input) for _ in range(num_layers))
        self._weight_quantizers = nn.ModuleList(_quantizer(quant_desc_weight) for _ in range(num_layers))

    @property
    def weight_quantizer(self) -> TensorQuantizer:
        """The quantizer of the weight."""
        return self._weight_quantizer


class WeightedModule(QuantMixin):
    """A mixin before the class of a layer with a weight, which takes `quant_desc_input` and `quant_desc_weight`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        descriptors = take_descriptors(kwargs, super().__init__)
        super().__init__(*args, **kwargs)
        self.init_quantizer(*pop_quant_desc_in_kwargs(type(self), **descriptors))
        cast("nn.Module", self).to(next(cast("nn.Module", self).parameters()).device)

    def quantized_weight(self) -> Tensor:
        """The quantized weight, as the product multiplies it."""
        return self._weight_quantizer(cast("nn.Linear", self).weight)


class InputModule(QuantInputMixin):
    """A mixin before the class of a layer without a weight, which takes `quant_desc_input`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        descriptors = take_descriptors(kwargs, super().__init__)
        super().__init__(*args, **kwargs)
        self.init_quantizer(pop_quant_desc_in_kwargs(type(self), input_only=True, **descriptors))

    def forward(self, input: Tensor) -> Any:
        """The layer's output for the quantized input."""
        return cast("Any", super()).forward(self._input_quantizer(input))


def pop_quant_desc_in_kwargs(quant_cls: Any, input_only: bool = False, **kwargs: Any) -> Any:
    """The descriptors among keyword arguments, with the class's defaults for missing descriptors.

    Args:
        quant_cls: a class with `default_quant_desc_input` and `default_quant_desc_weight`.
        input_only: whether to take and return only `quant_desc_input`.

    Raises:
        TypeError: any other keyword argument.
    """
    quant_desc_input = kwargs.pop("quant_desc_input", quant_cls.default_quant_desc_input)
    quant_desc_weight = None if input_only else kwargs.pop("quant_desc_weight", quant_cls.default_quant_desc_weight)
    if kwargs:
        expected = "quant_desc_input" if input_only else "quant_desc_input and quant_desc_weight"
        raise TypeError(f"Unused keys: {', '.join(kwargs)}; {quant_cls.__name__} takes {expected}")
    return quant_desc_input if input_only else (quant_desc_input, quant_desc_weight)


def take_descriptors(kwargs: dict[str, Any], made_by: Callable[..., None]) -> dict[str, Any]:
    """Remove from `kwargs`, and return, descriptors and arguments that the float layer does not take."""
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
    """Raise TypeError unless `init_quantizer` was called by an `__init__`."""
    if sys._getframe(2).f_code.co_name != "__init__":
        raise TypeError("init_quantizer is for the __init__ of a quantized module; assign to the quantizers instead")


class QuantLinear(WeightedModule, nn.Linear):
    """nn.Linear that also takes `quant_desc_input` and `quant_desc_weight`; weights have a scale per row.

    >>> print(QuantLinear(4, 2, bias=False))
    QuantLinear(
      in_features=4, out_features=2, bias=False
      (_input_quantizer): TensorQuantizer(8bit fake per-tensor amax=dynamic calibrator=MaxCalibrator scale=1.0 quant)
      (_weight_quantizer): TensorQuantizer(8bit fake axis=0 amax=dynamic calibrator=MaxCalibrator scale=1.0 quant)
    )
    """

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self._input_quantizer(input), self.quantized_weight(), self.bias)


Linear = QuantLinear


class _QuantConv(WeightedModule):
    bias: Tensor | None
    _conv_forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(self._input_quantizer(input), self.quantized_weight(), self.bias)


class _QuantConvTranspose(WeightedModule, nn.Module):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return conv_transpose(self, self._input_quantizer(input), self.quantized_weight(), output_size)


class QuantConv1d(_QuantConv, nn.Conv1d):
    """nn.Conv1d that also takes `quant_desc_input` and `quant_desc_weight`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL


class QuantConv2d(_QuantConv, nn.Conv2d):
    """nn.Conv2d that also takes `quant_desc_input` and `quant_desc_weight`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL


class QuantConv3d(_QuantConv, nn.Conv3d):
    """nn.Conv3d that also takes `quant_desc_input` and `quant_desc_weight`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL


class QuantConvTranspose1d(_QuantConvTranspose, nn.ConvTranspose1d):
    """nn.ConvTranspose1d that also takes `quant_desc_input` and `quant_desc_weight`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL


class QuantConvTranspose2d(_QuantConvTranspose, nn.ConvTranspose2d):
    """nn.ConvTranspose2d that also takes `quant_desc_input` and `quant_desc_weight`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL


class QuantConvTranspose3d(_QuantConvTranspose, nn.ConvTranspose3d):
    """nn.ConvTranspose3d that also takes `quant_desc_input` and `quant_desc_weight`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL


Conv1d = QuantConv1d
Conv2d = QuantConv2d
Conv3d = QuantConv3d
ConvTranspose1d = QuantConvTranspose1d
ConvTranspose2d = QuantConvTranspose2d
ConvTranspose3d = QuantConvTranspose3d


class QuantMaxPool1d(InputModule, nn.MaxPool1d):
    """nn.MaxPool1d that also takes `quant_desc_input`."""


class QuantMaxPool2d(InputModule, nn.MaxPool2d):
    """nn.MaxPool2d that also takes `quant_desc_input`."""


class QuantMaxPool3d(InputModule, nn.MaxPool3d):
    """nn.MaxPool3d that also takes `quant_desc_input`."""


class QuantAvgPool1d(InputModule, nn.AvgPool1d):
    """nn.AvgPool1d that also takes `quant_desc_input`."""


class QuantAvgPool2d(InputModule, nn.AvgPool2d):
    """nn.AvgPool2d that also takes `quant_desc_input`."""


class QuantAvgPool3d(InputModule, nn.AvgPool3d):
    """nn.AvgPool3d that also takes `quant_desc_input`."""


class QuantAdaptiveAvgPool1d(InputModule, nn.AdaptiveAvgPool1d):
    """nn.AdaptiveAvgPool1d that also takes `quant_desc_input`."""


class QuantAdaptiveAvgPool2d(InputModule, nn.AdaptiveAvgPool2d):
    """nn.AdaptiveAvgPool2d that also takes `quant_desc_input`."""


class QuantAdaptiveAvgPool3d(InputModule, nn.AdaptiveAvgPool3d):
    """nn.AdaptiveAvgPool3d that also takes `quant_desc_input`."""


MaxPool1d = QuantMaxPool1d
MaxPool2d = QuantMaxPool2d
MaxPool3d = QuantMaxPool3d
AvgPool1d = QuantAvgPool1d
AvgPool2d = QuantAvgPool2d
AvgPool3d = QuantAvgPool3d
AdaptiveAvgPool1d = QuantAdaptiveAvgPool1d
AdaptiveAvgPool2d = QuantAdaptiveAvgPool2d
AdaptiveAvgPool3d = QuantAdaptiveAvgPool3d


class QuantInstanceNorm1d(InputModule, nn.InstanceNorm1d):
    """nn.InstanceNorm1d that also takes `quant_desc_input`."""


class QuantInstanceNorm2d(InputModule, nn.InstanceNorm2d):
    """nn.InstanceNorm2d that also takes `quant_desc_input`."""


class QuantInstanceNorm3d(InputModule, nn.InstanceNorm3d):
    """nn.InstanceNorm3d that also takes `quant_desc_input`."""


class QuantRNNBase(QuantMixin):
    """Base of quantized recurrent layers: a mixin before torch's class that takes both descriptors."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        descriptors = take_descriptors(kwargs, nn.RNNBase.__init__)
        if kwargs.get("proj_size", 0):
            raise ValueError("proj_size is not supported: its product would need more quantizers; leave it at 0")
        super().__init__(*args, **kwargs)
        layer = cast("nn.RNNBase", self)
        pairs = layer.num_layers * (2 if layer.bidirectional else 1)
        self.init_quantizer(*pop_quant_desc_in_kwargs(type(self), **descriptors), num_layers=pairs)
        layer.to(next(layer.parameters()).device)

    def gates(self) -> list[tuple[GateWeights, GateQuantizers]]:
        """The parameters and quantizers of every layer in each direction."""
        quantizers = zip(self._input_quantizers, self._weight_quantizers, strict=True)
        weights = cast("nn.RNNBase", self).all_weights
        return [(GateWeights(*w), _gate_quantizers(*q)) for w, q in zip(weights, quantizers, strict=True)]

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Compute torch's layer, quantized; input [time, n, in], [n, time, in], [time, in] or a PackedSequence."""
        quantizers = [quantizers for _, quantizers in self.gates()]
        if all(_pass_through(pair) for pair in quantizers):
            return cast("Any", super()).forward(input, hx)
        return unroll(cast("nn.RNNBase", self), input, hx, quantizers)


class QuantLSTM(QuantRNNBase, nn.LSTM):
    """nn.LSTM that also takes `quant_desc_input` and `quant_desc_weight`.

    >>> layer = QuantLSTM(4, 8, num_layers=2)
    >>> len(layer._input_quantizers)
    2
    """


class QuantRNN(QuantRNNBase, nn.RNN):
    """nn.RNN that also takes `quant_desc_input` and `quant_desc_weight`."""


class GRU(QuantRNNBase, nn.GRU):
    """nn.GRU that also takes `quant_desc_input` and `quant_desc_weight`."""


class QuantRNNCellBase(WeightedModule):
    """Base of quantized recurrent cells: a mixin before torch's class that takes both descriptors."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW
    mode: str

    def gates(self) -> list[tuple[GateWeights, GateQuantizers]]:
        """A list with a single pair: the parameters and the quantizers of the cell."""
        cell = cast("nn.LSTMCell", self)
        weights = GateWeights(cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
        return [(weights, _gate_quantizers(self._input_quantizer, self._weight_quantizer))]

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Compute torch's cell with quantized input [n, in] or [in], hidden state and weights."""
        cell = cast("nn.LSTMCell", self)
        ((weights, quantizers),) = self.gates()
        if _pass_through(quantizers):
            return cast("Any", super()).forward(input, hx)
        x = torch.atleast_2d(input)
        if hx is None:
            zeros = x.new_zeros(x.shape[0], cell.hidden_size)
            state = (zeros, zeros) if self.mode == "LSTM" else (zeros,)
        else:
            state = tuple(torch.atleast_2d(s) for s in (hx if self.mode == "LSTM" else (hx,)))
        after = step(self.mode, x, state, quantizers.weights(weights), quantizers, weights)
        if input.dim() == 1:
            after = tuple(s.squeeze(0) for s in after)
        return after if self.mode == "LSTM" else after[0]


class QuantLSTMCell(QuantRNNCellBase, nn.LSTMCell):
    """nn.LSTMCell that also takes `quant_desc_input` and `quant_desc_weight`."""

    mode = "LSTM"


class QuantRNNCell(QuantRNNCellBase, nn.RNNCell):
    """nn.RNNCell that also takes `quant_desc_input` and `quant_desc_weight`."""

    @property
    def mode(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The name of the cell's step function, which follows from the nonlinearity."""
        return f"RNN_{self.nonlinearity.upper()}"


class GRUCell(QuantRNNCellBase, nn.GRUCell):
    """nn.GRUCell that also takes `quant_desc_input` and `quant_desc_weight`."""

    mode = "GRU"


LSTM = QuantLSTM
LSTMCell = QuantLSTMCell


def _gate_quantizers(input: nn.Module, weight: nn.Module) -> GateQuantizers:
    return GateQuantizers(cast("TensorQuantizer", input), cast("TensorQuantizer", weight))


def _pass_through(quantizers: GateQuantizers) -> bool:
    return all(cast("TensorQuantizer", each).passes_through for each in quantizers)
