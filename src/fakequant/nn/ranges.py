"""Ranges that training moves, and ranges that a value of the batch, such as a timestep, chooses.

A method of learning computes scale and zero point from its parameters by differentiable torch operations; the operator
computes the gradients of scale and zero point. A new method is one class here.

If a tensor has several ranges, a value of the batch chooses one. A hook reads the value before the model's `forward`,
and quantizers use the range for this value. Outside of a call of the model such quantizers raise an error.
"""

from __future__ import annotations

import inspect
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame as _frames

from fakequant.calibration.calibrator import check_options, registered_in
from fakequant.distributed import gathered
from fakequant.errors import (
    CalibrationError,
    ConfigError,
    NoWeightError,
    QParamsError,
    ShapeError,
    nearest,
    shown,
    warn_user,
)
from fakequant.numerics.division import divide, reciprocal
from fakequant.numerics.formats.floats import power_of_two
from fakequant.numerics.granularity import Granularity, PerChannel, PerTensor, rounded
from fakequant.numerics.qparams import QParams, compute_dtype, is_readable_without_sync, shape_of
from fakequant.numerics.scales import ScaleRounding
from fakequant.numerics.spec import Arithmetic, Gradient, QuantSpec
from fakequant.ops import library
from fakequant.ops.dispatch import find_plan
from fakequant.ops.graph_operators import apply_plan
from fakequant.restore import restore_after


class PreciseModule(nn.Module):
    """Base of modules whose tensors stay at least float32 under `half()`, and get their shapes from a state dict."""

    def __getattr__(self, name: str) -> Any:
        """The attribute `name` as torch finds it; NoWeightError for "weight", which `RowwiseParallel` reads."""
        if name == "weight":
            raise NoWeightError
        return nn.Module.__getattr__(self, name)  # of quantizers in peft's adapters, `super()` is another class

    def _own(self) -> dict[str, Tensor | None]:
        return {**self._parameters, **self._buffers}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PreciseModule:
        """Apply `fn`, but keep tensors at least float32, because a float16 scale would change every code."""
        # Detached, because a parameter is converted in place.
        before = {name: value.detach() for name, value in self._own().items() if value is not None}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            dtype = compute_dtype(new.dtype) if old.is_floating_point() else old.dtype
            if new.dtype != dtype and old.device.type != "meta":
                restored = old.to(new.device, dtype)
                if isinstance(new, nn.Parameter):
                    new.data = restored
                else:
                    setattr(self, name, restored)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load the state, also tensors that this module does not have yet, or has in another shape."""
        for name, own in self._own().items():
            given = state_dict.get(prefix + name)
            if given is not None and (own is None or own.shape != given.shape):
                fresh = torch.empty_like(given, device=given.device if own is None else own.device)
                setattr(self, name, nn.Parameter(fresh) if name in self._parameters else fresh)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class QuantizerPart(PreciseModule):
    """Base of quantizers and learned ranges, which a state dict of a float model leaves unchanged."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the state; report missing keys only if the state has keys of any quantizer of the model.

        Therefore `strict=True` accepts a state dict of the float model, but refuses one that lacks some quantizers.
        """
        absent: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, absent, unexpected_keys, error_msgs)
        given = not prefix or any(key.startswith(prefix) for key in state_dict)  # no prefix: it is loaded alone
        _absent.add(missing_keys, absent, given)


class _Absent(threading.local):
    """Collects the missing keys of quantizers in a `load_state_dict`, and reports them if any quantizer has keys.

    A quantizer sees only the keys under its prefix. torch's list of missing keys is the same object in the whole call.
    """

    call: list[str] | None = None
    keys: list[str] | None = None

    def add(self, missing_keys: list[str], absent: list[str], given: bool) -> None:
        if self.call is not missing_keys:
            self.call, self.keys = missing_keys, []
        if given and self.keys is not None:
            missing_keys += self.keys
            self.keys = None
        if self.keys is None:
            missing_keys += absent
        else:
            self.keys += absent


_absent = _Absent()


GLOBAL_SCALE = "global_scale"
"""The name of the buffer of 1 / a tensor's scale, and the last part of its key in a state dict."""
_NO_CODE = 0.125
"""The code that replaces 0 for a block's scale, as in compressed-tensors: all values of such a block become 0."""


