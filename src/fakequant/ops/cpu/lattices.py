"""Negative scales and offsets on the CPU: the backend's kernels between two passes of torch operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fakequant.numerics import reference
from fakequant.numerics.blocks import blocked, blocked_groups, unblocked
from fakequant.numerics.qparams import FLOATING, QParams
from fakequant.numerics.spec import Gradient, QuantSpec, Rounding
from fakequant.ops.backend import RELU, CallKind, Extras, KernelPlan
from fakequant.ops.cpu.backend import CpuBackend, CpuKernels
from fakequant.ops.kernel_params import cannot_hold


class LatticeBackend(CpuBackend):
    """The CPU backend with kernels for negative scales and offsets."""

    def unsupported(self, x: Tensor, spec: QuantSpec, *, codes: bool) -> str | None:
        if cannot_hold(spec) is None or self.unfit(x):
            return super().unsupported(x, spec, codes=codes)
        # The kernels need the format alone; scales and offsets are torch's here.
        plain = QuantSpec(spec.format, spec.granularity, rounding=spec.rounding, symmetric=True)
        return _cannot_shift(spec, x.dtype) or super().unsupported(x, plain, codes=codes)

    def plan(self, kind: CallKind) -> KernelPlan | None:
        if cannot_hold(kind.spec) is None:
            return super().plan(kind)
        return None if kind.variant == RELU else LatticeKernels(kind, self.name).plan()


def _cannot_shift(spec: QuantSpec, dtype: torch.dtype) -> str | None:
    """The reason why no kernel quantizes a dtype with negative scales or offsets, or None."""
    if spec.arithmetic.has_two_scales:
        return cannot_hold(spec)
    if spec.gradient in (Gradient.CLIP, Gradient.INPUT_RANGE):
        return f"the ends of its range turn round with the sign of a scale, where {spec.gradient.value} looks at them"
    if spec.offset is None:
        return None
    if spec.rounding is Rounding.STOCHASTIC or dtype not in FLOATING[:2]:
        return f"{spec} shifts x, which a kernel takes in float32 or float64 and rounds to nearest"
    return None


class LatticeKernels(CpuKernels):
    """The kernels for one kind of call; the reference computes calls with a scale of 0."""

    def plan(self) -> KernelPlan:
        return super(CpuKernels, self).plan()._replace(values=self._nonzero, values_and_mask=self._nonzero_and_mask)

    def _nonzero(self, x: Tensor, scale: Tensor | None, zero_point: Tensor | None, extras: Any) -> Tensor | None:
        params = self._chosen(x, scale, zero_point, extras)
        return None if _has_zero(params) else self.quantize(x, params, mask=False)[0]

    def _nonzero_and_mask(
        self, x: Tensor, scale: Tensor | None, zero_point: Tensor | None, extras: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        params = self._chosen(x, scale, zero_point, extras)
        return (None, None) if _has_zero(params) else self.quantize(x, params, mask=self.masks)

    def _chosen(self, x: Tensor, scale: Tensor | None, zero_point: Tensor | None, extras: Any) -> QParams:
        if scale is not None:
            return self._params(scale, zero_point, extras)
        seed = extras.seed if isinstance(extras, Extras) else None
        return reference.choose_from(x, self.measure(x), self.spec)._replace(seed=seed)

    def quantize(self, x: Tensor, params: QParams, *, mask: bool) -> tuple[Tensor, Tensor | None]:
        taken, given, back = self._taken(x, params)
        y, bits = super().quantize(taken, given, mask=mask)
        return back(y), bits

    def encode(self, x: Tensor, params: QParams) -> tuple[Tensor, bool | Tensor]:
        if _has_zero(params):
            return reference.quantize(x, params, self.spec), x.isnan().any()
        taken, given, _ = self._taken(x, params)
        return super().encode(taken, given)

    def decode(self, codes: Tensor, params: QParams) -> Tensor:
        return reference.dequantize(codes, params, self.spec, self.kind.dtype)

    def grad_params(
        self, dy: Tensor, x: Tensor, params: QParams, wants: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        return reference.grad_params(dy, x, params, self.spec, wants)

    def _taken(self, x: Tensor, params: QParams) -> tuple[Tensor, QParams, Callable[[Tensor], Tensor]]:
        """An input with positive scales and no offsets for the kernels, and the function that restores x's values.

        -x with scale -s has the same codes as x with scale s, and the negated values, also for 0.
        """
        spec, scale, offset = self.spec, params.scale, params.zero_point if self.spec.offset is not None else None
        blocks = spec.granularity.block_shape(x.shape)
        sign = torch.ones_like(scale).copysign(scale) if bool((scale < 0).any()) else None

        def changed(x: Tensor, by: Tensor | None, operation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
            if by is None:
                return x
            view = operation(blocked(x, blocks), blocked_groups(by.to(x.dtype), x.shape, blocks))
            result = unblocked(view, x.shape, blocks)
            return result if result.stride() == x.stride() else torch.empty_like(x).copy_(result)

        def back(y: Tensor) -> Tensor:
            return changed(changed(y, sign, torch.mul), offset, torch.sub)

        taken = changed(changed(x, offset, torch.add), sign, torch.mul)
        given = params._replace(scale=scale.abs(), zero_point=None if offset is not None else params.zero_point)
        return taken, given, back


def _has_zero(params: QParams) -> bool:
    return not bool(params.scale.all())
