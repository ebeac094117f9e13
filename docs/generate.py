"""Write docs/formats.md from the formats that the package knows: `make docs`."""

from __future__ import annotations

from pathlib import Path

import torch

from fakequant import FloatFormat, Format, IntegerFormat, formats
from fakequant.files import write_whole
from fakequant.numerics.floats import ExponentFormat
from fakequant.numerics.tables import TableFormat

PAGE = Path(__file__).with_name("formats.md")
_FEW = 16
_INTRODUCTION = """\
# Number formats

Names are those of ml_dtypes. A format is a value: `fakequant.parse_format("float6_e2m3fn")`, or one of your own,
`fakequant.FloatFormat("float8_e2m5fn", 2, 5, Specials.NONE)`. This page is written by `make docs` from the code.
"""


def page() -> str:
    """The page as Markdown."""
    known = list(formats().values())
    parts = [_INTRODUCTION, "## Integers\n", _integers([f for f in known if isinstance(f, IntegerFormat)])]
    parts.append(
        "\nThe lowest code is left out by `_narrow`: `int8_narrow` is -127 to 127. Any other range that contains 0 is "
        "a format too: `int[-100,37]`.\n"
    )
    parts.append("## Floats\n")
    parts += [_float(f) for f in known if isinstance(f, FloatFormat)]
    parts.append("## Scales\n")
    parts += [_exponent(f) for f in known if isinstance(f, ExponentFormat)]
    parts.append("## Tables\n")
    parts += [_table(f) for f in known if isinstance(f, TableFormat)]
    return "\n".join(parts)


def _integers(known: list[IntegerFormat]) -> str:
    rows = [f"| `{f}` | {f.bits} | {f.low} | {f.high} | {_dtype(f)} |" for f in known]
    return "\n".join(["| name | bits | lowest | highest | stored in |", "|---|---|---|---|---|", *rows])


def _float(fmt: FloatFormat) -> str:
    smallest_normal = 2.0**fmt.grid.min_exponent
    smallest = smallest_normal * 2.0**-fmt.mantissa_bits
    lines = [
        f"### `{fmt}`\n",
        f"* bits: 1 sign, {fmt.exponent_bits} exponent, {fmt.mantissa_bits} mantissa; bias {fmt.exponent_bias}",
        f"* special codes: {fmt.specials.value}",
        f"* largest {fmt.quant_max:g}, smallest normal {smallest_normal:g}, smallest {smallest:g}",
        f"* codes are stored in {_dtype(fmt)}",
    ]
    if 1 << fmt.bits - 1 <= 2 * _FEW:
        codes = torch.arange(1 << fmt.bits - 1, dtype=torch.uint8)
        values = fmt.from_storage(codes.view(fmt.storage), torch.float32).tolist()
        lines.append(f"* values, with both signs: `[{', '.join(f'{v:g}' for v in values)}]`")
    return "\n".join(lines) + "\n"


def _exponent(fmt: ExponentFormat) -> str:
    return (
        f"### `{fmt}`\n\n* {fmt.bits} exponent bits, no sign, no mantissa: 2**-{fmt.exponent_bias} to "
        f"2**{fmt.exponent_bias}; no zero, so that it is for scales only\n* codes are stored in {_dtype(fmt)}\n"
    )


def _table(fmt: TableFormat) -> str:
    values = ", ".join(f"{v:.6g}" for v in fmt.values)
    return f"### `{fmt}`\n\n* {fmt.bits} bits; codes are stored in {_dtype(fmt)}\n* values: `[{values}]`\n"


def _dtype(fmt: Format) -> str:
    return f"`{str(fmt.storage).removeprefix('torch.')}`"


if __name__ == "__main__":
    write_whole(PAGE, page().encode())