def has_tensor_scale(spec: QuantSpec) -> bool:
    """Whether a specification has a float32 scale of the whole tensor that multiplies blocks' scales, like NVFP4."""
    return spec.symmetric and spec.scale.is_under_a_tensor and spec.scale.rounding is ScaleRounding.NEAREST


def check_global_scale(global_scale: Tensor, spec: QuantSpec) -> None:
    """Raise QParamsError unless a global scale is float32 [1], finite and positive, and the specification has one."""
    if not has_tensor_scale(spec):
        raise QParamsError(
            f"{spec} has no per-tensor scale that multiplies the scales of blocks, as {GLOBAL_SCALE} needs; leave "
            f"{GLOBAL_SCALE} out"
        )
    if global_scale.dtype is not torch.float32 or tuple(global_scale.shape) != (1,):
        raise QParamsError(f"{GLOBAL_SCALE} must be float32 [1], got {global_scale.dtype} {list(global_scale.shape)}")
    if not bool(global_scale.isfinite().all() and (global_scale > 0).all()):
        raise QParamsError(f"{GLOBAL_SCALE} must be finite and above 0, got {global_scale.item()}")


def params_under(x: Tensor, spec: QuantSpec, global_scale: Tensor) -> QParams:
    """The scales of the blocks of x: amax / bound * global_scale, rounded to the scales' format, / global_scale.

    The operations and their order are those of compressed-tensors, `calculate_qparams`.
    """
    fmt = spec.scale.format
    assert fmt is not None, "see `has_tensor_scale`"
    amax = library.measure(x, spec.granularity).amax
    code = rounded(divide(amax, torch.full_like(amax, spec.scale.bound(spec.format))) * global_scale, fmt)
    return QParams(divide(torch.where(code > 0, code, _NO_CODE), global_scale.expand_as(code)), None)


def shared_by(granularity: Granularity, shape: tuple[int, ...], *, examples: bool) -> int:
    """How many elements share a scale; with `examples`, how many elements of one example (index of the first axis).

    >>> from fakequant import PerTensor
    >>> shared_by(PerTensor(), (32, 10), examples=True), shared_by(PerTensor(), (32, 10), examples=False)
    (10, 320)
    """
    blocks = granularity.block_shape(shape)
    return max(1, math.prod(blocks[1:] if examples and len(blocks) > 1 else blocks))


_shared_by = lru_cache(maxsize=4096)(shared_by)  # asked at every call, and the same for every tensor of a shape


def straight_through(value: Tensor, parameter: Tensor, factor: float | Tensor = 1.0) -> Tensor:
    """`value`, whose gradient times `factor` goes to `parameter` (straight-through); `parameter` must be finite.

    >>> step = torch.tensor([1.4], requires_grad=True)
    >>> straight_through(step.ceil(), step, 0.5).backward()
    >>> step.grad
    tensor([0.5000])
    """
    return value.detach() + (parameter - parameter.detach()) * factor


