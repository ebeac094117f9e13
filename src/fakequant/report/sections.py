"""The sections of a page; each function returns HTML, or "" if there is nothing to show."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from fakequant.export.verdict import OPTIMISED_ERROR
from fakequant.ptq.trial import Compared
from fakequant.report.data import (
    DECIBELS,
    Channels,
    Distribution,
    Layer,
    ReportData,
    Section,
    accuracy_cells,
    checked_in,
)
from fakequant.report.measure import CHOSEN, readable
from fakequant.text import breakable, html_table

_COLOURS = ("var(--mark)", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#0072b2")
"""The colours of Okabe and Ito, distinct to colour-blind readers; every range also has its own dashes."""
_DASHES = ("", "6 3", "2 2", "8 2 2 2", "1 3", "4 1")
_WIDTH, _HEIGHT = 300, 70
WORST = 10
BAD, FAIR = 20.0, 30.0
"""The ratios in dB at which the colour changes: the noise is a tenth, and a thirtieth, of the signal's size."""
FAIR_LOSS, BAD_LOSS = 0.01, 0.05
"""Shares of the float model's metric: a loss up to the first is small, a loss above the second is large."""
_LONGEST = 60.0
_HEADER = ("layer", "type", "input; weight", "alone, dB", "input, dB", "weight, dB", "bits", "share")
_WORTH = 1.0
"""The page says that the whole range is better than the chosen range if it is better by so many decibels."""


_Show = Callable[[ReportData], str]
SECTIONS = dict[Section | str, tuple[_Show, bool]]()
"""By heading, in order, the function that shows a section, and whether a page leaves an empty section out."""


def section(heading: Section | str, *, optional: bool = False) -> Callable[[_Show], _Show]:
    """Add the decorated function to the sections of a page, in the order of the definitions."""

    def add(show: _Show) -> _Show:
        SECTIONS[heading] = show, optional
        return show

    return add


def histogram(shown: Distribution) -> str:
    """The picture of a histogram: bars of the logarithms of counts, the ends of the ranges, and the scale below."""
    lowest, highest = shown.edges[0], shown.edges[-1]
    tallest = math.log1p(max(shown.counts, default=0)) or 1.0
    heights = [round(_HEIGHT * (1 - math.log1p(count) / tallest)) for count in shown.counts]
    width = _WIDTH / max(len(heights), 1)
    path = "".join(f"V{height}H{(index + 1) * width:.4g}" for index, height in enumerate(heights))
    parts = [f'<path d="M0 {_HEIGHT}{path}V{_HEIGHT}Z" fill="var(--bar)" opacity=".55"/>']
    for index, (low, high) in enumerate(shown.ranges.values()):
        for end in (low, high):
            at = _WIDTH * (end - lowest) / (highest - lowest)
            if 0 < at < _WIDTH and end:
                parts.append(f'<path d="M{at:.4g} 0V{_HEIGHT}" {_stroke(index)}/>')
    picture = _svg(f"distribution of {shown.name} with the chosen ranges", "".join(parts))
    middle = "<span>0</span>" if lowest < 0 < highest and 0.2 < -lowest / (highest - lowest) < 0.8 else ""
    return f'{picture}<div class="axis"><span>{lowest:.3g}</span>{middle}<span>{highest:.3g}</span></div>'


