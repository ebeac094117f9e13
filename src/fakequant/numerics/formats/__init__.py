"""Number formats: a table with a line for each format, and functions to find them by name, as in ml_dtypes."""

from __future__ import annotations

from fakequant.errors import SpecError, nearest
from fakequant.numerics.formats.floats import (
    MAX_NAMED_BITS,
    ExponentFormat,
    FloatFormat,
    Format,
    IntegerFormat,
    Specials,
    TableFormat,
)

INT8 = IntegerFormat.of(8)
UINT8 = IntegerFormat.of(8, signed=False)
INT4 = IntegerFormat.of(4)
FLOAT8_E4M3FN = FloatFormat("float8_e4m3fn", 4, 3, Specials.NAN_ONLY)
FLOAT8_E5M2 = FloatFormat("float8_e5m2", 5, 2, Specials.IEEE)
FLOAT8_E4M3FNUZ = FloatFormat("float8_e4m3fnuz", 4, 3, Specials.NEGATIVE_ZERO_IS_NAN, bias=8)
FLOAT8_E5M2FNUZ = FloatFormat("float8_e5m2fnuz", 5, 2, Specials.NEGATIVE_ZERO_IS_NAN, bias=16)
FLOAT8_E4M3B11FNUZ = FloatFormat("float8_e4m3b11fnuz", 4, 3, Specials.NEGATIVE_ZERO_IS_NAN, bias=11)
FLOAT8_E4M3 = FloatFormat("float8_e4m3", 4, 3, Specials.IEEE)
FLOAT8_E3M4 = FloatFormat("float8_e3m4", 3, 4, Specials.IEEE)
FLOAT6_E3M2FN = FloatFormat("float6_e3m2fn", 3, 2, Specials.NONE)
FLOAT6_E2M3FN = FloatFormat("float6_e2m3fn", 2, 3, Specials.NONE)
FLOAT4_E2M1FN = FloatFormat("float4_e2m1fn", 2, 1, Specials.NONE)
FLOAT16 = FloatFormat("float16", 5, 10, Specials.IEEE)
BFLOAT16 = FloatFormat("bfloat16", 8, 7, Specials.IEEE)
FLOAT8_E8M0FNU = ExponentFormat("float8_e8m0fnu")
# Quantiles of a normal distribution as float32: QLoRA, arXiv 2305.14314, appendix E, as bitsandbytes stores them.
NF4 = TableFormat(
    "nf4",
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
)
# The table of llama.cpp's IQ4_NL and IQ4_XS, without 0.
IQ4_NL = TableFormat("iq4_nl", (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
BINARY = TableFormat("binary", (-1.0, 1.0))
# A mid-rise quantizer: as many values below 0 as above.
INT2_MIDRISE = TableFormat("int2_midrise", (-1.5, -0.5, 0.5, 1.5))

_registry: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        *(IntegerFormat.of(bits) for bits in range(1, MAX_NAMED_BITS + 1)),
        *(IntegerFormat.of(bits, signed=False) for bits in range(1, MAX_NAMED_BITS + 1)),
        *(value for value in list(globals().values()) if isinstance(value, FloatFormat | ExponentFormat | TableFormat)),
    )
}


def register_format(fmt: Format) -> Format:
    """Register a format, so that texts can name it, and return it.

    Raises:
        SpecError: another format already has the name.

    >>> float6 = register_format(FloatFormat("example_float6_e4m1", 4, 1, Specials.NONE))
    >>> fake_quantize(torch.tensor([1.2, 5.0]), "example_float6_e4m1", scale=1.0)
    tensor([1., 4.])
    >>> del _registry["example_float6_e4m1"]  # of the example only
    """
    if _registry.get(fmt.name, fmt) != fmt:
        raise SpecError(f"a different format is already registered as {fmt.name!r}; choose another name")
    _registry[fmt.name] = fmt
    return fmt


def formats() -> dict[str, Format]:
    """All registered formats by name.

    >>> formats()["int8"]
    IntegerFormat(low=-128, high=127)
    """
    return dict(_registry)


def parse_format(fmt: str | Format) -> Format:
    """The format called `fmt`; a `Format` is returned as it is. Raises SpecError for an unknown name.

    >>> parse_format("uint4")
    IntegerFormat(low=0, high=15)
    """
    if isinstance(fmt, Format):
        return fmt
    found = _registry.get(fmt) or IntegerFormat.parse(fmt)
    if found is not None:
        return found
    first, *others = fmt.split() or [fmt]
    if others and (first in _registry or IntegerFormat.parse(first)):
        raise SpecError(f"unknown format {fmt!r}; a text with more than a format is read by QuantSpec.parse({fmt!r})")
    raise SpecError(f"unknown format {fmt!r}{nearest(fmt, list(_registry))}")
