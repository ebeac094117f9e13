"""Quantized weights that are given out again while nothing changes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fakequant.errors import CallError
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec, Rounding
from fakequant.ops import library

_Made = TypeVar("_Made")


class _Cached(Protocol):
    """What a cache needs to know of a `Quantizer`."""

    name: str
    spec: QuantSpec
    dynamic: bool
    scale: Tensor | None
    zero_point: Tensor | None
    fixed_codes: Tensor | None

    @property
    def learned(self) -> object | None: ...

    def quantized(self, x: Tensor) -> Tensor: ...

    def encoded(self, x: Tensor) -> tuple[Tensor, QParams] | None: ...


class WeightCache:
    """The values and the codes of the weight of one quantizer, each found at its first use.

    Copies and pickles of it are None: the copy of a quantizer quantizes its weight at every call.
    """

    def __init__(self, quantizer: _Cached) -> None:
        self._quantizer = quantizer
        self._state: tuple[Any, ...] | None = None
        self._held: list[Tensor] = []
        self._made: dict[str, Any] = {}

    def serves(self, x: Tensor) -> bool:
        """Whether x is a weight whose quantized values stay the same, and no gradient of it is wanted."""
        if torch.compiler.is_compiling() or not isinstance(x, nn.Parameter) or x.is_inference():
            return False
        if torch.is_grad_enabled() and x.requires_grad:
            return False
        quantizer = self._quantizer
        drawn = quantizer.spec.rounding is Rounding.STOCHASTIC
        return not drawn and quantizer.learned is None and not library.needs_tracing(x)

    def values(self, x: Tensor) -> Tensor:
        """The quantized weight.

        Raises:
            CallError: the weight or its parameters have changed since they were first used.
        """

        def made() -> tuple[Tensor, int]:
            values = self._quantizer.quantized(x)
            return values, values._version

        values, version = self._once("values", x, made)
        if values._version != version:  # what was given out was written to
            del self._made["values"]
            return self.values(x)
        # Another tensor each time, on the same memory: its attributes are the caller's.
        return values.detach()

    def codes(self, x: Tensor) -> tuple[Tensor, QParams] | None:
        """The codes of the weight and the parameters; None if it holds NaN, which has no code.

        Raises:
            CallError: as `values`.
        """
        return self._once("codes", x, lambda: self._quantizer.encoded(x))

    def _once(self, what: str, x: Tensor, make: Callable[[], _Made]) -> _Made:
        quantizer = self._quantizer
        tensors = x, quantizer.scale, quantizer.zero_point, quantizer.fixed_codes
        state = quantizer.spec, quantizer.dynamic, *map(_state_of, tensors)
        if self._state is None:
            # Once freed, an object or its memory could come back at the same address. A detached tensor keeps the
            # memory, whatever `data` the parameter gets.
            self._state = state
            self._held = [held for tensor in tensors if tensor is not None for held in (tensor, tensor.detach())]
        elif self._state != state:
            raise CallError(
                f"the weight of {quantizer.name or quantizer}, its scale or its specification changed inside "
                "cached_weights, which quantizes a weight once; change it outside of the context, and enter it again"
            )
        if what not in self._made:
            # Plain tensors, which calls outside of inference mode may use.
            with torch.inference_mode(False), torch.no_grad():
                self._made[what] = make()
        return self._made[what]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _state_of(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    # Tensors made in inference mode count no changes.
    version = None if tensor.is_inference() else tensor._version
    return id(tensor), version, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
