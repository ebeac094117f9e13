"""The report: one HTML file that is whole, needs nothing else, and says what is missing."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from html.parser import HTMLParser
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from torch import nn

from fakequant import ir
from fakequant.calibration import make_calibrator
from fakequant.errors import OutputError
from fakequant.model import presets
from fakequant.model.prepare import prepare
from fakequant.report import (
    Accuracy,
    Distribution,
    NodeCheck,
    ReportData,
    Section,
    Size,
    Verification,
    accuracy_cells,
    distributions,
    environment,
    layers_left,
    render,
    sizes,
    write_report,
)

_VOID = {"meta", "br", "img", "path", "use", "hr", "link", "input"}


class _Page(HTMLParser):
    """Checks that every element is closed in order; collects headings, text and tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.headings: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)

    @property
    def words(self) -> str:
        return " ".join(self.text)


def _graph() -> str:
    graph = ir.Graph("<i>")
    graph.outputs = [graph.add("ReLU", graph.add_input("<x>", ir.IRType.Float32, (2,)))]
    return ir.to_svg(graph)


def full() -> ReportData:
    return ReportData(
        "A <b>bold</b> model & more",
        summary=("Measured on <i>these</i> data.",),
        metric='accuracy "top-1", %',
        accuracy=[Accuracy("float32", "", 98.5), Accuracy("INT8<u>", "mse", 98.25, "a <note>")],
        sqnr={"INT8": {"head._input_quantizer": 38.4, r"<b>$\frac{$": 12.5, "exact": math.inf, "bad": -math.inf}},
        distributions=[
            Distribution('<b>"$y$._input', [0.0, 1.0, 2.0], [5, 0], {"max": (0.0, 2.0), "<i>mse": (-1.0, 1.0)}),
            Distribution("w", [-1.0, 0.0, 1.0], [2**40, 1], {}, groups=32),
        ],
        sizes=[Size("model.onnx", 1000, 3980), Size("empty<file>", 0), Size("unknown", 5)],
        left={"INT8": ["<lambda>: softmax, 1 of 1 inputs in float"], "INT4": []},
        verifications=[
            Verification("int8.onnx", [NodeCheck("a<b>", "int8 per_tensor", 1000, 0)], ["outputs <agree>"]),
            Verification("int4.onnx", [NodeCheck("b", "int4 per_tensor", 1000, 7), NodeCheck("c", "int4", 10, 0)]),
            Verification("nothing.onnx", []),
            Verification("edited.onnx", [NodeCheck("d", "int4", 10, 0, "changed <since> the export")]),
        ],
        graphs={"<b>INT8": _graph()},
        environment={"torch <x>": "2"},
    )


@pytest.fixture(scope="module")
def page() -> str:
    return render(full())


def test_page_is_well_formed_and_has_every_section_in_order(page: str) -> None:
    assert _Page(page).headings == [section.value for section in Section]


def test_page_needs_nothing_from_outside(page: str) -> None:
    parsed = _Page(page)
    assert "://" not in page
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    targets = [value for name, value in parsed.attributes if name in ("href", "src", "xlink:href")]
    assert targets
    assert all(value.startswith("#") for value in targets)
    assert re.findall(r"url\((?!#)", page) == []
    assert "@import" not in page


def test_every_reference_inside_the_page_has_its_target(page: str) -> None:
    parsed = _Page(page)
    targets = {value[1:] for name, value in parsed.attributes if name in ("href", "xlink:href")}
    targets |= set(re.findall(r"url\(#([^)]+)\)", page))
    identifiers = {value for name, value in parsed.attributes if name == "id"}
    assert targets <= identifiers
    numbered = [name for name in identifiers if re.search(r"_\d+$", name)]
    assert numbered == [], "matplotlib's own names would occur once per plot"


def test_names_are_escaped(page: str) -> None:
    parsed = _Page(page)
    assert not {"b", "i", "u", "note", "agree", "lambda", "file", "x"} & set(parsed.tags)
    labels = [value for name, value in parsed.attributes if name == "aria-label"]
    assert 'distribution of <b>"$y$._input with the chosen ranges' in labels
    for text in ("A <b>bold</b> model & more", "INT8<u>", "a <note>", "<lambda>: softmax", "a<b>", "empty<file>"):
        assert text in parsed.words


def test_figures_of_every_section_are_shown(page: str) -> None:
    words = _Page(page).words
    for text in ("98.50", "98.25", "-0.25", 'accuracy "top-1", %', "1,000", "3.98", "No operation."):
        assert text in words, text
    assert "32 groups together" in words
    assert page.count("<svg") == 4


def test_verdicts_of_verification(page: str) -> None:
    words = _Page(page).words
    assert "Exact: 0 of 1,000 compared elements differ." in words
    assert "Not exact: 7 of 1,010 compared elements differ, and 0 quantizers have another fault." in words
    assert "Not exact: 0 of 10 compared elements differ, and 1 quantizers have another fault." in words
    assert "changed <since> the export" in words
    assert "Nothing was compared." in words


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
    ("nodes", "exact"),
    [
        ([], False),
        ([NodeCheck("a", "", 5, 0)], True),
        ([NodeCheck("a", "", 5, 0), NodeCheck("b", "", 5, 1)], False),
        ([NodeCheck("a", "", 5, 0), NodeCheck("b", "", 5, 0, "changed")], False),
    ],
    ids=["nothing compared", "equal", "one differs", "one was changed"],
)
def test_exact_means_compared_and_equal(nodes: list[NodeCheck], exact: bool) -> None:
    assert Verification("x", nodes).exact is exact


