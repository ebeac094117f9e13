"""Render the report as one HTML file without external references."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from html import escape
from importlib.util import find_spec
from pathlib import Path

from fakequant.files import writable_file, write_whole
from fakequant.report.data import ReportData, Section, Size, Verification, accuracy_cells
from fakequant.report.plots import distribution_plot, sqnr_bars

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #fff; --line: #d0d7de; --zebra: #f6f8fa;
  --good: #116329; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4af; --paper: #0d1117; --line: #30363d;
  --zebra: #161b22; --good: #56d364; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 76rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { line-height: 1.2; margin: 0 0 .5rem; } h2 { margin: 2.5rem 0 .5rem; border-bottom: 1px solid var(--line); }
h3 { margin: 1.5rem 0 .5rem; font-size: 1rem; overflow-wrap: anywhere; }
p, ul { max-width: 46rem; } .soft { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); }
nav a { margin-right: 1rem; } a { color: inherit; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
tbody tr:nth-child(even) { background: var(--zebra); } .number { text-align: right; }
svg { max-width: 100%; height: auto; display: block; }
.graph { overflow: auto; max-height: 80vh; } .graph svg { max-width: none; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: 1rem 2rem; }
figure { margin: 0; break-inside: avoid; } figcaption { font-size: .85rem; overflow-wrap: anywhere; }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --paper: #fff; --line: #bbb; --zebra: #fff;
  --good: #116329; --bad: #b42318; } nav { display: none; } body { max-width: none; padding: 0; font-size: 10pt; }
  h2, h3 { break-after: avoid; } tr { break-inside: avoid; } }
"""
_NO_MATPLOTLIB = (
    "The plots are missing because matplotlib is not installed: <code>pip install fakequant[report]</code>."
)


def write_report(path: str | os.PathLike[str], data: ReportData) -> Path:
    """Write a report as one HTML file, whole or not at all.

    Args:
        path: the file; its folder is created if it does not exist.
        data: the content; parts may be missing.

    Returns:
        The path of the file.

    Raises:
        OutputError: the file cannot be written.
    """
    target = writable_file(path)
    # UTF-8 cannot encode lone surrogates, so they are escaped.
    write_whole(target, render(data).encode("utf-8", "backslashreplace"))
    return target


def render(data: ReportData) -> str:
    """Render a report as HTML text.

    >>> from fakequant.report import Accuracy, ReportData
    >>> page = render(ReportData("A model", accuracy=[Accuracy("float32", "", 98.5)]))
    >>> page.count("<h2"), "98.5" in page
    (8, True)
    """
    sections = "".join(_section(section, data) for section in Section)
    links = "".join(f'<a href="#{section.name.lower()}">{escape(section.value)}</a>' for section in Section)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(data.title)}</title><style>{_STYLE}</style></head><body>"
        f"<header><h1>{escape(data.title)}</h1>{_paragraphs(data.summary)}"
        f'<p class="soft">Written {datetime.now().astimezone():%Y-%m-%d %H:%M %Z} by fakequant.</p></header>'
        f"<nav>{links}</nav><main>{sections}</main></body></html>\n"
    )


def _section(section: Section, data: ReportData) -> str:
    body = _SECTIONS[section](data)
    if not body:
        reason = data.missing.get(section, "This run did not measure it.")
        body = f'<p class="soft">Missing: {escape(reason)}</p>'
    return f'<section id="{section.name.lower()}"><h2>{escape(section.value)}</h2>{body}</section>\n'


def _accuracy(data: ReportData) -> str:
    if not data.accuracy:
        return ""
    header = ("format", "method", data.metric, f"change against {data.accuracy[0].format}", "")
    return _table(header, accuracy_cells(data.accuracy), numbers=(2, 3))


def _sqnr(data: ReportData) -> str:
    measured = {model: decibels for model, decibels in data.sqnr.items() if decibels}
    if not measured:
        return ""
    explanation = "Power of each quantizer's input over the power of its quantization error, worst first."
    parts = [_paragraphs([explanation]), "" if _can_plot() else f"<p>{_NO_MATPLOTLIB}</p>"]
    for model, decibels in measured.items():
        if _can_plot():
            shown = sqnr_bars(decibels)
        else:
            rows = [(name, f"{value:.1f}") for name, value in sorted(decibels.items(), key=lambda item: item[1])]
            shown = _table(("quantizer", "dB"), rows, numbers=(1,))
        parts.append(f"<h3>{escape(model)}</h3>{shown}")
    return "".join(parts)


