"""The stored form of scales and offsets: their formats, and shared scales that multiply them.

Sources: OCP Microscaling 1.0, section 6.3 (E8M0, floor); NVIDIA TensorRT Model Optimizer (E8M0, ceil; NVFP4);
llama.cpp, ggml-quants (float16 scales, K-quants).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from fakequant.errors import QParamsError, SpecError
from fakequant.numerics.division import divide
from fakequant.numerics.formats import parse_format
from fakequant.numerics.formats.floats import ExponentFormat, FloatFormat, Format, TableFormat, power_of_two
from fakequant.numerics.granularity import (
    Granularity,
    Shape,
    StoredScales,
    farthest,
    join_scales,
    over_blocks,
    parse_granularity,
    rounded,
    split_scales,
)


class ScaleRounding(Enum):
    """The rule that chooses a scale and rounds it to its format."""

    NEAREST = "nearest"
    """The largest magnitude becomes the format's bound; the scale is rounded to nearest, ties to even."""
    SIGNED = "signed"
    """As NEAREST, but the value that is farthest from 0 gets the code that is farthest from 0, -8 of int4, so that a
    scale may be negative: llama.cpp. Scales in signed integers are chosen by this rule."""
    HALF_RANGE = "half_range"
    """The largest magnitude becomes half of the range of codes, 127.5 of int8, and is clamped: compressed-tensors."""
    MEAN = "mean"
    """The mean magnitude becomes the code 1: BitNet b1.58, arXiv 2402.17764."""
    FOUR_OVER_SIX = "four_over_six"
    """The largest magnitude becomes the largest code or the one below, by the squared error of the group: 6 or 4 of
    float4_e2m1fn, arXiv 2512.02010."""
    SEARCHED = "searched"
    """The scale with the least squared error of the group: the scale of NEAREST, or one of the four numbers of its
    format below it and the six above it, under the per-tensor scale of NEAREST. For NVFP4, arXiv 2606.07618. With
    dynamic scales, torch.compile takes minutes."""
    FLOOR = "floor"
    """Power-of-two scales, exponent floor(log2(amax)) - floor(log2(bound)); may clip. OCP Microscaling 1.0."""
    CEIL = "ceil"
    """Power-of-two scales, exponent ceil(log2(amax / bound)); clips nothing. NVIDIA."""
    EVEN = "even"
    """Power-of-two scales: as FLOOR, after amax was rounded to the precision of the element format. torchao, Quark."""
    EVEN_FP4 = "even_fp4"
    """As EVEN at the precision of float4_e2m1fn for every element: MXFP8 inputs of compressed-tensors."""


_Spec = TypeVar("_Spec", bound="ScaleSpec")
_OF_POWERS = (ScaleRounding.FLOOR, ScaleRounding.CEIL, ScaleRounding.EVEN, ScaleRounding.EVEN_FP4)