@pytest.mark.parametrize(
    ("part", "section"),
    [
        ("accuracy", Section.ACCURACY),
        ("sqnr", Section.SQNR),
        ("distributions", Section.RANGES),
        ("sizes", Section.SIZES),
        ("left", Section.LEFT),
        ("verifications", Section.VERIFICATION),
        ("graphs", Section.GRAPH),
        ("environment", Section.ENVIRONMENT),
    ],
    ids=str,
)
def test_a_missing_part_is_said_with_its_reason(part: str, section: Section) -> None:
    values = {f.name: getattr(full(), f.name) for f in fields(ReportData)}
    values[part] = type(values[part])()
    parsed = _Page(render(ReportData(**{**values, "missing": {section: "because <so>."}})))
    assert parsed.words.count("Missing:") == 1
    assert "Missing: because <so>." in parsed.words
    assert parsed.headings == [s.value for s in Section]


def test_an_empty_report_says_all_is_missing() -> None:
    parsed = _Page(render(ReportData("Nothing")))
    assert parsed.words.count("Missing: This run did not measure it.") == len(Section)


def test_without_matplotlib_the_numbers_are_in_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fakequant.report.page.find_spec", lambda name: None)
    page = render(full())
    words = _Page(page).words
    assert page.count("<svg") == len(full().graphs)
    assert "pip install fakequant[report]" in words
    assert "38.4" in words
    assert "<i>mse" in words


def test_plots_leave_no_global_state() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    render(full())
    assert dict(matplotlib.rcParams) == before


def test_plots_are_the_same_in_every_run(page: str) -> None:
    def drawn(text: str) -> list[str]:
        return re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)

    assert drawn(page) == drawn(render(full()))


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


def observed(method: str, spec: str, *batches: torch.Tensor):
    calibrator = make_calibrator(method, spec)
    for batch in batches:
        calibrator.observe(batch)
    return calibrator


def test_distribution_keeps_every_count_and_the_range_seen() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    (found,) = distributions({"percentile": {"q": observed("percentile", "int8", x, x)}}, bins=32)
    assert sum(found.counts) == 2000
    assert (found.edges[0], found.edges[-1]) == (x.min().item(), x.max().item())
    assert len(found.counts) == 32


def test_distribution_has_the_ranges_of_all_methods_in_one_plot() -> None:
    x = torch.linspace(-1, 3, 401)
    both = {method: {"q": observed(method, "int8", x)} for method in ("max", "percentile")}
    (found,) = distributions(both)
    assert list(found.ranges) == ["max", "percentile"]
    assert found.ranges["max"] == (-1.0, 3.0)


def test_distribution_of_channels_counts_all_and_takes_the_widest_range() -> None:
    x = torch.tensor([[1.0, -100.0], [0.5, 200.0]])
    (found,) = distributions({"mse": {"q": observed("mse", "int8 per_channel(1)", x)}}, bins=10)
    assert found.groups == 2
    assert sum(found.counts) == 4
    assert found.ranges["mse"][1] > 100.0


@pytest.mark.parametrize(
    ("method", "batch"),
    [("max", torch.ones(3)), ("mse", torch.zeros(3)), ("percentile", torch.empty(0))],
    ids=["no histogram", "only zeros", "nothing observed"],
)
def test_what_cannot_be_drawn_is_left_out(method: str, batch: torch.Tensor) -> None:
    assert distributions({method: {"q": observed(method, "int8", batch)}}) == []


def test_layers_left_names_products_first() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x, -1) @ self.linear(x)

    model = prepare(Model(), presets.INT8)
    (left,) = layers_left({"INT8": model}, torch.ones(4, 4)).values()
    assert [line.split(":")[1].split(",")[0].strip() for line in left] == ["matmul", "softmax"]


def test_sizes_are_those_of_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "a").write_bytes(b"12345")
    (tmp_path / "folder" / "inner" / "b").write_bytes(b"123")
    found = sizes({"both": tmp_path / "folder", "a": tmp_path / "folder" / "a"}, {"a": 20})
    assert found == [Size("both", 8, None), Size("a", 5, 20)]


def test_environment_names_versions_and_why_a_backend_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fakequant.ops.cpu.backend.CpuBackend.unavailable", lambda self: "no kernels here")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    found = environment()
    assert found["torch"] == torch.__version__ or found["torch"] in torch.__version__
    assert found["backend cpu"] == "not available: no kernels here"
    assert found["backend reference"] == "available"
    assert found["C++ compiler"] == "none found"


def test_environment_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package in ("fakequant", "triton"):
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr("fakequant.report.collect.version", version)
    found = environment()
    assert found["fakequant"] == "from source, not installed"
    assert found["triton"] == "not installed"
    assert found["numpy"] == "1.0"


def test_a_name_that_utf_8_cannot_write_is_in_the_report(tmp_path: Path) -> None:
    path = write_report(tmp_path / "report.html", ReportData("a\ud800", left={"m": ["b\udfff"]}))
    assert r"a\ud800" in path.read_text()
    assert r"b\udfff" in path.read_text()
