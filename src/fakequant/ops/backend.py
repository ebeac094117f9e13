"""The interface of a backend, which returns a plan (functions that compute) for every kind of call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fakequant.numerics import reference
from fakequant.numerics.granularity import Granularity
from fakequant.numerics.qparams import QParams, Range, compute_dtype, measure
from fakequant.numerics.reference import Bins, Observed, is_less_by_plain_sums, observe_by_definition
from fakequant.numerics.spec import Gradient, QuantSpec, Rounding

from .layout import layout_of

VALUES, RELU, CODES = "values", "relu", "codes"


class ParameterKind(NamedTuple):
    """The properties of a scale or zero point that decide which plan computes a call."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    contiguous: bool


class CallKind(NamedTuple):
    """The kind of a call of the operator: all properties that decide which plan computes it.

    Attributes:
        spec: how x is quantized.
        variant: VALUES; RELU, where torch.relu(x) is quantized; CODES, where codes are written or read.
        dtype: the dtype of x, or of the decoded values.
        device, shape, stride: those of x, or of the codes.
        scale: None if the parameters come from the range of x.
        zero_point: None if it is 0 everywhere.
    """

    spec: QuantSpec
    variant: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    scale: ParameterKind | None
    zero_point: ParameterKind | None


class Extras(NamedTuple):
    """Arguments that only some calls need, besides x, scale and zero point.

    Attributes:
        range: the range from which the scale was computed, for `Gradient.INPUT_RANGE`; None: the scale implies it.
        seed: the seed of stochastic rounding.
    """

    range: Range | None = None
    seed: Tensor | None = None


class ColumnGrid(NamedTuple):
    """The parameters by which columns of a matrix are rounded, each float32 [runs, rows] or None.

    A value x becomes q((x + offset) sign) sign - offset, where q rounds by scale and zero point. Where `zero` is set, q
    is 0; where `zeros` is set, the result is 0.

    Attributes:
        spec: how q rounds a column if each row has a positive scale.
        runs: for each column the index of its parameters, int64.
        zero: where q is 0, bool.
        zeros: where the result is 0, bool [columns, rows], or None.
    """

    spec: QuantSpec
    runs: Tensor
    scale: Tensor
    zero_point: Tensor | None
    offset: Tensor | None
    sign: Tensor | None
    zero: Tensor | None
    zeros: Tensor | None

    def columns(self, part: slice | Tensor) -> ColumnGrid:
        """The parameters of a part of the columns."""
        return self._replace(runs=self.runs[part], zeros=None if self.zeros is None else self.zeros[part])

    def each(self, change: Callable[[Tensor], Tensor]) -> ColumnGrid:
        """The grid with `change` applied to each of its tensors [runs, rows]."""
        names = ("scale", "zero_point", "offset", "sign", "zero")
        held = {name: own for name in names if (own := getattr(self, name)) is not None}
        return self._replace(**{name: change(own) for name, own in held.items()})


class KernelPlan(NamedTuple):
    """The functions that compute calls of one kind.

    The functions are outside of autograd. Scale and zero point are None if they come from the range of x.

    Attributes:
        values: takes (x, scale, zero_point, descriptor), returns the quantized values, None if a parameter is invalid.
        values_and_mask: like `values`, with the packed mask of where gradients pass, or None if they pass everywhere.
        grad_input: takes (dy, mask), returns the gradient of x; dy must have the strides `stride`.
        gradients: takes (dy, x, mask, scale, zero_point, descriptor, wants_scale, wants_zero_point), returns the
            gradients of x, scale and zero point, each None if not needed; dy and x must have the strides `stride`.
        codes: takes (x, scale, zero_point, descriptor), returns the codes, and whether x has NaN, which has no integer
            code: a bool, or on an accelerator a tensor of one number.
        decode: takes (codes, scale, zero_point, descriptor), returns the decoded values.
        stride: the strides of results and gradients: those of x, or contiguous if x has gaps.
        spec: the specification.
        backend: the name of the backend.
        descriptor: the constants of the kind of call for the functions, or the `Extras` of one call.
        values_over: like `values`, but overwrites x; returns whether it did. None if no kernel does that.
        checks: whether the caller may skip checks of the parameters' values: kernels check, or the caller would have
            to wait for an accelerator.
        otherwise: the plan for parameters that are not valid; None if `values` computes with any parameters.
    """

    values: Callable[[Tensor, Tensor | None, Tensor | None, Any], Tensor | None]
    values_and_mask: Callable[[Tensor, Tensor | None, Tensor | None, Any], tuple[Tensor | None, Tensor | None]]
    grad_input: Callable[[Tensor, Tensor], Tensor]
    gradients: Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]]
    codes: Callable[[Tensor, Tensor, Tensor | None, Any], tuple[Tensor, bool | Tensor]]
    decode: Callable[[Tensor, Tensor, Tensor | None, Any], Tensor]
    stride: tuple[int, ...]
    spec: QuantSpec
    backend: str
    descriptor: Any = None
    values_over: Callable[[Tensor, Tensor, Tensor | None, Any], bool] | None = None
    checks: bool = False
    otherwise: KernelPlan | None = None


