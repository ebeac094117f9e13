"""Write the pictures of README.md and docs/accuracy.md: `python docs/pictures.py`, in seconds.

The first one draws rows of benchmarks/results/accuracy.json; the second runs `fakequant.ptq.improve` on a layer.
"""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fakequant as fq
from fakequant.files import write_whole
from fakequant.model.run.outputs import decibels

DOCS = Path(__file__).parent
ERRORS, LAYER = DOCS / "error-by-bits.svg", DOCS / "layer.svg"
_RESULTS = DOCS.parent / "benchmarks" / "results" / "accuracy.json"
_BITS = {"W3 per channel": "3", "W4 per channel": "4", "W4, groups of 128": "4.125", "W4, groups of 32": "4.5"}
"""Bits per weight with scales of 16 bits; weights alone are quantized in these cases."""
_SHOWN = {
    "fakequant nearest": "rounding to nearest",
    "ModelOpt AWQ": "ModelOpt, AWQ",
    "Brevitas GPTQ": "Brevitas, GPTQ",
    "Brevitas Qronos": "Brevitas, Qronos",
    "llm-compressor GPTQ": "llm-compressor, GPTQ",
    "AutoRound": "AutoRound",
    "fakequant fast": 'fakequant, improve("fast")',
    "fakequant best": 'fakequant, improve("best")',
}


def errors() -> str:
    """The signal over the error of the output over bits per weight, of the byte-level language model, by library."""
    rows: list[dict[str, Any]] = json.loads(_RESULTS.read_text())["rows"]
    figure, axes = _figure(5.4)
    for number, (by, label) in enumerate(_SHOWN.items()):
        own = [row for row in rows if row["model"] == "byte transformer" and row["by"] == by and row["case"] in _BITS]
        points = {row["case"]: decibels(row["error"]) for row in own if row["error"]}
        cases = [case for case in _BITS if case in points]
        ours = by.startswith("fakequant") and by != "fakequant nearest"
        style: dict[str, Any] = {"marker": "os^vDP*X"[number], "linewidth": 2.4 if ours else 1.2}
        axes.plot(
            [[*_BITS].index(case) for case in cases],
            [points[case] for case in cases],
            label=label,
            color=f"C{number}",
            linestyle="-" if ours else ":",
            **style,
        )
    axes.set_xticks(range(len(_BITS)), [f"{bits} bits\n{case}" for case, bits in _BITS.items()], fontsize=9)
    axes.set_ylabel("signal over error of the output, dB")
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=9, ncols=3, loc="outside lower center")
    return _svg(figure)


def layer() -> str:
    """How far outputs of a layer in INT3 are from those in float, before and after `improve`."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64))
    mixed = torch.randn(16, 64)
    batches = [torch.randn(128, 16) @ mixed + 0.3 * torch.randn(128, 64) for _ in range(8)]
    model = fq.prepare(copy.deepcopy(net), fq.Config("INT3", (fq.Rule(weight=fq.TensorConfig("int3 per_channel(0)")),)))
    new = torch.randn(512, 16) @ mixed + 0.3 * torch.randn(512, 64)
    with torch.no_grad():
        wanted, nearest = net(new).flatten(), model(new).flatten()
        fq.ptq.improve(model, batches, progress=False)
        chosen = model(new).flatten()
    figure, axes = _figure(4.2)
    for y, label, color in ((nearest, "rounding to nearest", "C0"), (chosen, "after improve", "C3")):
        share = float((y - wanted).square().sum() / wanted.square().sum())
        axes.scatter(wanted[::64], (y - wanted)[::64], s=4, color=color, label=f"{label}: {decibels(share):.1f} dB")
    axes.set_xlabel("output of the layer in float, on new data")
    axes.set_ylabel("its error in INT3")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, loc="upper left")
    return _svg(figure)


def _figure(height: float) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "fakequant", "svg.fonttype": "none", "font.size": 11}
    return plt.subplots(figsize=(7.0, height), layout="constrained")


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


if __name__ == "__main__":
    write_whole(ERRORS, errors().encode())
    write_whole(LAYER, layer().encode())
