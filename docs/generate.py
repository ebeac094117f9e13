"""Write docs/formats.md, docs/support.md, and tables of README.md and three other pages: `make docs`."""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fakequant import FloatFormat, Format, IntegerFormat, export_onnx, formats, verify_onnx
from fakequant.errors import ConfigError, ExportError
from fakequant.export.capability import Style
from fakequant.files import write_whole
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Config
from fakequant.model.engine import Engine, known_engines
from fakequant.model.prepare import prepare
from fakequant.model.presets import presets
from fakequant.model.summary import summary
from fakequant.nn.quantizer import quantizers
from fakequant.numerics.formats.floats import ExponentFormat, TableFormat

PAGE = Path(__file__).with_name("formats.md")
GUIDE = Path(__file__).with_name("guide.md")
STYLES_PAGE = Path(__file__).with_name("onnx.md")
SUPPORT_PAGE = Path(__file__).with_name("support.md")
ENGINES_PAGE = Path(__file__).with_name("engines") / "index.md"
README = Path(__file__).parents[1] / "README.md"
ENGINES_BEGIN, ENGINES_END = "<!-- engines:begin -->", "<!-- engines:end -->"
TREE_BEGIN, TREE_END = "<!-- tree:begin -->", "<!-- tree:end -->"
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
    """The front page with its line of engines written anew: a link to each page of an engine."""
    links = []
    for page in dict.fromkeys(engine.page for engine in known_engines().values() if engine.page):
        title = ENGINES_PAGE.with_name(f"{page}.md").read_text().partition("\n")[0].removeprefix("# ")
        links.append(f"[{title}](docs/engines/{page}.md)")
    return _with_table(README, [f"{'; '.join(links)}."])


def _with_table(page: Path, rows: list[str], begin: str = ENGINES_BEGIN, end: str = ENGINES_END) -> str:
    """A page with other rows between two marks."""
    before, rest = page.read_text().split(begin)
    return "\n".join([before + begin, *rows, end + rest.split(end)[1]])


class _Between(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(64, 64), nn.Linear(64, 64), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


_TOKENS = (2, 8, 64)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(64, 64), _TOKENS),
    "Conv1d": (lambda: nn.Conv1d(8, 8, 3), (2, 8, 16)),
    "Conv2d": (lambda: nn.Conv2d(8, 8, 3), (2, 8, 16, 16)),
    "Conv3d": (lambda: nn.Conv3d(8, 8, 3), (2, 8, 6, 6, 6)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(8, 8, 3), (2, 8, 16, 16)),
    "LSTM": (lambda: nn.LSTM(64, 64), _TOKENS),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(64, 2, 64, batch_first=True), _TOKENS),
}
"""A layer, alone in a model, and the shape of its input."""
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + x.flip(-1),
    "mul": lambda x: x * x.flip(-1),
    "cat": lambda x: torch.cat([x, x.flip(-1)], 1),
    "matmul": lambda x: x @ x.mT @ x,
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "layer_norm": lambda x: F.layer_norm(x, (64,)),
    "mean": lambda x: x.mean(1, keepdim=True),
}
FAMILIES = """
    INT8 INT8_AFFINE INT8_PER_TOKEN INT8_WEIGHT_ONLY INT4_WEIGHT_ONLY INT4_GROUP32 INT4_GROUP128 NF4_WEIGHT_ONLY FP8
    MXFP8 MXFP4 NVFP4 NVFP4_WEIGHT_ONLY GGUF_Q4_K MLX_4BIT
""".split()  # noqa: SIM905
_SUPPORT = """\
# What each engine takes

What `fq.prepare(model, preset, example, target=...)` does, tried by `make docs`, which writes this page. "yes": it gets
quantizers. "float": it stays in float. A number: `prepare` refuses, by the reason below. What was run, and how near it
was, is on the page of the [engine](engines/index.md); [ONNX](onnx.md) has each preset in each style.
"""


def support_page() -> str:
    """The page about layers, functions and formats by engine, from what `prepare` does."""
    reasons: list[str] = []
    engines = {engine.page: engine for engine in reversed(known_engines().values())}  # the first of each page
    engines = {page: engines[page] for page in sorted(engines) if page}

    def table(heading: str, columns: Sequence[str], cell: Callable[[Engine, str], str]) -> list[str]:
        rows = [f"## {heading}\n", f"| engine, preset | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for page, engine in engines.items():
            cells = " | ".join(cell(engine, column) for column in columns)
            rows.append(f"| [{engine.name}](engines/{page}.md), `{_first(engine)}` | {cells} |")
        return [*rows, ""]

    def tried(engine: Engine, module: nn.Module, x: Tensor, preset: str, part: str) -> str:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = prepare(module.eval(), preset, x, target=engine)
        except ConfigError as error:
            reason = _reason(error)
            if reason not in reasons:
                reasons.append(reason)
            return str(reasons.index(reason) + 1)
        return "yes" if any(part in name for name in quantizers(model)) else "float"

    def layer(engine: Engine, name: str) -> str:
        make, shape = LAYERS[name]
        return tried(engine, nn.Sequential(make()), torch.randn(shape), _first(engine), "")

    def function(engine: Engine, name: str) -> str:
        return tried(engine, _Between(FUNCTIONS[name]), torch.randn(_TOKENS), _first(engine), f"_sites.{name}_")

    def family(engine: Engine, preset: str) -> str:
        if engine.takes(preset):
            return "runs"
        return tried(engine, nn.Sequential(nn.Linear(256, 256)), torch.randn(2, 8, 256), preset, "")

    lines = [_SUPPORT, *table("Layers", [*LAYERS], layer), *table("Functions in a forward", [*FUNCTIONS], function)]
    lines += table("Formats, of a linear layer", FAMILIES, family)
    lines += ['"runs": the engine is known to run it. "yes": `prepare` does not refuse it.\n']
    return "\n".join([*lines, *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)), ""])


