"""The table of layers: the ten worst, then all in network order, folded by the blocks that repeat."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby

from fakequant.model.analysis.html import breakable
from fakequant.report.data import Layer

WORST = 10
BAD, FAIR = 20.0, 30.0
"""Below these ratios in dB the noise is a tenth, or a thirtieth, of the signal's size; the colours change there."""
_LONGEST = 60.0
_HEADER = ("layer", "type", "input; weight", "alone, dB", "input, dB", "weight, dB", "bits", "share")


def layer_tables(layers: Sequence[Layer]) -> str:
    """The ten worst layers, and all layers in network order."""
    total = sum(layer.bytes for layer in layers) or 1
    worst = sorted((layer for layer in layers if math.isfinite(layer.worst)), key=lambda layer: layer.worst)[:WORST]
    parts = [
        "<p>Signal over quantization noise: <em>alone</em>, of the model's output with only this layer quantized; "
        "<em>input</em> and <em>weight</em>, of its own tensors. <em>bits</em> counts codes and scales per weight; "
        "<em>share</em> is of the bytes of quantized weights. "
        f'<span class="bad">Below {BAD:g} dB</span>, <span class="fair">below {FAIR:g} dB</span>, '
        '<span class="good">above</span>.</p>'
    ]
    if any(layer.weight_sqnr == math.inf for layer in layers):
        parts.append(
            "<p>A weight that reads <em>exact</em> already has the values of its codes, as after "
            "<code>fq.ptq.improve</code>. The error against the weights before that is in none of these columns.</p>"
        )
    if len(layers) > WORST:
        parts += [f"<h3>The {len(worst)} worst</h3>", layer_table(worst, total), "<h3>All, in network order</h3>"]
    return "".join(parts) + f'<div id="rows">{folded(layers, lambda some: layer_table(some, total))}</div>'


def folded(layers: Sequence[Layer], render: Callable[[Sequence[Layer]], str]) -> str:
    """Layers in their order; those of a block that repeats are folded under its name."""
    block = blocks([layer.name for layer in layers])
    parts = []
    for name, some in groupby(layers, key=lambda layer: block[layer.name]):
        own = list(some)
        if not name:
            parts.append(f"<div>{render(own)}</div>")
            continue
        worst = min(own, key=lambda layer: layer.worst)
        shown = f"worst {decibels(worst.worst)} dB" if math.isfinite(worst.worst) else ""
        heat = "".join(f'<i class="{grade(layer.worst)}"></i>' for layer in own)
        parts.append(
            f"<details><summary><code>{breakable(name)}</code> "
            f'<span class="soft">{len(own)} layers{", " if shown else ""}{shown}</span>'
            f'<span class="heat" aria-hidden="true">{heat}</span></summary>{render(own)}</details>'
        )
    return "".join(parts)


def blocks(names: Sequence[str]) -> dict[str, str]:
    """The block of each layer: its path up to the first number, if several layers share it; else "".

    >>> blocks(["stem", "body.0.a", "body.0.b", "body.1.a", "body.1.b", "head.0"])["body.1.b"]
    'body.1'
    """
    found = {name: match.group(1) if (match := re.match(r"(.*?(?:^|\.)\d+)\.", name)) else "" for name in names}
    sizes = Counter(found.values())
    return {name: block if sizes[block] > 1 else "" for name, block in found.items()}


def layer_table(layers: Sequence[Layer], total: int) -> str:
    """The rows of some layers."""
    header = "".join(f"<th>{cell}</th>" for cell in _HEADER)
    rows = "".join(_row(layer, total) for layer in layers)
    return f'<table class="layers single"><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>'


def _row(layer: Layer, total: int) -> str:
    bits = f"{8 * layer.bytes / layer.elements:.2f}" if layer.elements else ""
    share = f"{layer.bytes / total:.1%}" if layer.bytes else ""
    specs = f"{layer.input or 'float'}; {layer.weight}" if layer.weight else layer.input or "float"
    return (
        f"<tr><th scope=row><code>{breakable(layer.name)}</code></th>"
        f"<td>{escape(layer.type)}</td><td>{escape(specs)}</td>"
        f"{measured(layer.alone)}{measured(layer.input_sqnr)}{measured(layer.weight_sqnr)}"
        f"<td>{bits}</td><td>{share}</td></tr>"
    )


def measured(value: float | None) -> str:
    """A cell with a ratio in dB, coloured, with a bar."""
    if value is None:
        return "<td></td>"
    length = 100 * min(max(value, 0.0), _LONGEST) / _LONGEST
    return f'<td class="{grade(value)}">{decibels(value)}<i style="width:{length:.0f}%"></i></td>'


def grade(value: float) -> str:
    """The colour of a ratio in dB."""
    return "bad" if value < BAD else "fair" if value < FAIR else "good"


def decibels(value: float) -> str:
    """A ratio as text; "exact" without noise."""
    return "exact" if value == math.inf else f"{value:.1f}"