@dataclass(frozen=True)
class ScaleSpec:
    """How scales are stored.

    Without a shared scale, a scale in a float format is exactly a number of the format; under a shared scale with a
    format, it is exactly the product of a number of each. Such scales are 0 if all values of the group are 0. Signed
    scales may be negative. The extent of a group is the number from which its scale follows, see `extent`.

    Args:
        format: None for float32; a float format, an integer format, or `float8_e8m0fnu`.
        rounding: see `ScaleRounding`; power-of-two scales need FLOOR, CEIL, EVEN or EVEN_FP4, signed integers SIGNED.
        granularity: the groups of scales that have one shared scale each (NVFP4: `PerTensor()`); None for no shared
            scales.
        shared: the float format of the shared scales; None for float32.

    Raises:
        SpecError: a combination that is not defined.

    >>> print(ScaleSpec("float8_e8m0fnu", ScaleRounding.FLOOR), ScaleSpec("float8_e4m3fn", granularity=PerTensor()))
    scale=float8_e8m0fnu:floor scale=float8_e4m3fn@per_tensor
    >>> ScaleSpec.parse("scale=uint6@per_block(-1:8)/float16").shared.name
    'float16'
    """

    word: ClassVar[str] = "scale"
    format: Format | None = None
    rounding: ScaleRounding = ScaleRounding.NEAREST
    granularity: Granularity | None = None
    shared: Format | None = None

    def __init__(
        self,
        format: Format | str | None = None,
        rounding: ScaleRounding | None = None,
        granularity: Granularity | None = None,
        shared: Format | str | None = None,
    ) -> None:
        fmt = None if format is None else parse_format(format)
        object.__setattr__(self, "format", fmt)
        object.__setattr__(self, "rounding", rounding or _default_rounding(fmt))
        object.__setattr__(self, "granularity", granularity)
        object.__setattr__(self, "shared", None if shared is None else parse_format(shared))
        self._check()

    def _check(self) -> None:
        fmt, rounding, granularity, named = self.format, self.rounding, self.granularity, self.format or "float32"
        if isinstance(fmt, TableFormat):
            raise SpecError(f"{fmt} is not a format for {self.word}s; use a float or an integer")
        if granularity is not None and not isinstance(granularity, Granularity):
            raise SpecError(f"granularity must be a Granularity such as PerTensor(), got {granularity!r}")
        if (kinds := self._roundings()) and rounding not in kinds:
            words = ", ".join(one.value for one in kinds[:-1]) + " or " * (len(kinds) > 1) + kinds[-1].value
            raise SpecError(f"{self.word}s in {named} are rounded by {words}, not by {rounding.value}")
        if (fmt is None or isinstance(fmt, ExponentFormat)) and granularity is not None:
            raise SpecError(f"{self.word}s in {named} need no shared scale; leave the granularity out")
        if rounding is ScaleRounding.FOUR_OVER_SIX and self.shared is not None:
            raise SpecError(f"four_over_six needs a shared scale in float32: leave /{self.shared} out")
        if rounding is ScaleRounding.SEARCHED and (granularity is None or self.shared is not None):
            raise SpecError(
                f"searched {self.word}s need a shared scale in float32: give its granularity, such as "
                f"'{self.word}=float8_e4m3fn:searched@per_tensor'"
            )
        if fmt is not None and fmt.has_zero_point and granularity is None:
            raise SpecError(
                f"{self.word}s in {fmt} reach {fmt.quant_max:g} at most and need a shared scale: give its "
                f"granularity, such as '{self.word}={fmt}@per_block(-1:8)/float16'"
            )
        if self.shared is not None and (granularity is None or not isinstance(self.shared, FloatFormat)):
            raise SpecError(
                f"{self.shared} for the shared scale of {self.word}s in {named}: expected a float format after a "
                f"granularity, such as '{self.word}=uint6@per_block(-1:8)/float16'"
            )

    def _roundings(self) -> tuple[ScaleRounding, ...]:
        """The roundings that the format allows, the default first."""
        if isinstance(self.format, ExponentFormat):
            return _OF_POWERS
        plain = ScaleRounding.NEAREST, ScaleRounding.HALF_RANGE, ScaleRounding.MEAN
        if self.format is None:
            return plain
        if self.format.has_zero_point:
            return (ScaleRounding.SIGNED,) if self.format.signed else plain
        return *plain, ScaleRounding.SIGNED, ScaleRounding.FOUR_OVER_SIX, ScaleRounding.SEARCHED

    @property
    def is_exact(self) -> bool:
        """Whether every scale is exactly a number of the format, times an exact shared scale if any; it may be 0."""
        powers = isinstance(self.format, ExponentFormat)
        return self.format is not None and not powers and (self.granularity is None) == (self.shared is None)

    def regrouped(self: _Spec, change: Callable[[Granularity], Granularity]) -> _Spec:
        """The same specification with a changed granularity, if the scales have a granularity."""
        return self if self.granularity is None else replace(self, granularity=change(self.granularity))

    def up_from(self, element: Format) -> float:
        """The mantissa in [0.5, 1) from which on an extent is rounded up to a power of two; 1 if it never is."""
        digits = {ScaleRounding.EVEN: element.fraction_bits, ScaleRounding.EVEN_FP4: 1}.get(self.rounding)
        return 1.0 if digits is None else 1 - 2.0 ** -(digits + 2)

    @property
    def needs_values(self) -> bool:
        """Whether scales follow from all values of a group, and not from their range alone."""
        return self.rounding in (ScaleRounding.MEAN, ScaleRounding.FOUR_OVER_SIX, ScaleRounding.SEARCHED)

    def __str__(self) -> str:
        powers = isinstance(self.format, ExponentFormat)
        said = powers or self.rounding is not _default_rounding(self.format)
        if self.format is None and not said:
            return ""
        # Added up, because torch.compile does not know the texts of formats that are filled in.
        text = self.word + "=" + (str(self.format) if self.format is not None else "float32")
        if said:
            text += ":" + self.rounding.value
        if self.granularity is not None:
            text += "@" + str(self.granularity)
        return text if self.shared is None else text + "/" + str(self.shared)

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}.parse({str(self)!r})" if str(self) else f"{name}()"

    @classmethod
    def parse(cls, text: str) -> ScaleSpec:
        """Parse the text of a specification, which is empty for float32 scales; raises SpecError for other texts."""
        if not text:
            return cls()
        name, _, granularity = text.removeprefix(cls.word + "=").partition("@")
        name, _, rounding = name.partition(":")
        granularity, _, shared = granularity.partition("/")
        try:
            return cls(
                None if name == "float32" else name,
                ScaleRounding(rounding) if rounding else None,
                parse_granularity(granularity) if granularity else None,
                shared or None,
            )
        except ValueError as error:
            raise SpecError(f"cannot read the {cls.word} format {text!r}: {error}") from error

    def bound(self, element: Format) -> float:
        """The divisor that makes a scale from a group's extent; negative if the farthest value gets the lowest code."""
        if self.rounding is ScaleRounding.SIGNED:
            return element.farthest
        half = (element.quant_max - element.quant_min) / 2
        return half if self.rounding is ScaleRounding.HALF_RANGE else element.bound

    def extent(self, lo: Tensor, hi: Tensor, element: Format) -> Tensor:
        """The largest magnitude of a group; if `bound` is negative, the value of the group that is farthest from 0."""
        if self.rounding is ScaleRounding.SIGNED and self.bound(element) < 0:
            return torch.where(-lo > hi, lo, hi)
        return torch.maximum(-lo, hi) + 0.0

    @property
    def is_under_a_tensor(self) -> bool:
        """Whether a single per-tensor float32 scale multiplies all stored scales, as in NVFP4."""
        if self.format is None or self.granularity is None or self.shared is not None:
            return False
        return self.granularity.group_shape((2, 2)) == (1, 1)

    def shared_by(self, values: Tensor, *, wider: bool = False) -> Tensor | None:
        """The per-tensor scale that multiplies the stored codes of float32 scales; None if there is none.

        Args:
            values: the scales [groups per axis].
            wider: whether the per-tensor scale leaves room for 1.5 times the largest scale, as under FOUR_OVER_SIX.
        """
        if not self.is_under_a_tensor:
            return None
        stored = split_scales(values, self.format, self.granularity, self.shared)
        if stored is None or stored.shared is None or not wider or self.rounding is ScaleRounding.FOUR_OVER_SIX:
            return None if stored is None else stored.shared
        return stored.shared * self._room

    @property
    def _room(self) -> float:
        """The format's largest number over its largest power of two; 1.5 times that power is a number of the format."""
        assert self.format is not None, "float32 scales need none"
        return self.format.quant_max / 2.0 ** (math.frexp(self.format.quant_max)[1] - 1)

    def choose(
        self,
        extent: Tensor,
        element: Format,
        limit: float,
        bound: float | None = None,
        shared: Tensor | None = None,
        steps: int = 0,
    ) -> Tensor:
        """The scale of every group, rounded to its format.

        Args:
            extent: [groups per axis], in units of x; float32 or float64.
            element: the format of the codes.
            limit: the largest scale with which every code stays finite.
            bound: the divisor of the extent; by default `self.bound(element)`.
            shared: the per-tensor scale, where `is_under_a_tensor`; by default it follows from the extents.
            steps: by how many numbers of the format a scale is moved away from 0, for SEARCHED.

        Returns:
            [groups per axis], in units of x per code; positive unless `is_exact`.

        Raises:
            SpecError: the format's largest number times the largest code exceeds the dtype of the extent.
        """
        bound = self.bound(element) if bound is None else bound
        if isinstance(self.format, ExponentFormat):
            # 2**e for every group, e limited to +-largest; a group of zeros gets the smallest.
            largest = self.format.exponent_bias
            if self.rounding is ScaleRounding.CEIL:
                measured = divide(extent, torch.full_like(extent, element.bound))
                mantissa, exponent = torch.frexp(measured)
                exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
            else:
                measured = extent
                mantissa, exponent = torch.frexp(measured)
                exponent = exponent - 1 - (math.frexp(element.bound)[1] - 1)
                exponent = exponent + (mantissa >= self.up_from(element)).to(exponent.dtype)
            # At most the largest power of two that is not beyond the limit.
            exponent = exponent.clamp(-largest, min(largest, math.frexp(limit)[1] - 1))
            # frexp gives 0, to which a quotient may underflow, the exponent 0 instead of one below all.
            exponent = torch.where(measured > 0, exponent, -largest).to(torch.int64)
            # float64 has all these powers as normal numbers; the cast is exact (2**-127 is subnormal in float32).
            return power_of_two(exponent).to(extent.dtype)
        if self.format is None:
            scale = divide(extent, torch.full_like(extent, bound)).clamp(min=torch.finfo(extent.dtype).tiny)
            return scale.clamp(max=limit)
        if self.is_exact:
            return self._exact(extent, bound, limit)
        is_wide = self.rounding is ScaleRounding.FOUR_OVER_SIX
        whole = self.format.quant_max / self._room * element.bound if is_wide else self.format.quant_max * bound
        tiny = torch.finfo(extent.dtype).tiny
        shared = self._shared(extent, whole).clamp(min=tiny) if shared is None else shared
        # code * g, with g = amax of the whole / (bound * largest code) and code = amax / (bound * g) rounded. A code of
        # 0 becomes the smallest positive one: a block that is small compared with its tensor loses precision, not all.
        if extent.numel() and whole > torch.finfo(extent.dtype).max:
            raise SpecError(
                f"scales in {self.format} under codes up to {bound:g} reach beyond {extent.dtype}; use a smaller format"
            )
        code = rounded(divide(extent, bound * shared), self.format)
        code = torch.where(code > 0, code, self.format.smallest)
        if steps:
            patterns = self.format.to_storage(code).view(self._patterns)
            most = self.format.to_storage(torch.full_like(code, self.format.quant_max)).view(self._patterns)
            moved = torch.minimum((patterns.to(torch.int32) + steps).clamp(min=1), most.to(torch.int32))
            code = self.format.from_storage(moved.to(self._patterns).view(self.format.storage), code.dtype)
        return (code * shared).clamp(min=tiny).clamp(max=limit)

    @property
    def _patterns(self) -> torch.dtype:
        """The integer dtype for the bit patterns of the format: positive numbers are in the order of their patterns."""
        assert self.format is not None, "float32 scales are not searched"
        return torch.int16 if self.format.bits > 8 else torch.uint8

    def _shared(self, extent: Tensor, divisor: float) -> Tensor:
        """For each extent, the extent farthest from 0 under the same shared scale, divided by `divisor`."""
        assert self.granularity is not None, "only scales with one share"
        whole = over_blocks(extent, self.granularity.block_shape(extent.shape), farthest)
        return divide(whole, torch.full_like(whole, divisor))

    def _exact(self, extent: Tensor, bound: float, limit: float, *, keeps_small: bool = True) -> Tensor:
        """The scales code * d, where code and d are exactly numbers of their formats; 0 where the extent is 0.

        The group with the farthest extent gets the farthest code, up to the rounding of d. A code or a d of 0 becomes
        the smallest number with the sign of its extent; no product is beyond the limit.
        """
        assert self.format is not None, "float32 scales are not rounded"
        if self.granularity is None:
            return _stored(divide(extent, torch.full_like(extent, bound)), self.format, limit, keeps_small)
        assert self.shared is not None, "else they are not exact"
        shared = self._shared(extent, self.format.farthest * bound)
        shared = _stored(shared, self.shared, limit / self.format.smallest, True)
        some = torch.where(shared == 0, 1.0, shared)
        most = divide(torch.full_like(some, limit), some.abs())
        return _stored(divide(extent, bound * some), self.format, most, keeps_small) * shared

    def split(self, values: Tensor, under: Tensor | None = None) -> StoredScales:
        """Split float32 scales into codes and shared scales, as a file stores them.

        If several splits are exact, the scale farthest from 0 gets the farthest code that is possible, as in `choose`
        and llama.cpp.

        Args:
            values: [groups per axis].
            under: the per-tensor scale, where `is_under_a_tensor`; by default it is searched.

        Raises:
            QParamsError: no split is exact.

        >>> spec = ScaleSpec.parse("scale=uint6@per_block(-1:2)/float16")
        >>> spec.split(torch.tensor([[0.5 * 63, 0.5 * 2]]))
        StoredScales(codes=tensor([[63,  2]], dtype=torch.uint8), shared=tensor([[0.5000]]))
        """
        stored = split_scales(values, self.format, self.granularity, self.shared, under)
        if stored is None:
            raise QParamsError(
                f"{self.word}s of shape {list(values.shape)} are not in the form {self}; choose them by "
                "fakequant.choose_qparams, or join them from codes"
            )
        return stored

    def join(self, stored: StoredScales) -> Tensor:
        """The scales that `stored` stands for, float32 [groups per axis]."""
        return join_scales(stored, self.format, self.granularity)

    def bits(self, groups: Shape) -> int:
        """The size in bits of all scales, shared scales included."""
        own = math.prod(groups) * (32 if self.format is None else self.format.bits)
        if self.granularity is None:
            return own
        return own + math.prod(self.granularity.group_shape(groups)) * (32 if self.shared is None else self.shared.bits)


