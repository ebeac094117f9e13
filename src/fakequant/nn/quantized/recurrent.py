"""Recurrent layers step by step, where a quantizer reaches the input and the state of every step.

Biases and the state of an LSTM's cell stay in float.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fakequant.nn.backward.products import Factor, LinearSum, is_trained, multiplied
from fakequant.nn.backward.trained import Backward
from fakequant.nn.products.recurrent_loop import after_step

State = tuple[Tensor, ...]
"""The hidden state [n, hidden], and for an LSTM the state of the cell [n, hidden]."""

_CELLS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm_cell,
    "GRU": torch.gru_cell,
    "RNN_TANH": torch.rnn_tanh_cell,
    "RNN_RELU": torch.rnn_relu_cell,
}


class GateWeights(NamedTuple):
    """The parameters of one layer in one direction, or of a cell."""

    input: Tensor
    """[gates * hidden, in]"""
    hidden: Tensor
    """[gates * hidden, hidden]"""
    input_bias: Tensor | None = None
    hidden_bias: Tensor | None = None


class StepQuantizers(Protocol):
    """How one layer in one direction, or a cell, is quantized."""

    @property
    def backward(self) -> tuple[Backward, Backward] | None:
        """How the backward products of both products of a step are quantized; None leaves them in float."""
        ...

    def weights(self, weights: GateWeights) -> GateWeights:
        """The weights as the products of all steps see them."""
        ...

    def transformed(self, x: Tensor) -> Tensor:
        """The input [n, in] of a step before its quantizer."""
        ...

    def factors(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Transformed input [n, in] and hidden state [n, hidden] as the products of one step see them."""
        ...