class LearnedRange(QuantizerPart, ABC):
    """Base of the methods of learning: parameters that training moves, and the scale and zero point from them.

    Parameters are None until `start` or a state dict sets them.

    Args:
        spec: how the tensor is quantized.

    Raises:
        ConfigError: the method does not support the specification.
    """

    method: ClassVar[str] = ""
    """The name under which the class is registered."""
    names: ClassVar[tuple[str, ...]]
    """The names of the parameters."""
    by_group: ClassVar[bool] = True
    """Whether each parameter has an element for each group of the tensor."""
    _is_told = False

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__()
        if spec.arithmetic.has_two_scales:
            raise ConfigError(
                f"{spec} encodes with another scale than it decodes with, so that no single scale can be learned; "
                "keep the range calibrated or dynamic, or use the arithmetic divide"
            )
        if not spec.is_plain:
            raise ConfigError(
                f"{spec} has scales in {spec.scale.format or spec.scale}, which cannot be learned: they follow from "
                "the values of every block. Train with Scales.EPOCH, which takes them from the weights in each epoch, "
                "with Scales.FIXED, or use a specification with float32 scales"
            )
        self.spec = spec
        for name in self.names:
            self.register_parameter(name, None)

    @property
    def started(self) -> bool:
        """Whether the parameters are set."""
        return getattr(self, self.names[0]) is not None

    @abstractmethod
    def start(self, params: QParams) -> None:
        """Set the parameters so that `qparams` returns this calibrated scale and zero point."""

    @abstractmethod
    def qparams(self, elements: int) -> QParams:
        """The present scale and zero point, differentiable; `elements` counts the elements that share a scale."""

    def vanished(self) -> tuple[int, int]:
        """How many scales training drove to 0 or below (their groups lose all values), and the count of all scales."""
        return 0, 0

    def fake_quantize(self, x: Tensor, params: QParams) -> Tensor:
        """x quantized with the scale and zero point from `qparams`, reshaped to fit x."""
        return library.fake_quantize(x, params, self.spec)

    def fake_quantize_in_one_call(self, x: Tensor, *, examples: bool) -> Tensor | None:
        """x quantized by one operator; None if callers must use `qparams` and `fake_quantize` instead.

        `examples` is as for `shared_by`.
        """
        return None

    def warn_if_frozen(self) -> None:
        """Warn once, in training, if the parameters have requires_grad=False."""
        first = self._parameters.get(self.names[0])
        if first is None or first.requires_grad or self._is_told or torch.compiler.is_compiling():
            return
        self._is_told = True
        warn_user(  # without a name: it is one line for all ranges of a model
            "learned scales have requires_grad=False in training, as after peft froze a model that was prepared before "
            "peft was imported: they stay as they are. Call fakequant.qat.set_scales(model, Scales.LEARNED) on the "
            "wrapped model before its optimizer is made to train them, or set_scales(model, Scales.FIXED) to keep them"
        )

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the constructor that make an equal object, without the specification."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters if name != "spec"}

    def _set(self, **values: Tensor) -> None:
        """Set parameters; a parameter of the same shape stays the same object, so that optimizers keep it."""
        for name, value in values.items():
            own = getattr(self, name)
            if own is not None and own.shape == value.shape:
                own.data.copy_(value)
            else:
                setattr(self, name, nn.Parameter(value.detach().clone()))


_registry: dict[str, type[LearnedRange]] = {}
_Class = TypeVar("_Class", bound=type[LearnedRange])


def register_learned_range(name: str) -> Callable[[_Class], _Class]:
    """A decorator that registers a `LearnedRange` under `name`, which must be a new identifier, else ConfigError."""
    if not name.isidentifier():
        raise ConfigError(f"the name {name!r} of a method must be an identifier, such as 'lsq_plus'")
    return registered_in(_registry, name, "method")


def learned_ranges() -> list[str]:
    """The names of all methods to learn ranges.

    >>> learned_ranges()
    ['lsq', 'lsq_plus', 'pact', 'tqt']
    """
    return sorted(_registry)


def make_learned_range(method: str, spec: QuantSpec, **options: Any) -> LearnedRange:
    """A new object of a learning method, for a specification; its parameters are not set yet.

    Raises ConfigError for an unknown method or option, or a method that does not support the specification.
    """
    cls = _registry.get(method)
    if cls is None:
        raise ConfigError(f"unknown method {method!r} to learn a range{nearest(method, learned_ranges())}")
    check_options(cls, options, f"the method {method!r}")
    return cls(spec, **options)


