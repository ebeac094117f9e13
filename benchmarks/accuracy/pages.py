"""The page of what accuracy algorithms win back."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_HEAD = """# What accuracy algorithms win back, measured

Written by `make accuracy`. Four small models, trained by the benchmark itself: a residual CNN and a depthwise-separable
CNN on handwritten digits, a vision transformer on the same digits, and a byte-level language model of source text. Each
row quantizes the same tensors in every library: the weights, and with A8 or A4 the inputs, of all linear layers (per
channel, and in groups in networks of convolutions, theirs too: a group is whole kernels of as many channels as fit,
which no other library here has); all else stays in float. Every library gets the same 8 batches to choose by. The first
figure is the squared error of the model's output on other data as a share of that by rounding to nearest here (`max`
ranges, for weights below 4 bits those of the least error); the second is accuracy in percent (top 1, or the next byte).

Source of the algorithms: `fakequant.ptq` here; ModelOpt {modelopt}; Brevitas {brevitas}, GPTQ and Qronos with
activation order and quantized inputs; on the language model, which they get in the shape of a model of transformers,
llm-compressor {llmcompressor}, GPTQ with static activation order, and AutoRound {auto_round} with 200 steps for each
block. A library without a case has an empty cell.

"""


def write_page(path: Path, scores: dict[str, float], rows: list[dict[str, Any]]) -> None:
    """Write the page from the rows of a run."""
    names = {"modelopt": "nvidia-modelopt", "brevitas": "brevitas", "llmcompressor": "llmcompressor"}
    text = _HEAD.format(**{key: _version(name) for key, name in (names | {"auto_round": "auto-round"}).items()})
    for model, score in scores.items():
        text += f"## {model}: {score} % in float\n\n{_table([row for row in rows if row['model'] == model])}\n"
    path.write_text(text)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def _table(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(row["by"] for row in rows))
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for case in dict.fromkeys(row["case"] for row in rows):
        own = {row["by"]: row for row in rows if row["case"] == case}
        nearest = own["fakequant nearest"]["error"]
        best = min(row["error"] for row in own.values() if "error" in row)
        lines.append(f"| {case} | {' | '.join(_cell(own.get(name), nearest, best) for name in names)} |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any] | None, nearest: float, best: float) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return "fails"
    share = f"{row['error'] / nearest:.3f}"
    return f"{f'**{share}**' if row['error'] == best else share}, {row['score']} %"
