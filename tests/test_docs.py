import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fakequant.model.engine import known_engines
from fakequant.model.presets import presets
from tests.support.matrix import full, sweep
from tests.support.pages import blocks

DOCS = Path(__file__).parents[1] / "docs"


def script(name):
    """A script of docs as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate():
    """docs/generate.py as a module."""
    pytest.importorskip("onnxruntime")
    return script("generate")


def test_the_picture_of_the_readme_is_drawn_from_the_measured_rows():
    pytest.importorskip("matplotlib")
    pictures = script("pictures")
    assert pictures.ERRORS.read_text() == pictures.errors(), "run `make docs`"


def test_the_page_of_formats_is_the_one_that_the_code_writes(generate):
    assert generate.PAGE.read_text() == generate.page(), "run `make docs`"


@sweep("name", full(["INT8", "MXFP4", "NVFP4_WEIGHT_ONLY"]), full(["INT8"]))
def test_rows_of_the_page_about_onnx_are_what_is_exported(generate, name):
    page = generate.STYLES_PAGE.read_text().splitlines()
    rows = generate.style_rows(presets()[name])
    assert [row for row in page if row.startswith(f"| {name} |")] == rows, "run `make docs`"


@pytest.mark.exhaustive
def test_the_page_about_onnx_is_the_one_that_is_exported(generate):
    assert generate.STYLES_PAGE.read_text() == generate.styles_page(), "run `make docs`"


def test_the_table_of_engines_is_what_they_say(generate):
    assert generate.ENGINES_PAGE.read_text() == generate.engines_page(), "run `make docs`"
    assert generate.README.read_text() == generate.readme(), "run `make docs`"


def test_the_page_of_support_is_what_prepare_does(generate):
    assert generate.SUPPORT_PAGE.read_text() == generate.support_page(), "run `make docs`"


def test_the_tree_of_presets_is_what_prepare_takes(generate):
    pytest.importorskip("transformers")
    assert generate.GUIDE.read_text() == generate.guide(), "run `make docs`"


def test_the_tree_has_every_engine_and_presets_that_it_runs(generate):
    tree = generate.GUIDE.read_text().split(generate.TREE_BEGIN)[1].split(generate.TREE_END)[0]
    rows = re.findall(r'^\| \[.*?\]\(engines/(\w+)\.md\) \| `"(.*?)"` \| (.*) \|$', tree, re.MULTILINE)
    engines = known_engines()
    assert {page for page, _, _ in rows} == {engine.page for engine in engines.values()}
    for page, name, aims in rows:
        presets_of = [aim.strip(" `") for aim in aims.split("|")]
        assert len(presets_of) == 3
        assert engines[name].page == page
        assert all(engines[name].takes(preset) for preset in presets_of if preset)


ROOT = DOCS.parent
PAGES = [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]
GENERATED = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def headings(page: Path) -> set[str]:
    """The anchors that the site gives the headings of a page."""
    found = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", one).strip().lower()) for one in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    for link, anchor in LINK.findall(FENCED.sub("", page.read_text())):
        if "://" in link or link.startswith("gallery/"):  # which `make site` writes
            continue
        target = page.parent / link if link else page
        assert target.is_file(), link
        assert not anchor or anchor in headings(target), f"{link}#{anchor}"


def test_a_missing_heading_is_seen():
    assert "data-for-calibration" in headings(DOCS / "guide.md")
    assert "data-for-nothing" not in headings(DOCS / "guide.md")


WRITTEN = "formats.md", "support.md"


def test_a_reader_has_at_most_so_many_words():
    """Without docs/notes and tables that commands write; what is longer says something twice, or belongs there."""
    pages = [page for page in DOCS.rglob("*.md") if "notes" not in page.parts and page.name not in WRITTEN]
    words = {page: len(GENERATED.sub("", page.read_text()).split()) for page in pages}
    assert sum(words.values()) <= 25_000
    engines = {page.name: count for page, count in words.items() if page.parent.name == "engines"}
    assert {name: count for name, count in engines.items() if count > 400} == {}


# Blocks without prompts, which doctest does not run, by page: the test that runs them.
RUN_BY = {
    "jobs.md": "cli/test_jobs.py",
    "recipe.md": "cli/test_recipe.py",
    "execution.md": "model/test_dtensor.py",
    "training.md": "integrations/test_training_page.py",
}


def test_every_block_of_a_page_is_run_by_a_test():
    plain = {page for page in PAGES if any(">>> " not in block.code for block in blocks(page.read_text()))}
    tutorials = set((DOCS / "tutorials").glob("*.md"))  # run by test_tutorials.py
    assert {page.name for page in plain - tutorials} == set(RUN_BY)
    for page, test in RUN_BY.items():
        assert page in (DOCS.parent / "tests" / test).read_text()


@pytest.mark.exhaustive
def test_the_gallery_has_the_reports_that_its_page_names(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("sklearn")
    done = subprocess.run([sys.executable, DOCS / "gallery.py", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    named = set(re.findall(r"\(gallery/(\w+\.html)\)", (DOCS / "gallery.md").read_text()))
    assert {page.name for page in tmp_path.glob("*.html")} == named
    assert len(named) == 3


EXAMPLE = DOCS.parent / "examples" / "quickstart.py"


def test_the_readme_is_one_page():
    assert len(GENERATED.sub("", (DOCS.parent / "README.md").read_text()).splitlines()) <= 100


def test_the_first_example_runs(tmp_path):
    pytest.importorskip("onnxruntime")
    done = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "model.onnx: exact" in done.stdout
    assert "left in float: 0 products, 0 other operations" in done.stdout
    assert (tmp_path / "checkpoint").is_dir()