def _step_of(scale: Tensor, spec: QuantSpec) -> Tensor:
    """The step (units of x per code) of a scale, or the scale of a step: reciprocals under MULTIPLIER, else equal."""
    if spec.arithmetic is not Arithmetic.MULTIPLIER:
        return scale
    return reciprocal(scale)


_SMALLEST = {dtype: torch.finfo(dtype).tiny for dtype in (torch.float32, torch.float64)}


def _positive(step: Tensor, spec: QuantSpec) -> Tensor:
    """Clamp the step so that its reciprocal is finite, and under MULTIPLIER also the reciprocal's square."""
    smallest = torch.finfo(step.dtype).tiny
    return step.clamp(min=smallest**0.5 if spec.arithmetic is Arithmetic.MULTIPLIER else smallest)


def _not_positive(parameter: Tensor) -> tuple[int, int]:
    values = gathered(parameter.detach())
    return int((values <= 0).sum()), values.numel()


def _need_symmetric(method: str, spec: QuantSpec) -> None:
    if not spec.symmetric:
        raise ConfigError(
            f"{spec} has a zero point, which {method!r} cannot learn; use 'lsq_plus', or 'lsq' to learn the step alone"
        )


@register_learned_range("lsq")
class LSQ(LearnedRange):
    """A learned range whose parameter is the step between codes; the zero point stays as calibrated.

    A step that training drives to zero or below counts as the smallest positive step and still gets its gradient.

    Args:
        spec: any specification with float32 scales.
        gradient_factor: whether the gradient is multiplied by 1 / sqrt(elements * quant_max), which balances the
            step's updates with those of the weights.

    Source: Esser et al., Learned Step Size Quantization, arXiv 1902.08153, equation 3 and section 2.2.
    """

    names = ("step",)
    step: Tensor
    zero_point: Tensor | None

    def __init__(self, spec: QuantSpec, gradient_factor: bool = True) -> None:
        super().__init__(spec)
        self.gradient_factor = gradient_factor
        self.register_buffer("zero_point", None)

    def vanished(self) -> tuple[int, int]:
        return _not_positive(self.step)

    def start(self, params: QParams) -> None:
        self._set(step=_step_of(params.scale, self.spec))
        self.zero_point = None if params.zero_point is None else params.zero_point.detach().clone()

    def qparams(self, elements: int) -> QParams:
        step = straight_through(_positive(self.step, self.spec), self.step, self._factor(elements))
        return QParams(_step_of(step, self.spec), self.zero_point)

    def fake_quantize_in_one_call(self, x: Tensor, *, examples: bool) -> Tensor | None:
        step, spec = self._parameters.get("step"), self.spec
        # Subclasses of LSQ and LSQPlus may compute scale and zero point differently.
        known = type(self) is LSQ or (type(self) is LSQPlus and spec.symmetric)
        if not known or step is None or spec.arithmetic is Arithmetic.MULTIPLIER or not is_readable_without_sync(step):
            return None
        # Smaller steps count as the smallest positive step, and NaN is not valid; the general path handles both.
        if not (step if step.numel() == 1 else step.amin()).item() >= _SMALLEST[step.dtype]:
            return None
        zero_point = self._buffers.get("zero_point")
        plan = find_plan(x, spec, step, zero_point)
        if plan is None or not plan.checks:
            return None
        elements = _shared_by(spec.granularity, x.shape, examples=examples)
        return apply_plan(plan, x, step, zero_point, self._factor(elements))

    def _factor(self, elements: int) -> float:
        return (elements * self.spec.format.bound) ** -0.5 if self.gradient_factor else 1.0


