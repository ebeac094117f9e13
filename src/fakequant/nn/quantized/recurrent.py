"""Recurrent layers step by step, where a quantizer reaches the input and the state of every step.

Biases and the state of an LSTM's cell stay in float.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fakequant.errors import CoverageWarning, ExportError, warn_user
from fakequant.nn.backward import Backward, Factor, LinearSum, WeightedSum, is_trained, multiplied
from fakequant.nn.integer import Watched
from fakequant.nn.quantized.layers import QuantizedLayer, quantizes
from fakequant.nn.quantizer import Proxy, as_leaf
from fakequant.nn.recurrent_loop import (
    GateProduct,
    LoopQuantizers,
    after_step,
    is_exporting_loops,
    looped,
    why_no_loop,
)
from fakequant.nn.transforms import first_weights
from fakequant.nn.wrappers import Operand, Role

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


class _Separate(NamedTuple):
    """Each factor of a step's two products has its quantizer."""

    input: Callable[[Tensor], Tensor]
    hidden: Callable[[Tensor], Tensor]
    input_weight: Callable[[Tensor], Tensor]
    hidden_weight: Callable[[Tensor], Tensor]
    transform: Callable[[Tensor], Tensor]
    backward: tuple[Backward, Backward] | None

    def transformed(self, x: Tensor) -> Tensor:
        return self.transform(x)

    def weights(self, weights: GateWeights) -> GateWeights:
        return weights._replace(input=self.input_weight(weights.input), hidden=self.hidden_weight(weights.hidden))

    def factors(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.input(x), self.hidden(hidden)


_Rows = Callable[[], Tensor]
"""The rows of all steps, made when something looks at them."""


def _names(suffix: str) -> tuple[str, str, str, str]:
    """The attributes of the quantizers of one layer in one direction, "_l0_reverse"; of a cell, ""."""
    return (
        f"{suffix}_input_quantizer",
        f"{suffix}_hidden_quantizer",
        f"_ih{suffix}_weight_quantizer",
        f"_hh{suffix}_weight_quantizer",
    )


class Recurrent(Watched, QuantizedLayer):
    """Functions that watch it are called with the attribute of a weight's quantizer, and what gives its rows.

    Those are [n, columns] of a cell, [n, steps, columns] of a layer, and [1, rows, columns] of a packed sequence.
    """

    product_class = GateProduct

    @classmethod
    def suffixes(cls, layer: nn.Module) -> list[str]:
        """The endings of parameter names: one for each layer and direction."""
        return [""]

    @classmethod
    def factors(cls, layer: nn.Module) -> dict[str, Operand]:
        found: dict[str, Operand] = {}
        for suffix in cls.suffixes(layer):
            input, hidden, input_weight, hidden_weight = _names(suffix)
            found |= {input: Operand(Role.INPUT), hidden: Operand(Role.INPUT)}
            found[input_weight] = Operand(Role.WEIGHT, weight=f"weight_ih{suffix}")
            found[hidden_weight] = Operand(Role.WEIGHT, weight=f"weight_hh{suffix}")
        return found

    @classmethod
    def weighted_sum(cls, layer: nn.Module) -> WeightedSum | None:
        return LinearSum()

    def places(self, attribute: str, steps: int) -> Sequence[int] | None:
        """The places in time of the steps that a quantizer sees one after the other; None where they are not known."""
        return None

    def _quantizers(self) -> list[_Separate] | None:
        """Those of every layer in each direction; None if all are off, and nothing watches."""
        suffixes = self.suffixes(self)
        is_on = any(self.is_on(name) for suffix in suffixes for name in _names(suffix))
        if not is_on and not self.is_watched and self.input_transform is None:
            return None
        found = []
        for suffix in suffixes:
            held = tuple(getattr(self, name) or _as_it_is for name in _names(suffix))
            transform = self._transformed if f"weight_ih{suffix}" in first_weights(self) else _as_it_is
            how = self.backward_of()
            backward = None if how is None else (how, how)
            found.append(_Separate(*held, transform=transform, backward=backward))
        return found

    def _transformed(self, x: Tensor) -> Tensor:
        transform = self.input_transform  # now: what watches a layer may give it one before its steps run
        return x if transform is None else transform(x)

    def _show(self, own: _Separate, place: int, inputs: _Rows, hidden: Callable[[StepQuantizers], Tensor]) -> None:
        *_, input_weight, hidden_weight = _names(self.suffixes(self)[place])
        self.show(input_weight, inputs)
        # What is chosen for the weight will be nearer to it than what rounding to nearest gives.
        exact = own._replace(hidden_weight=_as_it_is)
        self.show(hidden_weight, cache(lambda: hidden(exact)))


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _rows(steps: Sequence[Tensor]) -> Tensor:
    is_packed = any(len(x) != len(steps[0]) for x in steps)
    return torch.cat([*steps])[None] if is_packed else torch.stack([*steps], 1)


class _RecurrentLayer(Recurrent):
    @classmethod
    def suffixes(cls, layer: nn.Module) -> list[str]:
        layer = cast("nn.RNNBase", layer)
        directions = ("", "_reverse") if layer.bidirectional else ("",)
        return [f"_l{index}{direction}" for index in range(layer.num_layers) for direction in directions]

    @classmethod
    def takes(cls, layer: nn.Module) -> bool:
        return not getattr(layer, "proj_size", 0)  # a projection is a third product, without a quantizer here

    def places(self, attribute: str, steps: int) -> Sequence[int]:
        return range(steps)[::-1] if "_reverse_" in attribute else range(steps)

    def put(self, name: str, parameter: nn.Parameter) -> None:
        super().put(name, parameter)
        cast("nn.RNNBase", self)._init_flat_weights()  # torch's layer keeps its parameters in a list, too

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Output and last state as the float layer returns them, of the same arguments."""
        if isinstance(input, Proxy):
            return as_leaf(self, input, hx)
        if (quantizers := self._quantizers()) is None:
            return cast("Any", super()).forward(input, hx)
        layer = cast("nn.RNNBase", self)
        why_not = why_no_loop(input, self._of_loops()) if is_exporting_loops() else None
        if is_exporting_loops() and why_not is None and input.dim() in (2, 3):
            return self._looped(input, hx)
        if not isinstance(input, PackedSequence) and input.dim() in (2, 3):
            self._check_steps(input.shape[1 if layer.batch_first and input.dim() == 3 else 0], why_not)
        inputs: dict[int, _Rows] = {}  # one tensor for both directions

        def show(place: int, steps: Sequence[Tensor], hidden: Callable[[StepQuantizers], Sequence[Tensor]]) -> None:
            seen = inputs.setdefault(id(steps), cache(lambda: _rows(steps)))
            self._show(quantizers[place], place, seen, lambda own: _rows(hidden(own)))

        return unroll(layer, input, hx, quantizers, show if self.is_watched else None)

    def _check_steps(self, steps: Any, why_not: str | None) -> None:
        """Say before the work that each step is written, or that this cannot be where their number is dynamic."""
        name = f"a quantized {self.float_class.__name__} is written step by step"
        because = f", because {why_not}" if why_not else ""
        if isinstance(steps, torch.SymInt):
            raise ExportError(
                f"{name}{because}, and the number of steps is dynamic; export it with a fixed length, without that "
                "axis in dynamic_shapes"
            )
        if why_not:
            warn_user(f"{name}{because}: the file has the nodes of {steps} steps, and takes no others", CoverageWarning)

    def _of_loops(self) -> list[LoopQuantizers]:
        return [LoopQuantizers(*(getattr(self, name) for name in _names(suffix))) for suffix in self.suffixes(self)]

    def _looped(self, input: Tensor, hx: Any) -> Any:
        layer, is_lstm = cast("nn.RNNBase", self), cast("nn.RNNBase", self).mode == "LSTM"
        steps_axis = 1 if layer.batch_first and input.dim() == 3 else 0
        x = self._transformed(input.unsqueeze(1) if input.dim() == 2 else input.transpose(0, steps_axis))
        quantizers = self._of_loops()
        given = [x.new_zeros(len(quantizers), x.shape[1], layer.hidden_size)] * (2 if is_lstm else 1)
        if hx is not None:
            given = [s.unsqueeze(1) if input.dim() == 2 else s for s in (hx if is_lstm else (hx,))]
        names = [_names(suffix)[1] for suffix in self.suffixes(self)]
        y, state = looped(layer, x, given, quantizers, names)
        if input.dim() == 2:
            y, state = y.squeeze(1), [s.squeeze(1) for s in state]
        return y.transpose(0, steps_axis), (state[0], state[1]) if is_lstm else state[0]


@quantizes(nn.LSTM)
class QuantLSTM(_RecurrentLayer, nn.LSTM):
    """LSTM with quantized input [n, in] and hidden state [n, hidden] of every step, and weights [4 * hidden, ...]."""


@quantizes(nn.GRU)
class QuantGRU(_RecurrentLayer, nn.GRU):
    """GRU with quantized input [n, in] and hidden state [n, hidden] of every step, and weights [3 * hidden, ...]."""


@quantizes(nn.RNN)
class QuantRNN(_RecurrentLayer, nn.RNN):
    """RNN with quantized input [n, in] and hidden state [n, hidden] of every step, and weights [hidden, ...]."""


class _RecurrentCell(Recurrent):
    mode: ClassVar[str]

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """The state after one step as the float cell returns it, of the same arguments."""
        if isinstance(input, Proxy):
            return as_leaf(self, input, hx)
        quantizers = self._quantizers()
        if quantizers is None or input.dim() not in (1, 2):
            return cast("Any", super()).forward(input, hx)
        cell, is_lstm = cast("nn.LSTMCell", self), self.mode == "LSTM"
        x = torch.atleast_2d(input)
        zeros = x.new_zeros(x.shape[0], cell.hidden_size)
        given = ((zeros, zeros) if is_lstm else zeros) if hx is None else hx
        state = tuple(torch.atleast_2d(s) for s in (given if is_lstm else (given,)))
        if self.is_watched:
            self._show(quantizers[0], 0, lambda: x, lambda _: state[0])
        own = GateWeights(cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
        after = step(self._mode(), x, state, quantizers[0].weights(own), quantizers[0], own)
        if input.dim() == 1:
            after = tuple(s.squeeze(0) for s in after)
        return after if is_lstm else after[0]

    def _mode(self) -> str:
        return self.mode


@quantizes(nn.LSTMCell)
class QuantLSTMCell(_RecurrentCell, nn.LSTMCell):
    """LSTMCell with quantized input [n, in], hidden state [n, hidden] and weights [4 * hidden, ...]."""

    mode = "LSTM"


@quantizes(nn.GRUCell)
class QuantGRUCell(_RecurrentCell, nn.GRUCell):
    """GRUCell with quantized input [n, in], hidden state [n, hidden] and weights [3 * hidden, ...]."""

    mode = "GRU"


@quantizes(nn.RNNCell)
class QuantRNNCell(_RecurrentCell, nn.RNNCell):
    """RNNCell with quantized input [n, in], hidden state [n, hidden] and weights [hidden, ...]."""

    mode = "RNN"

    def _mode(self) -> str:
        return f"RNN_{self.nonlinearity.upper()}"
