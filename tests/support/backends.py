"""Single calls of a backend, without autograd: what a plan does, by the names of what is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import dispatch
from fakequant.ops.backend import CODES, RELU, VALUES, Backend, CallKind, Extras, KernelPlan, ParameterKind
from fakequant.ops.graph_operators import laid, unpack_mask

if TYPE_CHECKING:
    import pytest


class Encoded(NamedTuple):
    codes: Tensor
    has_nan: bool


class Calls:
    """A backend that plans each call anew and computes it, whatever else would be asked first.

    Everything else is the backend's own.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def fake_quantize(
        self, x: Tensor, params: QParams, spec: QuantSpec, *, mask: bool, variant: str = VALUES
    ) -> tuple[Tensor, Tensor | None]:
        plan = self._plan(x, spec, params, variant=variant)
        given = x, params.scale, params.zero_point, plan.descriptor
        y, bits = plan.values_and_mask(*given) if mask else (plan.values(*given), None)
        assert y is not None
        return y, bits

    def fake_quantize_relu(
        self, x: Tensor, params: QParams, spec: QuantSpec, *, mask: bool
    ) -> tuple[Tensor, Tensor | None]:
        return self.fake_quantize(x, params, spec, mask=mask, variant=RELU)

    def fake_quantize_dynamic(
        self, x: Tensor, spec: QuantSpec, *, mask: bool, seed: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        plan = self._plan(x, spec)._replace(descriptor=Extras(None, seed))
        given = x, None, None, plan.descriptor
        y, bits = plan.values_and_mask(*given) if mask else (plan.values(*given), None)
        assert y is not None
        return y, bits

    def grad_input(self, dy: Tensor, mask: Tensor, spec: QuantSpec, x_stride: tuple[int, ...]) -> Tensor:
        """dy where the mask is set, else 0; x had the shape of dy and these strides."""
        dtype = dy.dtype if dy.is_floating_point() else torch.float32  # ones of bool unpack the mask
        plan = self._plan(dy.new_empty_strided(dy.shape, x_stride, dtype=dtype), spec)
        return plan.grad_input(laid(dy, plan.stride), mask)

    def unpack_mask(self, mask: Tensor, x: Tensor, spec: QuantSpec) -> Tensor:
        """The mask as a bool tensor, the shape of x."""
        return unpack_mask(mask, x.shape, self._plan(x, spec))

    def grad_params(
        self, dy: Tensor, x: Tensor, params: QParams, spec: QuantSpec, wants: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        plan = self._plan(x, spec, params)
        given = laid(dy, plan.stride), laid(x, plan.stride), None, params.scale, params.zero_point, plan.descriptor
        _, by_scale, by_zero_point = plan.gradients(*given, *wants)
        return by_scale, by_zero_point

    def quantize(self, x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
        plan = self._plan(x, spec, params, variant=CODES)
        return plan.codes(x, params.scale, params.zero_point, plan.descriptor)[0]

    def encode(self, x: Tensor, params: QParams, spec: QuantSpec) -> Encoded:
        plan = self._plan(x, spec, params, variant=CODES)
        codes, has_nan = plan.codes(x, params.scale, params.zero_point, plan.descriptor)
        return Encoded(codes, bool(has_nan))

    def dequantize(self, codes: Tensor, params: QParams, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
        plan = self._plan(codes, spec, params, variant=CODES, dtype=dtype)
        return plan.decode(codes, params.scale, params.zero_point, plan.descriptor)

    def _plan(
        self,
        x: Tensor,
        spec: QuantSpec,
        params: QParams | None = None,
        *,
        variant: str = VALUES,
        dtype: torch.dtype | None = None,
    ) -> KernelPlan:
        scale, zero_point = (None, None) if params is None else params[:2]
        given = (
            None if p is None else ParameterKind(p.dtype, p.device, p.shape, p.is_contiguous())
            for p in (scale, zero_point)
        )
        kind = CallKind(spec, variant, dtype or x.dtype, x.device, x.shape, x.stride(), *given)
        plan = self.backend.plan(kind)
        assert plan is not None, f"{self.name} has no plan for {variant}"
        extras = Extras() if params is None else Extras(params.range, params.seed)
        return (plan.otherwise or plan)._replace(descriptor=extras)


def recorded_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """A list that gets "values" or "codes" and a shape whenever a plan computes these of a tensor."""
    made: list[tuple[str, tuple[int, ...]]] = []
    right = dispatch._made_plan

    def counting(function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(x: Tensor, *given: Any) -> Any:
            made.append((what, tuple(x.shape)))
            return function(x, *given)

        return call

    def counted(key: tuple[Any, ...], x: Tensor) -> KernelPlan | None:
        plan = right(key, x)
        if plan is None:
            return None
        counts = {"values": "values", "values_and_mask": "values", "codes": "codes"}
        plan = plan._replace(**{name: counting(getattr(plan, name), what) for name, what in counts.items()})
        return dispatch._remember(key, plan)

    monkeypatch.setattr(dispatch, "_made_plan", counted)
    monkeypatch.setattr(dispatch, "_known", {})
    return made
