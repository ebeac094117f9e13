"""The report: one HTML file that is whole, needs nothing else, and says what is missing."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields, replace
from html import escape
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import fakequant as fq
from fakequant.delivery.verifying import DeliveryReport
from fakequant.errors import ConfigError, OutputError
from fakequant.export import Row
from fakequant.model import presets
from fakequant.model.prepare import prepare
from fakequant.report import (
    Accuracy,
    Layer,
    ReportData,
    Section,
    accuracy_cells,
    from_json,
    render,
    report_pair,
    to_json,
    write_report,
)
from fakequant.report.of_model import with_advice
from fakequant.report.sections import SECTIONS, blocks, section
from fakequant.report.terminal import print_report
from tests.support.parsed_page import Page
from tests.support.report_data import full


@pytest.fixture(scope="module")
def page() -> str:
    return render(full())


def test_page_is_well_formed_and_has_every_section_in_order(page: str) -> None:
    assert Page(page).headings == [section.value for section in Section]


def test_page_needs_nothing_from_outside(page: str) -> None:
    parsed = Page(page)
    assert "://" not in page
    assert not {"link", "img", "iframe", "object"} & set(parsed.tags)
    assert not [name for name, _ in parsed.attributes if name in ("src", "onclick")]
    targets = [value for name, value in parsed.attributes if name in ("href", "src", "xlink:href")]
    assert targets
    assert all(value.startswith("#") for value in targets)
    assert re.findall(r"url\((?!#)", page) == []
    assert "@import" not in page


def test_every_reference_inside_the_page_has_its_target(page: str) -> None:
    parsed = Page(page)
    targets = {value[1:] for name, value in parsed.attributes if name in ("href", "xlink:href")}
    targets |= set(re.findall(r"url\(#([^)]+)\)", page))
    identifiers = {value for name, value in parsed.attributes if name == "id"}
    assert targets <= identifiers
    ids = [value for name, value in parsed.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_names_are_escaped(page: str) -> None:
    parsed = Page(page)
    assert not {"u", "note", "agree", "lambda", "file", "x"} & set(parsed.tags)
    assert page.count("<b>") == page.count("</b>") == 4, "the figures of the tiles"
    labels = [value for name, value in parsed.attributes if name == "aria-label"]
    assert 'distribution of <b>"y, input with the chosen ranges' in labels
    for text in ("A <b>bold</b> model & more", "INT8<u>", "a <note>", "<lambda>: softmax", "a<b>", "empty<file>"):
        assert text in parsed.words


def test_figures_of_every_section_are_shown(page: str) -> None:
    words = Page(page).words
    for text in ("98.50", "98.25", "-0.25", 'accuracy "top-1", %', "1,000", "3.98", "No operation."):
        assert text in words, text
    assert "32 groups together" in words
    assert "clips 25.00% of the values, 12.0\u00a0dB" in words
    assert "10% of the error of rounding to nearest is left." in words
    assert page.count("<svg") == 6, "with two lines of legends"


def test_verdicts_of_verification(page: str) -> None:
    words = Page(page).words
    assert "Exact: 0 of 1,000 compared elements differ." in words
    assert "Not exact: 7 of 1,010 compared elements differ, and 0 quantizers or outputs have another fault." in words
    assert "Not exact: 0 of 10 compared elements differ, and 1 quantizers or outputs have another fault." in words
    assert "changed since the export" in words
    assert "Nothing was compared." in words


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"far": ["output 0"]}, "The outputs of output 0 are not those of the model."),
        ({"failed": ["transformers: OSError: no such file"]}, "transformers: OSError: no such file"),
    ],
    ids=["far", "failed"],
)
def test_a_delivery_that_programs_do_not_compute_is_not_called_exact(faults: dict[str, list[str]], said: str) -> None:
    """Though every code, scale and tensor in the file is that of the model: nowhere, and the fault is said."""
    found = DeliveryReport("folder", "given", [Row("0.weight", "int8", "weight", 10)], batches=1, style="", **faults)
    console = Console(file=(printed := StringIO()), width=200)
    print_report(console, data := ReportData("A model", verifications=[found]))
    for page in (Page(render(with_advice(one))) for one in (data, from_json(to_json(data)))):
        assert "Exact: 0 of" not in page.words
        assert "Exact, but a program" in page.words
        assert "exported file not as deployed" in page.words
        assert "folder computes the same as the model, but" in page.words
        assert said in page.words
    for text in (str(found), printed.getvalue()):
        assert " exact" not in text.replace("NOT exact", "").replace("not exact", "")
        assert said in text


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ((98.5, 100.0), [("98.50", ""), ("100.00", "+1.50")]),
        ((0.985, 0.98), [("0.9850", ""), ("0.9800", "-0.0050")]),
        ((-12.0, 0.5), [("-12.00", ""), ("0.50", "+12.50")]),
    ],
    ids=["percent", "share", "negative"],
)
def test_measurements_have_as_many_decimals(values: tuple[float, ...], shown: list[tuple[str, str]]) -> None:
    cells = accuracy_cells([Accuracy("x", "", value) for value in values])
    assert [(value, change) for _, _, value, change, _ in cells] == shown


@pytest.mark.parametrize(
    ("part", "section"),
    [
        ("accuracy", Section.ACCURACY),
        ("layers", Section.LAYERS),
        ("distributions", Section.RANGES),
        ("sizes", Section.SIZES),
        ("unquantized", Section.LEFT),
        ("verifications", Section.VERIFICATION),
        ("environment", Section.ENVIRONMENT),
    ],
    ids=str,
)
def test_a_missing_part_is_said_with_its_reason(part: str, section: Section) -> None:
    values = {f.name: getattr(full(), f.name) for f in fields(ReportData)}
    values[part] = type(values[part])()
    values["channels"] = []
    parsed = Page(render(ReportData(**{**values, "missing": {section: "because <so>."}})))
    assert parsed.words.count("Missing:") == 1
    assert "Missing: because <so>." in parsed.words
    assert parsed.headings == [s.value for s in Section]


def test_an_empty_report_says_all_is_missing() -> None:
    parsed = Page(render(ReportData("Nothing")))
    assert parsed.words.count("Missing: This run did not measure it.") == 7, "all but the two optional sections"


def test_a_section_is_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    for heading in ("Largest <layers>", "Nothing"):
        monkeypatch.setitem(SECTIONS, heading, None)  # which is removed after the test
        monkeypatch.delitem(SECTIONS, heading)
    section("Largest <layers>")(lambda data: "".join(escape(layer.name) for layer in data.layers))
    section("Nothing", optional=True)(lambda _: "")
    parsed, empty = Page(render(full())), render(ReportData("Nothing measured"))
    assert parsed.headings == [*(s.value for s in Section), "Largest <layers>"]
    assert "Missing: This run" in empty[empty.index('id="largest-layers-"') :]
    assert "Nothing</h2>" not in empty


def test_pages_need_no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert render(full()).count("<svg") == 6


def test_results_are_read_back(page: str) -> None:
    again = from_json(to_json(full()))
    assert json.loads(to_json(full()), parse_constant=pytest.fail)["layers"][5]["alone"] == "inf"
    assert re.sub(r"Written .*? by", "", render(again)) == re.sub(r"Written .*? by", "", page)


def test_results_of_an_earlier_release_are_read(page: str) -> None:
    """Which had other names for the rows of comparisons and verifications, and a fault in words."""
    first = render(from_json((Path(__file__).parent / "first_form.json").read_text()))
    words = [
        {*re.split(r"\s+", re.sub(r"Written .*? by|Compared in  on 1 batch of calibration\.", "", Page(one).words))}
        for one in (first, page)
    ]
    assert words[0] - words[1] <= {"d:", "<since>"}
    assert words[1] - words[0] <= {"since"}
    assert first.count("<circle") == page.count("<circle") == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"fakequant_report": 9}', '{"fakequant_report": 1, "layers": 5}'])
def test_a_damaged_file_of_results_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(OutputError, match=r"results\.json holds no results of a report"):
        report_pair(tmp_path, tmp_path, tmp_path / "both.html")
    with pytest.raises(OutputError, match=r"there is no .*absent\.json; give the folder"):
        report_pair(tmp_path / "absent.html", tmp_path, tmp_path / "both.html")


def test_layers_are_folded_by_the_blocks_that_repeat(page: str) -> None:
    assert blocks(["0", "2", "a.0.x", "a.0.y", "a.1.x", "b.c"]) == dict.fromkeys(["0", "2", "a.1.x", "b.c"], "") | {
        "a.0.x": "a.0",
        "a.0.y": "a.0",
    }
    assert re.findall(r"<summary><code>(.*?)</code>", page) == ["body.0", "body.1"]
    rows = page[page.index('id="rows"') :]
    places = [rows.index(name) for name in ("&lt;b&gt;stem", ">body.0.a", ">body.1.b", ">exact", ">lost", ">never")]
    assert places == sorted(places), "network order"


def test_the_ten_worst_are_above(page: str) -> None:
    many = [Layer(f"l{index:02}", "Linear", alone=50.0 - index) for index in range(20)]
    page = render(ReportData("x", layers=many))
    worst = page[page.index("The 10 worst") : page.index('id="rows"')]
    assert re.findall(r"<code>(l\d\d)</code>", worst) == [f"l{index}" for index in range(19, 9, -1)]


def test_an_interrupted_job_says_so() -> None:
    assert "Not finished: calibrating." in Page(render(ReportData("x", unfinished="calibrating."))).words


def test_two_runs_are_side_by_side(tmp_path: Path) -> None:
    first, second = full().layers[:2]
    changed = [replace(first, alone=20.0), replace(second, alone=None, weight_sqnr=40.0), Layer("new", "Linear")]
    other = replace(full(), title="other", layers=changed)
    for name, data in (("a", full()), ("b", other)):
        (tmp_path / f"{name}.json").write_text(to_json(data))
    page = report_pair(tmp_path / "a.html", tmp_path / "b.html", tmp_path / "both.html").read_text()
    words = Page(page).words
    assert "12.5 20.0 +7.5" in re.sub(r"\s+", " ", words)
    assert "not quantized; float x float" in words
    assert "30.0 40.0 +10.0" in re.sub(r"\s+", " ", words), "of own tensors, because one run measured no other"
    assert "A: A <b>bold</b> model & more" in words


class _Blocks(nn.Module):
    """Layers that are made in another order than they run in."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.stem = nn.Linear(8, 3), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.stem(x)))