@register_learned_range("lsq_plus")
class LSQPlus(LSQ):
    """A learned range whose parameters are the step and, for a specification with a zero point, the value of code 0.

    The value of code 0 is the offset; the zero point is the offset in steps, rounded to a code, so that 0.0 stays
    exact. A symmetric specification learns the step alone, as the paper does for weights.

    Source: Bhalgat et al., LSQ+, arXiv 2004.09576, section 3.
    """

    names = ("step", "offset")
    offset: Tensor

    def start(self, params: QParams) -> None:
        super().start(QParams(params.scale))
        if not self.spec.symmetric:
            code = torch.zeros_like(params.scale) if params.zero_point is None else params.zero_point
            self._set(offset=-code.to(params.scale.dtype) * params.scale)

    def qparams(self, elements: int) -> QParams:
        scale = super().qparams(elements).scale
        if self.spec.symmetric:
            return QParams(scale)
        offset = -straight_through(self.offset, self.offset, self._factor(elements))
        # A zero point is no larger than 2**16: where a step that fell below zero would make it infinite, it is finite.
        steps = divide(offset, torch.maximum(scale, offset.detach().abs() * 2.0**-20))
        fmt = self.spec.format
        return QParams(scale, straight_through(steps.round().clamp(fmt.quant_min, fmt.quant_max), steps))


@register_learned_range("pact")
class PACT(LearnedRange):
    """A learned range whose parameter is the clip value, which is mapped to the format's largest code.

    The gradient is that of clipping to the range of the codes, `Gradient.CLIP` whatever the specification says: 1 where
    x is at or beyond the clip value, 0 inside, quant_min / bound at the other end. If nothing is clipped, the gradient
    is 0; therefore begin with a range that clips (calibrated by percentile, entropy or mse), or use weight decay.

    Args:
        spec: symmetric, with float32 scales.

    Source: Choi et al., PACT, arXiv 1805.06085, equations 1 to 3; NVIDIA pytorch-quantization, learn_amax.
    """

    names = ("amax",)
    amax: Tensor

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(spec)
        _need_symmetric(self.method, spec)
        self.spec = spec.replace(gradient=Gradient.CLIP)

    def vanished(self) -> tuple[int, int]:
        return _not_positive(self.amax)

    def start(self, params: QParams) -> None:
        self._set(amax=_step_of(params.scale, self.spec) * self.spec.format.bound)

    def qparams(self, elements: int) -> QParams:
        bound = torch.full_like(self.amax, self.spec.format.bound)
        step = divide(self.amax, bound)
        return QParams(_step_of(straight_through(_positive(step, self.spec), step), self.spec))


@register_learned_range("tqt")
class TQT(LearnedRange):
    """A learned range whose parameter is the logarithm of the threshold; scales are powers of two.

    The scale is 2**ceil(log2_threshold) / 2**bits (bits without sign; for floats, 2**bits is the next power of two from
    the largest code), so that the threshold is never clipped. `ceil` is taken as the identity in the gradient.

    Args:
        spec: symmetric, with float32 scales.

    Source: Jain et al., Trained Quantization Thresholds, arXiv 1903.08066, equations 4 and 7.
    """

    names = ("log2_threshold",)
    log2_threshold: Tensor

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(spec)
        _need_symmetric(self.method, spec)

    def start(self, params: QParams) -> None:
        # (t / bound) * bound never rounds to above a power of two t, so that ceil finds its exponent again.
        self._set(log2_threshold=(_step_of(params.scale, self.spec) * self.spec.format.bound).log2())

    def qparams(self, elements: int) -> QParams:
        fmt = self.spec.format
        if fmt.has_zero_point:  # integers
            bits = fmt.bits - int(fmt.signed)
        else:
            mantissa, bits = math.frexp(fmt.bound)
            bits -= int(mantissa == 0.5)
        exponent = (self.log2_threshold.detach().ceil() - bits).clamp(-126, 127)
        scale = power_of_two(exponent.to(torch.int64)).to(self.log2_threshold.dtype)
        return QParams(_step_of(straight_through(scale, self.log2_threshold, scale * math.log(2)), self.spec))


