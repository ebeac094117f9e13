"""The sections of a page; each gives HTML, or "" if it has nothing to show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from fakequant.model.analysis.summary import breakable, html_table
from fakequant.report.advice import WORST, cut, layer_tables
from fakequant.report.data import (
    Channels,
    Distribution,
    Improved,
    Point,
    ReportData,
    Section,
    Size,
    Verification,
    accuracy_cells,
)
from fakequant.report.measure import CHOSEN, readable

_COLOURS = ("var(--mark)", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#0072b2")
"""The colours of Okabe and Ito, distinct to colour-blind readers; every range also has its own dashes."""
_DASHES = ("", "6 3", "2 2", "8 2 2 2", "1 3", "4 1")
_WIDTH, _HEIGHT = 300, 70


def histogram(shown: Distribution) -> str:
    """Bars of the logarithms of counts, with the ends of the ranges; the scale is text below."""
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


def legend(index: int) -> str:
    """The line by which a range is drawn, for its text."""
    return f'<svg class="key" viewBox="0 0 22 4" aria-hidden="true"><path d="M0 2H22" {_stroke(index)}/></svg>'


def channels(shown: Channels) -> str:
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
    return f'{picture}<div class="axis"><span>channel 0, ±{top:.3g}</span><span>{shown.channels - 1}</span></div>'


def curve(points: Sequence[Point], metric: str) -> str:
    """The metric over bits per weight; the forms that no other one beats in both are joined by a line."""
    wide, high, left, bottom = 420, 220, 46, 30
    bits, values = [p.bits for p in points], [p.metric for p in points if math.isfinite(p.metric)]
    low, top = min(values, default=0.0), max(values, default=1.0)
    span = (top - low) or 1.0
    most = max(bits) * 1.05 or 1.0

    def place(point: Point) -> tuple[float, float]:
        share = (max(point.metric, low) - low) / span if not math.isnan(point.metric) else 0.0
        return left + (wide - left - 70) * point.bits / most, 12 + (high - bottom - 18) * (1 - min(share, 1.0))

    line = " ".join("{:.4g},{:.4g}".format(*place(point)) for point in frontier(points))
    parts = [
        f'<path d="M{left} 4V{high - bottom}H{wide}" fill="none" stroke="currentColor" opacity=".5"/>',
        f'<polyline points="{line}" fill="none" stroke="var(--bar)" stroke-width="2"/>',
    ]
    taken: list[tuple[float, float]] = []
    for point in points:
        x, y = place(point)
        text_y = y + 4
        while any(abs(text_y - other) < 11 and abs(x - at) < 110 for at, other in taken):
            text_y += 11
        taken.append((x, text_y))
        parts.append(f'<circle cx="{x:.4g}" cy="{y:.4g}" r="4" fill="var(--mark)"/>')
        parts.append(f'<text x="{x + 7:.4g}" y="{text_y:.4g}">{escape(point.label)}</text>')
    for value in (low, top):
        y = 12 + (high - bottom - 18) * (1 - (value - low) / span)
        parts.append(f'<text x="{left - 4}" y="{y + 4:.4g}" text-anchor="end">{points[0].shown(value):.4g}</text>')
    parts.append(f'<text x="{left}" y="{high - 10}">0</text>')
    parts.append(f'<text x="{wide}" y="{high - 10}" text-anchor="end">bits per weight, to {most:.3g}</text>')
    return f'<div class="curve">{_svg(f"{metric} over bits per weight", "".join(parts), wide, high)}</div>'


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats with fewer bits and a better metric, by bits."""
    best, found = -math.inf, []
    for point in sorted(points, key=lambda p: (p.bits, -p.metric)):
        if point.metric > best:
            best = point.metric
            found.append(point)
    return found


def _stroke(index: int) -> str:
    colour, dashes = _COLOURS[index % len(_COLOURS)], _DASHES[index % len(_DASHES)]
    return f'stroke="{colour}" stroke-width="1.5"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def _svg(label: str, content: str, width: int = _WIDTH, height: int = _HEIGHT) -> str:
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {width} {height}">{content}</svg>'


def _accuracy(data: ReportData) -> str:
    if not data.accuracy:
        return ""
    header = ("format", "method", data.metric, f"change against {data.accuracy[0].format}", "")
    return table(header, accuracy_cells(data.accuracy), numbers=(2, 3))


def _layers(data: ReportData) -> str:
    if not data.layers:
        return ""
    kept = (
        "<p>Weights were chosen by the error of their layers and keep the chosen values, so that only what was done "
        "later is noise of weights here.</p>"
    )
    said = paragraphs([data.alone_on] if data.alone_on else [])
    return (kept if data.improvement else "") + said + layer_tables(data.layers)


def _ranges(data: ReportData) -> str:
    if not data.distributions and not data.channels:
        return ""
    ratio = {layer.name: layer.worst for layer in data.layers}
    figures = [(_place(shown.name, ratio), _distribution(shown)) for shown in data.distributions]
    figures += [(ratio.get(shown.name, 0.0), _channels(shown)) for shown in data.channels]
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


def _place(name: str, ratio: dict[str, float]) -> float:
    return ratio.get(name.rpartition(", ")[0], 0.0)


def _distribution(shown: Distribution) -> str:
    together = f' <span class="soft">{shown.groups} groups together, widest range</span>' if shown.groups > 1 else ""
    lines = []
    for index, (method, (low, high)) in enumerate(shown.ranges.items()):
        ends = f"±{high:.4g}" if low == -high else f"{low:.4g} to {high:.4g}"
        clip = shown.clips.get(method)
        cost = f": clips {_share(clip.share)}, {clip.sqnr:.1f}&nbsp;dB" if clip else ""
        flag = (
            f' <span class="bad">the whole range would give {shown.whole:.1f}&nbsp;dB</span>'
            if (method == CHOSEN and cut(shown))
            else ""
        )
        lines.append(f"<p>{legend(index)}{escape(method)} {ends}{cost}{flag}</p>")
    caption = f"<figcaption><code>{breakable(shown.name)}</code>{together}</figcaption>"
    return f"<figure>{caption}{histogram(shown)}{''.join(lines)}</figure>"