class Kernels(ABC):
    """Base of a backend's kernels for one kind of call; `plan` returns them as a `KernelPlan`.

    A backend implements the abstract methods, and overrides others to be faster with the same bits.
    """

    def __init__(self, kind: CallKind, backend: str) -> None:
        self.kind, self.spec, self.backend = kind, kind.spec, backend
        self.layout = layout_of(kind.spec.granularity, kind.shape, kind.stride)
        self.masks = kind.spec.gradient is not Gradient.IDENTITY or kind.variant == RELU

    @abstractmethod
    def quantize(self, x: Tensor, params: QParams, *, mask: bool) -> tuple[Tensor, Tensor | None]:
        """The quantized values and, if `mask`, the packed mask of where gradients pass (never for IDENTITY)."""

    @abstractmethod
    def mask_gradient(self, dy: Tensor, mask: Tensor) -> Tensor:
        """dy where the mask is set, else 0; dy has the strides of results, and may be a bool tensor."""

    @abstractmethod
    def encode(self, x: Tensor, params: QParams) -> tuple[Tensor, bool | Tensor]:
        """The codes of x, and whether x has NaN, for which the lowest integer is stored."""

    @abstractmethod
    def decode(self, codes: Tensor, params: QParams) -> Tensor:
        """The decoded values of codes."""

    def measure(self, x: Tensor) -> Range:
        """The range of the finite values of every group, see `numerics.qparams.measure`."""
        return measure(x, self.spec.granularity)

    def quantize_dynamic(self, x: Tensor, seed: Tensor | None, *, mask: bool) -> tuple[Tensor, Tensor | None]:
        """`quantize` with the parameters from the range of x."""
        params = reference.choose_from(x, self.measure(x), self.spec, is_less_by_plain_sums)
        return self.quantize(x, params._replace(seed=seed), mask=mask)

    def grad_params(
        self, dy: Tensor, x: Tensor, params: QParams, wants: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of scale and zero point [groups per axis]; None for a gradient that is not in `wants`."""
        return reference.grad_params(dy, x, params, self.spec, wants)

    @property
    def has_plain_params(self) -> bool:
        """Whether kernels can read scale and zero point without a conversion.

        Both must have the dtype of computation, or zero points int32, and both one shape without gaps.
        """
        scale, zero_point = self.kind.scale, self.kind.zero_point
        if scale is None or scale.dtype != compute_dtype(self.kind.dtype) or not scale.contiguous:
            return False
        return zero_point is None or (
            not self.spec.symmetric
            and zero_point.dtype in (scale.dtype, torch.int32)
            and zero_point.shape == scale.shape
            and zero_point.contiguous
        )

    def plan(self) -> KernelPlan:
        """The plan that calls these kernels."""
        on_accelerator = self.kind.device.type != "cpu" and self.spec.rounding is Rounding.NEAREST_EVEN
        return KernelPlan(
            values=self._values,
            values_and_mask=self._values_and_mask,
            grad_input=self.mask_gradient if self.masks else lambda dy, _: dy,
            gradients=self._gradients,
            codes=lambda x, *given: self.encode(x, self._params(*given)),
            decode=lambda codes, *given: self.decode(codes, self._params(*given)),
            stride=self.layout.result_stride,
            spec=self.spec,
            backend=self.backend,
            checks=on_accelerator and self.has_plain_params,
        )

    def _params(self, scale: Tensor, zero_point: Tensor | None, descriptor: Any) -> QParams:
        """Scale and zero point as [groups per axis], with the extras of a call."""
        groups = self.layout.group_shape
        if scale.shape != groups:
            scale = scale.reshape(groups)
        if zero_point is not None and zero_point.shape != groups:
            zero_point = zero_point.reshape(groups)
        return QParams(scale, zero_point, *(descriptor if isinstance(descriptor, Extras) else Extras()))

    def _values(
        self, x: Tensor, scale: Tensor | None, zero_point: Tensor | None, extras: Extras | None
    ) -> Tensor | None:
        if scale is None:
            return self.quantize_dynamic(x, extras and extras.seed, mask=False)[0]
        return self.quantize(x, self._params(scale, zero_point, extras), mask=False)[0]

    def _values_and_mask(
        self, x: Tensor, scale: Tensor | None, zero_point: Tensor | None, extras: Extras | None
    ) -> tuple[Tensor, Tensor | None]:
        if scale is None:
            return self.quantize_dynamic(x, extras and extras.seed, mask=self.masks)
        return self.quantize(x, self._params(scale, zero_point, extras), mask=self.masks)

    def _gradients(
        self,
        dy: Tensor,
        x: Tensor,
        mask: Tensor | None,
        scale: Tensor,
        zero_point: Tensor | None,
        extras: Extras | None,
        *wants: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dx = dy if mask is None else self.mask_gradient(dy, mask)
        of_scale, of_zero_point = self.grad_params(dy, x, self._params(scale, zero_point, extras), (wants[0], wants[1]))
        if of_zero_point is not None and zero_point is not None:
            of_zero_point = of_zero_point.reshape(zero_point.shape)
        return dx, None if of_scale is None else of_scale.reshape(scale.shape), of_zero_point


class Backend(ABC):
    """Base of backends, which compute calls by kernels; only the backend that packed a gradient mask can read it."""

    name: ClassVar[str]
    device_type: str | None = None
    """The only device type that the backend serves, or None for all."""
    at_once: ClassVar[int] = 2**18
    """How many elements a search computes at once, so that on a CPU they stay in a cache."""
    compiles_as_node: ClassVar[bool] = False
    """Whether compiled graphs on its device contain the operator as one node, because compilers compute the definition
    with other bits there: by approximate division, or by rounding a product and a sum once."""

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why the backend can compute no call on this machine; None if it can compute calls."""

    def unfit(self, x: Tensor) -> str | None:
        """Why the backend computes no calls for tensors of the type and device of x; None if it computes some."""
        return None

    @abstractmethod
    def unsupported(self, x: Tensor, spec: QuantSpec, *, codes: bool) -> str | None:
        """Why the backend cannot compute calls for `spec` and tensors like x; None if it can.

        Args:
            codes: whether the call reads or writes codes, not values.
        """

    @abstractmethod
    def plan(self, kind: CallKind) -> KernelPlan | None:
        """The plan for a kind of call; None for RELU if no kernel computes the ReLU in the same pass."""

    def measure(self, x: Tensor, granularity: Granularity) -> Range:
        """The range of the finite values of every group, see `numerics.qparams.measure`."""
        return measure(x, granularity)

    def observe(self, values: Tensor, bins: Bins | None) -> Observed:
        """The range of contiguous values [groups, elements >= 1], and their histogram if `bins` is not None."""
        return observe_by_definition(values, bins)

    def sweep(
        self, wanted: Tensor, left: Tensor, shares: Tensor, errors: Tensor, missed: Tensor, grid: ColumnGrid
    ) -> bool:
        """See `ops.sweep.sweep`; all tensors are contiguous and on one device."""
        return False

    def take_in(self, values: Tensor, range: Range, bins: Bins | None, counts: Tensor | None) -> bool:
        """See `ops.library.update`; all tensors are on one device."""
        return False