By = str | Callable[..., Any]
"""The name of an argument of `forward`, or a function that takes the arguments of `forward` and returns the value."""


class _Calls(threading.local):
    """The bins of the calls that run in this thread, by `ByValue`."""

    def __init__(self) -> None:
        self.bins: dict[ByValue, Tensor] = {}


_calls = _Calls()


class ByValue:
    """Boundaries that divide the values of a call, such as a timestep, into bins; each bin has a separate range.

    Args:
        by: the name of the argument of `forward` that is the value, or a function of all arguments that returns it.
            The value is a number, or a tensor of one number or of one number per row.
        boundaries: rising numbers; bin i holds values from boundaries[i - 1] to below boundaries[i], in float32.

    >>> by_value = ByValue("timestep", [10.0, 100.0])
    >>> by_value
    ByValue('timestep', [10, 100])
    >>> by_value.bins_of(torch.tensor([9, 10, 500]))
    tensor([0, 1, 2])
    """

    def __init__(self, by: By, boundaries: Iterable[float]) -> None:
        if not (isinstance(by, str) or callable(by)):
            raise ConfigError(
                f'by= must be the name of an argument, such as "timestep", or a function, got {shown(by)}'
            )
        self.by = by
        try:
            edges = torch.tensor([float(edge) for edge in boundaries], dtype=torch.float32, device="cpu")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"boundaries= must be numbers, such as [250, 500, 750], got {shown(boundaries)}"
            ) from error
        if not len(edges) or not bool(edges.isfinite().all()) or bool((edges[1:] <= edges[:-1]).any()):
            raise ConfigError(
                "boundaries= must be one or more finite numbers that rise, also as float32, such as [250, 500, 750], "
                f"got {shown(edges.tolist())}"
            )
        self.boundaries: tuple[float, ...] = tuple(edges.tolist())

    @property
    def count(self) -> int:
        """The number of bins."""
        return len(self.boundaries) + 1

    @property
    def name(self) -> str:
        """The name of the value, for messages."""
        return self.by if isinstance(self.by, str) else getattr(self.by, "__name__", "a value").strip("<>")

    def span(self, place: int) -> str:
        """The interval of values in a bin, as text for messages.

        >>> ByValue("timestep", [10, 100]).span(1)
        'timestep from 10 to below 100'
        """
        edges = [f"{edge:g}" for edge in self.boundaries]
        if place == 0:
            return f"{self.name} below {edges[0]}"
        return f"{self.name} from {edges[place - 1]}" + (f" to below {edges[place]}" if place < len(edges) else " on")

    def __repr__(self) -> str:
        return f"ByValue({self.name!r}, [{', '.join(f'{edge:g}' for edge in self.boundaries)}])"

    def is_like(self, other: ByValue | None) -> bool:
        """Whether two objects choose the same bin in every call."""
        return other is not None and (self.by, self.boundaries) == (other.by, other.boundaries)

    def rows_of(self, value: Any) -> Tensor:
        """A value as float32 [rows, 1], or [1, 1] for the whole batch.

        Raises ConfigError unless the value is a number, or a tensor of one number or of one number per row.
        """
        if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating, torch.SymInt, torch.SymFloat)):
            number: Any = value
            value = torch.full((1,), number, dtype=torch.float32, device="cpu")
        good = isinstance(value, Tensor) and not value.is_complex() and sum(n != 1 for n in value.shape) <= 1
        if not good or not value.numel():
            raise ConfigError(
                f"the ranges follow {self.name}, which must be a number or a tensor of one number, or of one for each "
                f"row of the batch, got {f'shape {[*value.shape]}' if isinstance(value, Tensor) else shown(value)}"
            )
        rows = value.detach().reshape(-1, 1).to(torch.float32)
        if _is_eager(rows) and bool(rows.isnan().any()):
            raise ConfigError(f"the ranges follow {self.name}, which is NaN and chooses no range; give a number")
        return rows

    def bins_of(self, value: Any) -> Tensor:
        """The bin of a value, int64 [1]; if the rows of a batch have different bins, one for each, int64 [rows]."""
        rows = self.rows_of(value)
        edges = torch.tensor(self.boundaries, dtype=torch.float32, device=rows.device)
        found = (rows >= edges).sum(-1)
        return found[:1] if _is_eager(found) and len(found) > 1 and bool((found == found[0]).all()) else found

    def check_rows(self, x: Tensor, rows: int, named: str = "") -> None:
        """Raise ShapeError if the first axis of x does not have `rows` elements; `named` begins the message."""
        if not x.dim() or len(x) != rows:
            raise ShapeError(
                f"{named}got a tensor of shape {list(x.shape)} in a batch whose {rows} rows have different bins of "
                f"{self.name}, and expected {rows} as the length of the first axis; give batches of one {self.name}"
            )

    def now(self) -> Tensor | None:
        """The bins of the model's running call, as from `bins_of`; None if no call runs."""
        return _calls.bins.get(self)


