"""Render the report as one HTML file without external references."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from html import escape
from pathlib import Path

from fakequant.files import writable_file, write_whole
from fakequant.report.data import Layer, ReportData, Section, accuracy_cells, checked_in, verdict_of
from fakequant.report.sections import (
    BAD_LOSS,
    FAIR_LOSS,
    SECTIONS,
    decibels,
    folded,
    grade,
    measured,
    paragraphs,
    ranked,
    table,
)
from fakequant.text import breakable

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #fff; --line: #d0d7de; --zebra: #f6f8fa;
  --good: #1a7f37; --fair: #9a6700; --bad: #c0341d; --bar: #0072b2; --mark: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4af; --paper: #0d1117; --line: #30363d;
  --zebra: #161b22; --good: #56d364; --fair: #e3b341; --bad: #ff7b72; --bar: #58a6ff; --mark: #f0883e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 76rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { line-height: 1.2; margin: 0 0 .25rem; font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .5rem; font-size: 1.25rem; border-bottom: 1px solid var(--line); }
h3 { margin: 1.5rem 0 .5rem; font-size: 1rem; overflow-wrap: anywhere; }
p { max-width: 46rem; margin: .4rem 0; } code { font-size: max(.9em, 11px); } ul { max-width: 46rem; }
.soft { color: var(--soft); } .good { color: var(--good); } .fair { color: var(--fair); } .bad { color: var(--bad); }
nav { font-size: .9rem; margin-top: 1rem; } nav a { margin-right: 1rem; display: inline-block; } a { color: inherit; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.tile { border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; border-left: 4px solid var(--line); }
.tile.good { border-left-color: var(--good); } .tile.bad { border-left-color: var(--bad); }
.tile.fair { border-left-color: var(--fair); } .tile > * { color: var(--ink); margin: 0; overflow-wrap: anywhere; }
.tile .what { font-size: .8rem; color: var(--soft); } .tile b { display: block; font-size: 1.35rem; line-height: 1.3; }
.tile.good b { color: var(--good); } .tile.bad b { color: var(--bad); } .tile.fair b { color: var(--fair); }
.tile b code { font-size: 1rem; } .tile p { font-size: .85rem; }
pre { background: var(--zebra); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; overflow-x:
  auto;
  font-size: .85rem; margin: .5rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  font-weight: normal; }
thead th { font-weight: 600; vertical-align: bottom; } tbody tr:nth-child(even) { background: var(--zebra); }
td.number { white-space: nowrap; } .number, .layers tr :nth-child(n+4) { text-align: right; }
.layers { width: 100%; table-layout: fixed; } .layers th:first-child { width: 22%; } .layers th,
.layers td { padding-right: .5rem; }
.layers th:nth-child(2) { width: 11%; } .layers th:nth-child(3) { width: 26%; }
.layers th:first-child, .layers td { overflow-wrap: anywhere; }
.layers td:nth-child(3) { font-size: .8rem; color: var(--soft); }
.layers i { display: block; height: 4px; background: currentColor; margin-left: auto; border-radius: 2px; }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; text-align: inherit; cursor:
  pointer;
  text-decoration: underline dotted; } th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.tools { display: flex; flex-wrap: wrap; gap: .5rem; margin: .5rem 0; } .tools input { flex: 1 1 12rem; max-width:
  24rem; }
.tools * { font: inherit; padding: .25rem .5rem; color: inherit; background: var(--paper);
  border: 1px solid var(--line); border-radius: 6px; } [hidden] { display: none !important; }
details { border-bottom: 1px solid var(--line); }
summary { cursor: pointer; padding: .3rem 0; overflow-wrap: anywhere; }
.heat { display: inline-flex; gap: 2px; vertical-align: middle; margin-left: .5rem; }
.heat i { width: 12px; height: 12px; border-radius: 2px; background: currentColor; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(19rem, 100%), 1fr)); gap: 1rem 1.5rem;
  margin: .75rem 0; }
figure { margin: 0; break-inside: avoid; min-width: 0; } figcaption { font-size: .85rem; overflow-wrap: anywhere; }
figure p { font-size: .8rem; margin: .1rem 0; } svg { display: block; width: 100%; height: auto; overflow: visible; }
.axis { display: flex; justify-content: space-between; font-size: .75rem; color: var(--soft); }
.curve { max-width: 40rem; } .curve text { font-size: 11px; fill: currentColor; }
.key { display: inline-block; width: 22px; height: 4px; vertical-align: middle; margin-right: .3em; }
@media print, (max-width: 900px) { .layers { font-size: .75rem; } .layers th,
  .layers td { padding-right: .3rem; } .layers th:nth-child(2) { width: 13%; }
  .layers th:nth-child(3) { width: 22%; } }
@media (max-width: 640px) { .wide th, .wide td { padding-right: .5rem; font-size: .8rem; }
  body { padding: 1rem .8rem 3rem; } .layers thead { display: none; }
  .layers, .layers tbody, .layers tr, .layers th, .layers td { display: block; width: auto !important; border: 0;
  text-align: left !important; padding: 0; }
  .layers tr { display: flex; flex-wrap: wrap; gap: 0 .8rem; border-bottom: 1px solid var(--line);
  padding: .35rem .2rem; }
  .layers tr th:first-child, .layers td:nth-child(3) { flex: 1 0 100%; } .layers td:empty { display: none; }
  .layers td { font-size: .8rem; } .layers td:nth-child(4) { font-weight: 600; } .layers i { display: none; }
  .layers td:nth-child(n+4)::before { color: var(--soft); font-weight: normal; }
  .single td:nth-child(4)::before { content: "alone "; } .single td:nth-child(5)::before { content: "input "; }
  .single td:nth-child(6)::before { content: "weight "; } .single td:nth-child(7)::before { content: "bits "; }
  .single td:nth-child(8)::before { content: "share "; } .pair td:nth-child(4)::before { content: "A "; }
  .pair td:nth-child(5)::before { content: "B "; } .pair td:nth-child(6)::before { content: "B minus A "; } }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --paper: #fff; --line: #bbb; --zebra: #fff;
  --good: #116329; --fair: #7a5200; --bad: #b42318; --bar: #0072b2; --mark: #d55e00; }
  body { max-width: none; padding: 0; font-size: 10pt; } nav, .tools { display: none; }
  .tiles { grid-template-columns: 1fr 1fr; } h2, h3, summary { break-after: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; }
  tr, .tile, figure { break-inside: avoid; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  .wide { overflow: visible; } }
"""

