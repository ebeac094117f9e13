"""The prose of the package: no people for code, and no clauses that must be read twice."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REFUSED = re.compile(r"\b(nobody|somebody|is to be|are to be|but for|who)\b", re.IGNORECASE)
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
]
MODULES = sorted((ROOT / "src").rglob("*.py"))
WITH_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(source: str) -> str:
    """All docstrings of a module, one after the other."""
    parts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, WITH_DOCSTRING)]
    return "\n".join(parts)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_are_in_plain_words(path: Path) -> None:
    assert REFUSED.findall(path.read_text()) == []


def test_docstrings_are_in_plain_words() -> None:
    assert len(MODULES) > 150
    found = {str(path.relative_to(ROOT)): REFUSED.findall(docstrings(path.read_text())) for path in MODULES}
    assert {path: words for path, words in found.items() if words} == {}


def test_the_search_can_fail() -> None:
    assert REFUSED.findall(docstrings('def f():\n    """What is to be read by nobody."""')) == ["is to be", "nobody"]
