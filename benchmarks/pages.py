"""The tables of docs/notes/performance.md and docs/notes/peers.md, and the plot, from lines of results."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import ATEN, COMPILED, COPY, DOUBLED, MEASURED
from fakequant.files import write_whole

from . import kinds
from .cases import COMPARED, COMPARED_SIZES, SIZES
from .kinds import GROWTH
from .peers import PEERS
from .peers import measure as peers
from .peers.call import NOT_TIMED
from .record import ROOT, Line, put_between

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PERFORMANCE, PEERS_PAGE = ROOT / "docs" / "notes" / "performance.md", ROOT / "docs" / "notes" / "peers.md"
PLOT = ROOT / "docs" / "cost-by-size.svg"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
PEERS_BEGIN, PEERS_END = "<!-- peers:begin -->", "<!-- peers:end -->"
_CHEAPEST = {"forward": COPY, "forward and backward": DOUBLED}
_ROWS = tuple((kind.name, direction) for direction in _CHEAPEST for kind in kinds.SHOWN)
_LEARNED = {kind.name for kind in kinds.SHOWN if kind.learned}


def write(lines: Sequence[Line], performance: Path = PERFORMANCE, page: Path = PEERS_PAGE, plot: Path = PLOT) -> None:
    """Write all of them.

    Raises:
        ValueError: a page lacks its markers.
    """
    content = [over_a_copy(lines), beside_others(lines), source(lines)]
    put_between(performance, BEGIN, END, "\n\n".join(content))
    put_between(page, PEERS_BEGIN, PEERS_END, f"{peers_table(lines)}\n\n{source(lines)}")
    write_whole(plot, picture(lines))


def found(lines: Sequence[Line], **wanted: object) -> list[Line]:
    """The lines with given values."""
    return [line for line in lines if all(line[name] == value for name, value in wanted.items())]


def size(elements: int) -> str:
    """A number of elements as text, in units of 1024.

    >>> size(4096), size(64)
    ('4K', '64')
    """
    if elements >= 1 << 20:
        return f"{elements >> 20}M"
    return f"{elements >> 10}K" if elements >= 1 << 10 else str(elements)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a bar in a cell is a slash."""
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in cells)


def over_a_copy(lines: Sequence[Line]) -> str:
    """Our time over that of the cheapest call, by size and dtype."""
    columns = [(elements, "float32") for elements in SIZES] + [(COMPARED, "bfloat16"), (COMPARED, "float16")]
    header = [f"{size(n)} {dtype}" if dtype != "float32" else size(n) for n, dtype in columns]
    rows = []
    for case, direction in _ROWS:
        wanted = {"case": case, "direction": direction, "against": _CHEAPEST[direction]}
        cells = [_time(found(lines, elements=n, dtype=dtype, **wanted)) for n, dtype in columns]
        if any(cells):
            rows.append([case, direction, *(cell or NOT_TIMED for cell in cells)])
    where = f"At {size(SIZES[-1])} only what the plot shows is timed."
    return f"{table(['time over a copy', '', *header], rows)}\n\n{where}"


def _time(lines: Sequence[Line]) -> str:
    return "" if not lines else _ratio(lines[0]["p50"]) if lines[0]["p50"] else lines[0]["outcome"]


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.0f}"


def beside_others(lines: Sequence[Line]) -> str:
    """The time of others over ours, float32: the nearest of all sizes, and which that is."""
    rows = []
    compared = [line for line in lines if line["elements"] in COMPARED_SIZES]
    for case, direction in _ROWS:
        own = found(compared, case=case, direction=direction, dtype="float32")
        if not own:
            continue
        cells = [_nearest(found(own, against=name)) or NOT_TIMED for name in (ATEN, COMPILED)]
        for peer in PEERS:
            of_peer = [line for line in calls_of_peers(own) if peer_of(line) == peer.name]
            cells.append(_nearest(of_peer) or peer.why_not(case))
        rows.append([case, direction, *cells])
    sizes = f"nearest of {', '.join(map(size, COMPARED_SIZES))}"
    header = [f"time over ours, float32, {sizes}", "", ATEN, COMPILED, *(peer.name for peer in PEERS)]
    return table(header, rows)


def _nearest(lines: Sequence[Line]) -> str:
    """The nearest of the calls of one library with its size, or why none can run."""
    timed = [line for line in lines if line["p50"]]
    if not timed:
        return _other(lines)
    return f"{_other(timed)} at {size(max(timed, key=lambda line: line['p50'])['elements'])}"


def calls_of_others(lines: Sequence[Line]) -> list[Line]:
    """The calls of ATen and torch's compiler in what the tables show, then those of other libraries."""
    shown = {kind.name for kind in kinds.SHOWN}
    by_torch = [line for line in lines if line["against"] in (ATEN, COMPILED) and line["case"] in shown]
    return [line for line in (*by_torch, *calls_of_peers(lines)) if line["dtype"] == "float32"]


def calls_of_peers(lines: Sequence[Line]) -> list[Line]:
    """The calls of other libraries as these come, without those under torch.compile."""
    names = {peer.name for peer in PEERS}
    return [line for line in lines if peer_of(line) in names and not line["against"].endswith(f", {peers.COMPILED}")]


def peer_of(line: Line) -> str:
    """The library that is compared with."""
    return line["against"].split(" ")[0]