SCRIPT = """
(() => {
  const home = document.getElementById("rows");
  if (!home) return;
  const blocks = [...home.children], flat = document.createElement("div");
  const rows = [...home.querySelectorAll("tbody tr")], places = rows.map(row => row.parentNode);
  const value = cell => { const text = cell.textContent.trim();
    return text === "exact" ? Infinity : text === "" ? NaN : parseFloat(text.replace(/,/g, "")); };
  const head = home.querySelector("table").cloneNode(true);
  head.tBodies[0].replaceChildren();
  flat.append(head); flat.hidden = true; home.after(flat);
  const tools = document.createElement("div"), search = document.createElement("input");
  const back = document.createElement("button");
  tools.className = "tools"; search.type = "search"; search.placeholder = "filter by name, type or format";
  search.setAttribute("aria-label", "filter layers"); back.textContent = "network order"; back.type = "button";
  back.hidden = true; tools.append(search, back); home.before(tools);
  const sort = (column, down) => {
    const key = row => column < 3 ? row.cells[column].textContent : value(row.cells[column]);
    const order = (a, b) => { const x = key(a), y = key(b);
      if (typeof x === "string") return (down ? -1 : 1) * x.localeCompare(y, "en", {numeric: true});
      return isNaN(x) ? 1 : isNaN(y) ? -1 : x === y ? 0 : (x < y ? -1 : 1) * (down ? -1 : 1); };
    head.tBodies[0].append(...[...rows].sort(order));
    flat.hidden = back.hidden = false; home.hidden = true;
    document.querySelectorAll(".layers.sortable thead th").forEach(th => th.removeAttribute("aria-sort"));
    head.tHead.rows[0].cells[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  };
  const button = (th, column) => { const b = document.createElement("button"); b.type = "button";
    b.append(...th.childNodes); th.append(b);
    b.onclick = () => sort(column, th.getAttribute("aria-sort") === "ascending"); };
  [...home.querySelectorAll("table"), head].forEach(table => { table.classList.add("sortable");
    [...table.tHead.rows[0].cells].forEach(button); });
  back.onclick = () => { rows.forEach((row, at) => places[at].append(row)); flat.hidden = back.hidden = true;
    home.hidden = false; };
  search.oninput = () => { const words = search.value.toLowerCase();
    rows.forEach(row => { row.hidden = !row.textContent.toLowerCase().includes(words); });
    blocks.forEach(block => { const found = block.querySelector("tbody tr:not([hidden])");
      block.hidden = !found; if (words && found && block.tagName === "DETAILS") block.open = true; }); };
})();
"""


