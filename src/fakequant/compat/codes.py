"""Ranges of integer codes in other libraries: any two integers, with or without 0 in between."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fakequant.errors import SpecError
from fakequant.numerics.formats.floats import IntegerFormat
from fakequant.numerics.granularity import Granularity
from fakequant.numerics.spec import Arithmetic, QuantSpec


class CodeRange(NamedTuple):
    """Codes from `quant_min` to `quant_max`, with the granularity and the arithmetic.

    >>> CodeRange(-8, 7, PerTensor(), Arithmetic.DIVIDE).origin, CodeRange(5, 20, PerTensor(), Arithmetic.DIVIDE).origin
    (0, 5)
    """

    quant_min: int
    quant_max: int
    granularity: Granularity
    arithmetic: Arithmetic

    @property
    def origin(self) -> int:
        """The code nearest to 0, from which codes are counted, because every format of this package contains 0."""
        return max(self.quant_min, min(self.quant_max, 0))

    @property
    def spec(self) -> QuantSpec:
        """Return the specification for codes counted from `origin`.

        Raises:
            SpecError: a range of fewer than two codes, or of more than 24 bits.
        """
        spec = _specs.get(self)
        if spec is None:
            try:
                fmt = IntegerFormat(self.quant_min - self.origin, self.quant_max - self.origin)
            except SpecError as error:
                raise SpecError(f"codes from {self.quant_min} to {self.quant_max}: {error}") from error
            spec = QuantSpec(fmt, self.granularity, symmetric=False, arithmetic=self.arithmetic)
            if not torch.compiler.is_compiling():  # a trace must not change what outlives it
                _specs[self] = spec
        return spec


# A plain dict: torch.compile warns about functools.lru_cache.
_specs: dict[CodeRange, QuantSpec] = {}
