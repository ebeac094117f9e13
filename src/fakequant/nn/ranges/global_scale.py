"""Scales of blocks that follow the input under a shared scale that is fixed: NVFP4 inputs of servers."""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.errors import ConfigError, QParamsError
from fakequant.functional import choose_qparams
from fakequant.nn.ranges.precise import QuantizerPart
from fakequant.numerics.division import divide
from fakequant.numerics.qparams import QParams
from fakequant.numerics.scales import ScaleRounding
from fakequant.numerics.spec import QuantSpec
from fakequant.numerics.stored_scales import rounded
from fakequant.ops import library

KEY = "global_scale"
"""The name of the buffer, and the last part of its key in a state dict."""
_NO_CODE = 0.125
"""Takes the place of a code of 0, as compressed-tensors has it: all values of such a block become 0."""


def may_be_fixed(spec: QuantSpec) -> bool:
    """Whether a specification has one float32 scale of the tensor above the scales of its blocks."""
    return spec.symmetric and spec.scale.is_under_a_tensor and spec.scale.rounding is ScaleRounding.NEAREST


def check_global_scale(global_scale: Tensor, spec: QuantSpec) -> None:
    """Raise a QParamsError where a specification cannot have such a number."""
    if not may_be_fixed(spec):
        raise QParamsError(f"{KEY} fixes the scale of a tensor above those of blocks, which {spec} has not")
    if global_scale.dtype is not torch.float32 or tuple(global_scale.shape) != (1,):
        raise QParamsError(f"{KEY} must be float32 [1], got {global_scale.dtype} {list(global_scale.shape)}")
    if not bool(global_scale.isfinite().all() and (global_scale > 0).all()):
        raise QParamsError(f"{KEY} must be finite and above 0, got {global_scale.item()}")


def params_under(x: Tensor, spec: QuantSpec, global_scale: Tensor) -> QParams:
    """The scales of x's blocks: codes of amax / bound * global_scale, divided by global_scale.

    The operations and their order are those of compressed-tensors, `calculate_qparams`.
    """
    fmt = spec.scale.format
    assert fmt is not None, "see `may_be_fixed`"
    amax = library.measure(x, spec.granularity).amax
    code = rounded(divide(amax, torch.full_like(amax, spec.scale.bound(spec.format))) * global_scale, fmt)
    return QParams(divide(torch.where(code > 0, code, _NO_CODE), global_scale.expand_as(code)), None)


class GlobalScale(QuantizerPart):
    """The part of a dynamic quantizer that may hold 1 / the scale of the tensor; blocks have their own below it."""

    name: str
    spec: QuantSpec
    dynamic: bool
    global_scale: Tensor | None

    def qparams_by_input(self, x: Tensor) -> QParams:
        """The parameters that x itself gives."""
        given = self._buffers[KEY]
        return choose_qparams(x, self.spec) if given is None else params_under(x, self.spec, given)

    def fake_quantize_by_input(self, x: Tensor) -> Tensor:
        """x with these parameters."""
        if self._buffers[KEY] is None:
            return library.fake_quantize_dynamic(x, self.spec)
        return library.quantize_by(x, self.spec, self.qparams_by_input(x).scale)

    def fix_global_scale(self, global_scale: Tensor) -> None:
        """Fix 1 / the scale of the tensor, float32 [1]; the scales of its blocks stay dynamic.

        Raises:
            ConfigError: the quantizer is not dynamic.
            QParamsError: the specification has no such scale, or no call would take the number.
        """
        if not self.dynamic:
            raise ConfigError(f"the quantizer {self.name or self} is not dynamic: its scales are fixed by calibrate")
        check_global_scale(global_scale, self.spec)
        self.global_scale = global_scale.detach().clone()
