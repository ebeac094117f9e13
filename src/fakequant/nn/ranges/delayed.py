"""Ranges of earlier steps: the scale of a tensor follows from the largest magnitudes that its place had before.

Source: NVIDIA Transformer Engine, the recipe `DelayedScaling`. There, too, a step of zeros leaves everything as it is.
Infinity, which there keeps a scale as it is while the history has it, does not count here.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from fakequant.errors import ConfigError
from fakequant.nn.ranges.learned import LearnedRange, register_learned_range
from fakequant.numerics.granularity import PerTensor
from fakequant.numerics.qparams import QParams, Range, choose_qparams, compute_dtype
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library
from fakequant.ops.graph_operators import text_of
from fakequant.ops.tracing import is_compiled_in_transforms, needs_tracing

_MOST_STEPS = 1 << 16
_PROCESS = int.from_bytes(os.urandom(3), "big") + 1 << 32
"""Added to the number of a backward pass, which begins again in each process that loads a model."""


class DelayedRange(LearnedRange):
    """The scale follows from the largest magnitudes of earlier steps; values beyond it are clipped.

    Nothing is learned by gradient. In training mode each call of a forward pass is a step, and so are all calls of one
    backward pass together. What a checkpoint computes again there has the scale of the last call before, and is no
    step. A step counts its finite values; one of zeros is left out.

    Args:
        spec: one float32 scale for a tensor, without a zero point.
        steps: how many steps count.

    Attributes:
        history: the largest magnitudes [1 + steps], that of the last step first; 0 where there was none.

    Raises:
        ConfigError: no step, or another specification.
    """

    names = ("history",)
    by_group = False
    history: Tensor
    backward_pass: Tensor
    """The number [1] of the one to which the first magnitude of the history belongs."""

    def __init__(self, spec: QuantSpec, steps: int = 1024) -> None:
        if not (isinstance(spec.granularity, PerTensor) and spec.symmetric and spec.is_plain):
            raise ConfigError(
                f"{spec} cannot have a delayed scale, which is one float32 number for the whole tensor; use per_tensor "
                "without a format of the scales and without a zero point, such as float8_e5m2"
            )
        if type(steps) is not int or not 1 <= steps <= _MOST_STEPS:
            raise ConfigError(
                f"a delayed scale needs the number of steps that count, 1 to {_MOST_STEPS}, such as 16, got {steps!r}"
            )
        super().__init__(spec)
        self.steps = steps
        del self._parameters["history"]
        self.register_buffer("history", None)
        self.register_buffer("backward_pass", torch.zeros(1, dtype=torch.int64), persistent=False)

    def extra_repr(self) -> str:
        return f"steps={self.steps}"

    def start(self, params: QParams) -> None:
        scale = params.scale.detach().reshape(1)
        amax = self.spec.format.bound * (scale if self.spec.arithmetic.is_linear else 1.0 / scale)
        self.history = torch.cat([amax, amax.new_zeros(self.steps)])

    def start_at_one(self) -> None:
        """Begin without a magnitude: the scale of the first step is 1, as in Transformer Engine."""
        self.history = torch.zeros(1 + self.steps, device=self.backward_pass.device)

    def qparams(self, elements: int) -> QParams:
        """The scale of the next step."""
        history = _moved_on(self.history, self.history[:1] > 0)
        return QParams(_scale_of(history, self.spec, self.method))

    def fake_quantize_in_one_call(self, x: Tensor, *, examples: bool) -> Tensor:
        return library.quantize_by(x, self.spec, self.scale_for(x, self.spec))

    def scale_for(self, x: Tensor, spec: QuantSpec, *, in_backward: bool = False) -> Tensor:
        """The scale [groups of x] of this step; in training mode the magnitude of x is noted for later ones.

        Args:
            x: the tensor.
            spec: that of the range.
            in_backward: whether x is an operand of a backward product.
        """
        if not self.training:
            scale = self.qparams(1).scale.to(x.device, compute_dtype(x.dtype))
            return scale.reshape(spec.granularity.group_shape(x.shape))
        is_compiling = torch.compiler.is_compiling()
        if is_compiled_in_transforms() or (needs_tracing(x) and not is_compiling):
            raise ConfigError(
                "a delayed scale notes the tensors of each step in training mode, which transforms of torch.func, "
                "forward-mode AD and exporters cannot do; call model.eval() before, or train by loss.backward()"
            )
        given = self.history, self.backward_pass if in_backward else None
        if is_compiling:
            found: Tensor = torch.ops.fakequant.next_scale(x.detach(), *given, text_of(spec), self.method)
            return found
        with torch.no_grad():
            return _next_scale(x, *given, spec, self.method)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load; a range that has begun keeps its number of steps, another takes that of the state."""
        given = state_dict.get(prefix + "history")
        if given is not None and len(given) != 1 + self.steps:
            if self.history is not None:
                args[-1].append(f"{prefix}history is of {len(given) - 1} steps, and the model counts {self.steps}")
                return
            self.steps = len(given) - 1
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


