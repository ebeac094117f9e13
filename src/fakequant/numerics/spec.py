"""Specifications: a `QuantSpec` is a frozen object that alone decides how a tensor is quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

import torch

from fakequant.errors import SpecError, check_keys, nearest

from .formats import Format, parse_format
from .granularity import Granularity, PerTensor, parse_granularity
from .scales import OffsetSpec, ScaleRounding, ScaleSpec


class Arithmetic(Enum):
    """How values become codes by a scale, and back. `rint` is half to even; nothing is contracted or approximated."""

    DIVIDE = "divide"
    """clamp(rint(x / s) + zp), (q - zp) * s: ONNX QuantizeLinear and DequantizeLinear."""
    RECIPROCAL = "reciprocal"
    """clamp(rint(x * (1 / s)) + zp), (q - zp) * s: ATen fake_quantize_*."""
    MULTIPLIER = "multiplier"
    """clamp(rint(x * m)), q / m with m = bound / amax given as the scale: NVIDIA pytorch-quantization."""
    Q8_0 = "q8_0"
    """clamp(rint(x * (127 / a))), q * float16(a / 127): llama.cpp's inputs in blocks of 32, `quantize_row_q8_0`.

    Here a is the largest magnitude of a block, and the scale is a / 128, which is exact. 127 is the bound of the
    format, 128 the next power of two.
    """
    Q8_K = "q8_k"
    """clamp(rint(x * m)), q * (1 / m) with m = 127 / a and Q8_0's scale: blocks of 256, `quantize_row_q8_K`."""

    @property
    def is_linear(self) -> bool:
        """Whether a code q has the value (q - zp) * s."""
        return self in (Arithmetic.DIVIDE, Arithmetic.RECIPROCAL)

    @property
    def has_two_scales(self) -> bool:
        """Whether values are encoded with another scale than codes are decoded with."""
        return self in (Arithmetic.Q8_0, Arithmetic.Q8_K)


class Gradient(Enum):
    """The rule for where the straight-through estimator passes the gradient to the input."""

    CODE_RANGE = "code_range"
    """Where the code before clamping is in range: ATen, ONNX Runtime's mask."""
    INPUT_RANGE = "input_range"
    """Where the input is in the range that the scale was made from, -amax <= x <= amax: NVIDIA.

    If the scale was given, or calibrated earlier, the range is the one that the scale implies: amax = bound * scale.
    """
    IDENTITY = "identity"
    """Everywhere."""
    CLIP = "clip"
    """Where the input lies between the values of the lowest and the highest code; at and beyond these values the
    gradient goes to scale and zero point, which get none from inputs between: PACT, arXiv 1805.06085.
    """


class Rounding(Enum):
    """The rule that rounds a number to one of its two neighbouring codes. Scales are always rounded to nearest."""

    NEAREST_EVEN = "nearest_even"
    """The nearest code; in the middle of two the even code."""
    STOCHASTIC = "stochastic"
    """Either code, the nearer one with the higher probability, so that the expected code is the number itself.

    The random numbers are those of `numerics.philox`: they follow from a seed, which is an argument of the call, and
    from the row-major position of the element, not from its strides, the backend or the number of threads.
    """