def curve(points: Sequence[tuple[str, float, float]], best: Sequence[str], metric: str, sign: float) -> str:
    """A plot of the metric over bits per weight; a line joins the Pareto-optimal forms.

    Args:
        points: the name, bits and metric of each quantized form of the model.
        best: the names of the best forms, by bits.
        sign: -1 if figures of the metric are shown negated, else 1.
    """
    wide, high, left, bottom = 420, 220, 46, 30
    values = [value for _, _, value in points if math.isfinite(value)]
    low, top = min(values, default=0.0), max(values, default=1.0)
    span = (top - low) or 1.0
    most = max(bits for _, bits, _ in points) * 1.05 or 1.0

    def height(value: float) -> float:
        share = 0.0 if math.isnan(value) else min((max(value, low) - low) / span, 1.0)
        return 12 + (high - bottom - 18) * (1 - share)

    places = {name: (left + (wide - left - 70) * bits / most, height(value)) for name, bits, value in points}
    line = " ".join("{:.4g},{:.4g}".format(*places[name]) for name in best)
    parts = [
        f'<path d="M{left} 4V{high - bottom}H{wide}" fill="none" stroke="currentColor" opacity=".5"/>',
        f'<polyline points="{line}" fill="none" stroke="var(--bar)" stroke-width="2"/>',
    ]
    taken: list[tuple[float, float]] = []
    for name, (x, y) in places.items():
        text_y = y + 4
        while any(abs(text_y - other) < 11 and abs(x - at) < 110 for at, other in taken):
            text_y += 11
        taken.append((x, text_y))
        parts.append(f'<circle cx="{x:.4g}" cy="{y:.4g}" r="4" fill="var(--mark)"/>')
        parts.append(f'<text x="{x + 7:.4g}" y="{text_y:.4g}">{escape(name)}</text>')
    for value in (low, top):
        parts.append(f'<text x="{left - 4}" y="{height(value) + 4:.4g}" text-anchor="end">{sign * value:.4g}</text>')
    parts.append(f'<text x="{left}" y="{high - 10}">0</text>')
    parts.append(f'<text x="{wide}" y="{high - 10}" text-anchor="end">bits per weight, to {most:.3g}</text>')
    return f'<div class="curve">{_svg(f"{metric} over bits per weight", "".join(parts), wide, high)}</div>'


def _stroke(index: int) -> str:
    colour, dashes = _COLOURS[index % len(_COLOURS)], _DASHES[index % len(_DASHES)]
    return f'stroke="{colour}" stroke-width="1.5"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def _svg(label: str, content: str, width: int = _WIDTH, height: int = _HEIGHT) -> str:
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {width} {height}">{content}</svg>'


@section(Section.ACCURACY)
def _accuracy(data: ReportData) -> str:
    if not data.accuracy:
        return ""
    header = ("format", "method", data.metric, f"change against {data.accuracy[0].format}", "")
    return table(header, accuracy_cells(data.accuracy), numbers=(2, 3))


@section(Section.LAYERS)
def _layers(data: ReportData) -> str:
    """The HTML of the ten worst layers, and of all layers in network order."""
    layers = data.layers
    if not layers:
        return ""
    total = sum(layer.bytes for layer in layers) or 1
    header = "".join(f"<th>{cell}</th>" for cell in _HEADER)

    def row(layer: Layer) -> str:
        bits = f"{8 * layer.bytes / layer.elements:.2f}" if layer.elements else ""
        share = f"{layer.bytes / total:.1%}" if layer.bytes else ""
        specs = f"{layer.input or 'float'}; {layer.weight}" if layer.weight else layer.input or "float"
        return (
            f"<tr><th scope=row><code>{breakable(layer.name)}</code></th>"
            f"<td>{escape(layer.type)}</td><td>{escape(specs)}</td>"
            f"{measured(layer.alone)}{measured(layer.input_sqnr)}{measured(layer.weight_sqnr)}"
            f"<td>{bits}</td><td>{share}</td></tr>"
        )

    def shown(some: Sequence[Layer]) -> str:
        body = "".join(map(row, some))
        return f'<table class="layers single"><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>'

    kept = (
        "<p>Weights were chosen by the error of their layers and keep the chosen values, so that noise of weights "
        "comes from later steps alone.</p>"
    )
    parts = [
        kept if data.improvement else "",
        paragraphs([data.alone_on] if data.alone_on else []),
        "<p>Signal over quantization noise: <em>alone</em>, of the model's output with only this layer quantized; "
        "<em>input</em> and <em>weight</em>, of its own tensors. <em>bits</em> counts codes and scales per weight; "
        "<em>share</em> is of the bytes of quantized weights. "
        f'<span class="bad">Below {BAD:g} dB</span>, <span class="fair">below {FAIR:g} dB</span>, '
        '<span class="good">above</span>.</p>',
    ]
    if any(layer.weight_sqnr == math.inf for layer in layers):
        parts.append(
            "<p>A weight that reads <em>exact</em> already has the values of its codes, as after "
            "<code>fq.ptq.improve</code>. The error against the weights before that is in none of these columns.</p>"
        )
    if len(layers) > WORST:
        worst = ranked(data)[:WORST]
        parts += [f"<h3>The {len(worst)} worst</h3>", shown(worst), "<h3>All, in network order</h3>"]
    return "".join(parts) + f'<div id="rows">{folded(layers, shown)}</div>'