@dataclass(frozen=True, init=False, repr=False)
class OffsetSpec(ScaleSpec):
    """How offsets are stored, in units of x: like scales, rounded to the nearest number; 0 has a code.

    Ranges contain 0, so that offsets are not negative. Under SIGNED the range of a group need not contain 0: the offset
    follows from the lowest value of the group (KIVI, arXiv 2402.02750).

    >>> OffsetSpec.parse("offset=uint6@per_block(-1:8)/float16").granularity
    PerBlock(sizes=((-1, 8),), pad=False)
    """

    word: ClassVar[str] = "offset"

    def _roundings(self) -> tuple[ScaleRounding, ...]:
        is_signed_float = self.format is None or (self.format.signed and not self.format.has_zero_point)
        return (ScaleRounding.NEAREST, *([ScaleRounding.SIGNED] if is_signed_float else []))

    @property
    def needs_values(self) -> bool:
        return self.rounding is ScaleRounding.SIGNED

    def _check(self) -> None:
        super()._check()
        if self.needs_values and self.granularity is not None:
            raise SpecError(f"signed offsets have no shared scale: leave @{self.granularity} out")
        if self.format is not None and not self.is_exact:
            raise SpecError(f"offsets in {self.format} need a shared scale in a format: add one, such as /float16")

    def __str__(self) -> str:
        return super().__str__() or "offset=float32"

    def choose_offset(self, lo: Tensor, limit: float) -> Tensor:
        """The offsets that shift the lowest value of every group to 0: -lo rounded, [groups per axis]."""
        offset = -lo + 0.0
        return offset if self.format is None else self._exact(offset, 1.0, limit, keeps_small=False)


def _default_rounding(fmt: Format | None) -> ScaleRounding:
    if isinstance(fmt, ExponentFormat):
        return ScaleRounding.FLOOR
    is_signed = fmt is not None and fmt.has_zero_point and fmt.signed
    return ScaleRounding.SIGNED if is_signed else ScaleRounding.NEAREST


def _stored(v: Tensor, fmt: Format, limit: float | Tensor, keeps_small: bool) -> Tensor:
    """The nearest number of a format up to a limit; with `keeps_small`, only 0 becomes 0.

    A number of bfloat16 can be subnormal in float32. The result is not: processors may flush subnormal numbers.
    """
    most = fmt.neighbours(torch.as_tensor(limit, dtype=v.dtype, device=v.device)).near
    code = rounded(v, fmt)
    code = torch.where(code.abs() > most, most.copysign(code), code)
    smallest = max(fmt.smallest, torch.finfo(v.dtype).tiny)
    small = code.abs() < smallest
    least = torch.full_like(v, smallest).copysign(v) if keeps_small else torch.zeros_like(v)
    return torch.where(small, torch.where(v == 0, 0.0, least), code)