def _ranges(data: ReportData) -> str:
    if not data.distributions:
        return ""
    if not _can_plot():
        rows = [
            (shown.name, method, f"{low:.6g}", f"{high:.6g}")
            for shown in data.distributions
            for method, (low, high) in shown.ranges.items()
        ]
        return f"<p>{_NO_MATPLOTLIB}</p>" + _table(("quantizer", "method", "lowest", "highest"), rows, numbers=(2, 3))
    figures = []
    for shown in data.distributions:
        together = f"{shown.groups} groups together, widest range" if shown.groups > 1 else ""
        groups = f' <span class="soft">{together}</span>' if together else ""
        caption = f"<figcaption><code>{escape(shown.name)}</code>{groups}</figcaption>"
        figures.append(f"<figure>{caption}{distribution_plot(shown)}</figure>")
    explanation = "The values in calibration. Values outside a range are clipped to it; values inside are rounded."
    return _paragraphs([explanation]) + f'<div class="grid">{"".join(figures)}</div>'


def _sizes(data: ReportData) -> str:
    def ratio(size: Size) -> str:
        return f"{size.float_bytes / size.bytes:.2f}" if size.float_bytes and size.bytes else ""

    rows = [
        (size.name, f"{size.bytes:,}", "" if size.float_bytes is None else f"{size.float_bytes:,}", ratio(size))
        for size in data.sizes
    ]
    return _table(("what", "bytes", "bytes in float32", "times smaller"), rows, numbers=(1, 2, 3)) if rows else ""


def _left(data: ReportData) -> str:
    parts = []
    for model, operations in data.left.items():
        items = "".join(f"<li><code>{escape(operation)}</code></li>" for operation in operations)
        parts.append(f"<h3>{escape(model)}</h3>" + (f"<ul>{items}</ul>" if items else "<p>No operation.</p>"))
    return "".join(parts)


def _verification(data: ReportData) -> str:
    return "".join(_verified_model(verification) for verification in data.verifications)


def _verified_model(verification: Verification) -> str:
    differing = sum(node.differing for node in verification.nodes)
    elements = sum(node.elements for node in verification.nodes)
    if verification.exact:
        verdict = f'<p class="good">Exact: 0 of {elements:,} compared elements differ.</p>'
    elif verification.nodes:
        faults = sum(bool(node.fault) for node in verification.nodes)
        verdict = (
            f'<p class="bad">Not exact: {differing:,} of {elements:,} compared elements differ, '
            f"and {faults} quantizers have another fault.</p>"
        )
    else:
        verdict = '<p class="bad">Nothing was compared.</p>'
    rows = [
        (node.name or "(model)", node.spec, f"{node.elements:,}", f"{node.differing:,}", node.fault)
        for node in verification.nodes
    ]
    table = _table(("quantizer", "specification", "elements", "differing", ""), rows, numbers=(2, 3)) if rows else ""
    return f"<h3>{escape(verification.title)}</h3>{verdict}{_paragraphs(verification.notes)}{table}"


def _graph(data: ReportData) -> str:
    parts = [
        _paragraphs(["The operations of the model, top to bottom. Quantizers are filled; constants are left out."])
    ]
    for model, image in data.graphs.items():
        parts.append(f'<h3>{escape(model)}</h3><div class="graph">{image}</div>')
    return "".join(parts) if data.graphs else ""


def _environment(data: ReportData) -> str:
    return _table(("what", "value"), list(data.environment.items())) if data.environment else ""


def _can_plot() -> bool:
    return find_spec("matplotlib") is not None


def _paragraphs(sentences: Iterable[str]) -> str:
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = [' class="number"' if index in numbers else "" for index in range(len(row))]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells("th", header)}</tr></thead><tbody>{body}</tbody></table></div>'


_SECTIONS: dict[Section, Callable[[ReportData], str]] = {
    Section.ACCURACY: _accuracy,
    Section.SQNR: _sqnr,
    Section.RANGES: _ranges,
    Section.SIZES: _sizes,
    Section.LEFT: _left,
    Section.VERIFICATION: _verification,
    Section.GRAPH: _graph,
    Section.ENVIRONMENT: _environment,
}