def ranked(data: ReportData) -> list[Layer]:
    """The layers with a measurement, the worst first."""
    return sorted((layer for layer in data.layers if math.isfinite(layer.worst)), key=lambda layer: layer.worst)


def folded(layers: Sequence[Layer], render: Callable[[Sequence[Layer]], str]) -> str:
    """The HTML of layers in their order; the layers of a block are folded under the name of the block."""
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


def measured(value: float | None) -> str:
    """The HTML of a table cell with a ratio in dB, coloured, with a bar."""
    if value is None:
        return "<td></td>"
    length = 100 * min(max(value, 0.0), _LONGEST) / _LONGEST
    return f'<td class="{grade(value)}">{decibels(value)}<i style="width:{length:.0f}%"></i></td>'


def grade(value: float) -> str:
    """The CSS class for the colour of a ratio in dB."""
    return "bad" if value < BAD else "fair" if value < FAIR else "good"


def decibels(value: float) -> str:
    """A ratio as text; "exact" without noise."""
    return "exact" if value == math.inf else f"{value:.1f}"


@section(Section.RANGES)
def _ranges(data: ReportData) -> str:
    if not data.distributions and not data.channels:
        return ""
    ratio = {layer.name: layer.worst for layer in data.layers}
    figures = [(ratio.get(one.name.rpartition(", ")[0], 0.0), _distribution(one)) for one in data.distributions]
    figures += [(ratio.get(one.name, 0.0), _channels(one)) for one in data.channels]
    ordered = [figure for _, figure in sorted(figures, key=lambda pair: pair[0])]
    first = 2 * WORST
    parts = [
        "<p>Values of inputs in the batches, counted on a logarithmic scale, and weights by output channel; those of "
        "the worst layers first. Values outside a range are clipped to it; values inside are rounded.</p>",
        f'<div class="grid">{"".join(ordered[:first])}</div>',
    ]
    if rest := ordered[first:]:
        parts.append(f'<details><summary>{len(rest)} more</summary><div class="grid">{"".join(rest)}</div></details>')
    return "".join(parts)


def _distribution(shown: Distribution) -> str:
    together = f' <span class="soft">{shown.groups} groups together, widest range</span>' if shown.groups > 1 else ""
    lines = []
    for index, (method, (low, high)) in enumerate(shown.ranges.items()):
        ends = f"±{high:.4g}" if low == -high else f"{low:.4g} to {high:.4g}"
        cost = flag = ""
        if clip := shown.clips.get(method):
            share = "under 0.01% of the values" if clip.share < 0.0001 else f"{clip.share:.2%} of the values"
            cost = f": clips {share if clip.share else 'nothing'}, {clip.sqnr:.1f}&nbsp;dB"
            if method == CHOSEN and shown.whole is not None and shown.whole - clip.sqnr > _WORTH:
                flag = f' <span class="bad">the whole range would give {shown.whole:.1f}&nbsp;dB</span>'
        key = f'<svg class="key" viewBox="0 0 22 4" aria-hidden="true"><path d="M0 2H22" {_stroke(index)}/></svg>'
        lines.append(f"<p>{key}{escape(method)} {ends}{cost}{flag}</p>")
    caption = f"<figcaption><code>{breakable(shown.name)}</code>{together}</figcaption>"
    return f"<figure>{caption}{histogram(shown)}{''.join(lines)}</figure>"


