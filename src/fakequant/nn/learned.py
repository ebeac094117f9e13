"""Ranges that training moves: which parameters there are, and the scale and zero point they stand for.

Every method computes scale and zero point from its parameters by differentiable torch operations; the gradients of
scale and zero point are those of the operator. A new method is one class here.
"""

from __future__ import annotations

import inspect
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fakequant.calibration.calibrator import check_options, registered_in
from fakequant.distributed import gathered
from fakequant.errors import ConfigError, NoWeightError, QParamsError, nearest, warn_user
from fakequant.numerics.division import divide, reciprocal
from fakequant.numerics.formats.floats import power_of_two
from fakequant.numerics.granularity import Granularity, rounded
from fakequant.numerics.qparams import QParams, compute_dtype, is_readable_without_sync
from fakequant.numerics.scales import ScaleRounding
from fakequant.numerics.spec import Arithmetic, Gradient, QuantSpec
from fakequant.ops import library
from fakequant.ops.dispatch import find_plan
from fakequant.ops.graph_operators import apply_plan


class PreciseModule(nn.Module):
    """A module whose own tensors keep their precision in a half-precision model and take their shape from a state."""

    def __getattr__(self, name: str) -> Any:
        """What torch finds; of a weight, for which `RowwiseParallel` asks every module inside a layer, the way out."""
        if name == "weight":
            raise NoWeightError
        return nn.Module.__getattr__(self, name)  # of quantizers in peft's adapters, `super()` is another class

    def _own(self) -> dict[str, Tensor | None]:
        return {**self._parameters, **self._buffers}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PreciseModule:
        """Move with the model, but in float32 at least: a float16 scale would change every code."""
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
        """Accept tensors that this module does not have yet, or has in another shape."""
        for name, own in self._own().items():
            given = state_dict.get(prefix + name)
            if given is not None and (own is None or own.shape != given.shape):
                fresh = torch.empty_like(given, device=given.device if own is None else own.device)
                setattr(self, name, nn.Parameter(fresh) if name in self._parameters else fresh)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class QuantizerPart(PreciseModule):
    """A quantizer or its learned range: it stays as it is where a state holds nothing of any quantizer."""

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
        """Load, and count what is missing only if the state holds something of a quantizer of the same model.

        So a state dict of the float model loads with `strict=True`, and one that lacks some quantizers does not.
        """
        absent: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, absent, unexpected_keys, error_msgs)
        given = not prefix or any(key.startswith(prefix) for key in state_dict)  # no prefix: it is loaded alone
        _absent.add(missing_keys, absent, given)


class _Absent(threading.local):
    """The keys of quantizers that one call of `load_state_dict` did not find, while it found none.

    A quantizer sees its own part of the state only. torch's list of missing keys is one object in the whole call.
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
"""The name of the buffer, and the last part of its key in a state dict."""
_NO_CODE = 0.125
"""Takes the place of a code of 0, as compressed-tensors has it: all values of such a block become 0."""


def has_tensor_scale(spec: QuantSpec) -> bool:
    """Whether a specification has one float32 scale of the tensor above the scales of its blocks."""
    return spec.symmetric and spec.scale.is_under_a_tensor and spec.scale.rounding is ScaleRounding.NEAREST


def check_global_scale(global_scale: Tensor, spec: QuantSpec) -> None:
    """Raise a QParamsError where a specification cannot have such a number."""
    if not has_tensor_scale(spec):
        raise QParamsError(f"{GLOBAL_SCALE} fixes the scale of a tensor above those of blocks, which {spec} has not")
    if global_scale.dtype is not torch.float32 or tuple(global_scale.shape) != (1,):
        raise QParamsError(f"{GLOBAL_SCALE} must be float32 [1], got {global_scale.dtype} {list(global_scale.shape)}")
    if not bool(global_scale.isfinite().all() and (global_scale > 0).all()):
        raise QParamsError(f"{GLOBAL_SCALE} must be finite and above 0, got {global_scale.item()}")


def params_under(x: Tensor, spec: QuantSpec, global_scale: Tensor) -> QParams:
    """The scales of x's blocks: codes of amax / bound * global_scale, divided by global_scale.

    The operations and their order are those of compressed-tensors, `calculate_qparams`.
    """
    fmt = spec.scale.format
    assert fmt is not None, "see `has_tensor_scale`"
    amax = library.measure(x, spec.granularity).amax
    code = rounded(divide(amax, torch.full_like(amax, spec.scale.bound(spec.format))) * global_scale, fmt)
    return QParams(divide(torch.where(code > 0, code, _NO_CODE), global_scale.expand_as(code)), None)


def shared_by(granularity: Granularity, shape: tuple[int, ...], *, examples: bool) -> int:
    """How many elements of one example share a scale; with `examples`, the first axis counts these.

    >>> from fakequant import PerTensor
    >>> shared_by(PerTensor(), (32, 10), examples=True), shared_by(PerTensor(), (32, 10), examples=False)
    (10, 320)
    """
    blocks = granularity.block_shape(shape)
    return max(1, math.prod(blocks[1:] if examples and len(blocks) > 1 else blocks))


_shared_by = lru_cache(maxsize=4096)(shared_by)  # asked at every call, and the same for every tensor of a shape


def straight_through(value: Tensor, parameter: Tensor, factor: float | Tensor = 1.0) -> Tensor:
    """A value to the bit, whose gradient is passed to a finite parameter times a factor (straight-through).

    >>> step = torch.tensor([1.4], requires_grad=True)
    >>> straight_through(step.ceil(), step, 0.5).backward()
    >>> step.grad
    tensor([0.5000])
    """
    return value.detach() + (parameter - parameter.detach()) * factor


class LearnedRange(QuantizerPart, ABC):
    """Parameters that training moves, and the scale and zero point that follow from them.

    Parameters are None until `start` or a state dict sets them.

    Args:
        spec: how the tensor is quantized.

    Raises:
        ConfigError: the method cannot serve the specification.
    """

    method: ClassVar[str] = ""
    """The name under which the class is registered."""
    names: ClassVar[tuple[str, ...]]
    """The parameters."""
    by_group: ClassVar[bool] = True
    """Whether these have an element for each group of the tensor."""
    _is_told = False

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__()
        if spec.arithmetic.has_two_scales:
            raise ConfigError(
                f"{spec} makes codes by another scale than it decodes them, so that no one scale can be learned; leave "
                "it as calibrated or dynamic, or use the arithmetic divide"
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
        """Whether the parameters are there."""
        return getattr(self, self.names[0]) is not None

    @abstractmethod
    def start(self, params: QParams) -> None:
        """Set the parameters so that they stand for a calibrated scale and zero point."""

    @abstractmethod
    def qparams(self, elements: int) -> QParams:
        """The present scale and zero point, differentiable, for as many elements as share a scale."""

    def vanished(self) -> tuple[int, int]:
        """How many scales a gradient drove to zero or below, so that their values are lost, and of how many."""
        return 0, 0

    def fake_quantize(self, x: Tensor, params: QParams) -> Tensor:
        """x quantized with what `qparams` returned, shaped to fit x."""
        return library.fake_quantize(x, params, self.spec)

    def fake_quantize_in_one_call(self, x: Tensor, *, examples: bool) -> Tensor | None:
        """x quantized by one operator; None: by `qparams` and `fake_quantize`. `examples`: see `shared_by`."""
        return None

    def warn_if_frozen(self) -> None:
        """Warn once, in training, if the parameters cannot move."""
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
        """The keyword arguments that make an object like this one, for JSON."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters if name != "spec"}

    def _set(self, **values: Tensor) -> None:
        """Set parameters; one that is there already stays the same object, so that optimizers keep it."""
        for name, value in values.items():
            own = getattr(self, name)
            if own is not None and own.shape == value.shape:
                own.data.copy_(value)
            else:
                setattr(self, name, nn.Parameter(value.detach().clone()))


