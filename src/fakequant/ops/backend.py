"""What a backend must offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fakequant.numerics import reference
from fakequant.numerics.granularity import Granularity
from fakequant.numerics.histogram import Bins, Observed, observe_by_definition
from fakequant.numerics.qparams import QParams, Range, choose_qparams, measure
from fakequant.numerics.spec import QuantSpec


class Encoded(NamedTuple):
    """Codes, and what they do not tell.

    Attributes:
        codes: the shape of what was quantized.
        mask: where gradients pass, packed, as `Backend.fake_quantize` gives it; None if not asked for.
        has_nan: whether something was NaN, for which integer codes have no code.
    """

    codes: Tensor
    mask: Tensor | None
    has_nan: bool


class Direct(NamedTuple):
    """How tensors of one kind are quantized by one operator for each direction, with given parameters.

    Attributes:
        values: from (x, scale, zero_point, form) to the quantized values; None if a parameter is not valid.
        values_over: from the same to whether x now holds its quantized values: not if a parameter is not valid.
        values_and_mask: from the same to the quantized values, with the packed mask of `Gradient.CODE_RANGE`.
        grad_input: from (dy, mask) to the gradient, for dy that lies in memory as x does.
        gradients: from (dy, x, mask, scale, zero_point, form, wants_scale, wants_zero_point) to the gradients of x,
            None without a mask, and of scale and zero point [shape of scale], None where not wanted. dy lies in memory
            as x does, and the zero point has the dtype of the scale. None for an x without elements.
        codes: from (x, scale, zero_point, form, codes, masked) to whether `codes` now holds the codes, not if a
            parameter is not valid or x has NaN, and the packed mask where masked. None for formats without integer
            codes. No mask where it passes everything.
        form: what follows from the specification and the kind of tensor.
        dtype: of x.
        call: the backend, whose masks these are, the specification and the strides of x.
    """

    values: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor | None]
    values_over: Callable[[Tensor, Tensor, Tensor | None, Tensor], bool]
    values_and_mask: Callable[[Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor | None, Tensor | None]]
    grad_input: Callable[[Tensor, Tensor], Tensor]
    gradients: Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]] | None
    codes: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, bool], tuple[bool, Tensor | None]] | None
    form: Tensor
    dtype: torch.dtype
    call: BackwardCall


class Backend(ABC):
    """What serves the operator; a mask is opaque outside the backend that made it: one bit per element."""

    name: ClassVar[str]
    device_type: str | None = None
    """The only type of device whose tensors it serves; None: any."""
    compiles_as_node: ClassVar[bool] = False
    """Whether compiled graphs of its device hold the operator whole, because compilers compute the definition with
    other bits there: with approximate division, or a product and a sum rounded once."""
    rectifies: ClassVar[bool] = False
    """Whether `fake_quantize_relu` is there, and what `direct` says of a ReLU."""

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why the backend cannot serve any call here, or None."""

    def unfit(self, x: Tensor) -> str | None:
        """Why the backend can serve no call for this tensor, or None; its type and device may matter."""
        return None

    @abstractmethod
    def unsupported(self, x: Tensor, spec: QuantSpec, *, codes: bool) -> str | None:
        """Why the backend cannot serve this call, or None; of x, its type, dtype and device may matter.

        Args:
            codes: the call reads or writes codes, not values.
        """

    @abstractmethod
    def fake_quantize(self, x: Tensor, params: QParams, spec: QuantSpec, *, mask: bool) -> tuple[Tensor, Tensor | None]:
        """The quantized values and, if asked for, the packed mask of where gradients pass (never for IDENTITY)."""

    def fake_quantize_relu(
        self, x: Tensor, params: QParams, spec: QuantSpec, *, mask: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As `fake_quantize`, of torch.relu(x) in one pass; the mask is where gradients pass both, for IDENTITY too.

        For specifications that round to nearest.
        """
        raise NotImplementedError(f"the backend {self.name} has no ReLU; ask its `rectifies`")

    def fake_quantize_dynamic(
        self, x: Tensor, spec: QuantSpec, *, mask: bool, seed: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As `fake_quantize`, with the parameters that the range of x gives, and the seed of stochastic rounding.

        A backend that does it in fewer passes over memory overrides this; the bits are these.
        """
        params = choose_qparams(self.measure(x, spec.granularity), spec, largest=torch.finfo(x.dtype).max)
        return self.fake_quantize(x, params._replace(seed=seed), spec, mask=mask)

    def direct(self, x: Tensor, spec: QuantSpec, scale: Tensor, *, relu: bool = False) -> Direct | None:
        """How `fake_quantize` is done by one operator, which checks the parameters too; None if it is not.

        Args:
            x: of x, its type, dtype, device, shape and strides matter.
            scale: contiguous; of it, its dtype and shape. A zero point has the same shape, and its dtype or int32.
            relu: how it is done of torch.relu(x); asked of backends that rectify.
        """
        return None

    def measure(self, x: Tensor, granularity: Granularity) -> Range:
        """The range of the finite values of every group, see `numerics.qparams.measure`."""
        return measure(x, granularity)

    def observe(self, values: Tensor, bins: Bins | None) -> Observed:
        """The range of contiguous values [groups, elements] and, if asked for, their counts; elements >= 1."""
        return observe_by_definition(values, bins)

    def take_in(self, values: Tensor, range: Range, bins: Bins | None, counts: Tensor | None) -> bool:
        """See `ops.histogram.update`; all tensors are on one device."""
        return False

    @abstractmethod
    def grad_input(self, dy: Tensor, mask: Tensor, spec: QuantSpec, x_stride: tuple[int, ...]) -> Tensor:
        """dy where the mask is set, else 0; the input had the shape of dy and these strides. dy may be bool, too."""

    def unpack_mask(self, mask: Tensor, x: Tensor, spec: QuantSpec) -> Tensor:
        """The mask that quantizing x gave as a bool tensor, the shape of x: where a gradient of ones is let through."""
        return self.grad_input(torch.ones_like(x, dtype=torch.bool), mask, spec, x.stride()).bool()

    def grad_params(
        self, dy: Tensor, x: Tensor, params: QParams, spec: QuantSpec, wants: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of scale and zero point [groups, axes kept], where wanted.

        A backend that finds them without tensors of the size of x overrides this; the bits are these.
        """
        return reference.grad_params(dy, x, params, spec, wants)

    def squared_errors(
        self, centers: Tensor, sums: Tensor, middles: Tensor, params: QParams, spec: QuantSpec
    ) -> Tensor | None:
        """See `search.squared_errors`; None where the backend has no kernel for it."""
        return None

    def nearly_least(
        self, centers: Tensor, counts: Tensor, amax: Tensor, scale: Tensor, spec: QuantSpec
    ) -> Tensor | None:
        """See `search.nearly_least`; None where the backend has no kernel for it."""
        return None

    @abstractmethod
    def quantize(self, x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
        """Codes."""

    @abstractmethod
    def encode(self, x: Tensor, params: QParams, spec: QuantSpec, *, mask: bool) -> Encoded:
        """Codes with what they do not tell; of formats with integer codes, rounded to nearest."""

    @abstractmethod
    def dequantize(self, codes: Tensor, params: QParams, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
        """Values of codes."""


# What a mask is read by: the backend that packed it, the specification and the strides of the input. A plain tuple,
# because making a NamedTuple takes 0.2 us of every call.
BackwardCall = tuple[Backend, QuantSpec, tuple[int, ...]]
