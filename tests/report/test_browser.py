"""The pages in a browser: what fits, sorts and filters, with scripts and without. Needs Chromium."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from pathlib import Path

import pytest

from fakequant.export import Row
from fakequant.ptq import Compared, Comparison
from fakequant.report import (
    Accuracy,
    Channels,
    Clip,
    Distribution,
    Layer,
    ReportData,
    to_json,
    write_report,
)
from fakequant.report.of_model import report_pair
from tests.support.browser import BROWSER, MISSING, SETTLED, browse, in_scheme, picture, printed, printed_words
from tests.support.report_data import verified

pytestmark = pytest.mark.skipif(BROWSER is None, reason=MISSING)

SHEET = 720
"""The width in pixels of what is printed on a sheet of A4 or letter."""

# The page lies in a frame of a given width; what is measured of it becomes the text of the page around it.
AROUND = """<body style="margin:0">
<iframe id="f" src="{page}" {sandbox} style="width:{width}px;height:900px;border:0"></iframe>
<script>
f.onload = () => {{
  const page = f.contentDocument, root = page.documentElement, shown = row => row.checkVisibility();
  const rows = selector => [...page.querySelectorAll(selector)].filter(shown).map(row => row.cells[0].textContent);
  const top = (node, at) => {{ const one = page.createRange(); one.setStart(node, at); one.setEnd(node, at + 1);
    return one.getBoundingClientRect().top; }};
  const broken = code => [...code.childNodes].filter(node => node.nodeType === 3 && /^\\S+$/.test(node.data))
    .filter(node => top(node, 0) !== top(node, node.length - 1)).map(node => node.data);
  const colour = getComputedStyle(page.body).backgroundColor;
  const found = {{ wide: root.scrollWidth, fits: root.clientWidth, dark: colour, all: rows("#rows tbody tr").length,
    tools: !!page.querySelector(".tools"), tiles: page.querySelectorAll(".tile").length,
    broken: [...page.querySelectorAll("code")].filter(shown).flatMap(broken),
    next: page.querySelector(".next") && page.querySelector(".next").getBoundingClientRect().top }};
  page.querySelectorAll("details").forEach(one => {{ one.open = true; }});
  found.open = rows("#rows tbody tr").length; found.stillfits = root.scrollWidth;
  const texts = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT); found.smallest = Infinity;
  while (texts.nextNode()) if (texts.currentNode.data.trim() && shown(texts.currentNode.parentElement))
    found.smallest = Math.min(found.smallest, parseFloat(getComputedStyle(texts.currentNode.parentElement).fontSize));
  if (found.tools) {{
    const search = page.querySelector(".tools input");
    search.value = "BODY.1"; search.dispatchEvent(new Event("input"));
    found.filtered = rows("#rows tbody tr");
    search.value = ""; search.dispatchEvent(new Event("input"));
    const th = page.querySelector("#rows th:nth-child(4) button");
    th.click(); found.worst = rows("#rows + div tbody tr").slice(0, 3);
    page.querySelector("#rows + div th:nth-child(4) button").click();
    found.best = rows("#rows + div tbody tr").slice(0, 3);
    page.querySelector(".tools button").click(); found.back = rows("#rows tbody tr");
  }}
  document.body.textContent = JSON.stringify(found);
}};
</script></body>"""

LONG = "embeddings_of_tokens.and_of.their_positions.in_one_layer"
LAST = Layer("exact", "add", "int8", input_sqnr=math.inf)


def data(layers: int = 100) -> ReportData:
    inside = [
        Layer(
            f"body.{at // 4}.{'qkvo'[at % 4]}", "Linear", "int8 per_tensor", "int8 per_channel(0)", 20.0 + at % 37, 30.0
        )
        for at in range(layers)
    ]
    shown = [
        Distribution(
            f"{one.name}, input",
            [i / 64 for i in range(65)],
            [(7 * i) ** 2 for i in range(64)],
            {"chosen": (0.0, 0.7)},
            clips={"chosen": Clip(0.01, 20.0)},
            whole=30.0,
        )
        for one in inside
    ]
    return ReportData(
        "A model with a rather long name that has to be wrapped somewhere",
        metric="accuracy, %",
        accuracy=[Accuracy("float32", "", 90.0), Accuracy("INT8", "mse", 89.9, "a note that is rather long, too")],
        layers=[Layer(LONG, "Conv2d", "", "int8", alone=19.0), *inside, LAST],
        distributions=shown,
        channels=[Channels(one.name, [-1.0] * 48, [1.0] * 48, 384, 1.5) for one in inside],
        curve=Comparison([Compared("INT8", "", "", 0.1, 89.0, 8.1), Compared("INT4", "", "", 0.2, 80.0, 4.5)]),
        verifications=[verified("m.onnx", [Row(f"{o.name}._input_quantizer", "", "activation", 10) for o in inside])],
        next="Do something.",
        code="x = 1  # a line that is longer than a telephone is wide, so that it must scroll in itself",
    )  # fmt: skip


def measured(folder: Path, page: str, width: int = 1280, sandbox: str = "", *options: str) -> dict:
    (folder / "around.html").write_text(AROUND.format(page=page, width=width, sandbox=sandbox))
    options += (SETTLED, "--allow-file-access-from-files", f"--window-size={max(width, 600)},1000", "--dump-dom")
    text = browse((folder / "around.html").as_uri(), *options)
    body = re.search(r"<body[^>]*>(\{.*\})</body>", text, flags=re.DOTALL)
    assert body, text[-2000:]
    return json.loads(unescape(body.group(1)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pages")
    write_report(made / "page.html", data())
    for name in "ab":
        (made / f"{name}.json").write_text(to_json(data(12)))
    report_pair(made / "a.html", made / "b.html", made / "pair.html")
    return made


def test_a_page_of_a_hundred_layers_is_small(folder: Path) -> None:
    assert (folder / "page.html").stat().st_size < 400_000


@pytest.mark.parametrize("width", [1280, 768, 390])
def test_layers_sort_and_filter(folder: Path, width: int) -> None:
    found = measured(folder, "page.html", width)
    assert found["wide"] == found["fits"] == found["stillfits"] == width, "nothing is cut off or scrolls the page"
    assert (found["tiles"], found["tools"]) == (4, True)
    assert found["next"] < 800, "on the first screen"
    assert found["smallest"] >= 11, "pixels of a letter"
    assert found["broken"] == [], "a name breaks only after a dot or an underscore"
    assert (found["all"], found["open"]) == (2, 102), "blocks are folded"
    assert found["filtered"] == [f"body.{n}.{k}" for n in (1, *range(10, 20)) for k in "qkvo"]
    if width > 640:
        assert found["worst"] == [LONG, "body.0.q", "body.9.k"], "19 dB, then 20 dB"
        assert found["best"][0] == "body.9.q", "56 dB"
        assert found["back"][:2] == [LONG, "body.0.q"]


def test_a_page_reads_without_scripts(folder: Path) -> None:
    found = measured(folder, "page.html", 390, 'sandbox="allow-same-origin"')
    assert (found["tools"], found["tiles"]) == (False, 4)
    assert (found["all"], found["open"], found["wide"]) == (2, 102, 390)


def test_a_page_is_dark_where_the_reader_wants_that(folder: Path) -> None:
    for scheme, colour in (("dark", "rgb(13, 17, 23)"), ("light", "rgb(255, 255, 255)")):
        found = measured(folder, "page.html", 1280, "", in_scheme(scheme))
        assert found["dark"] == colour


def test_a_printed_page_shows_all(folder: Path) -> None:
    page = (folder / "page.html").read_text("utf-8")
    assert "<details>" in page
    (folder / "open.html").write_text(page.replace("<details>", "<details open>"), "utf-8")
    pages = {name: printed(folder / f"{name}.html", folder / f"{name}.pdf") for name in ("page", "open")}
    assert printed_words(pages["page"]) == printed_words(pages["open"])


def test_a_printed_page_fits_its_sheet(folder: Path) -> None:
    page = (folder / "page.html").read_text("utf-8")
    (folder / "sheet.html").write_text(page.replace("@media print", "@media all"), "utf-8")
    found = measured(folder, "sheet.html", SHEET)
    assert (found["wide"], found["stillfits"], found["broken"]) == (SHEET, SHEET, [])


@pytest.mark.parametrize(("width", "scheme", "scripts"), [(1280, "light", True), (390, "dark", False)])
def test_a_picture_shows_the_page(folder: Path, width: int, scheme: str, scripts: bool) -> None:
    image = pytest.importorskip("PIL.Image")
    path = picture(folder / "page.html", folder / "picture.png", width, 900, scheme, scripts)
    with image.open(path) as shown:
        assert shown.size == (width, 900)
        colours = shown.convert("RGB").getcolors(maxcolors=1 << 24)
    assert max(colours)[1] == ((13, 17, 23) if scheme == "dark" else (255, 255, 255)), "the paper"
    assert len(colours) > 50, "and what stands on it"


@pytest.mark.parametrize("width", [1280, 390])
def test_two_runs_fit_side_by_side(folder: Path, width: int) -> None:
    found = measured(folder, "pair.html", width)
    assert (found["wide"], found["tiles"], found["open"]) == (width, 8, 14)