def _other(lines: Sequence[Line]) -> str:
    """The nearest of the calls of one library, or the reason why the last cannot run."""
    timed = [line for line in lines if line["p50"]]
    if timed:
        return _ratio(1 / max(line["p50"] for line in timed))
    return lines[-1]["outcome"] if lines else ""


def source(lines: Sequence[Line]) -> str:
    """Where figures come from."""
    versions = {peer_of(line): line["version"] for line in lines if line.get("version")}
    named = "".join(f", {peer} {version}" for peer, version in versions.items())
    places = dict.fromkeys((line["machine"], line["threads"], line["torch"], line["commit"]) for line in lines)
    where = "; ".join(f"{m}, {t} threads, torch {torch}{named}, at {commit}" for m, t, torch, commit in places)
    return f"Written by `make bench` from {len(lines)} lines of `benchmarks/results/bench.jsonl`: {where}."


def peers_table(lines: Sequence[Line]) -> str:
    """Every call of every peer: its time over ours, compiled too, and in how many elements its results differ."""
    calls = calls_of_peers(lines)
    order = list(dict.fromkeys(line["case"] for line in calls))
    identities = dict.fromkeys((line["case"], line["spec"], line["against"]) for line in calls)
    rows = [_row_of_a_peer(lines, *call) for call in sorted(identities, key=lambda call: order.index(call[0]))]
    small, *more = map(size, COMPARED_SIZES)
    times = [f"forward, {small}", *more, f"with backward, {small}", *more, f"compiled, {size(COMPARED)}"]
    return table(["case", "library", *times, "elements that differ"], rows)


def _row_of_a_peer(lines: Sequence[Line], case: str, spec: str, against: str) -> list[str]:
    same = found(lines, case=case, spec=spec)
    of_call, compiled = found(same, against=against), found(same, against=f"{against}, {peers.COMPILED}")
    peer, way = against.split(" ", 1)
    names = [case, f"{peer} `{way}`"]
    reasons = dict.fromkeys(line["outcome"] for line in of_call)
    if len(reasons) == 1 and MEASURED not in reasons:
        return [*names, *["cannot run"] * (2 * len(COMPARED_SIZES) + 1), *reasons]
    cells = [
        _other(found(of_call, direction=direction, elements=elements))
        for direction in _CHEAPEST
        for elements in COMPARED_SIZES
    ]
    missing = "is learned with backward" if case in _LEARNED else NOT_TIMED
    cells = [cell or missing for cell in (*cells, _other(compiled))]
    return [*names, *cells, _difference(found(of_call, elements=COMPARED))]


def _difference(lines: Sequence[Line]) -> str:
    """In how many elements the results of a call differ; forward, if that is timed."""
    line = next((line for line in lines if line["outcome"] == MEASURED), None)
    if line is None:
        return NOT_TIMED
    words = _count(line["bits"], line["values"])
    if "bits_with_its_scales" in line:
        words += f" (given its scales: {_count(line['bits_with_its_scales'], line['values_with_its_scales'])})"
    return f"{words}: {line['why']}" if line["why"] else words


def _count(bits: int, values: int) -> str:
    return f"{bits:,} signs of zeros" if bits and not values else f"{bits:,}"


def picture(lines: Sequence[Line]) -> bytes:
    """Cost by size as SVG: seconds of a call, and its time over that of a copy."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "fakequant", "font.size": 9}):
        figure = Figure(figsize=(10, 7), layout="constrained")
        axes = figure.subplots(2, 2, sharex=True)
        for column, (direction, cheapest) in enumerate(_CHEAPEST.items()):
            _draw(axes[0][column], axes[1][column], found(lines, direction=direction, dtype="float32"), cheapest)
            axes[0][column].set_title(f"{direction}, float32")
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _draw(times: Axes, ratios: Axes, lines: Sequence[Line], cheapest: str) -> None:
    def draw(axes: Axes, case: str, against: str, value: str, **style: Any) -> list[Line]:
        timed = [line for line in found(lines, case=case, against=against) if line["p50"]]
        drawn = sorted(timed, key=lambda line: line["elements"])
        if drawn:
            axes.plot([line["elements"] for line in drawn], [line[value] for line in drawn], **style)
        return drawn

    for axes in (times, ratios):
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.3)
    for number, kind in enumerate(GROWTH):
        style = {"label": kind.name, "color": f"C{number}", "marker": "o", "markersize": 3}
        draw(times, kind.name, cheapest, "seconds", **style)
        drawn = draw(ratios, kind.name, cheapest, "p50", **style)
        low, high = ([line[share] for line in drawn] for share in ("p20", "p80"))
        ratios.fill_between([line["elements"] for line in drawn], low, high, color=f"C{number}", alpha=0.15, lw=0)
    draw(times, GROWTH[0].name, ATEN, "other_seconds", label=f"ATen, {GROWTH[0].name}", color="black", ls="--")
    draw(times, GROWTH[0].name, cheapest, "other_seconds", label=cheapest, color="gray", ls="--")
    times.set(ylabel="seconds of a call")
    ratios.set(xlabel="elements", ylabel=f"time over {cheapest}")
    ratios.axhline(1, color="gray", lw=0.8)
    ratios.set_yticks([1, 2, 5, 10], labels=["1", "2", "5", "10"])
    ratios.minorticks_off()
    if times.lines:
        times.legend(frameon=False)