def test_a_report_of_a_model_is_one_call(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = prepare(_Blocks(), presets.INT8), [torch.randn(16, 6) for _ in range(3)]
    batches[0][0, 0] = 40.0
    fq.calibrate(model, batches, method="percentile", percentile=99.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with fq.disabled(model):
        exact = model(batches[0]).detach()
    path = fq.report(
        model, iter(batches), tmp_path / "r.html", lambda net: 9.0 - float((net(batches[0]) - exact).norm())
    )
    found = from_json((tmp_path / "r.json").read_text())
    assert path == tmp_path / "r.html"
    assert [layer.name for layer in found.layers] == ["stem", "head"], "in the order in which they run"
    assert [layer.alone for layer in found.layers] == [
        {s.layer: s.value for s in fq.sensitivity(model, batches[:1])}[name] for name in ("stem", "head")
    ]
    ratios = fq.layer_sqnr(model, batches)
    assert found.layers[0].input_sqnr == ratios["stem._input_quantizer"]
    assert found.layers[0].weight_sqnr == pytest.approx(ratios["stem._weight_quantizer"], rel=1e-12)
    assert (found.layers[0].bytes, found.layers[0].float_bytes) == (48 + 8 * 4, 48 * 4)
    assert [row.format for row in found.accuracy] == ["float", "quantized"]
    clip = found.distributions[0].clips["chosen"]
    assert 0.0 < clip.share < 0.02
    assert clip.sqnr == pytest.approx(ratios["stem._input_quantizer"], abs=0.3), "by the histogram alone"
    assert found.distributions[0].whole > clip.sqnr + 1
    assert found.next.startswith("Take the preset int8_per_token, which takes ranges at run time: the error")
    assert "on 1 batch held back, with 2 batches to make it" in found.next
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_report_needs_a_prepared_model_and_batches(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no quantizers; call fakequant"):
        fq.report(nn.Linear(2, 2), [torch.ones(1, 2)], tmp_path / "r.html")
    with pytest.raises(ConfigError, match="the batches held no examples"):
        fq.report(prepare(nn.Sequential(nn.Linear(2, 2)), presets.INT8_WEIGHT_ONLY), [], tmp_path / "r.html")


def test_written_file_is_the_page_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.html"
    assert write_report(path, ReportData("first")) == path
    write_report(path, ReportData("second"))
    assert "second" in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


def test_an_unwritable_place_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write to .*file"):
        write_report(tmp_path / "file" / "report.html", ReportData("x"))
    with pytest.raises(OutputError, match="it is a folder; give the path of a file in it"):
        write_report(tmp_path, ReportData("x"))


def test_a_name_that_utf_8_cannot_write_is_in_the_report(tmp_path: Path) -> None:
    path = write_report(tmp_path / "report.html", ReportData("a\ud800", unquantized={"m": ["b\udfff"]}))
    assert r"a\ud800" in path.read_text()
    assert r"b\udfff" in path.read_text()


def test_the_improvement_shows_the_error_after_each_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)), "INT4_WEIGHT_ONLY")
    found = fq.ptq.improve(model, [torch.randn(512, 8)], ["ranges", "gptq", "bias"], progress=False)
    given = sorted(found.layers, key=lambda row: -row.after)
    header, first, *_ = re.findall(
        r"<tr.*?</tr>", render(ReportData("A", improvement=given)).split("chosen by their error")[-1]
    )
    cells = [re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", first)]
    names = [re.sub("<.*?>", "", cell) for cell in re.findall(r"<th.*?</th>", header)]
    assert names[1:-1] == ["error by rounding to nearest", "bias", "ranges", "gptq", "as chosen"]
    assert cells[1:-1] == [f"{number:.2e}" for number in (given[0].before, *given[0].steps.values(), given[0].after)]
    assert from_json(to_json(ReportData("A", improvement=given))).improvement == given