def _channels(shown: Channels) -> str:
    """The band from the smallest to the largest weight, channel by channel."""
    top = max([*map(abs, shown.highest), *map(abs, shown.lowest)], default=0.0) or 1.0
    step = _WIDTH / max(len(shown.highest), 1)

    def steps(values: Sequence[float], first: int) -> str:
        points = [round(_HEIGHT / 2 * (1 - value / top)) for value in values]
        order = range(len(points)) if first else range(len(points) - 1, -1, -1)
        return "".join(f"V{points[at]}H{(at + (1 if first else 0)) * step:.4g}" for at in order)

    path = f"M0 {_HEIGHT // 2}{steps(shown.highest, 1)}{steps(shown.lowest, 0)}Z"
    middle = f'<path d="M0 {_HEIGHT // 2}H{_WIDTH}" stroke="currentColor" opacity=".4"/>'
    picture = _svg(
        f"weights of {shown.name} by output channel",
        f'<path d="{path}" fill="var(--good)" opacity=".55"/>{middle}',
    )
    axis = f'<div class="axis"><span>channel 0, ±{top:.3g}</span><span>{shown.channels - 1}</span></div>'
    note = f"{shown.channels} channels; the largest is {shown.spread:.3g} times the median"
    return (
        f"<figure><figcaption><code>{breakable(shown.name)}, weight</code></figcaption>{picture}{axis}"
        f"<p>{note}</p></figure>"
    )


@section(Section.IMPROVEMENT, optional=True)
def _improvement(data: ReportData) -> str:
    if not data.improvement:
        return ""
    layers = sorted(data.improvement, key=lambda one: -one.after)
    before, after = (sum(getattr(one, name) for one in layers) for name in ("before", "after"))
    left = f"{after / before:.0%} of the error of rounding to nearest is left." if before else ""
    steps = list(dict.fromkeys(step for one in layers for step in one.steps))
    rows = []
    for one in layers:
        numbers = [one.before, *(one.steps.get(step) for step in steps), one.after]
        shown = ["-" if one.note or number is None else f"{number:.2e}" for number in numbers]
        share = f"{one.after / one.before:.0%} left" if one.before else ""
        rows.append([one.layer or "(model)", *shown, one.note or share])
    header = ("layer", "error by rounding to nearest", *steps, "as chosen", "")
    shown = table(header, rows, numbers=range(1, len(header) - 1))
    return f"<p>{left}</p>" + (
        shown if len(rows) <= WORST else f"<details><summary>by layer</summary>{shown}</details>"
    )


@section(Section.CURVE, optional=True)
def _curve(data: ReportData) -> str:
    """A plot and a table of the metric over bits; if a row lacks the metric, of the output's error in dB instead."""
    if data.curve is None:
        return ""
    succeeded = [row for row in data.curve.rows if not row.failed]
    with_metric = all(row.metric is not None for row in succeeded)
    sign = -1 if with_metric and data.curve.negated else 1

    def value(row: Compared) -> float:
        if with_metric and row.metric is not None:
            return row.metric
        return -10 * math.log10(row.error) if row.error > 0 else math.inf

    points = [(_form(row), row.bits, value(row)) for row in succeeded]
    best = [_form(row) for row in data.curve.curve()]
    metric = data.metric if with_metric else DECIBELS
    rows = [
        [_form(row), "-", "-", row.failed]
        if row.failed
        else [_form(row), f"{row.bits:.2f}", f"{sign * value(row):.6g}", "best for its bits" * (_form(row) in best)]
        for row in data.curve.rows
    ]
    shown = table(("form", "bits per weight", metric, ""), rows, numbers=(1, 2))
    return (curve(points, best, metric, sign) if points else "") + shown


def _form(row: Compared) -> str:
    return " ".join(filter(None, row.way))