def _share(share: float) -> str:
    return "nothing" if not share else f"{share:.2%} of the values" if share >= 0.0001 else "under 0.01% of the values"


def _channels(shown: Channels) -> str:
    note = f"{shown.channels} channels; the largest is {shown.spread:.3g} times the median"
    return (
        f"<figure><figcaption><code>{breakable(shown.name)}, weight</code></figcaption>{channels(shown)}"
        f"<p>{note}</p></figure>"
    )


def _improvement(data: ReportData) -> str:
    if not data.improvement:
        return ""
    before, after = (sum(getattr(one, name) for one in data.improvement) for name in ("before", "after"))
    left = f"{after / before:.0%} of the error of rounding to nearest is left." if before else ""
    steps = list(dict.fromkeys(step for one in data.improvement for step in one.steps))
    rows = [_improved_row(one, steps) for one in data.improvement]
    header = ("layer", "error by rounding to nearest", *steps, "as chosen", "")
    shown = table(header, rows, numbers=range(1, len(header) - 1))
    return f"<p>{left}</p>" + (
        shown if len(rows) <= WORST else f"<details><summary>by layer</summary>{shown}</details>"
    )


def _improved_row(one: Improved, steps: Sequence[str]) -> tuple[str, ...]:
    """The error before, after each of the steps, and as chosen."""
    numbers = [one.before, *(one.steps.get(step) for step in steps), one.after]
    shown = ["-" if one.note or number is None else f"{number:.2e}" for number in numbers]
    return one.layer or "(model)", *shown, one.note or (f"{one.after / one.before:.0%} left" if one.before else "")


_BEST = "best for its bits"


def _curve(data: ReportData) -> str:
    if not data.curve:
        return ""
    drawn = [point for point in data.curve if not point.failed]
    best = {point.label for point in frontier(drawn)}
    rows = [
        (one.label, "-", "-", one.failed)
        if one.failed
        else (one.label, f"{one.bits:.2f}", f"{one.shown(one.metric):.6g}", _BEST if one.label in best else "")
        for one in data.curve
    ]
    metric = data.curve_metric or data.metric
    shown = table(("form", "bits per weight", metric, ""), rows, numbers=(1, 2))
    return (curve(drawn, metric) if drawn else "") + shown


def _sizes(data: ReportData) -> str:
    def ratio(size: Size) -> str:
        return f"{size.float_bytes / size.bytes:.2f}" if size.float_bytes and size.bytes else ""

    rows = [
        (size.name, f"{size.bytes:,}", "" if size.float_bytes is None else f"{size.float_bytes:,}", ratio(size))
        for size in data.sizes
    ]
    return table(("what", "bytes", "bytes in float32", "times smaller"), rows, numbers=(1, 2, 3)) if rows else ""


def _left(data: ReportData) -> str:
    parts = []
    for model, operations in data.unquantized.items():
        items = "".join(f"<li><code>{breakable(operation)}</code></li>" for operation in operations)
        shown = f"<ul>{items}</ul>" if items else "<p>No operation.</p>"
        if len(operations) > WORST:
            shown = f"<details><summary>{len(operations)} operations</summary>{shown}</details>"
        parts.append(f"<h3>{escape(model)}</h3>{shown}")
    return "".join(parts)


def _verification(data: ReportData) -> str:
    return "".join(_verified_model(verification) for verification in data.verifications)


def _verified_model(verification: Verification) -> str:
    differing = sum(node.differing for node in verification.nodes)
    elements = sum(node.elements for node in verification.nodes)
    if verification.exact and not verification.passed:
        said = '<p class="bad">Exact, but ONNX Runtime loses more by default than quantization does.</p>'
    elif verification.exact:
        said = f'<p class="good">Exact: 0 of {elements:,} compared elements differ.</p>'
    elif verification.nodes:
        faults = sum(bool(node.fault) for node in verification.nodes)
        said = (
            f'<p class="bad">Not exact: {differing:,} of {elements:,} compared elements differ, '
            f"and {faults} quantizers or outputs have another fault.</p>"
        )
    else:
        said = '<p class="bad">Nothing was compared.</p>'
    rows = [
        (readable(node.name), node.spec, f"{node.elements:,}", f"{node.differing:,}", node.fault)
        for node in verification.nodes
    ]
    shown = table(("quantizer", "specification", "elements", "differing", ""), rows, numbers=(2, 3)) if rows else ""
    if len(rows) > WORST and verification.exact:
        shown = f"<details><summary>{len(rows)} quantizers</summary>{shown}</details>"
    return f"<h3>{escape(verification.title)}</h3>{said}{paragraphs(verification.notes)}{shown}"


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
    """A table that scrolls in itself where the page is narrow."""
    return f'<div class="wide">{html_table(header, rows, numbers=numbers)}</div>'


SECTIONS: dict[Section, Callable[[ReportData], str]] = {
    Section.ACCURACY: _accuracy,
    Section.LAYERS: _layers,
    Section.RANGES: _ranges,
    Section.IMPROVEMENT: _improvement,
    Section.CURVE: _curve,
    Section.SIZES: _sizes,
    Section.LEFT: _left,
    Section.VERIFICATION: _verification,
    Section.ENVIRONMENT: _environment,
}
