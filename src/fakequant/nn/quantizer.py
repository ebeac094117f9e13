"""The quantizer: one module that is off, observes, or quantizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.calibration import Calibrator
from fakequant.errors import CalibrationError, ConfigError, ShapeError
from fakequant.functional import choose_qparams as choose_qparams_of
from fakequant.numerics.qparams import QParams, Range, choose_qparams, compute_dtype
from fakequant.numerics.spec import QuantSpec, as_spec
from fakequant.ops import library


class Mode(Enum):
    """What a quantizer does with a tensor."""

    OFF = "off"
    """Returns it as it is."""
    OBSERVE = "observe"
    """Shows it to the calibrator and returns it as it is."""
    QUANTIZE = "quantize"
    """Fake-quantizes it."""


class Kind(Enum):
    """What a quantizer sits on, which decides where its range comes from before calibration."""

    INPUT = "input"
    """Activations: a static range must come from calibration."""
    WEIGHT = "weight"
    """A parameter: until calibration fixes the range, it is that of the parameter at each call."""


class Quantizer(nn.Module):
    """Fake-quantizes one tensor of a model, with parameters that calibration, a checkpoint or training sets.

    Args:
        spec: how to quantize.
        kind: activations or a weight, see `Kind`.
        dynamic: take the range from every tensor anew instead of calibrating it.

    `scale` and `zero_point` are buffers (None until calibrated); the scale stays float32 when the model becomes half
    precision. After `learn_scale()` the scale is a parameter.

    >>> quantizer = Quantizer(QuantSpec("int8"))
    >>> quantizer.set_range(Range(torch.tensor([-1.27]), torch.tensor([1.0])))
    >>> quantizer(torch.tensor([0.104, 5.0]))
    tensor([0.1000, 1.2700])
    >>> quantizer
    Quantizer(int8 per_tensor, input, scale 0.01)
    """

    scale: Tensor | None
    zero_point: Tensor | None

    def __init__(self, spec: QuantSpec | str, *, kind: Kind = Kind.INPUT, dynamic: bool = False) -> None:
        super().__init__()
        self.spec = as_spec(spec)
        self.kind = kind
        self.dynamic = dynamic
        self.mode = Mode.QUANTIZE
        self.name = ""
        self.calibrator: Calibrator | None = None
        self.register_buffer("scale", None)
        self.register_buffer("zero_point", None)

    @property
    def calibrated(self) -> bool:
        """Whether the parameters are fixed."""
        return self.scale is not None

    @property
    def needs_calibration(self) -> bool:
        """Whether the quantizer cannot work before it has seen data."""
        return self.kind is Kind.INPUT and not self.dynamic and not self.calibrated

    def forward(self, x: Tensor) -> Tensor:
        """x, observed or fake-quantized as the mode says; shape and dtype stay."""
        if self.mode is Mode.QUANTIZE:
            return library.fake_quantize(x, self.qparams(x), self.spec)
        if self.mode is Mode.OBSERVE:
            self.observe(x)
        return x

    def qparams(self, x: Tensor) -> QParams:
        """The parameters with which x would be quantized.

        Raises:
            CalibrationError: a static input quantizer that was not calibrated.
            ShapeError: the parameters were made for tensors of another shape.
        """
        if self.scale is None or self.dynamic:
            if self.needs_calibration:
                raise CalibrationError(
                    f"the quantizer {self.name or self} has not been calibrated; "
                    "call fakequant.calibrate(model, batches), or load a checkpoint"
                )
            return choose_qparams_of(x, self.spec)
        groups = self.spec.granularity.group_shape(x.shape)
        if groups != tuple(self.scale.shape):
            if self.scale.numel() == 1 == math.prod(groups):  # one scale fits tensors of any rank
                zero_point = None if self.zero_point is None else self.zero_point.reshape(groups)
                return QParams(self.scale.reshape(groups), zero_point)
            raise ShapeError(
                f"the quantizer {self.name or self} has a scale of shape {list(self.scale.shape)}, which does not fit "
                f"{self.spec.granularity} on a tensor of shape {list(x.shape)}; calibrate it on tensors of that shape"
            )
        return QParams(self.scale, self.zero_point)

    def set_range(self, range: Range) -> None:
        """Fix scale and zero point by a range [groups, axes kept]."""
        self.set_qparams(choose_qparams(range, self.spec))

    def set_qparams(self, params: QParams) -> None:
        """Fix scale and zero point; a learned scale keeps being learned."""
        scale = params.scale.detach().clone()
        if isinstance(self.scale, nn.Parameter):
            self.scale = nn.Parameter(scale)
        else:
            self.scale = scale
        self.zero_point = None if params.zero_point is None else params.zero_point.detach().clone()

    def freeze(self, x: Tensor) -> None:
        """Fix the parameters as they are for x now."""
        self.set_qparams(self.qparams(x))

    def reset(self) -> None:
        """Forget the parameters."""
        if isinstance(self.scale, nn.Parameter):
            del self.scale
            self.register_buffer("scale", None)
        self.scale = self.zero_point = None

    def learn_scale(self) -> None:
        """Make the scale a parameter that training moves (LSQ, arXiv 1902.08153).

        Raises:
            ConfigError: nothing to learn, because the scale is dynamic or not yet there.
        """
        if self.scale is None or self.dynamic:
            raise ConfigError(
                f"the quantizer {self.name or self} has no scale to learn; calibrate it first"
                if not self.dynamic
                else f"the quantizer {self.name or self} is dynamic: its scale comes from every tensor anew"
            )
        if not isinstance(self.scale, nn.Parameter):
            scale = self.scale
            del self.scale
            self.scale = nn.Parameter(scale)

    def observe(self, x: Tensor) -> None:
        """Show x to the calibrator.

        Raises:
            CalibrationError: x holds NaN or inf; the message names the quantizer.
        """
        with self._named_errors():
            if self.calibrator is None:
                raise CalibrationError("in mode OBSERVE without a calibrator; call fakequant.calibrate")
            self.calibrator.observe(x.detach())

    def observed_range(self) -> Range:
        """The range that the calibrator finds for what it was shown."""
        with self._named_errors():
            if self.calibrator is None:
                raise CalibrationError("nothing was observed; call fakequant.calibrate")
            return self.calibrator.compute_range()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (CalibrationError, ShapeError) as error:
            raise type(error)(f"{self.name or self}: {error}") from error

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quantizer:
        """Move with the model, but keep the precision of the parameters: a float16 scale would change every code."""
        values = {name: getattr(self, name) for name in ("scale", "zero_point")}
        # Detached, because a parameter is converted in place.
        before = {name: None if value is None else value.detach() for name, value in values.items()}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if old is None or old.device.type == "meta":
                continue
            dtype = compute_dtype(new.dtype) if old.is_floating_point() else old.dtype
            if new.dtype != dtype:
                restored = old.to(new.device, dtype)
                if isinstance(new, nn.Parameter):
                    new.data = restored
                else:
                    setattr(self, name, restored)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Accept parameters that this quantizer does not have yet, or has in another shape."""
        for name in ("scale", "zero_point"):
            given, own = state_dict.get(prefix + name), getattr(self, name)
            if given is not None and (own is None or own.shape != given.shape):
                fresh = torch.empty_like(given, device=given.device if own is None else own.device)
                setattr(self, name, nn.Parameter(fresh) if isinstance(own, nn.Parameter) else fresh)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __repr__(self) -> str:
        words = [str(self.spec), self.kind.value]
        if self.mode is not Mode.QUANTIZE:
            words.append(self.mode.value)
        if self.dynamic:
            words.append("dynamic")
        elif self.scale is None:
            words.append("follows the weight" if self.kind is Kind.WEIGHT else "not calibrated")
        elif self.scale.numel() == 1:
            words.append(f"scale {self.scale.item():.4g}")
        else:
            lowest, highest = self.scale.min().item(), self.scale.max().item()
            words.append(f"scale {lowest:.4g} to {highest:.4g} [{self.scale.numel()}]")
        if isinstance(self.scale, nn.Parameter):
            words.append("learned")
        return f"Quantizer({', '.join(words)})"


def quantizers(model: nn.Module) -> dict[str, Quantizer]:
    """All quantizers of a model by their path in it."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Quantizer)}
