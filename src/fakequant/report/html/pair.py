"""Two runs side by side on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from fakequant.model.analysis.html import breakable
from fakequant.report.data import Layer, ReportData, accuracy_cells
from fakequant.report.html.page import document
from fakequant.report.html.sections import paragraphs, table
from fakequant.report.html.verdict import verdict
from fakequant.report.layers import decibels, folded, measured

_HEADER = ("layer", "type", "A; B", "A, dB", "B, dB", "B less A, dB")


def render_pair(first: ReportData, second: ReportData) -> str:
    """The page of two runs: A, and B against it.

    >>> page = render_pair(ReportData("one"), ReportData("other"))
    >>> "A: one" in page, "B: other" in page
    (True, True)
    """
    runs = {"A": first, "B": second}
    heads = "".join(f"<h2>{name}: {escape(run.title)}</h2>{verdict(run)}" for name, run in runs.items())
    missing = paragraphs(["Missing: neither run measured it."], "soft")
    sections = "".join(
        f'<section id="{name}"><h2>{title}</h2>{body or missing}</section>'
        for name, title, body in (
            ("accuracy", "Accuracy", _accuracy(runs)),
            ("layers", "Layers", _layers(first.layers, second.layers)),
            ("sizes", "Sizes", _sizes(runs)),
        )
    )
    return document(f"{first.title} / {second.title}", f"{heads}<main>{sections}</main>")


def _accuracy(runs: dict[str, ReportData]) -> str:
    metrics = dict.fromkeys(run.metric for run in runs.values() if run.accuracy)
    rows = [(name, *cells) for name, run in runs.items() for cells in accuracy_cells(run.accuracy)]
    if not rows:
        return ""
    header = ("run", "format", "method", " / ".join(metrics), "change against float", "")
    return table(header, rows, numbers=(3, 4))


def _sizes(runs: dict[str, ReportData]) -> str:
    rows = [(name, size.name, f"{size.bytes:,}") for name, run in runs.items() for size in run.sizes]
    return table(("run", "what", "bytes"), rows, numbers=(2,)) if rows else ""


def _layers(first: Sequence[Layer], second: Sequence[Layer]) -> str:
    if not first and not second:
        return ""
    own, other = ({layer.name: layer for layer in layers} for layers in (first, second))
    every = [*first, *(layer for layer in second if layer.name not in own)]

    def rows(some: Sequence[Layer]) -> str:
        header = "".join(f"<th>{cell}</th>" for cell in _HEADER)
        body = "".join(_row(layer, own.get(layer.name), other.get(layer.name)) for layer in some)
        return f'<table class="layers pair"><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>'

    explanation = (
        "Signal over quantization noise of the model's output with only this layer quantized, where both runs measured "
        "that; else of the layer's own tensors."
    )
    return f'<p>{explanation}</p><div id="rows">{folded(every, rows)}</div>'


def _row(layer: Layer, one: Layer | None, two: Layer | None) -> str:
    ratios = _alike(one, two)
    specs = "; ".join(
        "not quantized" if f is None else f"{f.input or 'float'} x {f.weight or 'float'}" for f in (one, two)
    )
    change = "<td></td>"
    if ratios[0] is not None and ratios[1] is not None:
        gain = 0.0 if ratios[0] == ratios[1] else ratios[1] - ratios[0]
        kind = "good" if gain > 0.5 else "bad" if gain < -0.5 else "soft"
        change = f'<td class="{kind}">{"+" if gain > 0 else ""}{decibels(gain) if gain else "0.0"}</td>'
    return (
        f"<tr><th scope=row><code>{breakable(layer.name)}</code></th>"
        f"<td>{escape(layer.type)}</td><td>{escape(specs)}</td>"
        f"{measured(ratios[0])}{measured(ratios[1])}{change}</tr>"
    )


def _alike(one: Layer | None, two: Layer | None) -> list[float | None]:
    """The ratios of a layer in both runs by one measure: alone only if both runs measured that."""
    if one is not None and two is not None and (one.alone is None or two.alone is None):
        one, two = replace(one, alone=None), replace(two, alone=None)
    return [None if found is None else found.worst for found in (one, two)]