@dataclass(frozen=True, init=False)
class QuantSpec:
    """How a tensor is quantized: format, granularity, symmetry, arithmetic, gradient, format of the scales, rounding.

    Equal specifications give equal bits, on every backend. Specifications are hashable, and go to text (`str`,
    `QuantSpec.parse`) and to plain dicts (`to_dict`, `QuantSpec.from_dict`) and back.

    Args:
        format: a `Format` or its name as in ml_dtypes: "int8", "uint4", "int8_narrow", "float8_e4m3fn", ...
        granularity: `PerTensor()`, `PerChannel(axis)`, `PerToken()` or `PerBlock({axis: size})`.
        symmetric: whether 0.0 has the code 0, so that there is no zero point. Default: true for signed formats.
        arithmetic: see `Arithmetic`.
        gradient: see `Gradient`.
        scale: the format of the scales, see `ScaleSpec`; by default float32.
        rounding: see `Rounding`; by default to the nearest code.
        offset: how offsets m are stored, in units of x, which take the place of zero points: codes are
            clamp(rint((x + m) / s)), values q * s - m. None, the default: there are no offsets.

    Raises:
        SpecError: an unknown format, an asymmetric float format, a zero point under another arithmetic than
            DIVIDE and RECIPROCAL, or an offset for a format with negative codes.

    >>> spec = QuantSpec("uint8", PerChannel(0), arithmetic=Arithmetic.RECIPROCAL)
    >>> print(spec)
    uint8 per_channel(0) reciprocal
    >>> QuantSpec.parse(str(spec)) == spec == QuantSpec.from_dict(spec.to_dict())
    True
    """

    # Without defaults, which `__init__` has: where a class has a default, torch before 2.13 compiles False as True.
    format: Format
    granularity: Granularity
    symmetric: bool
    arithmetic: Arithmetic
    gradient: Gradient
    scale: ScaleSpec
    rounding: Rounding
    offset: OffsetSpec | None

    def __init__(  # noqa: PLR0913  all but the first two by name
        self,
        format: Format | str,
        granularity: Granularity | None = None,
        *,
        symmetric: bool | None = None,
        arithmetic: Arithmetic = Arithmetic.DIVIDE,
        gradient: Gradient = Gradient.CODE_RANGE,
        scale: ScaleSpec | None = None,
        rounding: Rounding = Rounding.NEAREST_EVEN,
        offset: OffsetSpec | None = None,
    ) -> None:
        fmt = parse_format(format)
        if symmetric is None:
            symmetric = offset is None and _symmetric_by_default(fmt, arithmetic)
        try:
            # Only what is none yet: before torch 2.13 a compiled graph ends where an enumeration is called.
            arithmetic = arithmetic if isinstance(arithmetic, Arithmetic) else Arithmetic(arithmetic)
            gradient = gradient if isinstance(gradient, Gradient) else Gradient(gradient)
            rounding = rounding if isinstance(rounding, Rounding) else Rounding(rounding)
        except ValueError as error:
            raise SpecError(
                f"{error}; expected an Arithmetic, a Gradient and a Rounding, such as Arithmetic.DIVIDE"
            ) from error
        for name, value in {
            "format": fmt,
            "granularity": PerTensor() if granularity is None else granularity,
            "symmetric": symmetric,
            "arithmetic": arithmetic,
            "gradient": gradient,
            "scale": ScaleSpec() if scale is None else scale,
            "rounding": rounding,
            "offset": offset,
        }.items():
            object.__setattr__(self, name, value)
        self._check()
        str(self)  # which keeps it

    def _check(self) -> None:
        if not isinstance(self.granularity, Granularity):
            raise SpecError(f"granularity must be a Granularity such as PerChannel(0), got {self.granularity!r}")
        if not isinstance(self.symmetric, bool):
            raise SpecError(f"symmetric must be True, False or None, got {self.symmetric!r}")
        if not isinstance(self.scale, ScaleSpec):
            raise SpecError(f"scale must be a ScaleSpec such as ScaleSpec('float8_e8m0fnu'), got {self.scale!r}")
        if self.format.quant_min > 0:
            raise SpecError(f"{self.format} has no code for 0.0: it is a format for scales, see ScaleSpec")
        scale, plain = self.scale, self.scale.rounding is ScaleRounding.NEAREST and self.scale.is_exact
        if scale != ScaleSpec() and (
            not self.arithmetic.is_linear or not (self.symmetric or plain or scale.format is None)
        ):
            raise SpecError(
                f"scales in {scale.format or scale} are for symmetric specifications with DIVIDE or RECIPROCAL; "
                "leave the scale format out, or change the specification"
            )
        if not self.symmetric and scale.rounding is not ScaleRounding.NEAREST:
            raise SpecError(f"{scale} is for symmetric specifications; leave {scale.rounding.value} out")
        if scale.rounding is ScaleRounding.HALF_RANGE and not self.format.signed:
            raise SpecError(f"{scale} is for signed formats; leave half_range out for {self.format}")
        if self.arithmetic.has_two_scales and not self.format.has_zero_point:
            raise SpecError(f"{self.arithmetic} is for integers such as int8_narrow, but {self.format} is not one")
        if self.offset is not None and not isinstance(self.offset, OffsetSpec):
            raise SpecError(f"offset must be an OffsetSpec such as OffsetSpec('float16'), got {self.offset!r}")
        if self.offset is not None and (self.symmetric or not self.format.has_zero_point or self.format.signed):
            raise SpecError(
                f"an offset needs symmetric=False and codes that begin at 0, got {self.format} with symmetric="
                f"{self.symmetric}; use an unsigned integer such as uint4, or leave the offset out"
            )
        if self.symmetric:
            return
        if not self.format.has_zero_point:
            raise SpecError(f"{self.format} has no zero point: symmetric=False is for integer formats only")
        if not self.arithmetic.is_linear:
            raise SpecError(f"{self.arithmetic} has no zero point; use DIVIDE or RECIPROCAL with symmetric=False")

    @property
    def is_plain(self) -> bool:
        """Whether scales are float32 numbers, chosen by the largest magnitudes, and there are no offsets."""
        return self.offset is None and self.scale == ScaleSpec()

    @property
    def has_signed_scales(self) -> bool:
        """Whether scales in float32 may be negative: under offsets of either sign, as in MLX's files."""
        return self.offset is not None and self.offset.needs_values

    @property
    def needs_values(self) -> bool:
        """Whether parameters follow from all values of a group; its range, extended to contain 0, is not enough."""
        return any(own is not None and own.needs_values for own in (self.scale, self.offset))

    @property
    def shared_granularities(self) -> list[Granularity]:
        """The granularities of the shared scales of scales, and of offsets; [] if there are none."""
        return [own.granularity for own in (self.scale, self.offset) if own is not None and own.granularity is not None]

    def __hash__(self) -> int:
        # Kept, because every call looks things up by its specification and the hash visits a dozen objects.
        kept = self.__dict__.get("_hash")
        if kept is None:
            kept = hash(tuple(getattr(self, f.name) for f in fields(self)))
            object.__setattr__(self, "_hash", kept)
        return kept

    def __getstate__(self) -> dict[str, Any]:
        """The fields without the hash, which differs between processes."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        str(self)

    def replace(self, **changes: Any) -> QuantSpec:
        """The same specification with some fields changed.

        >>> print(QuantSpec("int8").replace(granularity=PerChannel(0)))
        int8 per_channel(0)
        """
        return replace(self, **changes)

    def regrouped(self, change: Callable[[Granularity], Granularity]) -> QuantSpec:
        """The same specification with changed granularities: of the tensor, of its scales and of its offsets.

        >>> spec = QuantSpec.parse("int4 per_block(-1:32) scale=uint6@per_block(-1:8)/float16")
        >>> print(spec.regrouped(lambda granularity: granularity.remap_axes({-1: 0})))
        int4 per_block(0:32) scale=uint6@per_block(0:8)/float16
        """
        offset = None if self.offset is None else self.offset.regrouped(change)
        return self.replace(granularity=change(self.granularity), scale=self.scale.regrouped(change), offset=offset)

    def __str__(self) -> str:
        # Made once, by __init__: a compiler that made the text itself would take its numbers for varying ones.
        kept = getattr(self, "_text", None)
        if kept is None:
            words = [str(self.format), str(self.granularity)]
            if self.offset is None and self.symmetric != _symmetric_by_default(self.format, self.arithmetic):
                words.append("symmetric" if self.symmetric else "asymmetric")
            words += [
                value.value
                for value, default in (
                    (self.arithmetic, Arithmetic.DIVIDE),
                    (self.gradient, Gradient.CODE_RANGE),
                    (self.rounding, Rounding.NEAREST_EVEN),
                )
                if value is not default
            ]
            words += [str(stored) for stored in (self.scale, self.offset) if stored is not None and str(stored)]
            kept = " ".join(words)
            object.__setattr__(self, "_text", kept)
        return kept

    def __repr__(self) -> str:
        try:
            return f"QuantSpec.parse({self.to_text()!r})"
        except SpecError:  # of a format that is not registered, which no text gives back
            return f"<QuantSpec {self}>"

    @staticmethod
    def parse(text: str) -> QuantSpec:
        """The specification that a text describes: a format, a granularity, then options that differ from the defaults.

        Raises:
            SpecError: a word is unknown; the message lists the nearest words.
        """
        if torch.compiler.is_compiling():
            return _parse(text)  # a trace must not change what outlives it
        found = _parsed.get(text)
        if found is None:
            found = _parse(text)
            if len(_parsed) >= _MOST_PARSED:
                _parsed.clear()
            _parsed[text] = found
        return found

    def to_text(self) -> str:
        """`str(self)` for files and graphs; it is checked that the text is read back as this specification.

        Raises:
            SpecError: the format is not registered, or is not what is registered under its name.
        """
        text = str(self)
        try:
            same = QuantSpec.parse(text) == self
        except SpecError:
            same = False
        if not same:
            raise SpecError(
                f"the specification {text!r} would be read back as another specification or not at all; make its "
                "format known by fakequant.register_format before it is saved or exported, also where it is loaded"
            )
        return text

    def to_dict(self) -> dict[str, Any]:
        """A plain dict of strings and booleans, for JSON."""
        return {
            "format": str(self.format),
            "granularity": str(self.granularity),
            "symmetric": self.symmetric,
            "arithmetic": self.arithmetic.value,
            "gradient": self.gradient.value,
            "scale": str(self.scale),
            "rounding": self.rounding.value,
            **({} if self.offset is None else {"offset": str(self.offset)}),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> QuantSpec:
        """The specification from a dict of `to_dict`; missing keys get defaults. Raises SpecError for other dicts."""
        check_keys(values, [f.name for f in fields(cls)], "a specification", SpecError)
        options = dict(values)
        try:
            options["granularity"] = parse_granularity(options.get("granularity", "per_tensor"))
            options["arithmetic"] = Arithmetic(options.get("arithmetic", "divide"))
            options["gradient"] = Gradient(options.get("gradient", "code_range"))
            options["scale"] = ScaleSpec.parse(options.get("scale", ""))
            options["rounding"] = Rounding(options.get("rounding", "nearest_even"))
            options["offset"] = OffsetSpec.parse(options["offset"]) if options.get("offset") else None
            return cls(**options)
        except (ValueError, TypeError) as error:
            raise SpecError(f"cannot read the specification {values}: {error}") from error


def _symmetric_by_default(fmt: Format, arithmetic: Arithmetic) -> bool:
    return fmt.signed or not fmt.has_zero_point or not arithmetic.is_linear


_WORDS: dict[str, dict[str, Any]] = {
    "symmetric": {"symmetric": True},
    "asymmetric": {"symmetric": False},
    **{value.value: {"arithmetic": value} for value in Arithmetic},
    **{value.value: {"gradient": value} for value in Gradient},
    **{value.value: {"rounding": value} for value in Rounding},
}

_STORED: dict[str, type[ScaleSpec]] = {one.word: one for one in (ScaleSpec, OffsetSpec)}

# A plain dict, emptied when it is full: torch.compile warns about functools.lru_cache.
_parsed: dict[str, QuantSpec] = {}
_MOST_PARSED = 1024  # of about 1 kB each


def _parse(text: str) -> QuantSpec:
    if not text.strip():
        raise SpecError("an empty text is not a specification; give a format at least, such as 'int8'")
    format_name, *words = text.split()
    options: dict[str, Any] = {}
    for position, word in enumerate(words):
        key, equals, _ = word.partition("=")
        option = {key: _STORED[key].parse(word)} if equals and key in _STORED else _WORDS.get(word)
        if option:
            (name,) = option
            if name in options:
                raise SpecError(f"{word!r} in the specification {text!r}: {name} was said before; say it once")
            options.update(option)
        elif position == 0:
            options["granularity"] = parse_granularity(word)
        else:
            raise SpecError(
                f"cannot read {word!r} in the specification {text!r}{nearest(word, list(_WORDS))}. The order is: a "
                "format, a granularity without blanks, options; such as 'uint8 per_channel(0,1) reciprocal'"
            )
    return QuantSpec(format_name, **options)


def as_spec(spec: QuantSpec | str) -> QuantSpec:
    """The specification that a text describes; a `QuantSpec` is returned as it is. Raises SpecError for others."""
    if isinstance(spec, QuantSpec):
        return spec
    if not isinstance(spec, str):
        raise SpecError(f"expected a QuantSpec or its text, such as 'int8 per_channel(0)', got {spec!r}")
    return QuantSpec.parse(spec)
