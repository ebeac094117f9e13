"""What a backend must offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec


class Backend(ABC):
    """What serves the operator; a mask is opaque outside the backend that made it: one bit per element."""

    name: ClassVar[str]

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why the backend cannot serve any call here, or None."""

    @abstractmethod
    def unsupported(self, x: Tensor, spec: QuantSpec, *, codes: bool) -> str | None:
        """Why the backend cannot serve this call, or None. `codes`: the call reads or writes codes, not values."""

    @abstractmethod
    def fake_quantize(self, x: Tensor, params: QParams, spec: QuantSpec, *, mask: bool) -> tuple[Tensor, Tensor | None]:
        """The quantized values and, if asked for, the packed mask of where gradients pass (never for IDENTITY)."""

    @abstractmethod
    def grad_input(self, dy: Tensor, mask: Tensor, spec: QuantSpec, x_stride: tuple[int, ...]) -> Tensor:
        """dy where the mask is set, else 0; the input had the shape of dy and these strides."""

    @abstractmethod
    def quantize(self, x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
        """Codes."""

    @abstractmethod
    def dequantize(self, codes: Tensor, params: QParams, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
        """Values of codes."""