def verdict(data: ReportData) -> str:
    """The tiles of metric, size, exactness and worst layer, and the next step with the changes that were tried."""
    following = ""
    if data.next:
        code = f"<pre><code>{escape(data.code)}</code></pre>" if data.code else ""
        tried = ""
        if data.advice is not None and data.advice.tried:
            advice = data.advice
            header = ("what was tried", "error of the output", "bytes of weights", "")
            rows = [("before each change", f"{advice.error:.2e}", f"{advice.bytes:,}", "")]
            for number, one in enumerate(advice.tried):
                error, size = ("", "") if one.failed else (f"{one.after:.2e}", f"{one.bytes:,}")
                chance = "by chance: not on other batches" if one.by_chance else ""
                rows.append((one.what, error, size, one.failed or ("best" if number == advice.best else chance)))
            head = escape(f"Tried: {len(advice.tried)}, {advice.judged}")
            tried = f"<details><summary>{head}</summary>{table(header, rows, numbers=(1, 2))}</details>"
        following = f'<div class="next"><p><strong>Next:</strong> {breakable(data.next)}</p>{code}{tried}</div>'
    tiles = _metric(data), _size(data), _exactness(data), _worst(data)
    return f'<div class="tiles">{"".join(tiles)}</div>{following}'


def _tile(what: str, figure: str, note: str, kind: str = "") -> str:
    """The HTML of a tile; `figure` is HTML, the other texts are escaped."""
    shown = f"<p>{breakable(note)}</p>" if note else ""
    return f'<div class="tile {kind}"><p class="what">{escape(what)}</p><b>{figure}</b>{shown}</div>'


def _metric(data: ReportData) -> str:
    if not data.accuracy:
        return _tile("metric", "not measured", data.missing.get(Section.ACCURACY, ""))
    last = accuracy_cells(data.accuracy)[data.reported]
    if len(data.accuracy) < 2:
        return _tile(data.metric, escape(last[2]), f"{last[0]} {last[1]}".strip())
    kind = "good" if data.lost <= FAIR_LOSS else "fair" if data.lost <= BAD_LOSS else "bad"
    note = f"{last[3]} against {data.accuracy[0].format}; {last[0]} {last[1]}".strip()
    return _tile(data.metric, escape(last[2]), note, kind)


def _size(data: ReportData) -> str:
    before, after, elements = (
        sum(getattr(layer, name) for layer in data.layers) for name in ("float_bytes", "bytes", "elements")
    )
    if not elements:
        return _tile("size of quantized weights", "not measured", "")
    note = f"{amount(before)} in float: {before / after:.2f} times smaller, {8 * after / elements:.2f} bits per weight"
    return _tile("quantized weights with scales", amount(after), note)


def _exactness(data: ReportData) -> str:
    checks = data.verifications
    if not checks:
        return _tile("exported file", "not verified", "export the model to compare every quantizer bit for bit")
    if faulty := [Path(check.path).name for check in checks if not check.passed]:
        return _tile("exported file", verdict_of(checks), f"{', '.join(faulty)}: see Verification", "bad")
    rows = [row for check in checks for row in checked_in(check)]
    runtimes = " and ".join(dict.fromkeys(check.runtime for check in checks if check.runtime))
    note = f"all {len(rows)} quantizers, {sum(row.elements for row in rows):,} values, bit for bit"
    return _tile("exported file", "exact", note + (f" in {runtimes}" if runtimes else ""), "good")


def _worst(data: ReportData) -> str:
    layers = ranked(data)
    if not layers:
        return _tile("worst layer", "not measured", "")
    first = layers[0]
    what = "with this layer alone quantized" if first.alone is not None else "of its own tensors"
    after = f"; the next is {layers[1].name} with {decibels(layers[1].worst)}" if len(layers) > 1 else ""
    name = f"<code>{breakable(first.name)}</code>"
    return _tile("worst layer", name, f"{decibels(first.worst)} dB {what}{after}", grade(first.worst))