def _first(engine: Engine) -> str:
    return f"{engine.others}Q8_0" if engine.others else engine.presets[0]


_SPECIFICATION = r"(?:u?int|float|nf)\d\S*(?: \S*(?:per_|scale=|offset=)\S*| reciprocal| dynamic,?)*"


def _reason(error: ConfigError) -> str:
    """Why an engine refuses a model, without the names and specifications of its parts."""
    last = re.sub(r"^.*cannot hold [^:]*: ", "", str(error).strip().splitlines()[-1])
    last = re.sub(r"^\s*[\w.]+: ", "", last)
    last = re.sub(rf"^(?:its (?:input|weight) is )?{_SPECIFICATION}:? (?:and )?", "", last)
    return re.split(r"; |, and this is |, got |, but \w+ is not one", last)[0]


class _Encoder(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.key = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.value, self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _language_model() -> nn.Module:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.support.vision import import_torchvision

    import_torchvision()  # transformers imports it, and its operators may be of another torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig.from_dict({**sizes, "num_attention_heads": 4, "use_cache": False}))


_HAVE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "A network of convolutions": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32)),
        lambda: torch.randn(2, 8, 8, 8),
    ),
    "An encoder of texts, images or sound": (_Encoder, lambda: torch.randn(_TOKENS)),
    "A language model": (_language_model, lambda: torch.arange(16).view(2, 8)),
    "A recurrent network": (lambda: nn.Sequential(nn.LSTM(64, 64)), lambda: torch.randn(_TOKENS)),
    "Linear layers, as for tables": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)),
        lambda: torch.randn(2, 64),
    ),
}
"""What a user has: a small model of the kind, and its input."""
_KINDS = [*_HAVE]
_ONLY = {"networks of convolutions": _KINDS[:1], "language models": _KINDS[2:3], "Hugging Face models": _KINDS[1:3]}
"""What engines serve that say in these words that they serve no other models."""


def guide() -> str:
    """The guide with its tree: what a user has, where it runs, and the aim lead to a preset that `prepare` took."""
    engines = {engine.page: engine for engine in reversed(known_engines().values())}  # the first of each page
    lines = list[str]()
    for kind, (make, example) in _HAVE.items():
        rows = list[str]()
        for page, engine in sorted(engines.items()):
            served = next((kinds for words, kinds in _ONLY.items() if words in engine.serves), _KINDS)
            taken = [name for name in engine.presets if _quantizes(engine, name, make(), example())]
            if kind in served and page and taken:
                title = ENGINES_PAGE.with_name(f"{page}.md").read_text().partition("\n")[0].removeprefix("# ")
                names = " | ".join(name and f"`{name}`" for name in _by_aim(engine, taken))
                rows.append(f'| [{title}](engines/{page}.md) | `"{engine.name}"` | {names} |')
        heading = ["| it runs on | target | smallest | fastest | nearest to float |", "|---" * 5 + "|"]
        lines += [f"<details markdown><summary>{kind}</summary>", "", *heading, *rows, "", "</details>"]
    return _with_table(GUIDE, lines, TREE_BEGIN, TREE_END)


def _quantizes(engine: Engine, preset: str, module: nn.Module, x: Tensor) -> bool:
    """Whether an engine takes a model in a preset, and has quantized weights then."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = prepare(module.eval(), preset, x, target=engine)
    except ConfigError:
        return False
    return any("weight" in name for name in quantizers(model))


def _by_aim(engine: Engine, names: list[str]) -> tuple[str, str, str]:
    """Of presets the smallest of 4 bits or more, the fastest, "" where no order is known, and the nearest to float."""
    measured = {name: _bits_and_error(name) for name in names}
    smallest = min((name for name in names if measured[name][0] >= 4), key=lambda name: measured[name][0])
    in_order = sum(any(name in names for name in kind) for kind in engine.kinds) > 1 or len(names) == 1
    return smallest, names[0] if in_order else "", min(names, key=lambda name: measured[name][1])


@cache
def _bits_and_error(preset: str) -> tuple[float, float]:
    """Bits per weight of a linear layer, and the error of its output for inputs with large channels after a ReLU."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(256, 256)
    with torch.no_grad():
        layer.weight.normal_(generator=generator)
    x = torch.randn(64, 256, generator=generator).relu() * torch.linspace(-2, 2, 256).exp()
    expected = layer(x)
    model = prepare(layer, preset)
    calibrate(model, [x])
    return summary(model).bits_per_weight or 0.0, (model(x) - expected).square().mean().item()


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
    rows = ["| preset | style | weights | activations | opset | verified in |", "|---|---|---|---|---|---|"]
    rows += [row for name, config in presets().items() if name == config.name for row in style_rows(config)]
    return _with_table(STYLES_PAGE, rows, STYLES_BEGIN, STYLES_END)


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
    write_whole(GUIDE, guide().encode())
    write_whole(SUPPORT_PAGE, support_page().encode())
    write_whole(STYLES_PAGE, styles_page().encode())
