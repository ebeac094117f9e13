"""The sections of a page; each gives HTML, or "" if it has nothing to show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from fakequant.model.analysis.html import breakable, html_table
from fakequant.report.advice import cut
from fakequant.report.data import (
    Channels,
    Distribution,
    Improved,
    ReportData,
    Section,
    Size,
    Verification,
    accuracy_cells,
)
from fakequant.report.histograms import CHOSEN, readable
from fakequant.report.html import charts
from fakequant.report.layers import WORST, layer_tables


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
        lines.append(f"<p>{charts.legend(index)}{escape(method)} {ends}{cost}{flag}</p>")
    caption = f"<figcaption><code>{breakable(shown.name)}</code>{together}</figcaption>"
    return f"<figure>{caption}{charts.histogram(shown)}{''.join(lines)}</figure>"


def _share(share: float) -> str:
    return "nothing" if not share else f"{share:.2%} of the values" if share >= 0.0001 else "under 0.01% of the values"


def _channels(shown: Channels) -> str:
    note = f"{shown.channels} channels; the largest is {shown.spread:.3g} times the median"
    return (
        f"<figure><figcaption><code>{breakable(shown.name)}, weight</code></figcaption>{charts.channels(shown)}"
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
    best = {point.label for point in charts.frontier(drawn)}
    rows = [
        (one.label, "-", "-", one.failed)
        if one.failed
        else (one.label, f"{one.bits:.2f}", f"{one.shown(one.metric):.6g}", _BEST if one.label in best else "")
        for one in data.curve
    ]
    metric = data.curve_metric or data.metric
    shown = table(("form", "bits per weight", metric, ""), rows, numbers=(1, 2))
    return (charts.curve(drawn, metric) if drawn else "") + shown


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