class GateQuantizers(NamedTuple):
    """Input and hidden state are joined before they are quantized, as are their weights: one product for all gates."""

    input: Callable[[Tensor], Tensor]
    """Applied to the input and the hidden state of a step, joined [n, in + hidden]."""
    weight: Callable[[Tensor], Tensor]
    """Applied to their weights, joined [gates * hidden, in + hidden]."""

    @property
    def backward(self) -> None:
        """None: gradients stay in float."""

    def weights(self, weights: GateWeights) -> GateWeights:
        joined = self.weight(torch.cat([weights.input, weights.hidden], 1))
        input, hidden = joined.split([weights.input.shape[1], weights.hidden.shape[1]], 1)
        return weights._replace(input=input, hidden=hidden)

    def transformed(self, x: Tensor) -> Tensor:
        return x

    def factors(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.input(torch.cat([x, hidden], 1))
        x, hidden = joined.split([x.shape[1], hidden.shape[1]], 1)
        return x, hidden


def step(
    mode: str, x: Tensor, state: State, weights: GateWeights, quantizers: StepQuantizers, before: GateWeights
) -> State:
    """The state after one step; the weights are quantized already.

    Args:
        mode: "LSTM", "GRU", "RNN_TANH" or "RNN_RELU".
        x: [n, in]
        before: the weights before they were quantized.
    """
    plain_x = quantizers.transformed(x)
    x, hidden = quantizers.factors(plain_x, state[0])
    if (both := quantizers.backward) is not None and is_trained(both[0].config):
        pair = Factor(x, plain_x), Factor(weights.input, before.input)
        own = multiplied(LinearSum(), both[0], *pair, weights.input_bias)
        pair = Factor(hidden, state[0]), Factor(weights.hidden, before.hidden)
        kept = multiplied(LinearSum(), both[1], *pair, weights.hidden_bias)
        after = after_step(mode, own, kept, hidden, state[-1])
        return after[: len(state)]
    given = (hidden, *state[1:]) if len(state) > 1 else hidden
    after = _CELLS[mode](x, given, *weights)
    return after if isinstance(after, tuple) else (after,)


Show = Callable[[int, Sequence[Tensor], Callable[[StepQuantizers], Sequence[Tensor]]], None]
"""Gets the number of a layer in one direction, the inputs [n, in] of its steps, and what runs it with given quantizers.

That returns the hidden states [n, hidden] before the steps. A change of weights counts for the layer's own run."""


def unroll(
    layer: nn.RNNBase,
    input: Tensor | PackedSequence,
    hx: Any,
    quantizers: Sequence[StepQuantizers],
    show: Show | None = None,
) -> tuple[Tensor | PackedSequence, Any]:
    """What `layer(input, hx)` computes, every step quantized; arguments and results are those of torch's layers.

    Weights are quantized once per call. Steps of a packed sequence see the sequences that have not ended.

    Args:
        layer: nn.RNN, nn.GRU or nn.LSTM without projections.
        quantizers: of every layer, in each direction: forward, then backward.
        show: called before a layer runs in a direction.

    Raises:
        ValueError: an input of other than 2 or 3 axes.
        RuntimeError: input or state of a wrong shape.
    """
    steps, state = _opened(layer, input, hx)
    directions = 2 if layer.bidirectional else 1
    weights = [GateWeights(*tensors) for tensors in layer.all_weights]
    ended: list[State] = []
    for first in range(0, len(weights), directions):
        if first and layer.dropout:
            steps = [F.dropout(x, layer.dropout, layer.training) for x in steps]
        outputs = []
        for i in range(first, first + directions):
            start = tuple(s[i] for s in state)
            run = partial(_one_direction, layer.mode, steps, start, weights[i], reverse=i != first)
            if show is not None:
                show(i, steps, lambda own, run=run: run(own).hidden)
            found = run(quantizers[i])
            outputs.append(found.outputs)
            ended.append(found.end)
        steps = [torch.cat(both, 1) for both in zip(*outputs, strict=True)]
    return _closed(layer, input, steps, tuple(torch.stack(s) for s in zip(*ended, strict=True)))


class _Direction(NamedTuple):
    outputs: list[Tensor]
    """The hidden states [n, hidden] after every step."""
    hidden: list[Tensor]
    """Those before every step."""
    end: State
    """The last state of every sequence."""


def _one_direction(
    mode: str, steps: list[Tensor], state: State, weights: GateWeights, quantizers: StepQuantizers, *, reverse: bool
) -> _Direction:
    own, weights = weights, quantizers.weights(weights)
    outputs: list[Tensor] = []
    hidden: list[Tensor] = []
    for x in reversed(steps) if reverse else steps:
        n = x.shape[0]
        before = tuple(s[:n] for s in state)
        after = step(mode, x, before, weights, quantizers, own)
        outputs.append(after[0])
        hidden.append(before[0])
        # Sequences that have ended keep their state, those that have not begun (in reverse) their first one.
        if n < state[0].shape[0]:
            after = tuple(torch.cat([a, s[n:]]) for a, s in zip(after, state, strict=True))
        state = after
    return _Direction(outputs[::-1], hidden[::-1], state) if reverse else _Direction(outputs, hidden, state)


def _opened(layer: nn.RNNBase, input: Tensor | PackedSequence, hx: Any) -> tuple[list[Tensor], State]:
    """The input of every step [n, in] and the first state [layers * directions, n, hidden], checked."""
    lstm = layer.mode == "LSTM"
    given = None if hx is None else tuple(hx) if lstm else (hx,)
    if isinstance(input, PackedSequence):
        x, sizes = input.data, input.batch_sizes
        steps = list(x.split(sizes.tolist()))
        if given is not None and input.sorted_indices is not None:
            given = tuple(s.index_select(1, input.sorted_indices) for s in given)
    elif input.dim() not in (2, 3):
        raise ValueError(f"{type(layer).__name__}: expected an input of 2 or 3 axes, got shape {list(input.shape)}")
    else:
        x, sizes = input, None
        if input.dim() == 2:
            x = input.unsqueeze(0 if layer.batch_first else 1)
            given = None if given is None else tuple(s.unsqueeze(1) for s in given)
        steps = list(x.unbind(1 if layer.batch_first else 0))
    if given is None:
        layers = len(layer.all_weights)
        given = (x.new_zeros(layers, steps[0].shape[0], layer.hidden_size),) * (2 if lstm else 1)
    # nn.LSTM checks the pair, the others a tensor.
    layer.check_forward_args(x, given if lstm else given[0], sizes)  # pyright: ignore[reportArgumentType]
    return steps, given


def _closed(
    layer: nn.RNNBase, input: Tensor | PackedSequence, steps: list[Tensor], state: State
) -> tuple[Tensor | PackedSequence, Any]:
    """Output and state in the form that torch's layers return for an input."""
    if isinstance(input, PackedSequence):
        output: Any = input._replace(data=torch.cat(steps))
        if input.unsorted_indices is not None:
            state = tuple(s.index_select(1, input.unsorted_indices) for s in state)
    else:
        output = torch.stack(steps, 1 if layer.batch_first else 0)
        if input.dim() == 2:
            output, state = output.squeeze(0 if layer.batch_first else 1), tuple(s.squeeze(1) for s in state)
    return output, state if layer.mode == "LSTM" else state[0]