class Reader:
    """Two hooks of a model: before `forward`, the first reads a value, such as a timestep, and notes its bin.

    The second forgets the bin after `forward`.
    """

    def __init__(self, model: nn.Module, by_value: ByValue) -> None:
        self.by_value, self._place, self._default = by_value, None, None
        if isinstance(by_value.by, str):
            parameters = inspect.signature(model.forward).parameters
            own = parameters.get(by_value.by)
            if own is None and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                raise ConfigError(
                    f"by={by_value.by!r} names no argument of {type(model).__name__}.forward, which takes "
                    f"{', '.join(parameters)}; give one of these names, or a function that takes the same arguments"
                )
            if own is not None:
                self._default = None if own.default is own.empty else own.default
                self._place = None if own.kind is own.KEYWORD_ONLY else [*parameters].index(by_value.by)

    def value(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The value, such as a timestep, in a call with these arguments."""
        by, place = self.by_value.by, self._place
        if not isinstance(by, str):
            return by(*args, **kwargs)
        if by in kwargs:
            return kwargs[by]
        return args[place] if place is not None and place < len(args) else self._default

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the bin of the value, before `forward`."""
        bins = self.by_value.bins_of(self.value(args, kwargs))
        _calls.bins = {**_calls.bins, self.by_value: bins}

    def leave(self, *_: Any) -> None:
        """Forget the bin after `forward`, also after an error."""
        _calls.bins = {other: bins for other, bins in _calls.bins.items() if other is not self.by_value}

    def put(self, model: nn.Module) -> None:
        """Register both hooks on a model."""
        model.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True)
        model.register_forward_hook(self.leave, always_call=True)


# A compiled model runs its hooks before the graph of its `forward`, and torch would compile them, too; what they
# write then is not in the thread's variables, which that graph reads. In a larger graph they are a part of it.
_eager = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
for _hook in (Reader.enter, Reader.leave):
    _frames.set_code_exec_strategy(_hook.__code__, _eager)


def _reader(hook: object) -> Reader | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, Reader) else None


