"""Recurrent layers that are computed step by step, so that the input and hidden state of every step are quantized.

Biases and the cell state of an LSTM stay in float. Under an exporter a layer calls one operator for all steps, which
the exporter writes as a loop over any number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fakequant.errors import CoverageWarning, ExportError, warn_user
from fakequant.nn.backward import Backward, Factor, LinearSum, WeightedSum, is_trained, multiplied
from fakequant.nn.integer import Watched
from fakequant.nn.products import MatrixProduct
from fakequant.nn.quantized.layers import QuantizedLayer, quantizes
from fakequant.nn.quantizer import Mode, Proxy, Quantizer, as_leaf
from fakequant.nn.transforms import InputTransform, first_weights
from fakequant.nn.wrappers import Operand, Role
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library
from fakequant.restore import set_to

_PREFIX = "weight_"


class GateProduct(MatrixProduct):
    """The product of a weight, which holds all gates of a layer and direction, with each step's input or hidden state.

    The rows are the inputs or hidden states of all steps. For the rows, a layer computes hidden states with this
    weight in float; a cell gets hidden states from its caller.
    """

    has_steps = True
    is_result = False

    @property
    def readers(self) -> int:  # type: ignore[override]
        """How many weights multiply the layer's input if this weight does (one per direction); 0 for other weights."""
        names = first_weights(self.layer)
        return len(names) if self.name in names else 0

    @property
    def _ending(self) -> str:
        """The suffix of the names of weight and bias, such as "ih_l0_reverse" in a layer or "hh" in a cell."""
        return self.name.removeprefix(_PREFIX)

    @property
    def _seen(self) -> str:
        """A text that names the rows: both directions share the inputs, but have separate hidden states."""
        return self._ending.removesuffix("_reverse") if self._ending.startswith("ih") else self._ending

    @property
    def input_attribute(self) -> str:
        """The layer's attribute that holds the quantizer of the rows."""
        kind, suffix = self._ending[:2], self._ending[2:]
        return f"{suffix}_{'input' if kind == 'ih' else 'hidden'}_quantizer"

    @property
    def input_quantizer(self) -> Quantizer | None:
        return getattr(self.layer, self.input_attribute, None)

    @property
    def input_transform(self) -> InputTransform | None:
        return self.layer.input_transform if self.readers else None

    @property
    def bias(self) -> tuple[nn.Parameter | None, slice]:
        return self.layer._parameters.get(f"bias_{self._ending}"), slice(None)

    def makes_same_rows(self, other: MatrixProduct) -> bool:
        return isinstance(other, GateProduct) and self.layer is other.layer and self._seen == other._seen

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool) -> Any:
        def see(attribute: str, rows: Callable[[], Tensor]) -> None:
            if attribute == self.attribute:
                hook(self, (rows(),), {})

        return self.layer.watch(see)

    def quantized_inputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The rows after the transform and the quantizer, as in each step; [n, steps, columns], or [n, columns]."""
        (x,), quantizer, transform = inputs, self.input_quantizer, self.input_transform
        x = x if transform is None else transform(x)
        if quantizer is None or x.dim() < 3 or not quantizer.dynamic or is_by_row(quantizer.spec):
            return (self.layer.quantized(self.input_attribute, x),)
        return (torch.stack([quantizer(step) for step in x.unbind(1)], 1),)


def is_by_row(spec: QuantSpec) -> bool:
    """Whether each row of a matrix has separate scales, so that the range of a row depends on no other row.

    >>> is_by_row(QuantSpec.parse("int8 per_token")), is_by_row(QuantSpec.parse("int8 per_tensor"))
    (True, False)
    """
    shape: tuple[int, ...] = (2, 16_384)
    for granularity in (spec.granularity, *spec.shared_granularities):
        shape = tuple(granularity.group_shape(shape))
    return shape[0] == 2


_NONE = ""
_why_not: ContextVar[str | None] = ContextVar("_why_not", default=_NONE)
"""The reason why the running exporter writes no loops; None if it writes loops, "" without an exporter."""
_PARAMS = "Tensor weight, Tensor? bias, Tensor? scale, Tensor? zero_point"


def written_as_loops(why_not: str | None = None) -> AbstractContextManager[None]:
    """A context in which recurrent layers call the loop operator where it supports them.

    With `why_not`, the reason why the exporter writes no loops, layers never call the loop operator.
    """
    return set_to(_why_not, why_not)


def is_exporting_loops() -> bool:
    """Whether the running code is inside `written_as_loops`, but not traced by Dynamo."""
    # Dynamo cannot read context variables, and `export_onnx` traces without it.
    return not torch.compiler.is_dynamo_compiling() and _why_not.get() != _NONE


def runs_backwards(path: str) -> bool:
    """Whether the quantizer at `path` belongs to a reverse direction, which begins with the last step.

    >>> runs_backwards("rnn._l0_reverse_hidden_quantizer"), runs_backwards("rnn._l0_hidden_quantizer")
    (True, False)
    """
    return "_reverse_" in path.rpartition(".")[2]


State = tuple[Tensor, ...]
"""The hidden state [n, hidden], and for an LSTM the cell state [n, hidden]."""

_CELLS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm_cell,
    "GRU": torch.gru_cell,
    "RNN_TANH": torch.rnn_tanh_cell,
    "RNN_RELU": torch.rnn_relu_cell,
}


class GateWeights(NamedTuple):
    """The weights and biases of one layer in one direction, or of a cell."""

    input: Tensor
    """[gates * hidden, in]"""
    hidden: Tensor
    """[gates * hidden, hidden]"""
    input_bias: Tensor | None = None
    hidden_bias: Tensor | None = None


class GateQuantizers(NamedTuple):
    """Two quantizers: of the input joined with the hidden state, and of the two weights joined in the same way."""

    input: Callable[[Tensor], Tensor]
    """Applied to the input and the hidden state of a step, concatenated [n, in + hidden]."""
    weight: Callable[[Tensor], Tensor]
    """Applied to both weights, concatenated [gates * hidden, in + hidden]."""

    @property
    def backward(self) -> None:
        """None, because gradients stay in float."""

    def weights(self, weights: GateWeights) -> GateWeights:
        """The weights, quantized once for all steps."""
        joined = self.weight(torch.cat([weights.input, weights.hidden], 1))
        input, hidden = joined.split([weights.input.shape[1], weights.hidden.shape[1]], 1)
        return weights._replace(input=input, hidden=hidden)

    def transformed(self, x: Tensor) -> Tensor:
        """The input [n, in] of a step, transformed but not quantized."""
        return x

    def factors(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The quantized factors of one step, from transformed input [n, in] and hidden state [n, hidden]."""
        joined = self.input(torch.cat([x, hidden], 1))
        x, hidden = joined.split([x.shape[1], hidden.shape[1]], 1)
        return x, hidden


