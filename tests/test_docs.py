import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_of_formats_is_the_one_that_the_code_writes():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.PAGE.read_text() == generate.page(), "run `make docs`"