def amount(size: float) -> str:
    """Bytes in a readable unit.

    >>> amount(512), amount(22_700_000)
    ('512 bytes', '22.7 MB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} bytes"


def write_report(path: str | os.PathLike[str], data: ReportData) -> Path:
    """Write a report as one HTML file; an existing file is replaced in one step.

    Args:
        path: the file; its folder is made if it does not exist.
        data: the content; parts may be missing.

    Returns:
        The path of the file.

    Raises:
        OutputError: the file cannot be written.
    """
    return write_page(path, render(data))


def write_page(path: str | os.PathLike[str], page: str) -> Path:
    """Write the text of a page; see `write_report`."""
    target = writable_file(path)
    # UTF-8 cannot encode lone surrogates, so they are escaped.
    write_whole(target, page.encode("utf-8", "backslashreplace"))
    return target


def render(data: ReportData) -> str:
    """Render a report as HTML text.

    >>> from fakequant.report import Accuracy, ReportData
    >>> page = render(ReportData("A model", accuracy=[Accuracy("float32", "", 98.5)]))
    >>> "98.5" in page
    True
    """
    links, sections = [], []
    for section, (show, optional) in SECTIONS.items():
        body = show(data)
        if not body and optional:
            continue
        if not body:
            known = data.missing.get(section) if isinstance(section, Section) else None
            reason = known or "This run did not measure it."
            body = f'<p class="soft">Missing: {escape(reason)}</p>'
        name, heading = (section.name, section.value) if isinstance(section, Section) else (section, section)
        name, title = re.sub(r"\W+", "-", name.lower()), escape(heading)
        links.append(f'<a href="#{name}">{title}</a>')
        sections.append(f'<section id="{name}"><h2>{title}</h2>{body}</section>\n')
    state = ""
    if data.unfinished:
        state = f'<p class="bad">Not finished: {escape(data.unfinished)}. The page shows the steps until then.</p>'
    head = f"{state}{verdict(data)}{paragraphs(data.summary, 'soft')}"
    return document(data.title, f"{head}<nav>{''.join(links)}</nav><main>{''.join(sections)}</main>")


def document(title: str, body: str) -> str:
    """A whole page with the style sheet and the script; the body is HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<header><h1>{escape(title)}</h1>"
        f'<p class="soft">Written {datetime.now().astimezone():%Y-%m-%d %H:%M %Z} by fakequant.</p></header>'
        f"{body}<script>{SCRIPT}</script></body></html>\n"
    )


_HEADER = ("layer", "type", "A; B", "A, dB", "B, dB", "B minus A, dB")


def render_pair(first: ReportData, second: ReportData) -> str:
    """The HTML page of two runs, A and B, side by side.

    >>> page = render_pair(ReportData("one"), ReportData("other"))
    >>> "A: one" in page, "B: other" in page
    (True, True)
    """
    runs = {"A": first, "B": second}
    heads = "".join(f"<h2>{name}: {escape(run.title)}</h2>{verdict(run)}" for name, run in runs.items())
    metrics = " / ".join(dict.fromkeys(run.metric for run in runs.values() if run.accuracy))
    accuracy = [(name, *cells) for name, run in runs.items() for cells in accuracy_cells(run.accuracy)]
    sizes = [(name, size.name, f"{size.bytes:,}") for name, run in runs.items() for size in run.sizes]
    header = ("run", "format", "method", metrics, "change against float", "")
    bodies = {
        "Accuracy": table(header, accuracy, numbers=(3, 4)) if accuracy else "",
        "Layers": _layers(first.layers, second.layers),
        "Sizes": table(("run", "what", "bytes"), sizes, numbers=(2,)) if sizes else "",
    }
    missing = paragraphs(["Missing: neither run measured it."], "soft")
    sections = "".join(
        f'<section id="{title.lower()}"><h2>{title}</h2>{body or missing}</section>' for title, body in bodies.items()
    )
    return document(f"{first.title} / {second.title}", f"{heads}<main>{sections}</main>")


def _layers(first: Sequence[Layer], second: Sequence[Layer]) -> str:
    """A table of all layers in both runs; ratios of a layer quantized alone are shown only if both runs have them."""
    if not first and not second:
        return ""
    own, other = ({layer.name: layer for layer in layers} for layers in (first, second))
    header = "".join(f"<th>{cell}</th>" for cell in _HEADER)

    def row(layer: Layer) -> str:
        both = one, two = own.get(layer.name), other.get(layer.name)
        specs = ("not quantized" if it is None else f"{it.input or 'float'} x {it.weight or 'float'}" for it in both)
        if one is not None and two is not None and (one.alone is None or two.alone is None):
            both = replace(one, alone=None), replace(two, alone=None)
        before, after = (None if it is None else it.worst for it in both)
        change = "<td></td>"
        if before is not None and after is not None:
            gain = 0.0 if before == after else after - before
            kind = "good" if gain > 0.5 else "bad" if gain < -0.5 else "soft"
            change = f'<td class="{kind}">{"+" if gain > 0 else ""}{decibels(gain) if gain else "0.0"}</td>'
        return (
            f"<tr><th scope=row><code>{breakable(layer.name)}</code></th><td>{escape(layer.type)}</td>"
            f"<td>{escape('; '.join(specs))}</td>{measured(before)}{measured(after)}{change}</tr>"
        )

    def rows(some: Sequence[Layer]) -> str:
        body = "".join(map(row, some))
        return f'<table class="layers pair"><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>'

    every = [*first, *(layer for layer in second if layer.name not in own)]
    explanation = (
        "Signal over quantization noise of the model's output with only this layer quantized, where both runs measured "
        "that; else of the layer's own tensors."
    )
    return f'<p>{explanation}</p><div id="rows">{folded(every, rows)}</div>'
