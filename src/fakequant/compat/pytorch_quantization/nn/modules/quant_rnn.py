"""Recurrent layers with quantized inputs, hidden states and weights.

One quantizer serves the input and the hidden state of a step together, one their two weights: a pair for every layer
in every direction. Weights have a scale per row.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fakequant.compat.pytorch_quantization import tensor_quant
from fakequant.compat.pytorch_quantization.nn.modules._utils import (
    QuantMixin,
    WeightedModule,
    pop_quant_desc_in_kwargs,
    take_descriptors,
)
from fakequant.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer
from fakequant.nn.quantized.recurrent import GateQuantizers, GateWeights, step, unroll

__all__ = ["LSTM", "LSTMCell", "QuantLSTM", "QuantLSTMCell"]


class QuantRNNBase(QuantMixin):
    """What layers over sequences share: put before torch's class, it takes both descriptors."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        descriptors = take_descriptors(kwargs, nn.RNNBase.__init__)
        if kwargs.get("proj_size", 0):
            raise ValueError("proj_size is not supported: a projection has a product of its own")
        super().__init__(*args, **kwargs)
        layer = cast("nn.RNNBase", self)
        pairs = layer.num_layers * (2 if layer.bidirectional else 1)
        self.init_quantizer(*pop_quant_desc_in_kwargs(type(self), **descriptors), num_layers=pairs)
        layer.to(next(layer.parameters()).device)

    def gates(self) -> list[tuple[GateWeights, GateQuantizers]]:
        """The parameters of every layer, in each direction, and what they are quantized with."""
        quantizers = zip(self._input_quantizers, self._weight_quantizers, strict=True)
        weights = cast("nn.RNNBase", self).all_weights
        return [(GateWeights(*w), _gate_quantizers(*q)) for w, q in zip(weights, quantizers, strict=True)]

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As torch's layer; input [time, n, in], [n, time, in], [time, in] or a PackedSequence."""
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
    """What cells share: put before torch's class, it takes both descriptors."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW
    mode: str

    def gates(self) -> list[tuple[GateWeights, GateQuantizers]]:
        """The parameters, and what they are quantized with: one pair."""
        cell = cast("nn.LSTMCell", self)
        weights = GateWeights(cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
        return [(weights, _gate_quantizers(self._input_quantizer, self._weight_quantizer))]

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """As torch's cell; input [n, in] or [in]."""
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
        """By the nonlinearity."""
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
