"""Write docs/formats.md and the tables of README.md, docs/engines/index.md and docs/onnx.md: `make docs`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from fakequant import FloatFormat, Format, IntegerFormat, export_onnx, formats, verify_onnx
from fakequant.errors import ExportError
from fakequant.export.capability import Style
from fakequant.files import write_whole
from fakequant.model.calibration.calibrate import calibrate
from fakequant.model.config import Config
from fakequant.model.engine import known_engines
from fakequant.model.prepare import prepare
from fakequant.model.presets import presets
from fakequant.numerics.formats.floats import ExponentFormat, TableFormat

PAGE = Path(__file__).with_name("formats.md")
STYLES_PAGE = Path(__file__).with_name("onnx.md")
ENGINES_PAGE = Path(__file__).with_name("engines") / "index.md"
README = Path(__file__).parents[1] / "README.md"
ENGINES_BEGIN, ENGINES_END = "<!-- engines:begin -->", "<!-- engines:end -->"
STYLES_BEGIN, STYLES_END = "<!-- styles:begin -->", "<!-- styles:end -->"
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


def readme() -> str:
    """The front page with its table of engines written anew: one row for each page of an engine."""
    rows = {}
    for engine in dict.fromkeys(known_engines().values()):
        if engine.page not in rows:
            title = ENGINES_PAGE.with_name(f"{engine.page}.md").read_text().partition("\n")[0].removeprefix("# ")
            rows[engine.page] = f"| [{title}](docs/engines/{engine.page}.md) | {engine.bound} |"
    return _with_table(README, ["| engine | its results, beside the simulation |", "|---|---|", *rows.values()])


def _with_table(page: Path, rows: list[str]) -> str:
    """A page with other rows between the marks of engines."""
    before, rest = page.read_text().split(ENGINES_BEGIN)
    return "\n".join([before + ENGINES_BEGIN, *rows, ENGINES_END + rest.split(ENGINES_END)[1]])


def engines_page() -> str:
    """The page about engines with its table written anew, from what each engine says of itself."""
    rows = ["| engine | for | `target=` | presets to begin with | files by | results |", "|---|---|---|---|---|---|"]
    for engine in dict.fromkeys(known_engines().values()):
        title = engine.name
        if engine.page:
            title = ENGINES_PAGE.with_name(f"{engine.page}.md").read_text().partition("\n")[0].removeprefix("# ")
            title = f"[{title}]({engine.page}.md)"
        names = ", ".join(f"`{name}`" for name in (engine.name, *engine.aliases))
        first = f"`{engine.others}*`" if engine.others else ", ".join(f"`{kind[0]}`" for kind in engine.kinds)
        file = f"`{engine.export}`" if engine.export else f"`deliver`, {engine.files}" if engine.files else "-"
        if engine.files in {style.value for style in Style}:
            file += f", style `{engine.files}`"
        rows.append(f"| {title} | {engine.serves} | {names} | {first} | {file} | {engine.bound} |")
    return _with_table(ENGINES_PAGE, rows)


def styles_page() -> str:
    """The page about ONNX with a table written anew."""
    before, rest = STYLES_PAGE.read_text().split(STYLES_BEGIN)
    after = rest.split(STYLES_END)[1]
    rows = ["| preset | style | weights | activations | opset | verified in |", "|---|---|---|---|---|---|"]
    rows += [row for name, config in presets().items() if name == config.name for row in style_rows(config)]
    return "\n".join([before + STYLES_BEGIN, *rows, STYLES_END + after])


def style_rows(config: Config) -> list[str]:
    """How a preset comes out in every style; styles that say it alike share a row."""
    found: dict[str, list[str]] = {}
    for style in Style:
        found.setdefault(_style_cells(config, style), []).append(style.value)
    return [f"| {config.name} | {', '.join(styles)} | {cells} |" for cells, styles in found.items()]


def _style_cells(config: Config, style: Style) -> str:
    """Weights, activations, operator set and what ran the file, of one linear layer that was exported and verified."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 256, generator=generator)
    model = prepare(torch.nn.Sequential(torch.nn.Linear(256, 8)), config)
    calibrate(model, [x])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            written = export_onnx(model, x, path, dynamic_shapes=({0: "batch"},), style=style.value)
        except ExportError as error:
            first = str(error).splitlines()[1]
            who, reason = first.split("._")[1].split("_quantizer: ")
            return f"refused, {who}: {reason.removeprefix(f'{_spec(config, who)}: ').split(';')[0]} | | |"
        report = verify_onnx(path, model, [x])
    if not report.exact:
        raise SystemExit(f"{config.name} in the style {style.value} is not exact:\n{report}")
    said = {q.quantizer: q.expressed for q in written.quantizers}
    activations = said.get("0._input_quantizer", "float")
    runtime = report.runtime.rpartition(" ")[0].removeprefix("the ")
    return f"{said['0._weight_quantizer']} | {activations} | {written.opset} | {runtime}"


def _spec(config: Config, who: str) -> str:
    tensor = config.rules[0].input if who == "input" else config.rules[0].weight
    return "" if tensor is None else str(tensor.spec)


if __name__ == "__main__":
    write_whole(PAGE, page().encode())
    write_whole(ENGINES_PAGE, engines_page().encode())
    write_whole(README, readme().encode())
    write_whole(STYLES_PAGE, styles_page().encode())