@register_learned_range("delayed_max")
class DelayedMax(DelayedRange):
    """By the largest magnitude of the steps that count; see `DelayedRange`.

    >>> own = DelayedMax(QuantSpec("int8"), steps=2)
    >>> own.start(QParams(torch.tensor([0.01])))
    >>> for largest in (2.54, 1.0, 1.0, 1.0):
    ...     print(own.fake_quantize_in_one_call(torch.tensor([largest]), examples=True))
    tensor([1.2700])
    tensor([1.])
    tensor([1.])
    tensor([1.])
    """


@register_learned_range("delayed_most_recent")
class DelayedMostRecent(DelayedRange):
    """By the last step that counts; see `DelayedRange`."""


def delayed_range(text: str, spec: QuantSpec) -> DelayedRange:
    """That of a text for an operand of a backward product, before its first step.

    Raises:
        ConfigError: another text, or a specification that cannot have a delayed scale.

    >>> delayed_range("delayed_max:16", QuantSpec("float8_e5m2")).qparams(1).scale
    tensor([1.])
    """
    method, _, steps = str(text).partition(":")
    if method not in _AMAX_OF or not steps.isdecimal():
        raise ConfigError(f"scale must be such as 'delayed_max:16' or 'delayed_most_recent:16', got {text!r}")
    made = (DelayedMax if method == "delayed_max" else DelayedMostRecent)(spec, int(steps))
    made.start_at_one()
    return made


_AMAX_OF = {"delayed_max": lambda past: past.amax(0, keepdim=True), "delayed_most_recent": lambda past: past[:1]}
"""What gives the magnitude [1] of a scale, of those of earlier steps."""


def _moved_on(history: Tensor, does: Tensor) -> Tensor:
    """The history with room for a new magnitude where it moves on [1]."""
    return torch.where(does, torch.cat([torch.zeros_like(history[:1]), history[:-1]]), history)


def _scale_of(history: Tensor, spec: QuantSpec, method: str) -> Tensor:
    """The scale [1] of the step at the first place of a history; 1 where there was none before."""
    amax = _AMAX_OF[method](history[1:])
    return torch.where(amax > 0, choose_qparams(Range(-amax, amax), spec).scale, 1.0)


def _next_scale(x: Tensor, history: Tensor, backward_pass: Tensor | None, spec: QuantSpec, method: str) -> Tensor:
    """`scale_for` in training mode; `backward_pass` is None outside of backward products."""
    now = torch._C._current_graph_task_id()  # -1 outside of a backward pass
    begins = torch.ones(1, dtype=torch.bool, device=history.device)
    if backward_pass is not None and now >= 0:
        begins = backward_pass != _PROCESS + now
        backward_pass.fill_(_PROCESS + now)
    if backward_pass is not None or now < 0:
        amax = library.measure(x, spec.granularity).amax.reshape(1).to(history) if x.numel() else history.new_zeros(1)
        own = _moved_on(history, begins & (history[:1] > 0))
        own = torch.cat([torch.where(begins, amax, torch.maximum(own[:1], amax)), own[1:]])
        history.copy_(own)
    # The history of a function, which has no parameter by which to know it, may be on another device than x.
    scale = _scale_of(history.to(x.device, compute_dtype(x.dtype)), spec, method)
    return scale.reshape(spec.granularity.group_shape(x.shape))


# A graph that CUDA replays would always be of the backward pass in which it was recorded.
@torch.library.custom_op(
    "fakequant::next_scale",
    mutates_args=("history", "backward_pass"),
    schema="(Tensor x, Tensor(a!) history, Tensor(b!)? backward_pass, str spec, str method) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _noted(x: Tensor, history: Tensor, backward_pass: Tensor | None, spec: str, method: str) -> Tensor:
    return _next_scale(x, history, backward_pass, QuantSpec.parse(spec), method)


@_noted.register_fake
def _(x: Tensor, history: Tensor, backward_pass: Tensor | None, spec: str, method: str) -> Tensor:
    return x.new_empty(QuantSpec.parse(spec).granularity.group_shape(x.shape), dtype=compute_dtype(x.dtype))