def active(quantizer: Quantizer | None) -> Quantizer | None:
    """The quantizer if it is on; None if it is off or missing."""
    return None if quantizer is None or quantizer.mode is Mode.OFF else quantizer


def _by(quantizer: Quantizer | None, x: Tensor) -> Tensor:
    return x if quantizer is None else quantizer(x)


class LayerQuantizers(NamedTuple):
    """The quantizers of one layer in one direction, or of a cell: one for each factor of a step, or None."""

    input: Quantizer | None
    hidden: Quantizer | None
    input_weight: Quantizer | None
    hidden_weight: Quantizer | None
    transform: Callable[[Tensor], Tensor] | None
    backward: Backward | None

    def weights(self, weights: GateWeights) -> GateWeights:
        """The weights, quantized once for all steps."""
        input, hidden = _by(self.input_weight, weights.input), _by(self.hidden_weight, weights.hidden)
        return weights._replace(input=input, hidden=hidden)

    def transformed(self, x: Tensor) -> Tensor:
        """The input [n, in] of a step, transformed but not quantized."""
        return x if self.transform is None else self.transform(x)

    def factors(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The quantized factors of one step, from transformed input [n, in] and hidden state [n, hidden]."""
        return _by(self.input, x), _by(self.hidden, hidden)

    @property
    def why_no_loop(self) -> str | None:
        """Why the loop operator does not support these quantizers; None if it does."""
        hidden, input = active(self.hidden), active(self.input)
        if hidden is not None and hidden.by_value is not None:
            return "its hidden state has several ranges"
        by_row = hidden is None or (is_by_row(hidden.spec) and hidden.spec.symmetric)
        if hidden is not None and (hidden.learned is not None or (hidden.dynamic and not by_row)):
            return "the range of its hidden state is computed from all rows of a step"
        if input is not None and input.dynamic and not is_by_row(input.spec):
            return "the range of its input is computed at each step"
        return None


StepQuantizers = GateQuantizers | LayerQuantizers
"""Quantizers of one layer in one direction, or of a cell: joined or separate."""


def why_no_loop(input: Any, quantizers: Sequence[LayerQuantizers]) -> str | None:
    """The reason why an exporter must write a layer step by step, for a message; None if it can write a loop."""
    if not isinstance(input, Tensor):
        return "its input is a packed sequence"
    if input.dtype is not torch.float32:
        return f"its input is {str(input.dtype).removeprefix('torch.')}"
    return _why_not.get() or next(filter(None, (own.why_no_loop for own in quantizers)), None)


def step(
    mode: str, x: Tensor, state: State, weights: GateWeights, quantizers: StepQuantizers, before: GateWeights
) -> State:
    """The state after one step for x [n, in]; `weights` are the quantized weights, `before` the unquantized ones."""
    plain_x = quantizers.transformed(x)
    x, hidden = quantizers.factors(plain_x, state[0])
    if (how := quantizers.backward) is not None and is_trained(how.config):
        pair = Factor(x, plain_x), Factor(weights.input, before.input)
        of_input = multiplied(LinearSum(), how, *pair, weights.input_bias)
        pair = Factor(hidden, state[0]), Factor(weights.hidden, before.hidden)
        of_hidden = multiplied(LinearSum(), how, *pair, weights.hidden_bias)
        return after_step(mode, of_input, of_hidden, hidden, state[-1])[: len(state)]
    given = (hidden, *state[1:]) if len(state) > 1 else hidden
    after = _CELLS[mode](x, given, *weights)
    return after if isinstance(after, tuple) else (after,)


Show = Callable[[int, Sequence[Tensor], Callable[[StepQuantizers], Sequence[Tensor]]], None]
"""A function that is called before a layer runs in a direction: with the number of the run, the inputs [n, in] of its
steps, and `run`. `run(quantizers)` returns the hidden states [n, hidden] before each step. If the function changes the
weights, the layer runs with the changed weights."""


def unroll(
    layer: nn.RNNBase,
    input: Tensor | PackedSequence,
    hx: Any,
    quantizers: Sequence[StepQuantizers],
    show: Show | None = None,
) -> tuple[Tensor | PackedSequence, Any]:
    """The result of `layer(input, hx)` with every step quantized; arguments and results are those of torch's layers.

    Weights are quantized once per call. Steps of a packed sequence compute only sequences that have not ended.

    Args:
        layer: nn.RNN, nn.GRU or nn.LSTM without projections.
        quantizers: for each layer those of the forward direction, then those of the reverse direction.
        show: called before a layer runs in a direction.

    Raises:
        ValueError: the input does not have 2 or 3 axes.
        RuntimeError: the input or the state has a wrong shape.
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
    last = tuple(torch.stack(s) for s in zip(*ended, strict=True))
    if isinstance(input, PackedSequence):
        output: Any = input._replace(data=torch.cat(steps))
        if input.unsorted_indices is not None:
            last = tuple(s.index_select(1, input.unsorted_indices) for s in last)
    else:
        output = torch.stack(steps, 1 if layer.batch_first else 0)
        if input.dim() == 2:
            output, last = output.squeeze(0 if layer.batch_first else 1), tuple(s.squeeze(1) for s in last)
    return output, last if layer.mode == "LSTM" else last[0]


class _Direction(NamedTuple):
    outputs: list[Tensor]
    """The hidden states [n, hidden] after every step."""
    hidden: list[Tensor]
    """The hidden states [n, hidden] before every step."""
    end: State
    """The state of every sequence after its last step."""


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
    """The input of every step [n, in] and the first state [layers * directions, n, hidden].

    Raises ValueError or RuntimeError for wrong shapes.
    """
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


@torch.library.custom_op(
    "fakequant::recurrent",
    mutates_args=(),
    schema=f"(Tensor gates, Tensor hidden, Tensor cell, {_PARAMS}, str spec, str quantizer, str mode, bool reverse)"
    " -> (Tensor y, Tensor last_hidden, Tensor last_cell)",
)
def _recurrent(  # noqa: PLR0913
    gates: Tensor,
    hidden: Tensor,
    cell: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    zero_point: Tensor | None,
    spec: str,
    quantizer: str,
    mode: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    outputs, cell = [], cell.clone()
    for x in reversed(gates.unbind(0)) if reverse else gates.unbind(0):
        if spec and scale is not None:
            hidden = library.fake_quantize(hidden, QParams(scale, zero_point), QuantSpec.parse(spec))
        elif spec:
            hidden = library.fake_quantize_dynamic(hidden, QuantSpec.parse(spec))
        hidden, cell = after_step(mode, x, F.linear(hidden, weight, bias), hidden, cell)
        outputs.append(hidden)
    return torch.stack(outputs[::-1] if reverse else outputs), hidden.clone(), cell


@_recurrent.register_fake
def _(gates: Tensor, hidden: Tensor, cell: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    y = gates.new_empty(gates.shape[0], gates.shape[1], hidden.shape[-1])
    return y, hidden.new_empty(hidden.shape), cell.new_empty(cell.shape)


def after_step(mode: str, x: Tensor, own: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden and cell state after a step.

    `x` and `own` [n, gates * hidden] are the products of the weights with the input and with the hidden state.
    """
    if mode == "LSTM":
        into, forget, new, out = (x + own).chunk(4, -1)
        cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
        return out.sigmoid() * cell.tanh(), cell
    if mode == "GRU":
        (r, z, n), (of_r, of_z, of_n) = x.chunk(3, -1), own.chunk(3, -1)
        n = (n + (r + of_r).sigmoid() * of_n).tanh()
        return n + (z + of_z).sigmoid() * (hidden - n), cell
    return ((x + own).tanh() if mode == "RNN_TANH" else (x + own).relu()), cell


_Rows = Callable[[], Tensor]
"""Returns the rows of all steps; only watching functions call it."""


def _names(suffix: str) -> tuple[str, str, str, str]:
    """The attributes of the four quantizers of a layer and direction ("_l0_reverse"), or of a cell ("")."""
    return (
        f"{suffix}_input_quantizer",
        f"{suffix}_hidden_quantizer",
        f"_ih{suffix}_weight_quantizer",
        f"_hh{suffix}_weight_quantizer",
    )


class Recurrent(Watched, QuantizedLayer):
    """Base of quantized recurrent layers and cells.

    Functions that `watch` registers get, for each weight, the attribute of the weight's quantizer, and a function that
    returns the rows that the weight multiplies: [n, columns] in a cell; [n, steps, columns] in a layer, or
    [1, rows, columns] for a packed sequence of several lengths.
    """

    product_class = GateProduct

    @classmethod
    def suffixes(cls, layer: nn.Module) -> list[str]:
        """The suffixes of parameter names, such as "_l0_reverse": one for each layer and direction."""
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
        """The indices of the steps in the order of the quantizer's calls; None if the order is not known."""
        return None

    def _quantizers(self) -> list[LayerQuantizers] | None:
        """The quantizers of every layer and direction; None if all are off, and nothing watches or transforms."""
        suffixes, how = self.suffixes(self), self.backward_of()
        is_on = any(self.is_on(name) for suffix in suffixes for name in _names(suffix))
        if not is_on and not self.is_watched and self.input_transform is None:
            return None
        found = []
        for suffix in suffixes:
            transform = self._transformed if f"weight_ih{suffix}" in first_weights(self) else None
            found.append(
                LayerQuantizers(*(getattr(self, name) for name in _names(suffix)), transform=transform, backward=how)
            )
        return found

    def _transformed(self, x: Tensor) -> Tensor:
        transform = self.input_transform  # now: what watches a layer may give it one before its steps run
        return x if transform is None else transform(x)

    def _show(
        self, own: LayerQuantizers, place: int, inputs: _Rows, hidden: Callable[[StepQuantizers], Tensor]
    ) -> None:
        *_, input_weight, hidden_weight = _names(self.suffixes(self)[place])
        self.show(input_weight, inputs)
        # Codes that a solver chooses will give hidden states nearer to the float weight's than rounding to nearest.
        exact = own._replace(hidden_weight=None)
        self.show(hidden_weight, cache(lambda: hidden(exact)))


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
        """The output and last state that the float layer returns for these arguments."""
        if isinstance(input, Proxy):
            return as_leaf(self, input, hx)
        if (quantizers := self._quantizers()) is None:
            return cast("Any", super()).forward(input, hx)
        layer, is_exporting = cast("nn.RNNBase", self), is_exporting_loops()
        why_not = why_no_loop(input, quantizers) if is_exporting else None
        if not isinstance(input, PackedSequence) and input.dim() in (2, 3):
            if is_exporting and why_not is None:
                return self._looped(input, hx, quantizers)
            # Before the work: each step is written, or cannot be where the number of steps is dynamic.
            steps = input.shape[1 if layer.batch_first and input.dim() == 3 else 0]
            name = f"a quantized {self.float_class.__name__} is written step by step"
            because = f", because {why_not}" if why_not else ""
            if isinstance(steps, torch.SymInt):
                raise ExportError(
                    f"{name}{because}, which needs a fixed number of steps, but that axis is dynamic; export it with a "
                    "fixed length, without that axis in dynamic_shapes"
                )
            if why_not:
                text = f"{name}{because}: the file has the nodes of {steps} steps, and takes only inputs of that length"
                warn_user(text, CoverageWarning)
        inputs: dict[int, _Rows] = {}  # one tensor for both directions

        def show(place: int, steps: Sequence[Tensor], hidden: Callable[[StepQuantizers], Sequence[Tensor]]) -> None:
            seen = inputs.setdefault(id(steps), cache(lambda: _rows(steps)))
            self._show(quantizers[place], place, seen, lambda own: _rows(hidden(own)))

        return unroll(layer, input, hx, quantizers, show if self.is_watched else None)

    def _looped(self, input: Tensor, hx: Any, quantizers: Sequence[LayerQuantizers]) -> Any:
        """The result of `forward` in eval mode, by one loop operator for each layer and direction."""
        layer, is_lstm = cast("nn.RNNBase", self), cast("nn.RNNBase", self).mode == "LSTM"
        steps_axis = 1 if layer.batch_first and input.dim() == 3 else 0
        x = self._transformed(input.unsqueeze(1) if input.dim() == 2 else input.transpose(0, steps_axis))
        state = [x.new_zeros(len(quantizers), x.shape[1], layer.hidden_size)] * (2 if is_lstm else 1)
        if hx is not None:
            state = [s.unsqueeze(1) if input.dim() == 2 else s for s in (hx if is_lstm else (hx,))]
        suffixes, directions = self.suffixes(self), 2 if layer.bidirectional else 1
        ended: list[tuple[Tensor, Tensor]] = []
        for first in range(0, len(quantizers), directions):
            outputs = []
            for i in range(first, first + directions):
                own = quantizers[i]
                w, u, *biases = layer.all_weights[i]
                b, c = biases or (None, None)
                gates = F.linear(_by(own.input, x), _by(own.input_weight, w), b)
                hidden = active(own.hidden)
                found = torch.ops.fakequant.recurrent(
                    gates,
                    state[0][i],
                    state[-1][i],
                    _by(own.hidden_weight, u),
                    c,
                    None if hidden is None or hidden.dynamic else hidden.scale,
                    None if hidden is None or hidden.dynamic else hidden.zero_point,
                    "" if hidden is None else hidden.spec.to_text(),
                    _names(suffixes[i])[1],
                    layer.mode,
                    i != first,
                )
                outputs.append(found[0])
                ended.append(found[1:])
            x = torch.cat(outputs, -1) if directions > 1 else outputs[0]
        last = [torch.stack(own) for own in zip(*ended, strict=True)][: len(state)]
        if input.dim() == 2:
            x, last = x.squeeze(1), [s.squeeze(1) for s in last]
        return x.transpose(0, steps_axis), (last[0], last[1]) if is_lstm else last[0]


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
        """The state after one step, as the float cell returns it."""
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
