"""The prose of the package: no people for code, and no clauses that must be read twice."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import fakequant as fq

ROOT = Path(__file__).parent.parent
REFUSED = re.compile(r"\b(nobody|somebody|is to be|are to be|but for|who)\b", re.IGNORECASE)
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
]
PACKAGE = Path(fq.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".h", ".cpp"})


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_are_in_plain_words(path: Path) -> None:
    assert REFUSED.findall(path.read_text()) == []


def test_sources_are_in_plain_words() -> None:
    assert len(SOURCES) > 200
    found = {str(path.relative_to(PACKAGE)): REFUSED.findall(path.read_text()) for path in SOURCES}
    assert {path: words for path, words in found.items() if words} == {}


def test_the_search_can_fail() -> None:
    assert REFUSED.findall("# What is to be read by nobody.") == ["is to be", "nobody"]


def test_a_name_of_a_class_means_one_thing() -> None:
    """Classes of `compat` have the names that the other library gives them, which may be names of this package, too."""
    names = Counter[str]()
    for path in SOURCES:
        if path.suffix == ".py" and "compat" not in path.parts:
            names.update(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))
    assert len(names) > 500
    assert [name for name, count in names.items() if count > 1] == []