_registry: dict[str, type[LearnedRange]] = {}
_Class = TypeVar("_Class", bound=type[LearnedRange])


def register_learned_range(name: str) -> Callable[[_Class], _Class]:
    """Register a class as a method; a ConfigError if the name is taken, or cannot be in the key of a state dict."""
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
    """A method's object for a specification, without parameters yet.

    Raises a ConfigError for an unknown method or option (the nearest are offered), or one that cannot serve it.
    """
    cls = _registry.get(method)
    if cls is None:
        raise ConfigError(f"unknown method {method!r} to learn a range{nearest(method, learned_ranges())}")
    check_options(cls, options, f"the method {method!r}")
    return cls(spec, **options)


def _step_of(scale: Tensor, spec: QuantSpec) -> Tensor:
    """Units of x per code from the scale of a specification, and back."""
    if spec.arithmetic is not Arithmetic.MULTIPLIER:
        return scale
    return reciprocal(scale)


_SMALLEST = {dtype: torch.finfo(dtype).tiny for dtype in (torch.float32, torch.float64)}


def _positive(step: Tensor, spec: QuantSpec) -> Tensor:
    """The step, clamped so that its reciprocal is finite, and under MULTIPLIER the square of that, too."""
    smallest = torch.finfo(step.dtype).tiny
    return step.clamp(min=smallest**0.5 if spec.arithmetic is Arithmetic.MULTIPLIER else smallest)


def _not_positive(parameter: Tensor) -> tuple[int, int]:
    values = gathered(parameter.detach())
    return int((values <= 0).sum()), values.numel()


def _need_symmetric(method: str, spec: QuantSpec) -> None:
    if not spec.symmetric:
        raise ConfigError(
            f"{spec} has a zero point, which {method!r} does not know; learn it with 'lsq_plus', or the step alone "
            "with 'lsq'"
        )


@register_learned_range("lsq")
class LSQ(LearnedRange):
    """The step between codes is learned; a zero point stays as calibrated.

    A step that training drives below zero counts as the smallest positive one and still gets its gradient.

    Args:
        spec: any with float32 scales.
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
        # A class that inherits from these may find its parameters in another way.
        known = type(self) is LSQ or (type(self) is LSQPlus and spec.symmetric)
        if not known or step is None or spec.arithmetic is Arithmetic.MULTIPLIER or not is_readable_without_sync(step):
            return None
        # Others are not finite, or count as the smallest number.
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
    """The step is learned, and where the specification has a zero point, also the offset: the value of code 0.

    The zero point is the offset in steps, rounded to a code, so that 0.0 stays exact. A symmetric specification has no
    offset and learns the step alone, as the paper does for weights.

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
    """The magnitude that is mapped to the format's bound is learned, from the clipped values alone.

    The gradient is that of clipping to the range of the codes, `Gradient.CLIP` whatever the specification says: 1 where
    x is at or beyond the clip value, 0 inside, quant_min / bound at the other end. Where nothing is clipped there is no
    gradient: begin from a range that clips (calibrated by percentile, entropy or mse), or let weight decay shrink it.

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
    """The logarithm of the threshold is learned; scales are powers of two.

    The scale is 2**ceil(log2_threshold) / 2**bits (of the magnitude; for floats the next power of two from the largest
    code), so that the threshold itself is never cut off. `ceil` is taken as the identity in the gradient.

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
