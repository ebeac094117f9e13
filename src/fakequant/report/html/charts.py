"""Small pictures as SVG in the colours of the page, a few hundred bytes each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from fakequant.report.data import Channels, Distribution, Point

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
