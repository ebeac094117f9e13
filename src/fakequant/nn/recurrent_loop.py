"""Recurrent layers as one operator for all steps, which an exporter writes as a loop over any number of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.nn.products import MatrixProduct
from fakequant.nn.quantizer import Mode, Quantizer
from fakequant.nn.transforms import InputTransform, first_weights
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library

_PREFIX = "weight_"


class GateProduct(MatrixProduct):
    """A weight of all gates, of one layer in one direction, multiplied with the input or the hidden state of each step.

    Its rows are those of all steps. Hidden states are those that the layer computes while this weight is in float; of a
    cell those that its calls get.
    """

    has_steps = True
    is_result = False

    @property
    def readers(self) -> int:  # type: ignore[override]
        """Those of both directions; 0 for the inputs of inner layers and for hidden states."""
        names = first_weights(self.layer)
        return len(names) if self.name in names else 0

    @property
    def _ending(self) -> str:
        """What the names of weight and bias end with: "ih_l0_reverse" of a layer, "hh" of a cell."""
        return self.name.removeprefix(_PREFIX)

    @property
    def _seen(self) -> str:
        """What it is multiplied with: both directions see the same inputs, and each its own hidden states."""
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
        """Rows [n, steps, columns], or [n, columns] of one step, as the steps see them."""
        (x,), quantizer, transform = inputs, self.input_quantizer, self.input_transform
        x = x if transform is None else transform(x)
        if quantizer is None or x.dim() < 3 or not quantizer.dynamic or is_by_row(quantizer.spec):
            return (self.layer.quantized(self.input_attribute, x),)
        return (torch.stack([quantizer(step) for step in x.unbind(1)], 1),)


def is_by_row(spec: QuantSpec) -> bool:
    """Whether each row of a matrix has scales of its own, so that its range depends on no other row.

    >>> is_by_row(QuantSpec.parse("int8 per_token")), is_by_row(QuantSpec.parse("int8 per_tensor"))
    (True, False)
    """
    shape: tuple[int, ...] = (2, 16_384)
    for granularity in (spec.granularity, *spec.shared_granularities):
        shape = tuple(granularity.group_shape(shape))
    return shape[0] == 2


_NONE = ""
_why_not: ContextVar[str | None] = ContextVar("_why_not", default=_NONE)
"""Why the exporter at work writes no loops; None where it does, "" where none is at work."""
_PARAMS = "Tensor weight, Tensor? bias, Tensor? scale, Tensor? zero_point"


@contextmanager
def written_as_loops(why_not: str | None = None) -> Iterator[None]:
    """A context in which layers call the operator where it can hold their quantizers, unless something is against it.

    Args:
        why_not: a clause for messages, "TensorRT ...".
    """
    token = _why_not.set(why_not)
    try:
        yield
    finally:
        _why_not.reset(token)


class LoopQuantizers(NamedTuple):
    """Those of one layer in one direction; None leaves a tensor in float."""

    input: Quantizer | None
    hidden: Quantizer | None
    input_weight: Quantizer | None
    hidden_weight: Quantizer | None

    @property
    def why_not(self) -> str | None:
        """Why a loop cannot hold them; None where it can."""
        hidden, input = active(self.hidden), active(self.input)
        if hidden is not None and hidden.by_value is not None:
            return "its hidden state has several ranges"
        if hidden is not None and (hidden.learned is not None or (hidden.dynamic and not _is_own_of_rows(hidden.spec))):
            return "the range of its hidden state is computed of whole steps"
        if input is not None and input.dynamic and not is_by_row(input.spec):
            return "the range of its input is that of one step"
        return None


def _is_own_of_rows(spec: QuantSpec) -> bool:
    return is_by_row(spec) and spec.symmetric


def active(quantizer: Quantizer | None) -> Quantizer | None:
    """A quantizer that is on; None for one that is off, too."""
    return None if quantizer is None or quantizer.mode is Mode.OFF else quantizer


def is_exporting_loops() -> bool:
    """Whether layers are traced for an exporter that could write loops."""
    # Dynamo cannot read context variables, and `export_onnx` traces without it.
    return not torch.compiler.is_dynamo_compiling() and _why_not.get() != _NONE


def runs_backwards(path: str) -> bool:
    """Whether a layer calls the quantizer at a path for its last step first.

    >>> runs_backwards("rnn._l0_reverse_hidden_quantizer"), runs_backwards("rnn._l0_hidden_quantizer")
    (True, False)
    """
    return "_reverse_" in path.rpartition(".")[2]


def why_no_loop(input: Any, quantizers: Sequence[LoopQuantizers]) -> str | None:
    """Why an exporter writes a layer step by step, as a clause; None where it writes a loop.

    Args:
        input: of the layer.
        quantizers: of every layer, in each direction.
    """
    if not isinstance(input, Tensor):
        return "its input is a packed sequence"
    if input.dtype is not torch.float32:
        return f"its input is {str(input.dtype).removeprefix('torch.')}"
    return _why_not.get() or next(filter(None, (own.why_not for own in quantizers)), None)


def looped(
    layer: nn.RNNBase, x: Tensor, state: Sequence[Tensor], quantizers: Sequence[LoopQuantizers], names: Sequence[str]
) -> tuple[Tensor, list[Tensor]]:
    """The hidden states of the last layer [steps, n, directions * hidden], and the last states of all.

    Args:
        layer: in eval mode.
        x: [steps, n, in]
        state: [layers * directions, n, hidden], and for an LSTM that of its cell.
        quantizers: of every layer, in each direction.
        names: the attributes of the quantizers of hidden states.
    """
    directions = 2 if layer.bidirectional else 1
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
                names[i],
                layer.mode,
                i != first,
            )
            outputs.append(found[0])
            ended.append(found[1:])
        x = torch.cat(outputs, -1) if directions > 1 else outputs[0]
    return x, [torch.stack(own) for own in zip(*ended, strict=True)][: len(state)]


def _by(quantizer: Quantizer | None, x: Tensor) -> Tensor:
    return x if quantizer is None else quantizer(x)


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
    """Hidden state and state of the cell after a step, by the products [n, gates * hidden] of input and state."""
    if mode == "LSTM":
        into, forget, new, out = (x + own).chunk(4, -1)
        cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
        return out.sigmoid() * cell.tanh(), cell
    if mode == "GRU":
        (r, z, n), (of_r, of_z, of_n) = x.chunk(3, -1), own.chunk(3, -1)
        n = (n + (r + of_r).sigmoid() * of_n).tanh()
        return n + (z + of_z).sigmoid() * (hidden - n), cell
    return ((x + own).tanh() if mode == "RNN_TANH" else (x + own).relu()), cell