@section(Section.SIZES)
def _sizes(data: ReportData) -> str:
    rows = []
    for size in data.sizes:
        ratio = f"{size.float_bytes / size.bytes:.2f}" if size.float_bytes and size.bytes else ""
        rows.append((size.name, f"{size.bytes:,}", "" if size.float_bytes is None else f"{size.float_bytes:,}", ratio))
    return table(("what", "bytes", "bytes in float32", "times smaller"), rows, numbers=(1, 2, 3)) if rows else ""


@section(Section.LEFT)
def _left(data: ReportData) -> str:
    parts = []
    for model, operations in data.unquantized.items():
        items = "".join(f"<li><code>{breakable(operation)}</code></li>" for operation in operations)
        shown = f"<ul>{items}</ul>" if items else "<p>No operation.</p>"
        if len(operations) > WORST:
            shown = f"<details><summary>{len(operations)} operations</summary>{shown}</details>"
        parts.append(f"<h3>{escape(model)}</h3>{shown}")
    return "".join(parts)


@section(Section.VERIFICATION)
def _verification(data: ReportData) -> str:
    parts = list[str]()
    for check in data.verifications:
        found = checked_in(check)
        elements, differing = sum(row.elements for row in found), sum(row.differing for row in found)
        if check.passed:
            said = f'<p class="good">Exact: 0 of {elements:,} compared elements differ.</p>'
        elif check.exact:
            fails = "does not run it" if getattr(check, "failed", []) else "that loads it computes something else"
            lost = "ONNX Runtime loses more by default than quantization does" if check.as_deployed is False else ""
            said = f'<p class="bad">Exact, but {lost or f"a program {fails}"}.</p>'
        elif found:
            said = (
                f'<p class="bad">Not exact: {differing:,} of {elements:,} compared elements differ, '
                f"and {sum(bool(row.fault) for row in found)} quantizers or outputs have another fault.</p>"
            )
        else:
            said = '<p class="bad">Nothing was compared.</p>'
        rows = [(readable(one.name), one.spec, f"{one.elements:,}", f"{one.differing:,}", one.fault) for one in found]
        shown = table(("quantizer", "specification", "elements", "differing", ""), rows, numbers=(2, 3)) if rows else ""
        if len(rows) > WORST and check.exact:
            shown = f"<details><summary>{len(rows)} quantizers</summary>{shown}</details>"
        notes = list(check.not_run)
        if check.inputs:  # a file of the first form has these sentences among its notes
            source = "of calibration" if check.inputs == "given" else f"of {check.inputs}"
            notes.insert(0, f"Compared in {check.runtime} on {check.counted} {source}.")
        notes += [f"Against torch, whose sums may have another order, {row}" for row in check.outputs]
        notes += [f"By ONNX Runtime's default optimisations, {row}" for row in check.optimised]
        if check.optimised_error is not None:
            notes.append(
                f"ONNX Runtime fails with its default optimisations: {check.optimised_error}; {OPTIMISED_ERROR}"
            )
        notes += check.deployment if check.inputs else []
        notes += getattr(check, "failed", [])  # of a delivery
        notes += [f"The outputs of {name} are not those of the model." for name in getattr(check, "far", [])]
        parts.append(f"<h3>{escape(Path(check.path).name)}</h3>{said}{paragraphs(notes)}{shown}")
    return "".join(parts)


@section(Section.ENVIRONMENT)
def _environment(data: ReportData) -> str:
    if not data.environment:
        return ""
    shown = table(("what", "value"), list(data.environment.items()))
    return f"<details><summary>{len(data.environment)} values</summary>{shown}</details>"


def paragraphs(sentences: Iterable[str], kind: str = "") -> str:
    """Each sentence as a paragraph, escaped."""
    opening = f'<p class="{kind}">' if kind else "<p>"
    return "".join(f"{opening}{breakable(sentence)}</p>" for sentence in sentences)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """A table that can be scrolled if the page is narrow."""
    return f'<div class="wide">{html_table(header, rows, numbers=numbers)}</div>'
