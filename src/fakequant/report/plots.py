"""Plots as SVG elements for an HTML page: without external references, in the text colour of the page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from fakequant.report.data import Distribution

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A placeholder that `_svg` replaces by the text colour of the page, in light and dark mode.
_INK = "#123456"
# The palette of Okabe and Ito, which colour-blind readers can distinguish; every range also has its own dashes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
# The longest bar: above this ratio the noise is negligible.
_EXACT_DECIBELS = 100.0
_POINTS_PER_INCH = 72


def sqnr_bars(decibels: Mapping[str, float]) -> str:
    """Draw signal-to-noise ratios in dB as horizontal bars, worst first; returns SVG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    rows = sorted(decibels.items(), key=lambda item: item[1])
    figure, axes = _figure(8.0, 0.6 + 0.22 * len(rows))
    lengths = [min(max(value, 0.0), _EXACT_DECIBELS) for _, value in rows]
    axes.barh(range(len(rows)), lengths, color=_COLOURS[0], height=0.7)
    for position, (length, (_, value)) in enumerate(zip(lengths, rows, strict=True)):
        text = "exact" if value == math.inf else f"{value:.1f}"
        axes.text(length, position, f" {text}", va="center", fontsize=8, color=_INK)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8, parse_math=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, max([*lengths, 1.0]) * 1.12)
    axes.set_xlabel("dB", fontsize=8)
    axes.tick_params(axis="y", length=0)
    return _svg(figure, "signal-to-noise ratio of every quantizer in decibels")


def distribution_plot(distribution: Distribution) -> str:
    """Draw a histogram with a logarithmic count axis and the chosen ranges; returns SVG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure, axes = _figure(4.4, 2.5)
    floor = 0.5  # below 1, so that a bin with one value is visible
    heights = [max(count, floor) for count in distribution.counts]
    axes.stairs(heights, distribution.edges, baseline=floor, fill=True, color=_INK, alpha=0.35, linewidth=0)
    axes.set_yscale("log")
    axes.set_ylim(bottom=floor)
    for index, (method, (low, high)) in enumerate(distribution.ranges.items()):
        style: dict[str, Any] = {"color": _COLOURS[index % len(_COLOURS)], "linestyle": _DASHES[index % len(_DASHES)]}
        axes.axvline(high, linewidth=1.4, label=f"{method} {_interval(low, high)}", **style)
        # A range that begins at zero does not clip below, so a line would only hide the bars.
        if low < 0:
            axes.axvline(low, linewidth=1.4, **style)
    if distribution.ranges:
        axes.legend(fontsize=7, frameon=False, labelcolor=_INK, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
    axes.set_ylabel("count", fontsize=8)
    axes.tick_params(labelsize=7)
    return _svg(figure, f"distribution of {distribution.name} with the chosen ranges")


def _interval(low: float, high: float) -> str:
    return f"±{high:.4g}" if low == -high else f"{low:.4g} to {high:.4g}"


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    axes = figure.add_subplot()
    axes.patch.set_alpha(0.0)
    axes.tick_params(colors=_INK, labelsize=8)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_edgecolor(_INK)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    return figure, axes


def _svg(figure: Figure, description: str) -> str:
    """Return a figure as an svg element."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    # Text as paths does not depend on the reader's fonts; the fixed salt makes the file reproducible.
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "fakequant"}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    # matplotlib numbers some ids per figure, so they would repeat in a page. Referenced ids are hashes and stay.
    text = re.sub(r'\sid="[a-zA-Z][\w.]*_\d+"', "", text)
    width, height = figure.get_size_inches() * _POINTS_PER_INCH
    opening = (
        f'<svg role="img" aria-label="{escape(description)}" viewBox="0 0 {width:g} {height:g}" '
        f'style="width:{width:g}pt">'
    )
    body = text[text.index(">", text.index("<svg")) + 1 :]
    return opening + body.replace(_INK, "currentColor")
