"""The first screen of a page: what the metric lost, how small the model is, whether it is exact, what to do next."""

from __future__ import annotations

from html import escape

from fakequant.model.analysis.html import breakable, html_table
from fakequant.report.advice import BAD_LOSS, FAIR_LOSS, ranked
from fakequant.report.data import ReportData, Section, accuracy_cells
from fakequant.report.layers import decibels, grade


def verdict(data: ReportData) -> str:
    """The tiles and the next step."""
    tiles = [_metric(data), _size(data), _exactness(data), _worst(data)]
    following = ""
    if data.next:
        code = f"<pre><code>{escape(data.code)}</code></pre>" if data.code else ""
        following = f'<div class="next"><p><strong>Next:</strong> {breakable(data.next)}</p>{code}{_tried(data)}</div>'
    return f'<div class="tiles">{"".join(tiles)}</div>{following}'


def _tried(data: ReportData) -> str:
    """What was tried, in a table that is folded."""
    advice = data.advice
    if advice is None or not advice.tried:
        return ""
    header = ("what was tried", "error of the output", "bytes of weights", "")
    rows = [("before each change", f"{advice.error:.2e}", f"{advice.bytes:,}", "")]
    for number, one in enumerate(advice.tried):
        error, size = ("", "") if one.failed else (f"{one.after:.2e}", f"{one.bytes:,}")
        chance = "by chance: not on other batches" if one.by_chance else ""
        rows.append((one.what, error, size, one.failed or ("best" if number == advice.best else chance)))
    head = f"Tried: {len(advice.tried)}, {advice.judged}"
    shown = html_table(header, rows, numbers=(1, 2))
    return f'<details><summary>{escape(head)}</summary><div class="wide">{shown}</div></details>'


def _tile(what: str, figure: str, note: str, kind: str = "") -> str:
    """A tile; the figure is HTML."""
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
    before, after = sum(layer.float_bytes for layer in data.layers), sum(layer.bytes for layer in data.layers)
    elements = sum(layer.elements for layer in data.layers)
    if not elements:
        return _tile("size of quantized weights", "not measured", "")
    note = f"{amount(before)} in float: {before / after:.2f} times smaller, {8 * after / elements:.2f} bits per weight"
    return _tile("quantized weights with scales", amount(after), note)


def _exactness(data: ReportData) -> str:
    if not data.verifications:
        return _tile("exported file", "not verified", "export the model to compare every quantizer bit for bit")
    elements = sum(node.elements for check in data.verifications for node in check.nodes)
    count = sum(len(check.nodes) for check in data.verifications)
    runtimes = " and ".join(dict.fromkeys(check.runtime for check in data.verifications if check.runtime))
    if all(check.passed for check in data.verifications):
        where = f" in {runtimes}" if runtimes else ""
        return _tile(
            "exported file", "exact", f"all {count} quantizers, {elements:,} values, bit for bit{where}", "good"
        )
    faulty = [check.title for check in data.verifications if not check.passed]
    fault = "not as deployed" if all(check.exact for check in data.verifications) else "not the model"
    return _tile("exported file", fault, f"{', '.join(faulty)}: see Verification", "bad")


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
