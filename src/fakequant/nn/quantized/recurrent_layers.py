"""Quantized forms of torch's recurrent layers and cells: input, hidden state and both weights have their quantizers.

While a quantizer is on, a layer computes step by step as in `recurrent.py`; else torch computes it, in torch's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fakequant.errors import CoverageWarning, ExportError, warn_user
from fakequant.nn.backward.products import LinearSum, WeightedSum
from fakequant.nn.backward.trained import Backward
from fakequant.nn.hooks import Watched
from fakequant.nn.leaf import Proxy, as_leaf
from fakequant.nn.operands import Operand, Role
from fakequant.nn.products.of_recurrent import GateProduct
from fakequant.nn.products.recurrent_loop import LoopQuantizers, is_exporting_loops, looped, why_no_loop
from fakequant.nn.quantized.layers import QuantizedLayer, quantizes
from fakequant.nn.quantized.recurrent import GateWeights, StepQuantizers, step, unroll
from fakequant.nn.transforms import first_weights


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