def read_values(model: nn.Module, wanted: Iterable[ByValue]) -> None:
    """Register hooks by which calls of a model read the `wanted` values, and remove earlier hooks of this kind."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if _reader(hook) is not None]:
            hooks.pop(key)
            for others in (model._forward_pre_hooks_with_kwargs, model._forward_hooks_always_called):
                others.pop(key, None)
    for by_value in dict.fromkeys(wanted):
        Reader(model, by_value).put(model)


class CallEnded(BaseException):
    """Raised by a hook to end a call of a model before its `forward`."""


def bins_of_call(model: nn.Module, run: Callable[[], object]) -> dict[ByValue, Tensor]:
    """The bins that the model's hooks read when `run` calls the model; the call ends before `forward`."""
    readers = [reader for hook in model._forward_pre_hooks.values() if (reader := _reader(hook)) is not None]
    found: dict[ByValue, Tensor] = {}

    def read(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.update({own.by_value: own.by_value.bins_of(own.value(args, kwargs)) for own in readers})
        raise CallEnded

    if readers:
        handle = model.register_forward_pre_hook(read, with_kwargs=True, prepend=True)
        with restore_after(handle.remove), suppress(CallEnded):
            run()
    return found


def calls_now() -> dict[ByValue, Tensor]:
    """A copy of the bins of the calls that run in this thread, for `call_again`."""
    return dict(_calls.bins)


@contextmanager
def call_again(bins: Mapping[ByValue, Tensor]) -> Iterator[None]:
    """A context in which quantizers use the ranges of `bins`, which `calls_now` returned in an earlier call."""
    before = _calls.bins

    def restore() -> None:
        _calls.bins = before

    with restore_after(restore):
        _calls.bins = {**before, **bins}
        yield


def params_of_call(
    by_value: ByValue, params: QParams, spec: QuantSpec, x: Tensor, named: Callable[[], str]
) -> tuple[QParams, QuantSpec]:
    """The parameters for the running call, selected from `params` of all bins, and the specification to use with them.

    If rows of x have different bins, this specification has a scale for each row. `named` returns the start of
    messages, "the quantizer ...". Raises CalibrationError if no call runs, ShapeError if the parameters do not fit x,
    and ConfigError if rows have different bins, but the specification cannot have a scale for each row.
    """
    bins, shape, groups = by_value.now(), shape_of(x), params.scale.shape[1:]
    if bins is None:
        raise CalibrationError(
            f"{named()} has ranges by {by_value.name}, which is known only in a call of the calibrated model; call the "
            "model, not a part of it or its forward, and run no checkpointed part again in backward"
        )
    if bins.numel() == 1:
        expected = spec.granularity.group_shape(shape)
        groups = expected if groups.numel() == 1 == torch.Size(expected).numel() else groups
        if tuple(groups) != tuple(expected):
            raise ShapeError(
                f"{named()} has scales of shape {list(groups)} in each bin of {by_value.name}, but {spec.granularity} "
                f"needs {list(expected)} for a tensor of shape {list(shape)}; calibrate it on tensors of that shape"
            )
        return _taken(params, bins, groups), spec
    granularity, axes = spec.granularity, (0,)
    if isinstance(granularity, PerChannel):
        axes = (0, *(axis % x.dim() for axis in granularity.axes))
    known = isinstance(granularity, (PerTensor, PerChannel)) and axes.count(0) == 1
    if not known or not spec.is_plain or groups.numel() not in (1, *x.shape[1:]):
        raise ConfigError(
            f"{named()} is {spec}, which has no ranges for single rows; give batches of one {by_value.name}"
        )
    by_value.check_rows(x, len(bins), f"{named()} ")
    # The axis of bins takes the place of the first axis, of which there is one group.
    own = (len(bins), *(groups[1:] if len(groups) == len(shape) else [1] * (len(shape) - 1)))
    return _taken(params, bins, own), spec.replace(granularity=PerChannel(*sorted(axes)))


def _taken(params: QParams, bins: Tensor, shape: Iterable[int]) -> QParams:
    """The parameters of some bins, reshaped to `shape`."""

    def taken(table: Tensor) -> Tensor:
        return table.index_select(0, bins.to(table.device)).reshape([*shape])

    return QParams(taken(params.scale), None if params.zero_point is None else taken(params.zero_point))


def _is_eager(x: Tensor) -> bool:
    """Whether the values of x can be read now: no compiler, no tracer, and not on the meta device."""
    return not (torch.compiler.is_compiling() or library.needs_tracing(x) or x.is_meta)
